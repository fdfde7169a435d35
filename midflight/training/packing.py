"""Rows as a tree: whatever beginning rows share is one node, over turns and group members.

The beginning that all rows share (the trunk: system prompt, tools, examples) is kept apart and computed once an
update; the rest is cut into packs, each a tree of at most `budget` tokens with a mask that lets a token see only its
own ancestors. Invariant: every trained token of every row is predicted from exactly the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Ids = tuple[int, ...]
SCORED_AT_ONCE = 128
"""Distributions over the vocabulary that an update holds at a time."""


@dataclass(frozen=True)
class Row:
    """One planner turn as it trains. `weight` is that of each of its unforced tokens.

    `logprobs` are those it was drawn with, `old` the trainer's before the update where it needs them, `reference` the
    reference model's; `supports` are as in `Generation`. `trajectory` tells which rows belong together.
    """

    prompt_ids: Ids
    ids: Ids
    logprobs: tuple[float, ...]
    forced: tuple[bool, ...]
    temperature: float
    grammar: str | None
    supports: tuple[Ids, ...] = ()
    advantage: float = 0.0
    weight: float = 0.0
    trajectory: int = 0
    weights_version: int = 0
    old: tuple[float, ...] | None = None
    reference: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Term:
    """One trained token: `row` and `position` say which, `node` is the pack's token that predicts it."""

    row: int
    position: int
    node: int


@dataclass
class Pack:
    """A tree of N tokens behind the trunk. `parents[i]` is the token before i in the pack, -1 for the trunk's end."""

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)

    def visible(self) -> np.ndarray:
        """Boolean [N, N]: token i sees token j (itself and its ancestors)."""
        mask = np.zeros((len(self.ids), len(self.ids)), dtype=bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                mask[index] = mask[parent]
            mask[index, index] = True
        return mask


@dataclass(frozen=True)
class PackedBatch:
    """All rows of an update. `total_tokens` is what they would take unpacked, `unique_tokens` what they take here."""

    rows: tuple[Row, ...]
    trunk: Ids
    packs: tuple[Pack, ...]
    budget: int = 0

    def forwards(self) -> list[list[Pack]]:
        """The packs in order of length, as many together as fit the budget when padded to the longest of them."""
        made: list[list[Pack]] = []
        for pack in sorted(self.packs, key=lambda pack: len(pack.ids)):
            if made and len(pack.ids) * (len(made[-1]) + 1) <= self.budget:
                made[-1].append(pack)
            else:
                made.append([pack])
        return made

    @property
    def total_tokens(self) -> int:
        return sum(len(row.prompt_ids) + len(row.ids) for row in self.rows)

    @property
    def unique_tokens(self) -> int:
        return len(self.trunk) + sum(len(pack.ids) for pack in self.packs)


def common_beginning(sequences: Sequence[Ids]) -> Ids:
    """The longest beginning all sequences share."""
    low, high = min(sequences), max(sequences)
    for index, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return low[:index]
    return low[: min(len(low), len(high))]


def pack_rows(rows: Sequence[Row], budget: int) -> PackedBatch:
    """Pack rows in their order; a row longer than half the budget behind the trunk gets a pack of its own.

    A token attends to its whole pack, and what packs share is computed in each: a pack is half the budget.
    """
    if not rows:
        return PackedBatch((), (), ())
    prompts = [row.prompt_ids for row in rows]
    trunk = common_beginning(prompts)[: min(map(len, prompts)) - 1]
    packs: list[Pack] = []
    children: dict[tuple[int, int], int] = {}
    for number, row in enumerate(rows):
        path = (row.prompt_ids + row.ids)[len(trunk) : -1]  # the last token predicts nothing
        if not packs or len(packs[-1].ids) + _missing(path, children) > budget // 2:
            packs.append(Pack())
            children = {}
        _insert(packs[-1], children, number, row, path, len(trunk))
    return PackedBatch(tuple(rows), trunk, tuple(pack for pack in packs if pack.terms), budget)


def _missing(path: Ids, children: dict[tuple[int, int], int]) -> int:
    """How many tokens of `path` the pack does not hold yet."""
    node = -1
    for index, token in enumerate(path):
        child = children.get((node, token))
        if child is None:
            return len(path) - index
        node = child
    return 0


def _insert(
    pack: Pack, children: dict[tuple[int, int], int], number: int, row: Row, path: Ids, trunk_length: int
) -> None:
    node = -1
    nodes = []
    for index, token in enumerate(path):
        child = children.get((node, token))
        if child is None:
            child = len(pack.ids)
            children[node, token] = child
            pack.ids.append(token)
            pack.parents.append(node)
            pack.depths.append(trunk_length + index)
        node = child
        nodes.append(node)
    start = len(row.prompt_ids) - trunk_length - 1
    for position, forced in enumerate(row.forced):
        if not forced:
            pack.terms.append(Term(number, position, nodes[start + position]))
