"""Folders that go with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.paths import OwnFolder, remove_ownerless, remove_tree

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


def test_a_folder_is_removed_however_deep_and_closed_it_is(tmp_path: Path) -> None:
    own = OwnFolder.make("mine-", tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (own.path / "link").symlink_to(tmp_path / "kept")
    here = os.open(own.path, os.O_RDONLY)
    for depth in range(1010):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(os.open("f", os.O_CREAT, dir_fd=here))
        os.symlink(tmp_path / "kept", "l", dir_fd=inner)
        os.chmod("d", 0o700 if depth % 9 else 0o300, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    own.remove()
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"] and (tmp_path / "kept" / "file").exists()


def test_a_removal_that_was_cut_short_is_ended_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnFolder.make("mine-", tmp_path)
    for number in range(20):
        (own.path / f"{number}").touch()
        (own.path / f"folder-{number}").mkdir()
    left: list[list[str]] = []
    unlink, rmdir = os.unlink, os.rmdir
    monkeypatch.setattr(os, "unlink", lambda *path, **more: (left.append(os.listdir(own.path)), unlink(*path, **more)))
    monkeypatch.setattr(os, "rmdir", lambda *path, **more: (left.append(os.listdir(own.path)), rmdir(*path, **more)))
    own.remove()
    assert len(left) == 42 and all(".owned" in names for names in left[:41]) and left[40] == [".owned"]


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


def test_a_link_in_place_of_the_folder_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "folder").mkdir(parents=True)
    (kept / "file").write_text("x")
    modes = [path.stat().st_mode for path in (kept, kept / "folder")]
    link = tmp_path / "link"
    link.symlink_to(kept)
    remove_tree(link)
    assert not link.is_symlink() and sorted(path.name for path in kept.iterdir()) == ["file", "folder"]
    full = tmp_path / "full"
    (full / "a/b").mkdir(parents=True)
    (full / "a/b/link").symlink_to(kept)
    (full / "link").symlink_to(kept)
    remove_tree(full)
    assert not full.exists() and sorted(path.name for path in kept.iterdir()) == ["file", "folder"]
    assert [path.stat().st_mode for path in (kept, kept / "folder")] == modes


def test_a_closed_folder_and_an_odd_mark_hold_nothing_up(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "in").mkdir(parents=True)
    (closed / "in").chmod(0)
    closed.chmod(0)
    remove_tree(closed)
    assert not closed.exists()
    odd = tmp_path / "mine-odd"
    odd.mkdir()
    os.mkfifo(odd / ".owned")
    linked = tmp_path / "mine-linked"
    linked.mkdir()
    (tmp_path / "mark").touch()
    (linked / ".owned").symlink_to(tmp_path / "mark")
    remove_ownerless("mine-", tmp_path)  # and is not waited for
    assert odd.exists() and linked.exists()
