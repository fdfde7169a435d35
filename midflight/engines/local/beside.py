"""Linear maps of 16 bits with an adapter beside their weights, which are too coarse to be merged into.

Merged, round(W + s B A) is W wherever s B A is below half a step of W's numbers, so an adapter that grows by 1e-5 a
step changes nothing for long; added to a product that has been rounded already it is lost likewise. Here both are one
product, [W | s B] times [x, A x], which is summed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_COLUMNS = 8
"""An adapter's rank is filled up to a multiple of this, which the fast kernels of GPUs ask for."""


class BesideLinear(torch.nn.Linear):
    """A linear map [m, n] whose weight [m, n + k] ends with the s B of its adapters; `down` [k, n] holds their A."""

    down: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias, self.down)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor) -> Tensor:
    """x [..., n] to [..., m], in one sum over n + k; `weight` and `down` as a `BesideLinear` has them."""
    return linear(torch.cat([x, linear(x, down)], dim=-1), weight, bias)


def joined(base: Any, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and `down` of the linear map `base` with one more adapter: A [r, n], and s B [m, r]."""
    weight = base.weight
    missing = -len(down) % _COLUMNS
    down = torch.nn.functional.pad(down, (0, 0, 0, missing)).to(weight.dtype)
    up = torch.nn.functional.pad(up, (0, missing)).to(weight.dtype)
    if isinstance(base, BesideLinear):
        down = torch.cat([base.down, down])
    return torch.cat([weight, up], dim=1), down


@torch.no_grad()
def put(module: Any, base: Any, down: Tensor, up: Tensor) -> None:
    """Make the linear map `module` what `base`, which it may be, is with an adapter; see `joined`."""
    weight, beside = joined(base, down, up)
    module.__class__ = BesideLinear
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.register_buffer("down", beside)
    if base.bias is not None:
        module.bias.copy_(base.bias)


@torch.no_grad()
def merge(model: Any) -> dict[str, Tensor]:
    """Make the maps of `model` plain again; gives their merged weights, by name and in float32, before rounding."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, BesideLinear):
            own, up = module.weight.float().tensor_split([module.in_features], dim=1)
            weight = own + up @ module.down.float()
            found[f"{name}.weight"] = weight
            module.weight = torch.nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
            del module.down
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]
    return found


def factors(layer: Any) -> tuple[Tensor, Tensor]:
    """A [r, n] and s B [m, r] of a PEFT LoRA layer on a linear map."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight * layer.scaling[name]
