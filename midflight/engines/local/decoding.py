"""Batched decoding on one causal model: the shared trunk once, then each row's suffix, then what is drawn.

Invariant: a row's result depends on its own prompt, sampling settings and seed; the rows beside it change only
floating-point rounding. Log-probs are those of the distribution the token was drawn from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher

from midflight.engines.base import FinishReason, Sampling
from midflight.engines.local.attention import LayerKV, SuffixCache
from midflight.engines.local.grammar import Masks
from midflight.engines.local.prefixes import Ids, PrefixTree

SCORE_BUDGET = 32_000_000
"""Most attention scores of one layer in a forward of the prefill; more rows are prefilled in slices."""

LAST = torch.tensor([-1])
"""Logits of the last token alone. An index, since a slice would leave the hidden states strided, and slow."""


@dataclass
class Row:
    """One request in decoding. `segments` are the prompt's ids in order; `sampling.seed` must be set."""

    segments: list[list[int]]
    sampling: Sampling
    grammar: str | None
    stop_ids: frozenset[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    supports: list[Ids] = field(default_factory=list)
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt: Ids = tuple(token for segment in self.segments for token in segment)
        self.uniforms = np.random.Generator(np.random.Philox(self.sampling.seed))


@dataclass
class Node:
    """Rows that have drawn the same ids from the same prompt under the same rules: one forward serves them all.

    `pending` are the last ids, which the model has not been fed yet; `allowed` [vocabulary] are the tokens that may
    come next (None: all).
    """

    rows: list[Row]
    matcher: LLMatcher | None
    pending: list[int] = field(default_factory=list)
    allowed: np.ndarray | None = None

    @property
    def done(self) -> bool:
        return self.rows[0].finish is not None

    def take(self, token: int, logprob: float, *, forced: bool = False, support: Ids = ()) -> None:
        """Give every row its next token; `support` are the tokens it was drawn from, where the sampling truncates."""
        head = self.rows[0]
        if self.matcher is not None:
            self.matcher.consume_token(token)
        stopped = token in head.stop_ids or (self.matcher is not None and self.matcher.is_stopped())
        spent = len(head.ids) + 1 >= head.sampling.max_tokens
        for row in self.rows:
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.forced.append(forced)
            if row.sampling.truncates:
                row.supports.append(support)
            row.finish = FinishReason.STOP if stopped else FinishReason.LENGTH if spent else None
        self.pending.append(token)

    def settle(self, masks: Masks) -> None:
        """Take the tokens on which the grammar leaves no choice: they need no forward to be drawn."""
        while not self.done and self.matcher is not None:
            self.allowed = masks.allowed(self.matcher)
            if np.count_nonzero(self.allowed) != 1:
                break
            self.take(int(self.allowed.argmax()), 0.0, forced=True)


@dataclass(frozen=True)
class Trunk:
    """What all prompts of a batch begin with, computed and held once."""

    ids: Ids
    layers: list[LayerKV]

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model's forward is told of it."""
        return {"trunk": self.layers} if self.ids else {}


@dataclass
class Filled:
    """Prompts behind a trunk, computed: row i of everything is `prompts[i]`.

    `logits` [prompts, vocabulary] are those after each prompt; `padding` [rows, 1, 1, width] is an additive mask that
    hides the columns a row has nothing in.
    """

    prompts: list[Ids]
    cache: SuffixCache
    padding: torch.Tensor
    logits: torch.Tensor


def causal_mask(length: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Additive causal mask [1, 1, length, length]."""
    full = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype, device=device)
    return full.triu(1)[None, None]


def common_trunk(rows: list[Row]) -> Ids:
    """The longest run of whole segments all prompts begin with, short of a full prompt."""
    first = rows[0].segments
    count = min(len(row.segments) for row in rows) - 1
    for row in rows[1:]:
        for index in range(count):
            if row.segments[index] != first[index]:
                count = index
                break
    return tuple(token for segment in first[:count] for token in segment)


def make_trunk(model: Any, tree: PrefixTree, ids: Ids) -> Trunk:
    """Keys and values of `ids`, [kv heads, len(ids), d] a layer."""
    if not ids:
        return Trunk(ids, [])
    if tree.find(ids)[0] < len(ids):
        prefill(model, tree, Trunk((), []), [ids])
    whole = torch.cat(tree.find(ids)[1], dim=-2)
    return Trunk(ids, [(key, value) for key, value in whole])


def shared_runs(tree: PrefixTree, cut: int, rows: Iterable[Row]) -> list[Ids]:
    """Of the prompts' unknown segments behind a trunk of `cut` tokens: the longest runs that several begin with."""
    runs = []
    for row in rows:
        known = max(cut, tree.find(row.prompt)[0])
        ends = accumulate(map(len, row.segments[:-1]))
        runs.append([row.prompt[:end] for end in ends if end > known])
    times = Counter(run for found in runs for run in found)
    longest = ([run for run in found if times[run] > 1][-1:] for found in runs)
    return list(dict.fromkeys(run for found in longest for run in found))


def prefill(
    model: Any, tree: PrefixTree, trunk: Trunk, prompts: Sequence[Ids], *, rows: int = 0, room: int = 0
) -> Filled:
    """Compute of every prompt what the tree does not hold, prompts of like length together, and add it to the tree.

    All end in one column: [hidden, known, hidden, new tokens, room]. `rows` and `room` are how many rows and further
    columns the cache shall take.
    """
    device, dtype, cut = model.device, model.dtype, len(trunk.ids)
    known: dict[Ids, tuple[int, list[torch.Tensor]]] = {}
    for prompt in prompts:
        end, pieces = tree.find(prompt[:-1])  # the last token is computed for its logits
        known[prompt] = (end, _behind(pieces, cut)) if end > cut else (cut, [])
    prompts = sorted(prompts, key=lambda prompt: len(prompt) - known[prompt][0])
    fresh = [len(prompt) - known[prompt][0] for prompt in prompts]
    width = max(end for end, _ in known.values()) - cut + fresh[-1]
    cache = SuffixCache(model, max(rows, len(prompts)), width + room)
    padding = torch.full((max(rows, len(prompts)), 1, 1, width), torch.finfo(dtype).min, dtype=dtype)
    logits = []
    heads = model.config.num_attention_heads
    for first, last in slices(fresh, lambda new: SCORE_BUDGET // (heads * new * width)):
        bucket = prompts[first:last]
        new = fresh[last - 1]
        start = width - new
        ids = torch.zeros(len(bucket), new, dtype=torch.long)
        positions = torch.zeros(len(bucket), new, dtype=torch.long)
        cache.focus(first, last, start)
        for row, prompt in enumerate(bucket):
            end, pieces = known[prompt]
            ids[row, end - len(prompt) :] = torch.tensor(prompt[end:])
            positions[row, end - len(prompt) :] = torch.arange(end, len(prompt))
            padding[first + row, :, :, end - len(prompt) :] = 0.0
            padding[first + row, :, :, start - (end - cut) : start] = 0.0
            cache.load(first + row, pieces)
        causal = torch.cat([torch.zeros(1, 1, new, start, dtype=dtype), causal_mask(new, dtype)], dim=-1)
        output = model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=(causal + padding[first:last]).clamp(min=torch.finfo(dtype).min).to(device),
            cache=cache,
            logits_to_keep=LAST,
            **trunk.arguments,
        )
        logits.append(output.logits[:, -1])
        for row, prompt in enumerate(bucket):
            end = known[prompt][0]
            tree.add(prompt, end, cache.read(first + row, width - (len(prompt) - end), width))
    cache.focus(0, max(rows, len(prompts)), width)
    return Filled(prompts, cache, padding.to(device), torch.cat(logits))


def _behind(pieces: list[torch.Tensor], cut: int) -> list[torch.Tensor]:
    """The pieces without their first `cut` tokens."""
    kept = []
    for piece in pieces:
        if cut < piece.shape[-2]:
            kept.append(piece[..., cut:, :])
        cut = max(0, cut - piece.shape[-2])
    return kept


@torch.inference_mode()
def generate(model: Any, tree: PrefixTree, masks: Masks, rows: list[Row]) -> None:
    """Fill `ids`, `logprobs`, `forced` and `finish` of each row."""
    cut = len(trunk_ids := common_trunk(rows))
    by_prompt = {row.prompt: row for row in rows}
    try:
        trunk = make_trunk(model, tree, trunk_ids)
        if runs := shared_runs(tree, cut, by_prompt.values()):
            prefill(model, tree, trunk, runs)
        room = max(row.sampling.max_tokens for row in rows)
        filled = prefill(model, tree, trunk, list(by_prompt), rows=len(rows), room=room)
        decode(model, tree, masks, trunk, filled, first_nodes(rows, masks, filled.prompts))
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
    model: Any, tree: PrefixTree, masks: Masks, trunk: Trunk, filled: Filled, nodes: list[tuple[int, Node]]
) -> None:
    """Draw until every row has ended. Each of `nodes` comes with the row of `filled` that it goes on from.

    A node takes one row of the cache; nodes split as their rows part, and leave as they end. A forward feeds every
    node as many tokens as the one with the fewest pending has; a node draws when it has none.
    """
    cache, padding, logits = filled.cache, filled.padding, filled.logits
    device, dtype, width = model.device, model.dtype, padding.shape[-1]
    while True:
        waiting = [(place, node) for place, node in nodes if not node.pending]
        ongoing = [(place, node) for place, node in nodes if node.pending]
        if waiting:
            drawn = draw(logits[[place for place, _ in waiting]].float(), [node for _, node in waiting], masks)
            ongoing += [(waiting[index][0], node) for index, node in drawn]
        for place, node in ongoing:
            if node.done:
                head = node.rows[0]
                fed = len(head.ids) - len(node.pending)
                tree.add(
                    (head.prompt + tuple(head.ids))[: len(head.prompt) + fed],
                    len(head.prompt),
                    cache.read(place, width, width + fed),
                )
        nodes = arrange([(place, node) for place, node in ongoing if not node.done], cache, padding)
        if not nodes:
            return
        count = len(nodes)
        step = min(len(node.pending) for _, node in nodes)
        fed = cache.used - width
        heads = [node.rows[0] for _, node in nodes]
        mask = torch.zeros(count, 1, step, cache.used + step, dtype=dtype, device=device)
        mask[..., :width] = padding[:count]
        mask[..., cache.used :] = causal_mask(step, dtype, device)
        cache.focus(0, count, cache.used)
        logits = model(
            input_ids=torch.tensor([node.pending[:step] for _, node in nodes], device=device),
            position_ids=torch.tensor(
                [list(range(len(head.prompt) + fed, len(head.prompt) + fed + step)) for head in heads], device=device
            ),
            attention_mask=mask,
            cache=cache,
            logits_to_keep=LAST,
            **trunk.arguments,
        ).logits[:, -1]
        cache.advance(step)
        for _, node in nodes:
            del node.pending[:step]


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


def slices(
    lengths: list[int], most: Callable[[int], int], waste: float = 1.35, least: int = 4
) -> list[tuple[int, int]]:
    """Cut ascending lengths into spans [first, last) so that padding a span to its longest wastes little.

    A span goes on while the next length is within `waste` of its shortest, and at least until `least` are in it; but it
    holds at most `most(longest)`, or one.
    """
    spans = []
    first = 0
    for index in range(1, len(lengths) + 1):
        full = index < len(lengths) and index - first >= max(1, most(lengths[index]))
        unlike = index < len(lengths) and lengths[index] > waste * lengths[first] and index - first >= least
        if index == len(lengths) or full or unlike:
            spans.append((first, index))
            first = index
    return spans


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
