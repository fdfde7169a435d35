"""Batched decoding on one causal model: the shared trunk once, then each row's suffix, then token by token.

Invariant: a row's result depends on its own prompt, sampling settings and seed; the rows beside it change only
floating-point rounding. Log-probs are those of the distribution the token was drawn from.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
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


class TrunkCache:
    """Keys and values of prompts' common beginnings, for one weights version; the oldest go first."""

    def __init__(self, model: Any, entries: int = 8) -> None:
        self._model = model
        self._entries = entries
        self._kept: OrderedDict[Ids, list[LayerKV]] = OrderedDict()

    def clear(self) -> None:
        self._kept.clear()

    def get(self, ids: Ids) -> list[LayerKV] | None:
        """Keys and values of `ids`, [kv heads, len(ids), d] a layer; computed from the longest kept beginning."""
        if not ids:
            return None
        base: Ids = ()
        for known in self._kept:
            if len(base) < len(known) <= len(ids) and ids[: len(known)] == known:
                base = known
        if base:
            self._kept.move_to_end(base)
        if base == ids:
            return self._kept[base]
        parent = self._kept[base] if base else None
        device = self._model.device
        new = torch.tensor([ids[len(base) :]], device=device)
        positions = torch.arange(len(base), len(ids), device=device)[None]
        cache = SuffixCache(self._model.config.num_hidden_layers, new.shape[1])
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
        self._kept[ids] = layers
        while len(self._kept) > self._entries:
            self._kept.popitem(last=False)
        return layers


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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


@torch.inference_mode()
def generate(model: Any, trunks: TrunkCache, masks: Masks, rows: list[Row]) -> None:
    """Fill `ids`, `logprobs`, `forced` and `finish` of each row."""
    trunk_ids = common_trunk(rows)
    prompts: dict[Ids, int] = {}
    for row in rows:
        prompts.setdefault(row.prompt[len(trunk_ids) :], len(prompts))
    longest = max(map(len, prompts))
    scores = len(prompts) * model.config.num_attention_heads * longest * (len(trunk_ids) + longest)
    if scores > SCORE_BUDGET and len(rows) > 1:
        half = len(rows) // 2
        generate(model, trunks, masks, rows[:half])
        generate(model, trunks, masks, rows[half:])
        return
    shared = trunks.get(trunk_ids)
    trunk = {} if shared is None else {"trunk": shared}
    device, dtype = model.device, model.dtype
    low = torch.finfo(dtype).min

    # Prefill: every distinct suffix once, padded on the left so that all end in the same column.
    pads = torch.tensor([longest - len(suffix) for suffix in prompts])
    ids = torch.tensor([[0] * (longest - len(suffix)) + list(suffix) for suffix in prompts])
    columns = torch.arange(longest)
    hidden = columns[None] < pads[:, None]
    positions = (columns[None] - pads[:, None]).clamp(min=0) + len(trunk_ids)
    cache = SuffixCache(model.config.num_hidden_layers, longest + max(row.sampling.max_tokens for row in rows))
    padding = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, low)[:, None, None].to(device)
    mask = (causal_mask(longest, dtype, device) + padding).clamp(min=low)
    logits = model(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        attention_mask=mask,
        cache=cache,
        logits_to_keep=1,
        **trunk,
    ).logits[:, -1]
    cache.advance(longest)

    # Decode: one token a step for every distinct sequence; nodes split as their rows part, and leave as they finish.
    grouped: dict[tuple[Any, ...], Node] = {}
    for row in rows:
        key = (row.prompt, row.grammar, replace(row.sampling, seed=None))
        if key not in grouped:
            grouped[key] = Node([], masks.start(row.grammar) if row.grammar else None)
        grouped[key].rows.append(row)
    nodes = list(grouped.values())
    parents = [prompts[node.rows[0].prompt[len(trunk_ids) :]] for node in nodes]
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
        first = [node.rows[0] for node in nodes]
        mask = torch.zeros(len(nodes), 1, 1, cache.used + 1, dtype=dtype, device=device)
        mask[..., :longest] = padding
        logits = model(
            input_ids=torch.tensor([[row.ids[-1]] for row in first], device=device),
            position_ids=torch.tensor([[len(row.prompt) + len(row.ids) - 1] for row in first], device=device),
            attention_mask=mask,
            cache=cache,
            logits_to_keep=1,
            **trunk,
        ).logits[:, -1]
        cache.advance(1)


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
        for number, (token, rows) in enumerate(split.items()):
            matcher = node.matcher
            if matcher is not None:
                if number < len(split) - 1:
                    matcher = matcher.deep_copy()
                matcher.consume_token(token)
            done = token in rows[0].stop_ids or (matcher is not None and matcher.is_stopped())
            spent = len(rows[0].ids) >= samplings[index].max_tokens
            if done or spent:
                for row in rows:
                    row.finish = FinishReason.STOP if done else FinishReason.LENGTH
            else:
                children.append((index, Node(rows, matcher)))
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
