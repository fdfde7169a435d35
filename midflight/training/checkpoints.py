"""Checkpoints: one folder a step, written beside and renamed into place, so a folder that exists is whole."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from midflight.errors import UserError
from midflight.store.folder import whole_checkpoints
from midflight.training.policy import Policy


@dataclass(frozen=True)
class Checkpoint:
    """A saved step. `quality` orders the best ones (higher is better)."""

    folder: Path
    step: int
    quality: float


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Whole checkpoints under `root`, oldest first; see `unfinished_checkpoints` for the others."""
    found = []
    for folder in whole_checkpoints(root):
        state = json.loads((folder / "state.json").read_text())
        found.append(Checkpoint(folder, int(state["step"]), float(state["quality"])))
    return found


def unfinished_checkpoints(root: Path) -> list[Path]:
    """Folders under `root` that are not whole: a write that was cut off, or a checkpoint that lost its state."""
    whole = set(whole_checkpoints(root))
    return sorted(folder for folder in (*root.glob("step-*"), *root.glob(".writing-*")) if folder not in whole)


def save_checkpoint(
    root: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    quality: float,
    state: dict[str, Any],
    keep_last: int,
    keep_best: int,
) -> Path:
    """Write step `step` atomically, then delete all but the newest `keep_last` and the best `keep_best`."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover)
    temporary = root / f".writing-{step:05d}"
    temporary.mkdir()
    policy.save(temporary)
    torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    (temporary / "state.json").write_text(json.dumps({"step": step, "quality": quality, **state}))
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    final = root / f"step-{step:05d}"
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    everything = list_checkpoints(root)
    best = sorted(everything, key=lambda one: (one.quality, one.step))[-keep_best:] if keep_best else []
    for one in everything[:-keep_last]:
        if one not in best:
            shutil.rmtree(one.folder)
    return final


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore weights and optimizer from `folder`; returns the state saved with them.

    Raises:
        UserError: a file in it is missing, damaged or of another model.
    """
    try:
        policy.load(folder)
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except Exception as error:  # the boundary to files that may hold anything: each reader has errors of its own
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"checkpoint {folder}: cannot be read ({type(error).__name__}: {reason}); remove it to go on from the one "
            "before"
        ) from error
    return state
