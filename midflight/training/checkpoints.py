"""Checkpoints: one folder a step, written beside, sealed, brought to the disk and renamed into place.

Invariant: at every moment, a kill or a full disk leaves each checkpoint whole or absent.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from midflight.errors import CannotWrite, UserError
from midflight.store.seals import newest_whole, read_state, seal, to_disk, whole_checkpoints
from midflight.training.policy import Policy

WRITING, REMOVING = ".writing-", ".removing-"
"""A folder so called is on its way to be a checkpoint, or was one."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved step. `quality` orders the best ones (higher is better; one that is no number is the worst)."""

    folder: Path
    step: int
    quality: float


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """The checkpoints under `root` that are whole by names and sizes, oldest first."""
    found = []
    for folder in whole_checkpoints(root):
        state = read_state(folder)
        found.append(Checkpoint(folder, int(state["step"]), float(state["quality"])))
    return found


def newest_checkpoint(root: Path, say: Callable[[str], None]) -> Path | None:
    """`newest_whole`, and a line for each write that was cut off; the next save removes those."""
    for folder in sorted(root.glob(f"{WRITING}*")):
        say(f"{folder} was not written to its end, not used")
    return newest_whole(root, say)


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
    """Write step `step` atomically, then delete all but the newest `keep_last` and the best `keep_best`.

    A folder of the same step that is not whole is replaced.

    Raises:
        CannotWrite: the disk is full or broken; nothing is left of the new one, and the others are as they were.
    """
    temporary, final = root / f"{WRITING}{step:05d}", root / f"step-{step:05d}"
    try:
        for leftover in (*root.glob(f"{WRITING}*"), *root.glob(f"{REMOVING}*")):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        policy.save(temporary)
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        seal(temporary, {"step": step, "quality": quality, **state})
        if final.exists():
            _remove(final)
        os.replace(temporary, final)
        to_disk(root)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors, torch and tokenizers have an error of their own for what is an OSError elsewhere
        if isinstance(error, OSError | RuntimeError | SafetensorError) or type(error) is Exception:
            raise CannotWrite(final, error) from error
        raise
    _prune(root, keep_last, keep_best)
    return final


def _prune(root: Path, keep_last: int, keep_best: int) -> None:
    everything = list_checkpoints(root)
    best = sorted(everything, key=_worth)[-keep_best:] if keep_best else []
    for one in everything[:-keep_last]:
        if one not in best:
            _remove(one.folder)


def _worth(one: Checkpoint) -> tuple[float, int]:
    return -math.inf if math.isnan(one.quality) else one.quality, one.step


def _remove(folder: Path) -> None:
    """Delete a checkpoint; a kill in the middle leaves the whole folder, or one that the next save clears away."""
    away = folder.with_name(f"{REMOVING}{folder.name}")
    os.replace(folder, away)
    shutil.rmtree(away)


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore weights and optimizer from `folder`; returns the state saved with them.

    Raises:
        UserError: a file in it is missing, damaged or of another model.
    """
    try:
        policy.load(folder)
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
        return read_state(folder)
    except Exception as error:  # the boundary to files that may hold anything: each reader has errors of its own
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"checkpoint {folder}: cannot be read ({type(error).__name__}: {reason}); remove it to go on from the one "
            "before"
        ) from error
