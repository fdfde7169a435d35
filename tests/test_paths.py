"""Folders that go with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from midflight.paths import OwnFolder, remove_ownerless

OWNER = """
import sys, time
from pathlib import Path
from midflight.paths import OwnFolder
own = OwnFolder.make("mine-", Path(sys.argv[1]))
print(own.path, flush=True)
time.sleep(60)
"""


def test_a_folder_is_removed_once_its_process_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
        try:
            remove_ownerless("mine-", tmp_path)
            assert sorted(path.name for path in folder.iterdir()) == [".owned", "deep"]
        finally:
            owner.send_signal(signal.SIGKILL)
    remove_ownerless("other-", tmp_path)
    assert folder.exists()
    remove_ownerless("mine-", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    inside = tmp_path / "inside"
    for folder in (elsewhere, inside / "mine-by-hand"):
        folder.mkdir(parents=True)
    (elsewhere / ".owned").touch()
    (inside / "mine-link").symlink_to(elsewhere)
    (inside / "mine-file").touch()
    with_link = inside / "mine-with-link"
    with_link.mkdir()
    (with_link / "link").symlink_to(elsewhere)
    (with_link / ".owned").touch()
    own = OwnFolder.make("mine-", inside)
    remove_ownerless("mine-", inside)
    assert sorted(inside.iterdir()) == sorted(
        [own.path, inside / "mine-by-hand", inside / "mine-file", inside / "mine-link"]
    )
    assert (elsewhere / ".owned").exists()


def test_its_own_process_removes_it_once(tmp_path: Path) -> None:
    own = OwnFolder.make("mine-", tmp_path)
    assert own.path.parent == tmp_path and own.path.name.startswith("mine-")
    own.remove()
    reused = os.open(tmp_path, os.O_RDONLY)
    try:
        own.remove()
        os.fstat(reused)  # not closed by the second time
    finally:
        os.close(reused)
    assert list(tmp_path.iterdir()) == []
