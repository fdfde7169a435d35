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
from midflight.training.packing import Pack, PackedBatch

CHUNK = 128
"""Distributions over the vocabulary held at once."""

LayerKV = tuple[Tensor, Tensor]


class _TrunkedCache:
    """Stands where transformers expects a cache: puts the trunk's keys and values before the pack's."""

    is_compileable = False

    def __init__(self, trunk: list[LayerKV] | None) -> None:
        self.trunk = trunk
        self.layers: list[LayerKV] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> LayerKV:
        self.layers.append((key, value))
        if self.trunk is None:
            return key, value
        return torch.cat([self.trunk[layer_idx][0], key], dim=2), torch.cat([self.trunk[layer_idx][1], value], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.trunk is None else self.trunk[0][0].shape[2]


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
        cache = _TrunkedCache(None)
        _hidden(model, list(batch.trunk), list(range(len(batch.trunk))), None, cache, device)
        graph = cache.layers
        trunk = [(k.detach().requires_grad_(grad), v.detach().requires_grad_(grad)) for k, v in graph]
    for pack in batch.packs:
        hidden = _hidden(model, pack.ids, pack.depths, pack, _TrunkedCache(trunk), device)
        _score_pack(model, masks, batch, pack, hidden, on_scores)
    if grad and trunk is not None:
        outputs, gradients = [], []
        for (key, value), (key_leaf, value_leaf) in zip(graph, trunk, strict=True):
            for output, leaf in ((key, key_leaf), (value, value_leaf)):
                if leaf.grad is not None and output.requires_grad:
                    outputs.append(output)
                    gradients.append(leaf.grad)
        if outputs:
            torch.autograd.backward(outputs, gradients)


def _hidden(
    model: Any, ids: list[int], depths: list[int], pack: Pack | None, cache: _TrunkedCache, device: torch.device
) -> Tensor:
    """Last hidden states [N, width] of a pack's tokens, or of the trunk (pack None: plain causal)."""
    dtype = next(model.parameters()).dtype
    size = len(ids)
    past = cache.get_seq_length()
    if pack is None:
        visible = torch.ones(size, size, dtype=torch.bool).tril()
    else:
        visible = torch.cat([torch.ones(size, past, dtype=torch.bool), torch.from_numpy(pack.visible())], dim=1)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    output = model.get_decoder()(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([depths], device=device),
        attention_mask=mask[None, None].to(device),
        cache=cache,
        use_cache=True,
    )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


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
    grad = torch.is_grad_enabled()
    leaf = picked.detach().requires_grad_(grad)
    head = model.get_output_embeddings()
    for start in range(0, len(keys), CHUNK):
        chunk = keys[start : start + CHUNK]
        logits = head(leaf[start : start + CHUNK]).float()
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
            loss.backward()  # type: ignore[no-untyped-call]
    if grad and leaf.grad is not None:
        picked.backward(leaf.grad)  # type: ignore[no-untyped-call]
