"""Forward and backward over a packed batch: the trunk once, then pack by pack, gradients accumulated.

Memory grows with the pack, not with the batch: each pack's graph ends at the trunk's keys and values, whose gradients
are collected and sent through the trunk at the end. Logits exist only where a trained token is scored, a chunk at a
time: of a pack with several chunks they are made once for the loss and again for its gradient.
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
    """Of a pack's terms: log-prob and entropy under the distribution each was drawn from, both [terms]."""

    terms: list[int]
    logprobs: Tensor
    entropies: Tensor


def run(
    model: Any,
    masks: Masks,
    batch: PackedBatch,
    on_scores: Callable[[Pack, Scores], Tensor | None],
    *,
    entropy_grad: bool = False,
) -> None:
    """Score every trained token of `batch` under `model`.

    `on_scores` gets a pack and the scores of all its terms (`scores.terms` are indices into `pack.terms`). When it
    returns a loss, its gradient is accumulated into the model's parameters. Entropies carry one if asked for.
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
            _score_pack(model, masks, batch, pack, leaf[index], on_scores, entropy_grad)
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


@dataclass(frozen=True)
class _Distribution:
    """Terms that were drawn from one distribution: those of one node, temperature and grammar state."""

    node: int
    terms: list[int]


def _score_pack(
    model: Any,
    masks: Masks,
    batch: PackedBatch,
    pack: Pack,
    hidden: Tensor,
    on_scores: Callable[[Pack, Scores], Tensor | None],
    entropy_grad: bool,
) -> None:
    """Hand `on_scores` the scores of a pack's terms and send the gradient of what it returns to `hidden` [N, width]."""
    found = _distributions(batch, pack)
    chunks = [found[start : start + SCORED_AT_ONCE] for start in range(0, len(found), SCORED_AT_ONCE)]
    grad, whole = torch.is_grad_enabled(), len(chunks) == 1

    def score(chunk: list[_Distribution]) -> tuple[Tensor, Tensor]:
        return _score(model, masks, batch, pack, hidden, chunk, entropy_grad)

    with torch.set_grad_enabled(grad and whole):
        logprobs, entropies = (torch.cat(part) for part in zip(*map(score, chunks), strict=True))
    if grad and not whole:
        logprobs.requires_grad_(True)
        entropies.requires_grad_(entropy_grad)
    loss = on_scores(pack, Scores([term for one in found for term in one.terms], logprobs, entropies))
    if loss is None or not grad:
        return
    loss.backward()  # type: ignore[no-untyped-call]
    if whole:
        return
    start = 0
    for chunk in chunks:
        end = start + sum(len(one.terms) for one in chunk)
        pairs = [
            (made, leaf.grad[start:end])
            for made, leaf in zip(score(chunk), (logprobs, entropies), strict=True)
            if leaf.grad is not None
        ]
        torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
        start = end


def _distributions(batch: PackedBatch, pack: Pack) -> list[_Distribution]:
    found: dict[tuple[Any, ...], _Distribution] = {}
    for number, term in enumerate(pack.terms):
        row = batch.rows[term.row]
        support = row.supports[term.position] if row.supports else None
        key = (term.node, row.temperature, row.grammar, row.ids[: term.position], support)
        found.setdefault(key, _Distribution(term.node, [])).terms.append(number)
    return list(found.values())


def _score(
    model: Any,
    masks: Masks,
    batch: PackedBatch,
    pack: Pack,
    hidden: Tensor,
    chunk: list[_Distribution],
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of the terms of `chunk`, in order: of its temperature, within its mask or support."""
    device = hidden.device
    logits = model.get_output_embeddings()(hidden[torch.tensor([one.node for one in chunk], device=device)]).float()
    blocked = torch.zeros(logits.shape, dtype=torch.bool)
    heat = []
    for index, one in enumerate(chunk):
        term = pack.terms[one.terms[0]]
        row = batch.rows[term.row]
        heat.append(row.temperature)
        if row.supports:
            blocked[index] = True
            blocked[index, list(row.supports[term.position])] = False
        elif row.grammar is not None:
            blocked[index] = ~torch.from_numpy(masks.at(row.grammar, row.ids, term.position))
    blocked = blocked.to(device)
    logits = logits / torch.tensor(heat, device=device)[:, None]
    logprobs = logits.masked_fill(blocked, -torch.inf).log_softmax(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropies = -(logprobs.exp() * logprobs.masked_fill(blocked, 0.0)).sum(-1)
    place = torch.tensor([index for index, one in enumerate(chunk) for _ in one.terms], device=device)
    terms = [pack.terms[number] for one in chunk for number in one.terms]
    target = torch.tensor([batch.rows[term.row].ids[term.position] for term in terms], device=device)
    return logprobs[place, target], entropies[place]


def score_rows(model: Any, masks: Masks, batch: PackedBatch) -> list[tuple[float, ...]]:
    """Log-prob of each id of each row under `model`, 0 for forced ones; no gradient."""
    found = [[0.0] * len(row.ids) for row in batch.rows]

    def keep(pack: Pack, scores: Scores) -> None:
        for number, logprob in zip(scores.terms, scores.logprobs.tolist(), strict=True):
            term = pack.terms[number]
            found[term.row][term.position] = logprob

    with torch.no_grad():
        run(model, masks, batch, keep)
    return [tuple(row) for row in found]
