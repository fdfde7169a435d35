"""The parts of decoding that need no model."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from midflight.engines.base import FinishReason, Sampling
from midflight.engines.local.decoding import arrange
from midflight.engines.local.plain import generate_plain
from midflight.engines.local.prefilling import slices
from midflight.engines.local.rows import Node, Row

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


class Flat:
    """A model without a state to which every token is as likely; `meanwhile` comes before its second forward."""

    device = "cpu"

    def __init__(self, meanwhile=lambda: None):
        self.meanwhile, self.lengths = meanwhile, []

    def __call__(self, input_ids, **_):
        if len(self.lengths) == 1:
            self.meanwhile()
        self.lengths.append(input_ids.shape[1])
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 50))


def rows_of(prompts, max_tokens):
    settings = [Sampling(max_tokens=max_tokens, seed=seed) for seed in range(len(prompts))]
    return [Row([prompt], one, None, frozenset()) for prompt, one in zip(prompts, settings, strict=True)]


def test_one_sequence_at_a_time_takes_no_forward_for_a_request_that_is_gone():
    def leave():
        for row in rows[1:]:
            row.gone = True

    rows = rows_of([[1, k] for k in range(8)], 4)
    model = Flat(leave)  # while the first of them is drawn
    generate_plain(model, None, rows)
    assert model.lengths == [2, 3, 4, 5]
    assert [len(row.ids) for row in rows] == [4] + [0] * 7
    assert all(row.finish is FinishReason.LENGTH for row in rows)
    rows = rows_of([[1, 2]] * 8, 4)  # of one prompt: they part at the first draw
    model = Flat()
    generate_plain(model, None, rows)
    assert len({row.ids[0] for row in rows}) > 4 and len(model.lengths) > 12
    rows = rows_of([[1, 2]] * 8, 4)
    model = Flat(lambda: [setattr(row, "gone", True) for row in rows])
    generate_plain(model, None, rows)
    assert model.lengths == [2, 3]
    assert {len(row.ids) for row in rows} == {1, 2}
