"""Batched decoding on one causal model: the shared trunk once, then each row's suffix, then what is drawn.

Invariant: a row's result depends on its own prompt, sampling settings and seed; the rows beside it change only
floating-point rounding. Log-probs are those of the distribution the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from midflight.engines.base import Sampling
from midflight.engines.local.attention import SuffixCache
from midflight.engines.local.grammar import Masks
from midflight.engines.local.prefilling import LAST, Filled, behind, causal_mask, common_trunk, fill, make_trunk
from midflight.engines.local.prefixes import Ids, PrefixTree
from midflight.engines.local.rows import Node, Row

LAPS = 4
"""Lengths of a continuation that a running batch has columns for; then it runs out, and the next one starts."""


@dataclass(frozen=True)
class Arrivals:
    """Requests that join a running batch, in order of arrival; at most `most` are in it at a time.

    `peek` gives the next one and leaves it; `take` removes it. `ended` gets rows that have ended.
    """

    peek: Callable[[], Row | None]
    take: Callable[[], Row]
    ended: Callable[[list[Row]], None]
    most: int


@torch.inference_mode()
def generate(
    model: Any,
    tree: PrefixTree,
    masks: Masks,
    rows: list[Row],
    arrivals: Arrivals | None = None,
    *,
    exact: bool = False,
) -> None:
    """Fill `ids`, `logprobs`, `forced` and `finish` of each row, and of those that arrive meanwhile.

    `exact`: attention in float64, see `attention`.
    """
    room = max(row.sampling.max_tokens for row in rows)
    seats = len(rows) if arrivals is None else arrivals.most
    try:
        trunk = make_trunk(model, tree, common_trunk(rows), exact=exact)
        filled = fill(model, tree, trunk, rows, seats=seats, room=room if arrivals is None else LAPS * room)
        decode(model, tree, masks, filled, first_nodes(rows, masks, filled.prompts), arrivals)
    finally:
        tree.trim()


def first_nodes(rows: list[Row], masks: Masks, prompts: list[Ids]) -> list[tuple[int, Node]]:
    """Rows that are to be decoded alike as one node, each with the index of its prompt."""
    place = {prompt: index for index, prompt in enumerate(prompts)}
    grouped: dict[tuple[Any, ...], tuple[int, Node]] = {}
    for row in rows:
        key = (row.prompt, row.grammar, replace(row.sampling, seed=None))
        if key not in grouped:
            grouped[key] = (place[row.prompt], Node([], masks.start(row.grammar) if row.grammar else None))
        grouped[key][1].rows.append(row)
    for _, node in grouped.values():
        node.settle(masks)
    return list(grouped.values())


def decode(
    model: Any,
    tree: PrefixTree,
    masks: Masks,
    filled: Filled,
    nodes: list[tuple[int, Node]],
    arrivals: Arrivals | None = None,
) -> None:
    """Draw until every row has ended, or its request is gone.

    Each of `nodes` comes with the row of `filled` that it goes on from.

    A node takes one row of the cache; nodes split as their rows part, and leave as they end. A forward feeds every
    node as many tokens as the one with the fewest pending has; a node draws when it has none.
    """
    cache, padding, logits = filled.cache, filled.padding, filled.logits
    device, dtype = model.device, model.dtype
    while True:
        waiting = [(place, node) for place, node in nodes if not node.pending]
        ongoing = [(place, node) for place, node in nodes if node.pending]
        if waiting:
            drawn = draw(logits[[place for place, _ in waiting]].float(), [node for _, node in waiting], masks)
            ongoing += [(waiting[index][0], node) for index, node in drawn]
        for place, node in ongoing:
            node.leave()
            if node.done:
                head = node.rows[0]
                tree.add(
                    (head.prompt + tuple(head.ids))[: len(head.prompt) + node.fed],
                    len(head.prompt),
                    cache.read(place, cache.used - node.fed, cache.used),
                )
                if arrivals is not None:
                    arrivals.ended(node.rows)
        nodes = arrange([(place, node) for place, node in ongoing if not node.done], cache, padding)
        if not nodes:
            return
        if arrivals is not None:
            nodes += admit(model, tree, masks, filled, nodes, arrivals)
        count = len(nodes)
        step = min(len(node.pending) for _, node in nodes)
        mask = torch.zeros(count, 1, step, cache.used + step, dtype=dtype, device=device)
        mask[..., : cache.used] = padding[:count, ..., : cache.used]
        mask[..., cache.used :] = causal_mask(step, dtype, device)
        cache.focus(0, count, cache.used)
        starts = [len(node.rows[0].prompt) + node.fed for _, node in nodes]
        logits = model(
            input_ids=torch.tensor([node.pending[:step] for _, node in nodes], device=device),
            position_ids=torch.tensor([list(range(start, start + step)) for start in starts], device=device),
            attention_mask=mask,
            cache=cache,
            logits_to_keep=LAST,
            **filled.trunk.arguments,
        ).logits[:, -1]
        cache.advance(step)
        for _, node in nodes:
            del node.pending[:step]


def admit(
    model: Any, tree: PrefixTree, masks: Masks, filled: Filled, nodes: list[tuple[int, Node]], arrivals: Arrivals
) -> list[tuple[int, Node]]:
    """Take in the requests that arrived, as long as the first of them fits, in the rows behind those of `nodes`.

    It fits when it begins with the trunk, its prompt is no longer than the columns before the next and its continuation
    than those that are left. What does not fit waits for the next batch; nothing overtakes it. The tree keeps to its
    bound, but for the prompts that are running.
    """
    cache, cut = filled.cache, len(filled.trunk.ids)
    left = filled.padding.shape[-1] - cache.used
    inside = sum(len(node.rows) for _, node in nodes)
    fresh: list[Row] = []
    while inside + len(fresh) < arrivals.most and (row := arrivals.peek()) is not None:
        suffix = len(row.prompt) - cut
        if row.prompt[:cut] != filled.trunk.ids or not 0 < suffix <= cache.used or row.sampling.max_tokens > left:
            break
        fresh.append(arrivals.take())
    if not fresh:
        return []
    new = fill(model, tree, filled.trunk, fresh)
    started = first_nodes(fresh, masks, new.prompts)
    ready = [node for _, node in started if node.pending]
    if waiting := [(place, node) for place, node in started if not node.pending]:
        drawn = draw(new.logits[[place for place, _ in waiting]].float(), [node for _, node in waiting], masks)
        ready += [node for _, node in drawn]
    seated: list[tuple[int, Node]] = []
    for node in ready:
        if node.done:
            arrivals.ended(node.rows)
            continue
        place, prompt = len(nodes) + len(seated), node.rows[0].prompt
        length, pieces = tree.find(prompt)
        assert length == len(prompt), "fill leaves the whole prompt in the tree"
        filled.seat(place, behind(pieces, cut))
        seated.append((place, node))
    tree.trim(node.rows[0].prompt for _, node in [*nodes, *seated])
    return seated


def arrange(nodes: list[tuple[int, Node]], cache: SuffixCache, padding: torch.Tensor) -> list[tuple[int, Node]]:
    """Give n nodes the cache's first n rows, moving as little as possible; `nodes` name the rows they come from."""
    seats: list[Node | None] = [None] * len(nodes)
    movers = []
    for place, node in nodes:
        if place < len(nodes) and seats[place] is None:
            seats[place] = node
        else:
            movers.append((place, node))
    empty = [place for place, seat in enumerate(seats) if seat is None]
    if movers:
        sources = [place for place, _ in movers]
        cache.move(empty, sources)
        padding[empty] = padding[sources]
        for place, (_, node) in zip(empty, movers, strict=True):
            seats[place] = node
    return [(place, node) for place, node in enumerate(seats) if node is not None]


def draw(logits: torch.Tensor, nodes: list[Node], masks: Masks) -> list[tuple[int, Node]]:
    """Draw one token for every row of every node from its node's logits [nodes, vocabulary].

    Returns what the nodes become, also those that have ended, each with the index of the node it came from.
    """
    samplings = [node.rows[0].sampling for node in nodes]
    heat = [sampling.temperature or 1.0 for sampling in samplings]
    logits = logits / torch.tensor(heat, device=logits.device)[:, None]
    for index, node in enumerate(nodes):
        if node.allowed is not None:
            logits[index].masked_fill_(torch.from_numpy(~node.allowed).to(logits.device), -torch.inf)
    logprobs = truncate(logits, samplings).log_softmax(-1)
    best = logprobs.argmax(dim=-1).tolist()
    children: list[tuple[int, Node]] = []
    for index, node in enumerate(nodes):
        warm = samplings[index].temperature > 0
        cumulative = logprobs[index].double().exp().cumsum(-1) if warm else None
        support: Ids = ()
        if samplings[index].truncates:
            support = tuple(torch.nonzero(logprobs[index] > -torch.inf)[:, 0].tolist())
        split: dict[int, list[Row]] = {}
        for row in node.rows:
            token = best[index]
            if cumulative is not None:
                aim = float(row.uniforms.random()) * cumulative[-1]
                token = int(torch.searchsorted(cumulative, aim, right=True))
                if token >= logits.shape[1] or logprobs[index, token] == -torch.inf:
                    token = best[index]  # a uniform that rounds onto the end of the support must not leave it
            split.setdefault(token, []).append(row)
        for number, (token, together) in enumerate(split.items()):
            matcher = node.matcher
            if matcher is not None and number < len(split) - 1:
                matcher = matcher.deep_copy()
            child = Node(together, matcher)
            child.take(token, float(logprobs[index, token]) if warm else 0.0, support=support)
            child.settle(masks)
            children.append((index, child))
    return children


def truncate(logits: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Apply each row's top-k and top-p to tempered logits [rows, vocabulary]; what falls out becomes -inf."""
    for index, sampling in enumerate(samplings):
        if sampling.temperature == 0:
            continue
        if sampling.top_k > 0:
            least = logits[index].topk(min(sampling.top_k, logits.shape[1])).values[-1]
            logits[index] = logits[index].masked_fill(logits[index] < least, -torch.inf)
        if sampling.top_p < 1.0:
            ordered, places = logits[index].softmax(-1).sort(descending=True)
            outside = ordered.cumsum(-1) - ordered >= sampling.top_p
            logits[index, places[outside]] = -torch.inf
    return logits
