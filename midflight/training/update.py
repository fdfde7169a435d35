"""Forward and backward over a packed batch: a pack, what goes on from it, then the pack's backward pass.

A pack's graph ends at the keys and values of the packs before it, whose gradients are collected there until their own
backward pass. Invariant: one pack's graph is alive at a time, so memory grows with the pack and with the keys and
values of the longest row, not with the batch. A pack that others go on from is computed twice for that: without a graph
for its keys and values, and again when their gradients are there. Logits exist only where a trained token is scored, a
chunk at a time. Only of a model that runs by its own forward, and whose logits are made in another way than of its last
hidden states one by one, those of a whole row exist at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from midflight.engines.local.attention import block_mask
from midflight.engines.local.grammar import Masks
from midflight.engines.local.plain import gives_hidden, logits_of
from midflight.engines.local.support import is_ours
from midflight.training.packing import SCORED_AT_ONCE, Pack, PackedBatch

LayerKV = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [1, kv heads, tokens, d]."""


class _Prefix:
    """Stands where transformers expects a cache: puts the keys and values of the packs before in front of a pack's own.

    `before` are those packs' layers, the first pack first; `own` are the pack's, kept for what goes on from it.
    """

    is_compileable = False

    def __init__(self, before: list[list[LayerKV]]) -> None:
        self.before = before
        self.own: list[LayerKV] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> LayerKV:
        self.own.append((key, value))
        if not self.before:
            return key, value
        keys, values = zip(*(layers[layer_idx] for layers in self.before), strict=True)
        return torch.cat([*keys, key], dim=2), torch.cat([*values, value], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(frozen=True)
class Scores:
    """Of some terms of a pack: log-prob and entropy under the distribution each was drawn from, both [terms]."""

    terms: list[int]
    logprobs: Tensor
    entropies: Tensor


OnScores = Callable[[Pack, Scores], Tensor | None]


def run(
    model: Any,
    masks: Masks,
    batch: PackedBatch,
    on_scores: OnScores,
    *,
    entropy_grad: bool = False,
    flex: bool = False,
    exact: bool = False,
) -> None:
    """Score every trained token of `batch` under `model`, by sdpa, `flex` or `exact` attention.

    `on_scores` gets a pack and the scores of some of its terms (`scores.terms` are indices into `pack.terms`). When it
    returns a loss, its gradient is accumulated into the model's parameters. Entropies carry one if asked for.
    """
    if is_ours(model):
        head = model.get_output_embeddings()
    else:
        head = partial(logits_of, model) if gives_hidden(model) else None
    scorer = _Scorer(model, head, masks, batch, on_scores, entropy_grad, flex, exact)
    for root in batch.roots:
        scorer.run(root)


def score_rows(
    model: Any, masks: Masks, batch: PackedBatch, *, flex: bool = False, exact: bool = False
) -> list[tuple[float, ...]]:
    """Log-prob of each id of each row under `model`, 0 for forced ones; no gradient."""
    found = [[0.0] * len(row.ids) for row in batch.rows]

    def keep(pack: Pack, scores: Scores) -> None:
        for number, logprob in zip(scores.terms, scores.logprobs.tolist(), strict=True):
            term = pack.terms[number]
            found[term.row][term.position] = logprob

    with torch.no_grad():
        run(model, masks, batch, keep, flex=flex, exact=exact)
    return [tuple(row) for row in found]


@dataclass(frozen=True)
class _Distribution:
    """Terms that were drawn from one distribution: those of one node, temperature and grammar state."""

    node: int
    terms: list[int]


_Outputs = tuple[Tensor, list[LayerKV]]
"""Last hidden states [1, N, width] of a pack, or logits of its nodes with terms, and its keys and values."""


@dataclass(frozen=True)
class _Begun:
    """A pack whose backward pass is to come. `layers`, its keys and values as what goes on from it sees them, collect
    the gradients; `outputs` is None where it is to be computed again."""

    pack: Pack
    layers: list[LayerKV]
    outputs: _Outputs | None


@dataclass(frozen=True)
class _Scorer:
    """What stays the same over the packs of one pass. `head` makes logits of hidden states; None: they are logits."""

    model: Any
    head: Callable[[Tensor], Tensor] | None
    masks: Masks
    batch: PackedBatch
    on_scores: OnScores
    entropy_grad: bool
    flex: bool
    exact: bool

    def run(self, root: Pack) -> None:
        """A pack and all that goes on from it, each begun after the one it goes on from and ended before it."""
        path: list[_Begun] = []
        todo: list[Pack | None] = [root]  # None: the path's last has nothing more to wait for
        while todo:
            pack = todo.pop()
            if pack is None:
                self._end(path.pop(), path)
            else:
                path.append(self._begin(pack, path))
                todo += [None, *reversed(pack.branches)]

    def _begin(self, pack: Pack, path: list[_Begun]) -> _Begun:
        """Compute a pack behind those of `path`, with its graph if its backward pass is next."""
        grad = torch.is_grad_enabled()
        again = grad and bool(pack.branches)
        with torch.set_grad_enabled(grad and not again):
            if is_ours(self.model):
                hidden, own = self._forward(pack, path)
            else:
                (hidden, pack), own = self._plain(pack), []
        layers = [(key.detach().requires_grad_(grad), value.detach().requires_grad_(grad)) for key, value in own]
        return _Begun(pack, layers, None if again else (hidden, own))

    def _end(self, begun: _Begun, path: list[_Begun]) -> None:
        """Score a pack's terms, and send their gradients and those that were collected through it."""
        hidden, own = begun.outputs or self._forward(begun.pack, path)
        leaf = hidden.detach().requires_grad_(torch.is_grad_enabled())
        self._score(begun.pack, leaf[0])
        outputs = (hidden, *(part for layer in own for part in layer))
        leaves = (leaf, *(part for layer in begun.layers for part in layer))
        pairs = [
            (output, leaf.grad)
            for output, leaf in zip(outputs, leaves, strict=True)
            if leaf.grad is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def _forward(self, pack: Pack, path: list[_Begun]) -> _Outputs:
        """A pack behind those of `path`."""
        weight = next(self.model.parameters())
        visible = torch.from_numpy(pack.visible())
        mask: Any
        if self.flex:
            mask = block_mask(visible.to(weight.device))
        else:
            mask = torch.zeros(visible.shape, dtype=weight.dtype).masked_fill(~visible, torch.finfo(weight.dtype).min)
            mask = mask[None, None].to(weight.device)
        cache = _Prefix([one.layers for one in path])
        output = self.model.get_decoder()(
            input_ids=torch.tensor([pack.ids], device=weight.device),
            position_ids=torch.tensor([pack.depths], device=weight.device),
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            exact=self.exact,
        )
        return output.last_hidden_state, cache.own

    def _plain(self, pack: Pack) -> tuple[Tensor, Pack]:
        """Last hidden states [1, n, width], or logits, by the model's own forward of a pack that is one sequence, at
        the nodes its terms name, and the pack with those nodes numbered so."""
        nodes = sorted({term.node for term in pack.terms})
        ids = torch.tensor([pack.ids], device=next(self.model.parameters()).device)
        index = torch.tensor(nodes, device=ids.device)
        if self.head is not None:
            found: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, index]
        elif "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            found = self.model(input_ids=ids, use_cache=False, logits_to_keep=index).logits
        else:
            found = self.model(input_ids=ids, use_cache=False).logits[:, index]
        return found, replace(pack, terms=[replace(term, node=nodes.index(term.node)) for term in pack.terms])

    def _score(self, pack: Pack, hidden: Tensor) -> None:
        """Hand on the scores of a pack's terms, and send the gradient of what comes back to `hidden` [N, width].

        Without a `head`, `hidden` are logits.
        """
        found: dict[tuple[Any, ...], _Distribution] = {}
        for number, term in enumerate(pack.terms):
            row = self.batch.rows[term.row]
            support = row.supports[term.position] if row.supports else None
            # The node stands for all ids before it: rows that share it differ only in where their action began.
            key = (term.node, term.position, row.temperature, row.grammar, support)
            found.setdefault(key, _Distribution(term.node, [])).terms.append(number)
        distributions = list(found.values())
        for start in range(0, len(distributions), SCORED_AT_ONCE):
            loss = self.on_scores(pack, self._scores(pack, hidden, distributions[start : start + SCORED_AT_ONCE]))
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]

    def _scores(self, pack: Pack, hidden: Tensor, chunk: list[_Distribution]) -> Scores:
        """Of the terms of `chunk`: at their temperature, within their mask or support."""
        device = hidden.device
        nodes = torch.tensor([one.node for one in chunk], device=device)
        logits = (hidden[nodes] if self.head is None else self.head(hidden[nodes])).float()
        blocked = torch.zeros(logits.shape, dtype=torch.bool)
        heat = []
        for index, one in enumerate(chunk):
            term = pack.terms[one.terms[0]]
            row = self.batch.rows[term.row]
            heat.append(row.temperature)
            if row.supports:
                blocked[index] = True
                blocked[index, list(row.supports[term.position])] = False
            elif row.grammar is not None:
                blocked[index] = ~torch.from_numpy(self.masks.at(row.grammar, row.ids, term.position))
        blocked = blocked.to(device)
        logits = logits / torch.tensor(heat, device=device)[:, None]
        logprobs = logits.masked_fill(blocked, -torch.inf).log_softmax(-1)
        with torch.set_grad_enabled(self.entropy_grad and torch.is_grad_enabled()):
            entropies = -(logprobs.exp() * logprobs.masked_fill(blocked, 0.0)).sum(-1)
        place = torch.tensor([index for index, one in enumerate(chunk) for _ in one.terms], device=device)
        numbers = [number for one in chunk for number in one.terms]
        rows = self.batch.rows
        target = torch.tensor([rows[pack.terms[n].row].ids[pack.terms[n].position] for n in numbers], device=device)
        return Scores(numbers, logprobs[place, target], entropies[place])
