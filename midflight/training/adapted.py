"""Gradients of a LoRA adapter through weights it is already merged into.

With W' = W + s B A merged, y = x W'^T needs one matrix product forward and one backward, where the unmerged form adds
two thin products and two passes over the output each way. The adapter's gradients are the unmerged form's:
dB = s g^T (x A^T), dA = s (g B)^T x (LoRA, arXiv 2106.09685). The trainer then scores with the very weights that the
sampler draws with. In 16 bits these are W with the adapter beside it (`engines/local/beside.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from midflight.engines.local import beside
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
        others: Tensor | None,
    ) -> Tensor:
        """x [..., n]; down (A) [r, n]; up (B) [m, r]; weight [m, n], merged; `product` is the map's own forward.

        Of a `BesideLinear` weight is [m, n + k], and `others` [k, n] its `down`.
        """
        ctx.save_for_backward(x, down, up, weight, others)
        ctx.scale = scale
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, weight, others = ctx.saved_tensors
        flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        down, up = (part.to(rows.dtype) * ctx.scale for part in (down, up))
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = flat @ weight
            if others is not None:
                own, through = to_x.tensor_split([x.shape[-1]], dim=1)
                to_x = own + through @ others
            to_x = to_x.view(x.shape)
        to_down = (flat @ up).T @ rows
        to_up = ((rows @ down.T).T @ flat).T  # the thin matrix first: faster on CPUs
        return to_x, to_down, to_up, None, None, None, None, None


@contextmanager
def adapted(model: torch.nn.Module, layers: Mapping[str, Any]) -> Iterator[torch.nn.Module]:
    """`model`, whose linear maps named in `layers` send gradients to PEFT's LoRA layers of those names.

    The model's weights have to be those of the layers' present values, merged or beside.
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
    others = None
    if isinstance(module, beside.BesideLinear):
        others = module.down
        product = partial(beside.product, down=others)
    return _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
        x, down, up, module.weight, module.bias, scale, product, others
    )
