"""Prompts before decoding: what all share, what several share, and each prompt's own rest, computed in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from midflight.engines.local.attention import LayerKV, SuffixCache
from midflight.engines.local.prefixes import Ids, PrefixTree
from midflight.engines.local.rows import Row

SCORE_BUDGET = 32_000_000
"""Most attention scores of one layer in a forward of the prefill; more rows are prefilled in slices."""

LAST = torch.tensor([-1])
"""Logits of the last token alone. An index, since a slice would leave the hidden states strided, and slow."""


@dataclass(frozen=True)
class Trunk:
    """What all prompts of a batch begin with, computed and held once. `exact` is how all behind it is computed."""

    ids: Ids
    layers: list[LayerKV]
    exact: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model's forward is told of it."""
        return {"exact": self.exact, **({"trunk": self.layers} if self.ids else {})}


@dataclass
class Filled:
    """Prompts behind a trunk, computed: row i of everything is `prompts[i]`.

    `logits` [prompts, vocabulary] are those after each prompt; `padding` [rows, 1, 1, columns] is an additive mask that
    hides the columns a row has nothing in.
    """

    trunk: Trunk
    prompts: list[Ids]
    cache: SuffixCache
    padding: torch.Tensor
    logits: torch.Tensor

    def seat(self, row: int, pieces: list[torch.Tensor]) -> None:
        """Give a row other keys and values, [layers, 2, kv heads, n, d] each; they end where the next column begins."""
        self.cache.load(row, pieces)
        start = self.cache.used - sum(piece.shape[-2] for piece in pieces)
        self.padding[row, ..., :start] = torch.finfo(self.padding.dtype).min
        self.padding[row, ..., start:] = 0.0


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


def make_trunk(model: Any, tree: PrefixTree, ids: Ids, *, exact: bool = False) -> Trunk:
    """Keys and values of `ids`, [kv heads, len(ids), d] a layer."""
    if not ids:
        return Trunk(ids, [], exact)
    if tree.find(ids)[0] < len(ids):
        prefill(model, tree, Trunk((), [], exact), [ids])
    whole = torch.cat(tree.find(ids)[1], dim=-2)
    return Trunk(ids, [(key, value) for key, value in (whole.double() if exact else whole)], exact)


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


def fill(model: Any, tree: PrefixTree, trunk: Trunk, rows: Sequence[Row], *, seats: int = 0, room: int = 0) -> Filled:
    """The prompts of `rows`: first what several begin with, then the rest of each. The tree holds them afterwards."""
    by_prompt = {row.prompt: row for row in rows}
    if runs := shared_runs(tree, len(trunk.ids), by_prompt.values()):
        prefill(model, tree, trunk, runs)
    return prefill(model, tree, trunk, list(by_prompt), rows=seats, room=room)


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
        known[prompt] = (end, behind(pieces, cut)) if end > cut else (cut, [])
    prompts = sorted(prompts, key=lambda prompt: len(prompt) - known[prompt][0])
    fresh = [len(prompt) - known[prompt][0] for prompt in prompts]
    width = max(end for end, _ in known.values()) - cut + fresh[-1]
    cache = SuffixCache(model, max(rows, len(prompts)), width + room, exact=trunk.exact)
    padding = torch.full((max(rows, len(prompts)), 1, 1, width + room), torch.finfo(dtype).min, dtype=dtype)
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
            padding[first + row, :, :, width - (len(prompt) - end) :] = 0.0
            padding[first + row, :, :, start - (end - cut) : start] = 0.0
            cache.load(first + row, pieces)
        causal = torch.cat([torch.zeros(1, 1, new, start, dtype=dtype), causal_mask(new, dtype)], dim=-1)
        output = model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=(causal + padding[first:last, ..., :width]).clamp(min=torch.finfo(dtype).min).to(device),
            cache=cache,
            logits_to_keep=LAST,
            **trunk.arguments,
        )
        logits.append(output.logits[:, -1])
        for row, prompt in enumerate(bucket):
            end = known[prompt][0]
            tree.add(prompt, end, cache.read(first + row, width - (len(prompt) - end), width))
    cache.focus(0, max(rows, len(prompts)), width)
    return Filled(trunk, prompts, cache, padding.to(device), torch.cat(logits))


def behind(pieces: list[torch.Tensor], cut: int) -> list[torch.Tensor]:
    """The pieces without their first `cut` tokens."""
    kept = []
    for piece in pieces:
        if cut < piece.shape[-2]:
            kept.append(piece[..., cut:, :])
        cut = max(0, cut - piece.shape[-2])
    return kept


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
