"""Float32 masters of a model's 16-bit weights (mixed precision training, arXiv 1710.03740).

A step of 1e-6 is lost in the rounding of a 16-bit weight; its master takes it in, and the weight follows once the steps
add up to one of its own. Invariant: after `settle` each weight is its master, rounded. Gradients are summed over the
packs of an update in the masters' type, and the weights' own are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Masters:
    """The masters of all parameters of `model`, which train in their place.

    `exact` are values known more exactly than the model has them, by the parameter's name.
    """

    def __init__(self, model: Any, exact: Mapping[str, Tensor]) -> None:
        self._model = model
        self.of: dict[str, torch.nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            value = exact[name] if name in exact else parameter.detach().float()
            self.of[name] = torch.nn.Parameter(value)
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._hook(self.of[name]))

    @staticmethod
    def _hook(master: torch.nn.Parameter) -> Any:
        def move(parameter: Tensor) -> None:
            found, parameter.grad = parameter.grad, None
            assert found is not None
            master.grad = found.float() if master.grad is None else master.grad.add_(found)

        return move

    @torch.no_grad()
    def settle(self) -> None:
        """Round the masters into the model."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(self.of[name])

    def state(self) -> dict[str, Tensor]:
        """The model's state with the masters in place of its weights, those that are tied under each of their names."""
        return {name: value.detach() if master is None else master.data for name, value, master in self._named()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, of tied weights under any of their names, and settle."""
        for name, _, master in self._named():
            if master is not None and name in state:
                master.copy_(state[name])
        self.settle()

    def _named(self) -> Iterator[tuple[str, Tensor, torch.nn.Parameter | None]]:
        """Name, value and master of all that the model's state holds."""
        known = {id(parameter): self.of[name] for name, parameter in self._model.named_parameters()}
        for name, value in self._model.state_dict(keep_vars=True).items():
            yield name, value, known.get(id(value))
