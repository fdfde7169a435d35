"""Checkpoints with a stand-in policy: whole or absent, the newest and the best kept."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from midflight.errors import CannotWrite, UserError
from midflight.store import seals
from midflight.store.seals import checkpoint_folders
from midflight.training import checkpoints
from midflight.training.checkpoints import list_checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint


class OneWeight:
    """Saves a single number."""

    def __init__(self, value: float = 0.0) -> None:
        self.weight = torch.nn.Parameter(torch.tensor([value]))

    def save(self, folder: Path) -> None:
        torch.save(self.weight.detach(), folder / "weight.pt")

    def load(self, folder: Path) -> None:
        self.weight.data = torch.load(folder / "weight.pt", weights_only=True)


def made(value: float = 0.0) -> tuple[Any, torch.optim.AdamW]:
    policy = OneWeight(value)
    return policy, torch.optim.AdamW([policy.weight], lr=0.1)


def save(root: Path, step: int, quality: float = 0.0, keep_last: int = 2, keep_best: int = 0, **state: Any) -> Path:
    policy, optimizer = made(float(step))
    return save_checkpoint(
        root,
        policy,
        optimizer,
        step=step,
        quality=quality,
        state=state,
        keep_last=keep_last,
        keep_best=keep_best,
    )


def steps(root: Path) -> list[int]:
    return [one.step for one in list_checkpoints(root)]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    policy, optimizer = made(1.0)
    policy.weight.grad = torch.ones(1)
    optimizer.step()
    state = {"success": {"capital": 0.5}, "base": "b"}
    folder = save_checkpoint(tmp_path, policy, optimizer, step=3, quality=0.5, state=state, keep_last=1, keep_best=0)
    assert folder == tmp_path / "step-00003"
    other, fresh = made()
    assert load_checkpoint(folder, other, fresh) == {"step": 3, "quality": 0.5, **state}
    for one, steps_on in ((policy, optimizer), (other, fresh)):
        one.weight.grad = torch.tensor([0.3])
        steps_on.step()
    # the optimizer holds the parameter object itself, so its second step moves what was loaded
    assert fresh.state_dict()["state"][0]["exp_avg"] == optimizer.state_dict()["state"][0]["exp_avg"]
    assert fresh.state_dict()["state"][0]["step"] == 2
    assert torch.equal(other.weight, policy.weight)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, quality in enumerate([0.9, 0.1, 0.2, 0.9, 0.3, 0.4], 1):
        save(tmp_path, step, quality, keep_last=2, keep_best=2)
    assert steps(tmp_path) == [1, 4, 5, 6]
    save(tmp_path, 7, 0.95, keep_last=1, keep_best=1)
    assert steps(tmp_path) == [7]


def test_a_quality_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    for step, quality in enumerate([0.2, 0.9, math.nan, 0.1, math.nan, 0.3], 1):
        save(tmp_path, step, quality, keep_last=1, keep_best=1)
    assert steps(tmp_path) == [2, 6]


def test_a_write_that_was_cut_off_is_ignored_and_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".writing-00002", "step-00003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weight.pt").write_text("half")
    assert steps(tmp_path) == [1]
    said: list[str] = []
    assert newest_checkpoint(tmp_path, said.append) == tmp_path / "step-00001"
    assert said == [
        f"{tmp_path}/.writing-00002 was not written to its end, not used",
        f"{tmp_path}/step-00003 is not whole, not used: it has no state.json, which is written last",
    ]
    (tmp_path / ".removing-step-00000").mkdir()
    save(tmp_path, 2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00001", "step-00002", "step-00003"]
    save(tmp_path, 3)
    assert steps(tmp_path) == [2, 3]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00002", "step-00003"]


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (OSError(28, "No space left on device"), CannotWrite),
        (RuntimeError("unexpected pos 64 vs 0"), CannotWrite),  # torch's
        (SafetensorError("I/O error"), CannotWrite),
        (Exception("os error 28"), CannotWrite),  # that of tokenizers
        (TypeError("a mistake of ours"), TypeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failed_write_leaves_the_checkpoints_as_they_were(
    tmp_path: Path, error: BaseException, becomes: type[BaseException]
) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00002").mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    def full(folder: Path) -> None:
        (folder / "weight.pt").write_bytes(b"half")
        raise error

    with pytest.raises(BaseException) as raised:
        save_checkpoint(
            tmp_path,
            SimpleNamespace(save=full),  # type: ignore[arg-type]
            made()[1],
            step=2,
            quality=1.0,
            state={},
            keep_last=1,
            keep_best=0,
        )
    assert raised.type is becomes
    if becomes is CannotWrite:
        reason = "No space left on device" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        begins = rf"{tmp_path / 'step-00002'}: cannot be written \({reason}; [\d,.]+ MB free there\); what was "
        assert re.fullmatch(begins + "saved before is kept: make room, then go on with --resume", str(raised.value))
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then the folder that names them, then the name, then the folder that holds it."""
    done: list[str] = []
    by_number: dict[int, str] = {}
    real_open, real_replace = os.open, os.replace

    def opened(path: Path, flags: int, **options: Any) -> int:
        number = real_open(path, flags, **options)
        by_number[number] = Path(path).name
        return number

    def replaced(source: Path, target: Path) -> None:
        done.append(f"{source.name} > {target.name}")
        real_replace(source, target)

    monkeypatch.setattr(seals.os, "open", opened)
    monkeypatch.setattr(seals.os, "fsync", lambda number: done.append(by_number[number]))
    monkeypatch.setattr(checkpoints.os, "replace", replaced)
    save(tmp_path, 1)
    assert sorted(done[:3]) == ["optimizer.pt", "state.json", "weight.pt"]
    assert done[3:] == [".writing-00001", ".writing-00001 > step-00001", tmp_path.name]
    done.clear()
    save(tmp_path, 2, keep_last=1)
    assert done[-2:] == [tmp_path.name, "step-00001 > .removing-step-00001"]


def test_what_is_not_whole_takes_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-00002" / "weight.pt").write_bytes(b"half")
    save(tmp_path, 3, quality=0.5, keep_last=2)
    assert steps(tmp_path) == [1, 3]
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-00001", "step-00002", "step-00003"]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (99_999, 100_000):
        save(tmp_path, step)
    assert steps(tmp_path) == [99_999, 100_000]
    assert steps(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["weight.pt", "optimizer.pt", "state.json"])
def test_a_checkpoint_that_cannot_be_loaded_is_one_line(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 3)
    (folder / name).write_bytes(b"{")
    with pytest.raises(UserError, match=rf"checkpoint {folder}: cannot be read \(.*remove it to go on from the one be"):
        load_checkpoint(folder, *made())
