"""Forward and backward over a packed batch: the trunk once, then pack by pack, gradients accumulated.

Memory grows with the pack, not with the batch: each pack's graph ends at the trunk's keys and values, whose gradients
are collected and sent through the trunk at the end. Logits exist only where a trained token is scored, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midflight.engines.local.grammar import Masks
from midflight.training.packing import SCORED_AT_ONCE, Pack, PackedBatch

LayerKV = tuple[Tensor, Tensor]


class _Keep:
    """Stands where transformers expects a cache: hands keys and values through and keeps them."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[LayerKV] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> LayerKV:
        self.layers.append((key, value))
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(frozen=True)
class Scores:
    """Of the terms of one chunk: log-prob and entropy under the distribution each was drawn from, both [terms]."""

    terms: list[int]
    logprobs: Tensor
    entropies: Tensor


def run(
    model: Any,
    masks: Masks,
    batch: PackedBatch,
    on_scores: Callable[[Pack, Scores], Tensor | None],
) -> None:
    """Score every trained token of `batch` under `model`.

    `on_scores` gets a pack and the scores of some of its terms (indices into `pack.terms`). When it returns a loss, its
    gradient is accumulated into the model's parameters; when None, nothing is kept for a backward pass.
    """
    device = next(model.parameters()).device
    grad = torch.is_grad_enabled()
    trunk: list[LayerKV] | None = None
    graph: list[LayerKV] = []
    if batch.trunk:
        cache = _Keep()
        size = len(batch.trunk)
        visible = torch.ones(1, size, size, dtype=torch.bool).tril()
        _hidden(model, [list(batch.trunk)], [list(range(size))], visible, device, cache=cache)
        graph = cache.layers
        trunk = [(k[0].detach().requires_grad_(grad), v[0].detach().requires_grad_(grad)) for k, v in graph]
    for packs in batch.forwards():
        width = max(len(pack.ids) for pack in packs)
        visible = torch.zeros(len(packs), width, width, dtype=torch.bool)
        for index, pack in enumerate(packs):
            visible[index, : len(pack.ids), : len(pack.ids)] = torch.from_numpy(pack.visible())
        visible |= torch.eye(width, dtype=torch.bool)  # padding sees itself
        ids = [pack.ids + [0] * (width - len(pack.ids)) for pack in packs]
        depths = [pack.depths + [0] * (width - len(pack.ids)) for pack in packs]
        hidden = _hidden(model, ids, depths, visible, device, trunk=trunk)
        leaf = hidden.detach().requires_grad_(grad)
        for index, pack in enumerate(packs):
            _score_pack(model, masks, batch, pack, leaf[index], on_scores)
        if grad and leaf.grad is not None:
            hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
    if grad and trunk is not None:
        outputs, gradients = [], []
        for (key, value), (key_leaf, value_leaf) in zip(graph, trunk, strict=True):
            for output, leaf in ((key, key_leaf), (value, value_leaf)):
                if leaf.grad is not None and output.requires_grad:
                    outputs.append(output)
                    gradients.append(leaf.grad[None])
        if outputs:
            torch.autograd.backward(outputs, gradients)


def _hidden(
    model: Any,
    ids: list[list[int]],
    depths: list[list[int]],
    visible: Tensor,
    device: torch.device,
    *,
    trunk: list[LayerKV] | None = None,
    cache: _Keep | None = None,
) -> Tensor:
    """Last hidden states [B, N, width] of B packs of N tokens behind the trunk, under the mask `visible` [B, N, N]."""
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    extra = {} if trunk is None else {"trunk": trunk}
    output = model.get_decoder()(
        input_ids=torch.tensor(ids, device=device),
        position_ids=torch.tensor(depths, device=device),
        attention_mask=mask[:, None].to(device),
        cache=cache,
        use_cache=cache is not None,
        **extra,
    )
    return output.last_hidden_state  # type: ignore[no-any-return]


def _score_pack(
    model: Any,
    masks: Masks,
    batch: PackedBatch,
    pack: Pack,
    hidden: Tensor,
    on_scores: Callable[[Pack, Scores], Tensor | None],
) -> None:
    # Terms that share node, temperature and grammar state share one distribution.
    distributions: dict[tuple[int, float, str | None, tuple[int, ...]], list[int]] = {}
    for number, term in enumerate(pack.terms):
        row = batch.rows[term.row]
        key = (term.node, row.temperature, row.grammar, row.ids[: term.position])
        distributions.setdefault(key, []).append(number)
    keys = list(distributions)
    device = hidden.device
    nodes = torch.tensor([key[0] for key in keys], device=device)
    picked = hidden[nodes]
    head = model.get_output_embeddings()
    for start in range(0, len(keys), SCORED_AT_ONCE):
        chunk = keys[start : start + SCORED_AT_ONCE]
        logits = head(picked[start : start + SCORED_AT_ONCE]).float()
        heat = torch.tensor([key[1] for key in chunk], device=device)
        logits = logits / heat[:, None]
        blocked = torch.zeros(logits.shape, dtype=torch.bool)
        for index, key in enumerate(chunk):
            term = pack.terms[distributions[key][0]]
            row = batch.rows[term.row]
            if row.grammar is not None:
                blocked[index] = ~torch.from_numpy(masks.at(row.grammar, row.ids, term.position))
        blocked = blocked.to(device)
        logprobs = logits.masked_fill(blocked, -torch.inf).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs.masked_fill(blocked, 0.0)).sum(-1)
        numbers = [number for key in chunk for number in distributions[key]]
        place = torch.tensor([i for i, key in enumerate(chunk) for _ in distributions[key]], device=device)
        wanted = [batch.rows[pack.terms[n].row].ids[pack.terms[n].position] for n in numbers]
        target = torch.tensor(wanted, device=device)
        loss = on_scores(pack, Scores(numbers, logprobs[place, target], entropies[place]))
        if loss is not None:
            loss.backward(retain_graph=start + SCORED_AT_ONCE < len(keys))  # type: ignore[no-untyped-call]
