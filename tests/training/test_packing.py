import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midflight.training.packing import Row, common_beginning, pack_rows


def row(prompt, ids, forced=None):
    ids = tuple(ids)
    return Row(
        prompt_ids=tuple(prompt),
        ids=ids,
        logprobs=(0.0,) * len(ids),
        forced=tuple(forced or [False] * len(ids)),
        temperature=1.0,
        grammar=None,
        advantage=1.0,
        weight=1.0,
    )


def context(batch, pack, node):
    """The tokens a node of a pack sees, in order, the trunk first."""
    seen = np.flatnonzero(pack.visible()[node])
    return batch.trunk + tuple(pack.ids[i] for i in sorted(seen, key=lambda i: pack.depths[i]))


def test_shared_beginnings_are_held_once():
    rows = [row([1, 2, 3], [7, 8]), row([1, 2, 3], [7, 9]), row([1, 2, 4], [7, 8])]
    batch = pack_rows(rows, 100)
    assert batch.trunk == (1, 2)
    (pack,) = batch.packs
    assert pack.ids == [3, 7, 4, 7]  # the last token of a row predicts nothing
    assert pack.parents == [-1, 0, -1, 2]
    assert pack.depths == [2, 3, 2, 3]
    assert [(term.row, term.position, term.node) for term in pack.terms] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
        (2, 0, 2),
        (2, 1, 3),
    ]
    assert (batch.unique_tokens, batch.total_tokens) == (6, 15)


def test_forced_tokens_are_not_trained():
    batch = pack_rows([row([1, 2], [7, 8, 9], [False, True, False]), row([1, 3], [7], [True])], 100)
    assert [(term.row, term.position) for pack in batch.packs for term in pack.terms] == [(0, 0), (0, 2)]


def test_no_rows_no_packs():
    assert pack_rows([], 10).packs == ()


def test_a_prompt_that_is_all_trunk_still_predicts_its_first_token():
    batch = pack_rows([row([1, 2, 3], [7]), row([1, 2, 3], [8])], 10)
    assert batch.trunk == (1, 2)
    assert batch.packs[0].ids == [3]


def test_common_beginning():
    assert common_beginning([(1, 2, 3), (1, 2), (1, 2, 9)]) == (1, 2)
    assert common_beginning([(1,), (2,)]) == ()


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=8), st.integers(1, 12))
def test_every_term_sees_exactly_the_tokens_before_it_and_packs_keep_the_budget(pairs, budget):
    rows = [row([5, *prompt], ids) for prompt, ids in pairs]
    batch = pack_rows(rows, budget)
    met = set()
    for pack in batch.packs:
        alone = len({term.row for term in pack.terms}) == 1
        assert len(pack.ids) <= budget // 2 or alone
        for term in pack.terms:
            one = rows[term.row]
            assert context(batch, pack, term.node) == one.prompt_ids + one.ids[: term.position]
            met.add((term.row, term.position))
    assert met == {(number, position) for number, one in enumerate(rows) for position in range(len(one.ids))}
