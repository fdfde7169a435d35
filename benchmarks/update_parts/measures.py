"""Time, arithmetic and memory of an update.

FLOPs are counted, not estimated: 2 n m k of every matrix product that runs in forward and backward, whatever tokens it
computes, padding included. With merged LoRA that is, a token and linear map n -> m of rank r, 2 n m forward, 2 n m back
to its input and 4 r (n + m) for the adapter (none for the weight itself), and the head at scored positions only.
Attention is not counted, though its time is.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from common import environment
from torch.utils.flop_counter import FlopCounterMode

from midflight.errors import UserError

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def seconds(run: Callable[[], object]) -> float:
    """Wall clock of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def fastest(candidates: Mapping[int, Callable[[], float]], rounds: int = 2) -> int:
    """The candidate with the fewest seconds in its best of interleaved rounds; a single one runs not at all."""
    if len(candidates) == 1:
        return next(iter(candidates))
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for size, run in candidates.items():
            best[size] = min(best[size], run())
    return min(best, key=lambda size: best[size])


def matmul_flops(run: Callable[[], object]) -> int:
    """FLOPs of the matrix products of one call, batched ones (attention's) left out."""
    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    return int(sum(counts.get(product, 0) for product in PRODUCTS))


class MatmulRate:
    """How fast the machine multiplies: every linear map of the decoder once, `tokens` at a time, forward and back."""

    def __init__(self, model: Any, tokens: int) -> None:
        maps = [part for part in model.get_decoder().modules() if isinstance(part, torch.nn.Linear)]
        self._weights = [part.weight.detach() for part in maps]
        widths = {width for weight in self._weights for width in weight.shape}
        self._inputs = {width: torch.randn(tokens, width, dtype=maps[0].weight.dtype) for width in widths}
        self.flops = sum(4 * tokens * weight.numel() for weight in self._weights)

    def measure(self) -> float:
        """FLOPs a second, now."""
        return self.flops / seconds(self._run)

    def _run(self) -> None:
        for weight in self._weights:
            out_width, in_width = weight.shape
            torch.nn.functional.linear(self._inputs[in_width], weight)
            torch.mm(self._inputs[out_width], weight)


def release() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
    if trim is not None:
        trim(0)


def peak_increase(run: Callable[[], object]) -> tuple[float, float]:
    """Resident memory before `run`, and by how much it rises at its peak, both in 10^9 bytes.

    Raises:
        UserError: not Linux, which alone tells the peak of a part of a process.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        raise UserError(
            f"--no-memory: needed on {sys.platform}: only Linux tells the peak memory of a part of a process"
        )

    def read(name: str) -> float:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024 / 1e9

    release()  # what loading freed is not there for the update to hide in
    reset.write_text("5")  # VmHWM := VmRSS
    before = read("VmRSS")
    run()
    return before, read("VmHWM") - before


def peak_in_child(spec: dict[str, Any], folder: Path) -> dict[str, float]:
    """`update_parts/memory.py` on `spec` in a fresh process: `loaded_gb` and `peak_gb`.

    Raises:
        UserError: it failed; its last line.
    """
    file = folder / "memory.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "update_parts.memory", str(file)]
    done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise UserError(f"measuring memory failed: {lines[-1] if lines else f'exit code {done.returncode}'}")
    found: dict[str, float] = json.loads(done.stdout)
    return found
