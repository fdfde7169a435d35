"""Linear maps whose rows do not depend on what is computed beside them.

A BLAS sums a product in an order that it chooses by the number of rows: a token's hidden state rounds in one way where
it is drawn, in a batch of 64, and in another where it is trained, in a pack of 700, and thirty layers magnify that.
Here the rows are cut and padded to counts for which this machine's BLAS rounds alike, tried out once for each shape.
With attention in float64 (`attention.py`), whose rounding to float32 forgets the order of its sums, sampler and trainer
compute the same bits. The term is that of He et al. 2025, "Defeating nondeterminism in LLM inference".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512)
"""Numbers of rows that are tried, of large maps the small ones alone."""
FEW = 8
"""Up to so many rows a thread every number is tried: where each has a row or two, neighbours round differently."""
MOST_TRIED = 2**32
"""Multiplications in the largest product that is tried."""
CUT = 32
"""Rows that cost as much as one more call of the BLAS."""


class BatchInvariantLinear(torch.nn.Linear):
    """A linear map by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def make_batch_invariant(model: Any) -> bool:
    """Let the linear maps of `model` be batch-invariant; False, and nothing done, unless it is float32 on the CPU."""
    weight = next(model.parameters())
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = BatchInvariantLinear
    return True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., n] to [..., m]; float32 on the CPU. Equal rows of x give equal bits, whatever their number."""
    flat = x.reshape(-1, x.shape[-1])
    cuts = agreement(*weight.shape, torch.get_num_threads()).cuts(len(flat))
    if cuts == [len(flat)]:
        return plain_linear(x, weight, bias)
    missing = sum(cuts) - len(flat)
    if missing:
        flat = torch.nn.functional.pad(flat, (0, 0, 0, missing))
    found = torch.cat([plain_linear(part, weight, bias) for part in torch.split(flat, cuts)])
    return found[: len(found) - missing].reshape(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Agreement:
    """Of the numbers of rows that were `tried` on a shape, those `alike` round rows alike; both ascending."""

    tried: tuple[int, ...]
    alike: tuple[int, ...]

    def cuts(self, rows: int) -> list[int]:
        """Numbers of rows, one after the other, that `rows` are computed in; they may add up to more, never to less.

        A number between two tried neighbours that agree is taken to agree with them, one over all with the last.
        """
        found = []
        while rows > 0:
            below = max((count for count in self.tried if count <= rows), default=0)
            above = min((count for count in self.tried if count >= rows), default=below)
            if below in self.alike and above in self.alike:
                cut = rows
            else:
                cut = max((count for count in self.alike if count <= rows), default=self.alike[0])
            found.append(cut)
            rows -= cut
        return found

    @property
    def cost(self) -> int:
        """Rows and cuts that all numbers tried take together."""
        return sum(cut + CUT for count in self.tried for cut in self.cuts(count))


@cache
def agreement(outputs: int, inputs: int, threads: int) -> Agreement:
    """What this machine's BLAS does with a map [outputs, inputs] on `threads`, the number it runs on now.

    Of several sets that round alike among themselves it is the cheapest.
    """
    few = min(FEW * max(threads, 1), COUNTS[-1])
    counts = (*range(1, few + 1), *(count for count in COUNTS if count > few))
    tried = tuple(count for count in counts if count * outputs * inputs <= MOST_TRIED) or COUNTS[:1]
    draws = torch.Generator().manual_seed(0)
    sets: list[tuple[list[int], Tensor]] = []
    with torch.no_grad():
        x = torch.randn(tried[-1], inputs, generator=draws)
        weight = torch.randn(outputs, inputs, generator=draws)
        for count in reversed(tried):
            found = plain_linear(x[:count], weight)
            for alike, like in sets:
                if torch.equal(found, like[:count]):
                    alike.insert(0, count)
                    break
            else:
                sets.append(([count], found))
    return min((Agreement(tried, tuple(alike)) for alike, _ in sets), key=lambda one: one.cost)
