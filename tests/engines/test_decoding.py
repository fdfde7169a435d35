"""The parts of decoding that need no model."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from midflight.engines.local.decoding import arrange
from midflight.engines.local.prefilling import slices
from midflight.engines.local.rows import Node

UNBOUNDED = 10**9


def test_spans_are_of_like_lengths_and_bounded():
    assert slices([5, 5, 5, 5, 20, 20], lambda new: UNBOUNDED) == [(0, 4), (4, 6)]
    assert slices([5, 20, 20], lambda new: UNBOUNDED) == [(0, 3)]  # too few to be worth a forward
    assert slices([5, 5, 5, 20, 20], lambda new: 40 // new) == [(0, 3), (3, 5)]
    assert slices([7, 7, 7], lambda new: 0) == [(0, 1), (1, 2), (2, 3)]


class Rows:
    """Stands for the cache: what each row holds."""

    def __init__(self, held):
        self.held, self.moved = list(held), 0

    def move(self, targets, sources):
        assert not set(targets) & set(sources)
        for target, source in zip(targets, sources, strict=True):
            self.held[target] = self.held[source]
        self.moved += len(targets)


@given(st.data())
def test_nodes_get_the_first_rows_with_what_they_come_from(data):
    rows = data.draw(st.integers(1, 8))
    places = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows))
    cache = Rows(range(rows))
    padding = torch.arange(rows).view(-1, 1, 1, 1).float()
    nodes = [(place, Node([], None)) for place in places]
    seated = arrange(nodes, cache, padding)
    assert [place for place, _ in seated] == list(range(len(places)))
    came_from = {id(node): place for place, node in nodes}
    for seat, node in seated:
        assert cache.held[seat] == came_from[id(node)] == int(padding[seat])
    stay = {place for place in places if place < len(places)}
    assert cache.moved == len(places) - len(stay)
