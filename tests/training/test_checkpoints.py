"""Checkpoints with a stand-in policy: whole or absent, the newest and the best kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midflight.errors import UserError
from midflight.training.checkpoints import (
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    unfinished_checkpoints,
)


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


def test_a_write_that_was_cut_off_is_ignored_and_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".writing-00002", "step-00003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weight.pt").write_text("half")
    assert steps(tmp_path) == [1]
    assert [folder.name for folder in unfinished_checkpoints(tmp_path)] == [".writing-00002", "step-00003"]
    save(tmp_path, 2)
    assert not (tmp_path / ".writing-00002").exists()
    save(tmp_path, 3)
    assert steps(tmp_path) == [2, 3]
    assert unfinished_checkpoints(tmp_path) == []


def test_a_failed_write_leaves_the_checkpoints_as_they_were(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
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
    assert steps(tmp_path) == [1]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (99_999, 100_000):
        save(tmp_path, step)
    assert steps(tmp_path) == [99_999, 100_000]
    assert steps(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["weight.pt", "optimizer.pt", "state.json"])
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 3)
    (folder / name).write_bytes(b"{")
    with pytest.raises(UserError, match=rf"checkpoint {folder}: cannot be read \(.*remove it to go on from the one be"):
        load_checkpoint(folder, *made())
