import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.training.packing import Row, pack_rows


def row(prompt, ids, forced=None):
    ids = tuple(ids)
    return Row(
        prompt_ids=tuple(prompt),
        ids=ids,
        logprobs=(0.0,) * len(ids),
        forced=tuple(forced or [False] * len(ids)),
        temperature=1.0,
        grammar=None,
    )


def context(batch, pack, node):
    """The tokens that a node of a pack sees, in order: those of the packs before it, then of its own."""

    def before(packs, wanted):
        for one in packs:
            if one is wanted:
                return ()
            found = before(one.branches, wanted)
            if found is not None:
                return tuple(one.ids) + found
        return None

    line = before(batch.roots, pack)
    mask = pack.visible()[node]
    assert len(line) == pack.start and mask[: pack.start].all()
    seen = np.flatnonzero(mask[pack.start :])
    assert [pack.depths[i] for i in seen] == list(range(pack.start, pack.start + len(seen)))
    return line + tuple(pack.ids[i] for i in seen)


def test_shared_beginnings_are_held_once():
    rows = [row([1, 2, 3], [7, 8]), row([1, 2, 3], [7, 9]), row([1, 2, 4], [7, 8])]
    batch = pack_rows(rows, 100)
    (pack,) = batch.packs
    assert pack.ids == [1, 2, 3, 7, 4, 7]  # the last token of a row predicts nothing
    assert pack.parents == [-1, 0, 1, 2, 1, 4]
    assert pack.depths == [0, 1, 2, 3, 2, 3]
    assert [(term.row, term.position, term.node) for term in pack.terms] == [
        (0, 0, 2),
        (0, 1, 3),
        (1, 0, 2),
        (1, 1, 3),
        (2, 0, 4),
        (2, 1, 5),
    ]
    assert (batch.unique_tokens, batch.total_tokens) == (6, 15)


def test_what_does_not_fit_goes_on_from_a_chain_that_is_computed_once():
    common, members = list(range(40)), [[100, 101, 102], [110, 111, 112], [120, 121, 122]]
    rows = [row(common + member, [7, 8]) for member in members]
    batch = pack_rows(rows, 45)
    (chain,) = batch.roots
    assert (chain.start, chain.ids, chain.parents) == (0, common, list(range(-1, 39)))
    (branch,) = chain.branches
    assert (branch.start, branch.ids, branch.parents[::4]) == (
        40,
        [100, 101, 102, 7, 110, 111, 112, 7, 120, 121, 122, 7],
        [-1, -1, -1],
    )
    assert batch.unique_tokens == 40 + 3 * 4
    assert pack_rows(rows, 44).unique_tokens == 52


def test_a_beginning_too_short_for_a_forward_of_its_own_is_repeated():
    rows = [row([1, 2, 3, *range(first, first + 30)], [7]) for first in (100, 200)]
    batch = pack_rows(rows, 34)
    assert [len(pack.ids) for pack in batch.packs] == [33, 33]
    assert all(pack.start == 0 for pack in batch.packs)


def test_a_row_longer_than_the_budget_is_a_chain_of_packs():
    (first,) = pack_rows([row(range(100), [7, 8, 9])], 40).roots
    assert [(pack.start, len(pack.ids)) for pack in first.all()] == [(0, 40), (40, 40), (80, 22)]
    assert [(term.position, term.node) for term in first.all()[2].terms] == [(0, 19), (1, 20), (2, 21)]


def test_a_chain_may_have_more_packs_than_a_stack_is_deep():
    batch = pack_rows([row(range(64 * 1500), [7, 8]), row(range(64 * 1500 + 1), [7])], 64)
    (first,) = batch.roots
    packs = first.all()
    assert [pack.start for pack in packs[:-1]] == list(range(0, 64 * 1500, 64))
    assert packs == batch.packs and packs[-1].ids == [7, 64 * 1500]


def test_forced_tokens_are_not_trained():
    batch = pack_rows([row([1, 2], [7, 8, 9], [False, True, False]), row([1, 3], [7], [True])], 100)
    assert [(term.row, term.position) for pack in batch.packs for term in pack.terms] == [(0, 0), (0, 2)]


def test_no_rows_no_packs():
    assert pack_rows([], 10).packs == []


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=70)


@settings(deadline=None)
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=8), st.integers(1, 60), st.randoms())
def test_every_term_sees_exactly_the_tokens_before_it_and_no_pack_exceeds_the_budget(pairs, budget, rng):
    stem = [rng.randint(0, 2) for _ in range(rng.choice([1, 50]))]
    rows = [row(stem + prompt, ids, [rng.random() < 0.4 for _ in ids]) for prompt, ids in pairs]
    batch = pack_rows(rows, budget)
    met = []
    for pack in batch.packs:
        assert 0 < len(pack.ids) <= budget
        assert not pack.branches or pack.parents == list(range(-1, len(pack.ids) - 1))
        for term in pack.terms:
            one = rows[term.row]
            assert context(batch, pack, term.node) == one.prompt_ids + one.ids[: term.position]
            met.append((term.row, term.position))
    free = [(n, position) for n, one in enumerate(rows) for position, forced in enumerate(one.forced) if not forced]
    assert sorted(met) == free
    assert batch.unique_tokens >= len(tree_of(rows))
    if budget >= len(tree_of(rows)):
        assert batch.unique_tokens == len(tree_of(rows))


def tree_of(rows):
    """Every beginning of what the rows feed the model."""
    paths = [one.prompt_ids + one.ids[:-1] for one in rows]
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}
