"""Rows as a tree: whatever beginning rows share is in it once, over turns and group members.

A pack is what one forward computes: at most `budget` tokens, behind packs that are computed before it. Where more than
fits goes on from one beginning, the beginning is a pack of its own, a chain, and what follows are its branches.
Invariants: every trained token of every row is predicted from exactly the tokens before it; no pack exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from os.path import commonprefix

import numpy as np

Ids = tuple[int, ...]
LEAST_CHAIN = 32
"""Tokens that a beginning must have to be worth a forward of its own; shorter ones are computed in each branch."""
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
    """A tree of N tokens behind `start` others. `parents[i]` is the token before i in the pack, -1 for those before it.

    `branches` go on from the pack's last token.
    """

    start: int
    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    branches: list[Pack] = field(default_factory=list)

    def visible(self) -> np.ndarray:
        """Boolean [N, start + N]: token i sees all that is before the pack, its ancestors and itself."""
        mask = np.zeros((len(self.ids), self.start + len(self.ids)), dtype=bool)
        mask[:, : self.start] = True
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                mask[index] = mask[parent]
            mask[index, self.start + index] = True
        return mask

    def all(self) -> list[Pack]:
        """The pack and all that goes on from it, in the order they are computed."""
        found, todo = [], [self]
        while todo:
            pack = todo.pop()
            found.append(pack)
            todo += reversed(pack.branches)
        return found


@dataclass(frozen=True)
class PackedBatch:
    """All rows of an update. `total_tokens` is what they would take unpacked, `unique_tokens` what they take here."""

    rows: tuple[Row, ...]
    roots: tuple[Pack, ...]
    budget: int

    @property
    def packs(self) -> list[Pack]:
        return [pack for root in self.roots for pack in root.all()]

    @property
    def total_tokens(self) -> int:
        return sum(len(row.prompt_ids) + len(row.ids) for row in self.rows)

    @property
    def unique_tokens(self) -> int:
        return sum(len(pack.ids) for pack in self.packs)


def pack_rows(rows: Sequence[Row], budget: int) -> PackedBatch:
    """Pack rows into forwards of at most `budget` tokens."""
    return PackedBatch(tuple(rows), tuple(_Packer(rows, budget).roots()), budget)


def rows_apart(rows: Sequence[Row]) -> PackedBatch:
    """Every row as a forward of its own, whatever its length: for models that take no tree."""
    packer = _Packer(rows, budget=1)
    packs = [packer.whole(k) for k in range(len(rows))]
    return PackedBatch(tuple(rows), tuple(packs), max((len(pack.ids) for pack in packs), default=0))


class _Packer:
    """Cuts the tree of `rows` into packs.

    `paths` are what the rows feed the model, in lexical order, so that a subtree is a run of neighbours; `shared[k]` is
    how many tokens path k begins with that path k - 1 begins with too.
    """

    def __init__(self, rows: Sequence[Row], budget: int) -> None:
        self.budget = budget
        fed = [(row.prompt_ids + row.ids[:-1], number) for number, row in enumerate(rows)]  # the last predicts nothing
        fed.sort()
        self.paths = [path for path, _ in fed]
        self.numbers = [number for _, number in fed]
        self.rows = [rows[number] for number in self.numbers]
        pairs = zip(self.paths, self.paths[1:], strict=False)
        self.shared = [0, *(len(commonprefix(pair)) for pair in pairs)]
        self.new = [0, *accumulate(len(path) - own for path, own in zip(self.paths, self.shared, strict=False))]

    def roots(self) -> list[Pack]:
        """The packs of all rows, each with what goes on from it."""
        roots: list[Pack] = []
        todo = [(0, len(self.rows), 0, roots)]  # rows [first, last), how many tokens precede, where their packs go
        while todo:
            first, last, start, packs = todo.pop()
            if self._size(first, last, start) <= self.budget:
                packs += self._leaf(first, last, start)
                continue
            common = min([len(self.paths[first]), *self.shared[first + 1 : last]])
            if common - start >= min(LEAST_CHAIN, self.budget) or first + 1 == last:
                end = min(common, start + self.budget)
                packs.append(self._chain(first, last, start, end))
                todo.append((first, last, end, packs[-1].branches))
            else:
                todo += [(begin, end, start, packs) for begin, end in reversed(self._parts(first, last, start, common))]
        return roots

    def _parts(self, first: int, last: int, start: int, common: int) -> list[tuple[int, int]]:
        """Rows [first, last), cut where no more than `common` tokens are shared, into as few parts as fit a pack each.

        What fits none by itself is a part.
        """
        cuts = [first, *(k for k in range(first + 1, last) if self.shared[k] == common), last]
        parts = []
        while len(cuts) > 1:
            count = 1
            while count + 1 < len(cuts) and self._size(cuts[0], cuts[count + 1], start) <= self.budget:
                count += 1
            parts.append((cuts[0], cuts[count]))
            cuts = cuts[count:]
        return parts

    def _size(self, first: int, last: int, start: int) -> int:
        """Tokens of the subtree of rows [first, last) behind `start`."""
        return len(self.paths[first]) - start + self.new[last] - self.new[first + 1] if first < last else 0

    def whole(self, k: int) -> Pack:
        """Path k alone."""
        return self._chain(k, k + 1, 0, len(self.paths[k]))

    def _leaf(self, first: int, last: int, start: int) -> list[Pack]:
        pack = Pack(start)
        line: list[int] = []  # the pack's nodes of the path at hand
        for k in range(first, last):
            path = self.paths[k]
            del line[(self.shared[k] if k > first else start) - start :]
            for depth in range(start + len(line), len(path)):
                pack.parents.append(line[-1] if line else -1)
                line.append(len(pack.ids))
                pack.ids.append(path[depth])
                pack.depths.append(depth)
            pack.terms += self._terms(k, start, len(path), line)
        return [pack] if pack.ids else []

    def _chain(self, first: int, last: int, start: int, end: int) -> Pack:
        size = end - start
        pack = Pack(start, list(self.paths[first][start:end]), list(range(-1, size - 1)), list(range(start, end)))
        for k in range(first, last):
            pack.terms += self._terms(k, start, end, range(size))
        return pack

    def _terms(self, k: int, start: int, end: int, nodes: Sequence[int]) -> list[Term]:
        """The trained tokens of a row that its tokens [start, end) predict; `nodes` are the pack's for these."""
        row = self.rows[k]
        before = len(row.prompt_ids) - 1
        return [
            Term(self.numbers[k], position, nodes[before + position - start])
            for position, forced in enumerate(row.forced)
            if not forced and start <= before + position < end
        ]
