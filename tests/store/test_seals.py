"""Whole checkpoints: any byte that changes is noticed before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from midflight.errors import UserError
from midflight.store import seals
from midflight.store.seals import (
    checkpoint_folders,
    fault,
    is_sealed,
    newest_whole,
    read_state,
    seal,
    whole_checkpoints,
)

STATE = {"step": 5, "quality": 0.1 + 0.2, "success": {"é": 1e-9}}


def sealed(root: Path, step: int = 5) -> Path:
    folder = root / f"step-{step:05d}"
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(200)))
    (folder / "inner" / "more").write_bytes(b"more")
    seal(folder, {**STATE, "step": step})
    return folder


def of_an_earlier_version(root: Path, step: int) -> Path:
    folder = root / f"step-{step:05d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step, "quality": 0.5}))
    return folder


def test_the_state_comes_back_without_the_seal(tmp_path: Path) -> None:
    folder = sealed(tmp_path)
    assert read_state(folder) == STATE
    assert fault(folder) is None and is_sealed(folder)


def test_every_byte_is_under_the_seal(tmp_path: Path) -> None:
    folder = sealed(tmp_path)
    for file in (folder / "weights", folder / "inner" / "more", folder / "state.json"):
        content = file.read_bytes()
        for place in range(len(content)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert fault(folder) is not None, (file, place)
        file.write_bytes(content)
    assert fault(folder) is None


def test_every_length_but_the_right_one_is_noticed_without_reading_the_files(tmp_path: Path) -> None:
    folder = sealed(tmp_path)
    for file in (folder / "weights", folder / "state.json"):
        content = file.read_bytes()
        for length in range(len(content)):
            file.write_bytes(content[:length])
            assert fault(folder, contents=False) is not None, (file, length)
        file.write_bytes(content)
    assert fault(folder, contents=False) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "weights").write_bytes(b"1234"), "weights has 4 bytes, 200 were written"),
        (lambda folder: (folder / "weights").write_bytes(bytes(200)), "weights is not what was written (another SHA"),
        (lambda folder: (folder / "inner" / "more").unlink(), "inner/more is missing"),
        (lambda folder: (folder / "state.json").unlink(), "it has no state.json, which is written last"),
        (lambda folder: (folder / "state.json").write_text("[" * 100_000), "state.json is damaged (maximum recursion"),
        (lambda folder: (folder / "state.json").write_bytes(b"\xff"), "state.json is damaged ('utf-8' codec can't"),
        (lambda folder: (folder / "state.json").write_text("[]"), "state.json is damaged (it holds no step)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    folder = sealed(tmp_path)
    damage(folder)
    assert (fault(folder) or "").startswith(reason)
    assert whole_checkpoints(tmp_path) == ([folder] if "SHA" in reason else [])


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sealed(tmp_path)

    def broken(path: Path, *_: object) -> object:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("midflight.store.seals._sha256", broken)
    assert fault(folder) == f"{folder / 'inner' / 'more'} cannot be read (Input/output error)"


def test_the_newest_whole_one_is_taken_and_each_newer_one_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    assert newest_whole(tmp_path / "none", said.append) is None
    folders = [sealed(tmp_path, step) for step in (99_998, 99_999, 100_000, 100_001)]
    (folders[3] / "state.json").unlink()
    (folders[2] / "weights").write_bytes(b"")
    assert checkpoint_folders(tmp_path) == folders
    assert newest_whole(tmp_path, said.append) == folders[1]
    assert said == [
        f"{folders[3]} is not whole, not used: it has no state.json, which is written last",
        f"{folders[2]} is not whole, not used: weights has 0 bytes, 200 were written",
    ]


def test_when_none_is_whole_nothing_is_taken(tmp_path: Path) -> None:
    for step in (5, 10):
        (sealed(tmp_path, step) / "weights").unlink()
    said: list[str] = []
    with pytest.raises(UserError) as raised:
        newest_whole(tmp_path, said.append)
    assert str(raised.value) == (
        f"{tmp_path}: no checkpoint is whole (step-00005, step-00010); put back a copy of one, or remove them to begin "
        "at step 1"
    )
    assert len(said) == 2


def test_one_of_an_earlier_version_is_taken_and_said_to_be_unchecked(tmp_path: Path) -> None:
    folder = of_an_earlier_version(tmp_path, 5)
    said: list[str] = []
    assert newest_whole(tmp_path, said.append) == folder
    assert said == [f"{folder} is of an earlier version and has no checksums: taken without comparing its files"]
    assert read_state(folder) == {"step": 5, "quality": 0.5}
    assert not is_sealed(folder)


def test_a_seal_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    sealed(tmp_path)
    assert len(synced) == 5  # two files, the state, two folders


def test_one_that_its_run_drops_while_it_is_compared_is_passed_over_for_the_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed(tmp_path, 5)

    def trained_on(folder: Path) -> str | None:
        if folder.name == "step-00005":
            sealed(tmp_path, 6)
            shutil.rmtree(folder)
        return fault(folder)

    monkeypatch.setattr(seals, "fault", trained_on)
    said: list[str] = []
    assert newest_whole(tmp_path, said.append) == tmp_path / "step-00006"
    assert said == []
