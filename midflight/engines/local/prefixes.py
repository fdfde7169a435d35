"""A prefix tree of keys and values, for one weights version.

A node holds the keys and values of a run of tokens that come after its parent's. Turns of one trajectory, members of
one group and prompts with the same instructions share whatever they begin with. Invariant: the path to a node is its
whole past, so what it holds is what the model would compute for those ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import torch

Ids = tuple[int, ...]


class _Node:
    __slots__ = ("children", "ids", "kept", "parent", "used")

    def __init__(self, parent: _Node | None, ids: Ids, kept: torch.Tensor | None, used: int) -> None:
        self.parent, self.ids, self.kept, self.used = parent, ids, kept, used
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """Keys and values by token ids. Those of n tokens are one tensor [layers, 2, kv heads, n, d].

    Args:
        most_tokens: how many tokens `trim` leaves.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._clock = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._root = _Node(None, (), None, 0)
        self.tokens = 0

    def find(self, ids: Ids) -> tuple[int, list[torch.Tensor]]:
        """The longest known beginning of `ids`: its length, and its keys and values in pieces (views)."""
        self._clock += 1
        node, length, pieces = self._root, 0, []
        while (child := node.children.get(ids[length]) if length < len(ids) else None) is not None:
            assert child.kept is not None
            child.used = self._clock
            shared = _shared(child.ids, ids, length)
            pieces.append(child.kept[..., :shared, :])
            length += shared
            if shared < len(child.ids):
                break
            node = child
        return length, pieces

    def add(self, ids: Ids, start: int, computed: torch.Tensor) -> None:
        """Keep `computed`, of `ids[start:]`. Does nothing where `ids[:start]` is not known itself."""
        self._clock += 1
        node, length = self._root, 0
        while (child := node.children.get(ids[length]) if length < len(ids) else None) is not None:
            child.used = self._clock
            shared = _shared(child.ids, ids, length)
            length += shared
            if shared < len(child.ids):
                if length < len(ids) and length >= start:
                    child = self._split(child, shared)
                node = child
                break
            node = child
        if start <= length < len(ids):
            kept = computed[..., length - start :, :].clone(memory_format=torch.contiguous_format)
            node.children[ids[length]] = _Node(node, ids[length:], kept, self._clock)
            self.tokens += len(ids) - length

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two; gives the upper one. Both own their memory, so that each can go alone."""
        assert node.parent is not None and node.kept is not None
        upper = _Node(node.parent, node.ids[:at], node.kept[..., :at, :].clone(), node.used)
        node.parent.children[node.ids[0]] = upper
        node.parent, node.ids, node.kept = upper, node.ids[at:], node.kept[..., at:, :].clone()
        upper.children[node.ids[0]] = node
        return upper

    def trim(self, running: Iterable[Ids] = ()) -> None:
        """Cut ends of paths off, least recently used first, until at most `most_tokens` are left.

        What `running` are, with all that they begin with, stays, were it more than that.
        """
        if self.tokens <= self._most:
            return
        before = self._clock
        for ids in running:
            self.find(ids)
        leaves = [(leaf.used, number, leaf) for number, leaf in enumerate(self._leaves())]
        heapq.heapify(leaves)
        number = len(leaves)
        while self.tokens > self._most:
            used, _, leaf = heapq.heappop(leaves)
            if used > before:
                return
            over = self.tokens - self._most
            parent = leaf.parent
            assert parent is not None and leaf.kept is not None
            if over < len(leaf.ids):
                leaf.ids, leaf.kept = leaf.ids[:-over], leaf.kept[..., :-over, :].clone()
                self.tokens -= over
                return
            del parent.children[leaf.ids[0]]
            self.tokens -= len(leaf.ids)
            if not parent.children and parent is not self._root:
                number += 1
                heapq.heappush(leaves, (parent.used, number, parent))

    def _leaves(self) -> list[_Node]:
        found, open_nodes = [], list(self._root.children.values())
        while open_nodes:
            node = open_nodes.pop()
            open_nodes.extend(node.children.values())
            if not node.children:
                found.append(node)
        return found


def _shared(run: Ids, ids: Ids, start: int) -> int:
    """How many tokens `run` and `ids[start:]` begin with together."""
    if ids[start : start + len(run)] == run:
        return len(run)
    for index, token in enumerate(run):
        if start + index == len(ids) or ids[start + index] != token:
            return index
    raise AssertionError("unreachable: the runs differ")
