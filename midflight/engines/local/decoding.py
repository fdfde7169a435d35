"""Batched decoding on one causal model: the shared trunk once, then each row's suffix, then token by token.

Invariant: a row's result depends on its own prompt, sampling settings and seed; the rows beside it change only
floating-point rounding. Log-probs are those of the distribution the token was drawn from.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
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
    """One request in decoding. `segments` are the prompt's ids in order."""

    segments: list[list[int]]
    sampling: Sampling
    matcher: LLMatcher | None
    stop_ids: frozenset[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt: Ids = tuple(token for segment in self.segments for token in segment)
        self.uniforms = np.random.Generator(np.random.Philox(self.sampling.seed))


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
    unique: dict[Ids, int] = {}
    source = [unique.setdefault(row.prompt[len(trunk_ids) :], len(unique)) for row in rows]
    longest = max(map(len, unique))
    scores = len(unique) * model.config.num_attention_heads * longest * (len(trunk_ids) + longest)
    if scores > SCORE_BUDGET and len(rows) > 1:
        half = len(rows) // 2
        generate(model, trunks, masks, rows[:half])
        generate(model, trunks, masks, rows[half:])
        return
    shared = trunks.get(trunk_ids)
    trunk = {} if shared is None else {"trunk": shared}
    device, dtype = model.device, model.dtype
    low = torch.finfo(dtype).min

    # Prefill: every distinct suffix once, padded on the left so that all rows end in the same column.
    pads = torch.tensor([longest - len(suffix) for suffix in unique])
    ids = torch.tensor([[0] * (longest - len(suffix)) + list(suffix) for suffix in unique])
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

    # Decode: one token a row and step; rows leave the batch as they finish.
    order = torch.tensor(source, device=device)
    logits, padding = logits[order], padding[order]
    if order.tolist() != list(range(len(unique))):
        cache.select(order)
    active = list(rows)
    while True:
        _draw(logits.float(), active, masks)
        going = [index for index, row in enumerate(active) if row.finish is None]
        if not going:
            return
        if len(going) < len(active):
            keep = torch.tensor(going, device=device)
            cache.select(keep)
            padding = padding[keep]
            active = [active[index] for index in going]
        new = torch.tensor([[row.ids[-1]] for row in active], device=device)
        place = torch.tensor([[len(row.prompt) + len(row.ids) - 1] for row in active], device=device)
        mask = torch.zeros(len(active), 1, 1, cache.used + 1, dtype=dtype, device=device)
        mask[..., :longest] = padding
        logits = model(
            input_ids=new, position_ids=place, attention_mask=mask, cache=cache, logits_to_keep=1, **trunk
        ).logits[:, -1]
        cache.advance(1)


def _draw(logits: torch.Tensor, rows: list[Row], masks: Masks) -> None:
    """Draw one token for each row from its logits [rows, vocabulary]; end the rows that are done."""
    allowed: dict[int, torch.Tensor] = {}
    for index, row in enumerate(rows):
        if row.matcher is not None:
            allowed[index] = torch.from_numpy(masks.allowed(row.matcher)).to(logits.device)
    if allowed:
        mask = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        for index, row_mask in allowed.items():
            mask[index] = row_mask
        logits = logits.masked_fill(~mask, -torch.inf)
    greedy = [row.sampling.temperature == 0 for row in rows]
    heat = torch.tensor([1.0 if cold else row.sampling.temperature for cold, row in zip(greedy, rows, strict=True)])
    logprobs = truncate(logits / heat[:, None].to(logits.device), [row.sampling for row in rows]).log_softmax(-1)
    best = logprobs.argmax(dim=-1)
    choice = best.clone()
    warm = [index for index, cold in enumerate(greedy) if not cold]
    if warm:
        uniforms = torch.tensor([float(rows[index].uniforms.random()) for index in warm], dtype=torch.float64)
        cumulative = logprobs[warm].double().exp().cumsum(-1)
        aim = uniforms.to(logits.device)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, aim, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
        # A uniform that rounds onto the end of the support must not leave it.
        possible = logprobs[warm].gather(1, drawn[:, None])[:, 0] > -torch.inf
        choice[warm] = torch.where(possible, drawn, best[warm])
    chosen = logprobs.gather(1, choice[:, None])[:, 0].tolist()
    for index, (row, token) in enumerate(zip(rows, choice.tolist(), strict=True)):
        row.ids.append(token)
        row.logprobs.append(0.0 if greedy[index] else chosen[index])
        row.forced.append(index in allowed and int(allowed[index].sum()) == 1)
        if row.matcher is not None:
            row.matcher.consume_token(token)
            done = token in row.stop_ids or row.matcher.is_stopped()
        else:
            done = token in row.stop_ids
        if done:
            row.finish = FinishReason.STOP
        elif len(row.ids) >= row.sampling.max_tokens:
            row.finish = FinishReason.LENGTH


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
