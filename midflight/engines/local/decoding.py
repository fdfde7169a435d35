"""Batched decoding on one causal model: the shared trunk once, then each row's suffix, then token by token.

Invariant: a row's result depends on its own prompt, sampling settings and seed; the rows beside it change only
floating-point rounding. Log-probs are those of the distribution the token was drawn from.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher

from midflight.engines.base import FinishReason, Sampling
from midflight.engines.local.attention import LayerKV, SuffixCache
from midflight.engines.local.grammar import Masks

Ids = tuple[int, ...]
SCORE_BUDGET = 32_000_000
"""Most attention scores held at once in a prefill; more rows are prefilled in slices."""


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
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt: Ids = tuple(token for segment in self.segments for token in segment)
        self.uniforms = np.random.Generator(np.random.Philox(self.sampling.seed))


@dataclass
class Node:
    """Rows that have drawn the same ids from the same prompt under the same rules: one forward serves them all."""

    rows: list[Row]
    matcher: LLMatcher | None


class PrefixCache:
    """Keys and values of prompts' beginnings, for one weights version.

    Trunks are what a whole batch begins with. Stems are what single prompts begin with behind a trunk: the next turn of
    a trajectory repeats them and adds to them. The oldest of each go first.
    """

    def __init__(self, model: Any, *, trunks: int = 8, stem_tokens: int = 16_384) -> None:
        self._model = model
        self._most_trunks, self._most_tokens = trunks, stem_tokens
        self._trunks: OrderedDict[Ids, list[LayerKV]] = OrderedDict()
        self._stems: OrderedDict[tuple[int, Ids], list[LayerKV]] = OrderedDict()
        self._tokens = 0

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._trunks.clear()
        self._stems.clear()
        self._tokens = 0

    def stem(self, cut: int, row: Row) -> tuple[int, list[LayerKV] | None]:
        """The longest kept run of whole segments that `row` begins with behind a trunk of `cut` tokens.

        Returns its end in the prompt, and [kv heads, end - cut, d] keys and values a layer (None: nothing kept).
        """
        end = len(row.prompt)
        for segment in reversed(row.segments[1:]):
            end -= len(segment)
            if end <= cut:
                break
            found = self._stems.get((cut, row.prompt[:end]))
            if found is not None:
                self._stems.move_to_end((cut, row.prompt[:end]))
                return end, found
        return cut, None

    def keep_stem(self, cut: int, ids: Ids, layers: list[LayerKV]) -> None:
        """Keep keys and values of `ids[cut:]`."""
        self._stems[cut, ids] = layers
        self._tokens += len(ids) - cut
        while self._tokens > self._most_tokens and len(self._stems) > 1:
            (start, gone), _ = self._stems.popitem(last=False)
            self._tokens -= len(gone) - start

    def trunk(self, ids: Ids) -> list[LayerKV] | None:
        """Keys and values of `ids`, [kv heads, len(ids), d] a layer; computed from the longest kept beginning."""
        if not ids:
            return None
        base: Ids = ()
        for known in self._trunks:
            if len(base) < len(known) <= len(ids) and ids[: len(known)] == known:
                base = known
        if base:
            self._trunks.move_to_end(base)
        if base == ids:
            return self._trunks[base]
        parent = self._trunks[base] if base else None
        device = self._model.device
        new = torch.tensor([ids[len(base) :]], device=device)
        positions = torch.arange(len(base), len(ids), device=device)[None]
        cache = SuffixCache(self._model.config.num_hidden_layers, 1, new.shape[1])
        mask = causal_mask(new.shape[1], self._model.dtype, device)
        self._model(
            input_ids=new, position_ids=positions, attention_mask=mask, cache=cache, trunk=parent, logits_to_keep=1
        )
        cache.advance(new.shape[1])
        layers: list[LayerKV] = []
        for index in range(self._model.config.num_hidden_layers):
            key, value = (block[0] for block in cache.layer(index))
            if parent is not None:
                key = torch.cat([parent[index][0], key], dim=1)
                value = torch.cat([parent[index][1], value], dim=1)
            layers.append((key, value))
        self._trunks[ids] = layers
        while len(self._trunks) > self._most_trunks:
            self._trunks.popitem(last=False)
        return layers


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


def keep_shared(prefixes: PrefixCache, cut: int, rows: Iterable[Row]) -> None:
    """Make a stem of what several prompts without one begin with behind the trunk, such as the same worked examples."""
    fresh = [row for row in rows if prefixes.stem(cut, row)[1] is None]
    runs = {
        row.prompt: [row.prompt[:end] for end in accumulate(map(len, row.segments[:-1])) if end > cut] for row in fresh
    }
    times = Counter(run for found in runs.values() for run in found)
    for run in {found[-1] for one in runs.values() if (found := [run for run in one if times[run] > 1])}:
        layers = prefixes.trunk(run)
        assert layers is not None
        prefixes.keep_stem(cut, run, [(key[:, cut:], value[:, cut:]) for key, value in layers])


@torch.inference_mode()
def generate(model: Any, prefixes: PrefixCache, masks: Masks, rows: list[Row]) -> None:
    """Fill `ids`, `logprobs`, `forced` and `finish` of each row."""
    trunk_ids = common_trunk(rows)
    cut = len(trunk_ids)
    by_prompt = {row.prompt: row for row in rows}
    keep_shared(prefixes, cut, by_prompt.values())
    ends: dict[Ids, int] = {}
    stems: dict[Ids, list[LayerKV] | None] = {}
    for prompt, row in by_prompt.items():
        ends[prompt], stems[prompt] = prefixes.stem(cut, row)
    prompts = sorted(by_prompt, key=lambda prompt: len(prompt) - ends[prompt])
    past = max(ends.values()) - cut
    longest = len(prompts[-1]) - ends[prompts[-1]]
    scores = len(prompts) * model.config.num_attention_heads * longest * (past + longest)
    if scores > SCORE_BUDGET and len(rows) > 1:
        half = len(rows) // 2
        generate(model, prefixes, masks, rows[:half])
        generate(model, prefixes, masks, rows[half:])
        return
    shared = prefixes.trunk(trunk_ids)
    trunk = {} if shared is None else {"trunk": shared}
    device, dtype = model.device, model.dtype
    low = torch.finfo(dtype).min

    # Prefill: of every distinct prompt what no stem holds, prompts of like length together. All end in one column:
    # [hidden, stem, hidden, new tokens, room for what is drawn].
    width = past + longest
    room = max(row.sampling.max_tokens for row in rows)
    cache = SuffixCache(model.config.num_hidden_layers, len(prompts), width + room)
    padding = torch.full((len(prompts), width), low, dtype=dtype)
    pieces = []
    for first, last in like_lengths([len(prompt) - ends[prompt] for prompt in prompts]):
        bucket = prompts[first:last]
        new = len(bucket[-1]) - ends[bucket[-1]]
        start = width - new
        ids = torch.zeros(len(bucket), new, dtype=torch.long)
        positions = torch.zeros(len(bucket), new, dtype=torch.long)
        for index, prompt in enumerate(bucket):
            fresh = len(prompt) - ends[prompt]
            ids[index, new - fresh :] = torch.tensor(prompt[ends[prompt] :])
            positions[index, new - fresh :] = torch.arange(ends[prompt], len(prompt))
            padding[first + index, width - fresh :] = 0.0
            padding[first + index, start - (ends[prompt] - cut) : start] = 0.0
        cache.focus(first, last, start)
        cache.load([stems[prompt] for prompt in bucket])
        causal = torch.cat([torch.zeros(1, 1, new, start, dtype=dtype), causal_mask(new, dtype)], dim=-1)
        output = model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=(causal + padding[first:last, None, None]).clamp(min=low).to(device),
            cache=cache,
            logits_to_keep=1,
            **trunk,
        )
        pieces.append(output.logits[:, -1])
        for index, prompt in enumerate(bucket):
            row = by_prompt[prompt]
            end = len(prompt) - len(row.segments[-1])
            if end > ends[prompt]:
                fresh = width - (len(prompt) - ends[prompt])
                spans = [(start - (ends[prompt] - cut), start), (fresh, fresh + end - ends[prompt])]
                prefixes.keep_stem(cut, prompt[:end], cache.copy(first + index, spans))
    logits = torch.cat(pieces)
    cache.focus(0, len(prompts), width)
    padding = padding[:, None, None].to(device)

    # Decode: one token a step for every distinct sequence; nodes split as their rows part, and leave as they finish.
    grouped: dict[tuple[Any, ...], Node] = {}
    for row in rows:
        key = (row.prompt, row.grammar, replace(row.sampling, seed=None))
        if key not in grouped:
            grouped[key] = Node([], masks.start(row.grammar) if row.grammar else None)
        grouped[key].rows.append(row)
    nodes = list(grouped.values())
    place = {prompt: index for index, prompt in enumerate(prompts)}
    parents = [place[node.rows[0].prompt] for node in nodes]
    while True:
        children = draw(logits[parents].float(), nodes, masks)
        if not children:
            return
        parents = [parents[index] for index, _ in children]
        nodes = [node for _, node in children]
        if parents != list(range(len(padding))):
            keep = torch.tensor(parents, device=device)
            cache.select(keep)
            padding = padding[keep]
        parents = list(range(len(nodes)))
        heads = [node.rows[0] for node in nodes]
        mask = torch.zeros(len(nodes), 1, 1, cache.used + 1, dtype=dtype, device=device)
        mask[..., :width] = padding
        logits = model(
            input_ids=torch.tensor([[row.ids[-1]] for row in heads], device=device),
            position_ids=torch.tensor([[len(row.prompt) + len(row.ids) - 1] for row in heads], device=device),
            attention_mask=mask,
            cache=cache,
            logits_to_keep=1,
            **trunk,
        ).logits[:, -1]
        cache.advance(1)


def like_lengths(lengths: list[int], waste: float = 1.35, least: int = 4) -> list[tuple[int, int]]:
    """Cut ascending lengths into spans [first, last) so that padding a span to its longest wastes little.

    A span goes on while the next length is within `waste` of its shortest, and at least until `least` are in it.
    """
    spans = []
    first = 0
    for index in range(1, len(lengths) + 1):
        if index == len(lengths) or (lengths[index] > waste * lengths[first] and index - first >= least):
            spans.append((first, index))
            first = index
    return spans


def draw(logits: torch.Tensor, nodes: list[Node], masks: Masks) -> list[tuple[int, Node]]:
    """Draw one token for every row of every node from its node's logits [nodes, vocabulary].

    Returns the nodes that go on, each with the index of the node it came from; finished rows are in none.
    """
    samplings = [node.rows[0].sampling for node in nodes]
    heat = [sampling.temperature or 1.0 for sampling in samplings]
    allowed = np.stack(
        [
            masks.allowed(node.matcher) if node.matcher is not None else np.ones(logits.shape[1], dtype=bool)
            for node in nodes
        ]
    )
    single = allowed.sum(axis=1) == 1
    logits = logits / torch.tensor(heat, device=logits.device)[:, None]
    logits = logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
    logprobs = truncate(logits, samplings).log_softmax(-1)
    best = logprobs.argmax(dim=-1).tolist()
    cumulative: dict[int, torch.Tensor] = {}
    children: list[tuple[int, Node]] = []
    for index, node in enumerate(nodes):
        split: dict[int, list[Row]] = {}
        for row in node.rows:
            token, logprob = best[index], 0.0
            if samplings[index].temperature > 0:
                if not single[index]:
                    if index not in cumulative:
                        cumulative[index] = logprobs[index].double().exp().cumsum(-1)
                    aim = float(row.uniforms.random()) * cumulative[index][-1]
                    token = int(torch.searchsorted(cumulative[index], aim, right=True))
                    if token >= logits.shape[1] or logprobs[index, token] == -torch.inf:
                        token = best[index]  # a uniform that rounds onto the end of the support must not leave it
                logprob = float(logprobs[index, token])
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.forced.append(bool(single[index]))
            split.setdefault(token, []).append(row)
        for number, (token, together) in enumerate(split.items()):
            matcher = node.matcher
            if matcher is not None:
                if number < len(split) - 1:
                    matcher = matcher.deep_copy()
                matcher.consume_token(token)
            done = token in together[0].stop_ids or (matcher is not None and matcher.is_stopped())
            spent = len(together[0].ids) >= samplings[index].max_tokens
            if done or spent:
                for row in together:
                    row.finish = FinishReason.STOP if done else FinishReason.LENGTH
            else:
                children.append((index, Node(together, matcher)))
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
