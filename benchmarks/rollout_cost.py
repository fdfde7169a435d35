"""What the model's forwards of a rollout cost, and how long the machine's matrix products alone would take.

A forward of B rows and T new tokens each, over S keys, is counted as

    2 B T W  +  2 B V h  +  4 B T S (heads x head width) layers        floating-point operations:

the weights W of the layers' linear maps for every position, the output projection [V, h] for one position a row, and
the scores and weighted sums of attention. Padding counts as computed, since it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

LAYER_ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
HEAD_ROWS = (1, 8, 16, 64)
"""Rows that products are measured at; small numbers of rows are far from linear."""
DECODE_ROWS, PREFILL_ROWS = 64, 512
"""Rows of the two matrix shapes whose rates are stated: a token of 64 trajectories; a piece of prompt."""


@dataclass(frozen=True)
class Forward:
    """The shape of one forward: `rows` of `tokens` new tokens, over `keys` keys."""

    rows: int
    tokens: int
    keys: int


@dataclass
class Forwards:
    """Forwards of a causal model."""

    shapes: list[Forward] = field(default_factory=list)

    @property
    def positions(self) -> int:
        """Token positions that were computed, padding included."""
        return sum(one.rows * one.tokens for one in self.shapes)

    def flops(self, model: Any) -> int:
        """See the module's docstring."""
        layers, head = (sum(weight.numel() for weight in weights) for weights in linear_weights(model))
        config = model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = 4 * config.num_hidden_layers * config.num_attention_heads * width
        return sum(
            2 * one.rows * (one.tokens * layers + head) + attention * one.rows * one.tokens * one.keys
            for one in self.shapes
        )

    def linear_seconds(self, rates: MatmulRates) -> float:
        """How long their linear maps alone take at the measured rates, each at its own number of rows."""
        return sum(rates.layers_at(one.rows * one.tokens) + rates.head_at(one.rows) for one in self.shapes)


@contextmanager
def counting(model: Any) -> Iterator[Forwards]:
    """Note the shape of every forward of `model`."""
    found = Forwards()

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows, tokens = kwargs["input_ids"].shape
        trunk = kwargs.get("trunk")
        mask = kwargs.get("attention_mask")
        keys = (tokens if mask is None else mask.shape[-1]) + (trunk[0][0].shape[1] if trunk else 0)
        found.shapes.append(Forward(rows, tokens, keys))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def linear_weights(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights [out, in] of the layers' linear maps, and of the output projection."""
    head = model.get_output_embeddings()
    layers = [one.weight for one in model.modules() if isinstance(one, torch.nn.Linear) and one is not head]
    return layers, [head.weight]


@dataclass
class MatmulRates:
    """Seconds that all linear maps of a model take, by rows, measured again and again; medians are what counts.

    All weights are gone through in the order of a forward, so they come from where a forward finds them.
    """

    weights: tuple[list[torch.Tensor], list[torch.Tensor]]
    layers: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in LAYER_ROWS})
    head: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in HEAD_ROWS})

    def measure(self, times: int = 3) -> None:
        """Add `times` measurements of each shape."""
        for weights, found in zip(self.weights, (self.layers, self.head), strict=True):
            for rows, seconds in found.items():
                products(weights, rows)
                seconds += [products(weights, rows) for _ in range(times)]

    def layers_at(self, rows: int) -> float:
        """Seconds of the layers' maps for `rows` rows."""
        return _at(self.layers, rows)

    def head_at(self, rows: int) -> float:
        """Seconds of the output projection for `rows` rows."""
        return _at(self.head, rows)

    def rates(self) -> dict[str, float]:
        """Floating-point operations a second at the two shapes, in 10^9."""
        layers, head = (sum(weight.numel() for weight in weights) for weights in self.weights)
        decode = 2 * DECODE_ROWS * (layers + head) / (self.layers_at(DECODE_ROWS) + self.head_at(DECODE_ROWS))
        return {
            "decode_gflops": decode / 1e9,
            "prefill_gflops": 2 * PREFILL_ROWS * layers / self.layers_at(PREFILL_ROWS) / 1e9,
        }


def _at(found: dict[int, Sequence[float]], rows: int) -> float:
    """Linear between the measured rows, proportional beyond the last."""
    known = sorted(found)
    seconds = [median(found[one]) for one in known]
    if rows > known[-1]:
        return seconds[-1] * rows / known[-1]
    return float(np.interp(rows, known, seconds))


@torch.inference_mode()
def products(weights: Sequence[torch.Tensor], rows: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one product of `rows` rows with each of `weights`."""
    inputs = {width: torch.randn(rows, width).to(weights[0].dtype) for width in {weight.shape[1] for weight in weights}}
    began = clock()
    for weight in weights:
        torch.nn.functional.linear(inputs[weight.shape[1]], weight)
    return clock() - began
