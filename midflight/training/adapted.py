"""Gradients of a LoRA adapter through weights it is already merged into.

With W' = W + s B A merged, y = x W'^T needs one matrix product forward and one backward, where the unmerged form adds
two thin products and two passes over the output each way. The adapter's gradients are the unmerged form's:
dB = s g^T (x A^T), dA = s (g B)^T x (LoRA, arXiv 2106.09685). The trainer then scores with the very weights that the
sampler draws with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from midflight.engines.local.batch_invariant import BatchInvariantLinear, linear

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        product: Product,
    ) -> Tensor:
        """x [..., n]; down (A) [r, n]; up (B) [m, r]; weight [m, n], merged; `product` is the map's own forward."""
        ctx.save_for_backward(x, down, up, weight)
        ctx.scale = scale
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, weight = ctx.saved_tensors
        flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        down, up = (part.to(rows.dtype) * ctx.scale for part in (down, up))
        to_x = (flat @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        to_down = (flat @ up).T @ rows
        to_up = ((rows @ down.T).T @ flat).T  # the thin matrix first: faster on CPUs
        return to_x, to_down, to_up, None, None, None, None


@contextmanager
def adapted(model: torch.nn.Module, layers: Mapping[str, Any]) -> Iterator[torch.nn.Module]:
    """`model`, whose linear maps named in `layers` send gradients to PEFT's LoRA layers of those names.

    The model's weights have to be the merged ones of the layers' present values.
    """
    changed = [model.get_submodule(name) for name in layers]
    try:
        for module, layer in zip(changed, layers.values(), strict=True):
            (name,) = layer.active_adapters
            module.forward = partial(
                _apply, module, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
            )
        yield model
    finally:
        for module in changed:
            module.__dict__.pop("forward", None)


def _apply(module: Any, down: Tensor, up: Tensor, scale: float, x: Tensor) -> Any:
    product: Product = linear if isinstance(module, BatchInvariantLinear) else torch.nn.functional.linear
    return _AdaptedLinear.apply(x, down, up, module.weight, module.bias, scale, product)  # type: ignore[no-untyped-call]
