"""The prefix tree: what it finds, shares, splits and drops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from midflight.engines.local.prefixes import PrefixTree


def kept(*ids):
    """Keys and values [layers, 2, kv heads, n, d] that name their tokens: all entries of token i are i."""
    return torch.tensor(ids, dtype=torch.float32).view(1, 1, 1, -1, 1).expand(2, 2, 1, len(ids), 3)


def found(tree, *ids):
    length, pieces = tree.find(ids)
    tokens = [int(token) for piece in pieces for token in piece[0, 0, 0, :, 0]]
    assert len(tokens) == length and tokens == list(ids[:length])
    return length


def test_it_finds_the_longest_known_beginning_token_by_token():
    tree = PrefixTree(100)
    assert found(tree, 1, 2) == 0
    tree.add((1, 2, 3, 4), 0, kept(1, 2, 3, 4))
    assert [found(tree, 1, 2, 3, 4, 5), found(tree, 1, 2, 9), found(tree, 1), found(tree, 2, 3)] == [4, 2, 1, 0]


def test_what_paths_share_is_held_once():
    tree = PrefixTree(100)
    tree.add((1, 2, 3, 4), 0, kept(1, 2, 3, 4))
    tree.add((1, 2, 7, 8), 0, kept(1, 2, 7, 8))
    tree.add((1, 2, 3, 4, 5), 4, kept(5))
    tree.add((1, 2, 3), 0, kept(1, 2, 3))  # known already
    assert tree.tokens == 7
    assert [found(tree, 1, 2, 3, 4, 5), found(tree, 1, 2, 7, 8, 9), found(tree, 1, 2, 3, 5)] == [5, 4, 3]


def test_an_addition_without_its_past_is_left_out():
    tree = PrefixTree(100)
    tree.add((1, 2, 3), 2, kept(3))
    assert tree.tokens == 0 and found(tree, 1, 2, 3) == 0
    tree.add((1, 2), 0, kept(1, 2))
    tree.add((1, 2, 3, 4), 1, kept(2, 3, 4))  # part of it is known
    assert tree.tokens == 4 and found(tree, 1, 2, 3, 4) == 4


def test_trim_drops_the_least_recently_used_ends_first():
    tree = PrefixTree(most_tokens=5)
    tree.add((1, 2, 3), 0, kept(1, 2, 3))
    tree.add((1, 2, 4, 5), 2, kept(4, 5))
    tree.add((6, 7), 0, kept(6, 7))
    assert tree.tokens == 7
    found(tree, 1, 2, 3)
    tree.trim()
    assert tree.tokens == 5
    assert [found(tree, 1, 2, 3), found(tree, 1, 2, 4, 5), found(tree, 6, 7)] == [3, 2, 2]


def test_trim_can_take_a_whole_path_and_clear_takes_all():
    tree = PrefixTree(most_tokens=0)
    tree.add((1, 2, 3), 0, kept(1, 2, 3))
    tree.add((1, 2, 4), 2, kept(4))
    tree.trim()
    assert tree.tokens == 0 and found(tree, 1, 2) == 0
    tree.add((1, 2), 0, kept(1, 2))
    tree.clear()
    assert tree.tokens == 0 and found(tree, 1, 2) == 0


def test_trim_leaves_what_is_running_were_it_more_than_the_bound():
    tree = PrefixTree(most_tokens=5)
    tree.add((1, 2, 3, 4), 0, kept(1, 2, 3, 4))
    tree.add((1, 2, 5, 6), 2, kept(5, 6))
    tree.add((7, 8, 9), 0, kept(7, 8, 9))
    tree.trim([(1, 2, 3, 4)])
    assert tree.tokens == 5
    assert [found(tree, 1, 2, 3, 4), found(tree, 1, 2, 5, 6), found(tree, 7, 8, 9)] == [4, 2, 1]
    tree.add((1, 2, 5, 6), 2, kept(5, 6))
    tree.trim([(1, 2, 3, 4), (1, 2, 5, 6)])
    assert tree.tokens == 6
    assert [found(tree, 1, 2, 3, 4), found(tree, 1, 2, 5, 6), found(tree, 7, 8, 9)] == [4, 4, 0]
    tree.trim()
    assert tree.tokens == 5


def test_what_is_kept_owns_its_memory():
    tree = PrefixTree(100)
    block = kept(1, 2, 3).clone()
    tree.add((1, 2, 3), 0, block)
    block.zero_()
    assert found(tree, 1, 2, 3) == 3


def test_trim_goes_by_last_use_along_a_path_too():
    tree = PrefixTree(8)
    tree.add((1, 1, 1, 1, 1), 0, kept(1, 1, 1, 1, 1))
    tree.add((1, 1, 1, 1, 1, 2), 5, kept(2))
    tree.add((9, 8, 7, 6), 0, kept(9, 8, 7, 6))
    assert found(tree, 9, 8, 7, 6) == 4
    tree.trim()
    assert tree.tokens == 8
    assert [found(tree, 9, 8, 7, 6), found(tree, 1, 1, 1, 1, 1, 2)] == [4, 4]  # of the older path the end is cut


def test_trim_shortens_what_is_longer_than_the_bound():
    tree = PrefixTree(3)
    tree.add((1, 2, 3, 4, 5), 0, kept(1, 2, 3, 4, 5))
    tree.trim()
    assert tree.tokens == 3 and found(tree, 1, 2, 3, 4) == 3


def test_a_split_leaves_no_part_that_holds_the_others_memory():
    tree = PrefixTree(100)
    tree.add((1, 2, 3, 4), 0, kept(1, 2, 3, 4))
    tree.add((1, 2, 9), 2, kept(9))
    for piece in tree.find((1, 2, 3, 4))[1]:
        assert piece.untyped_storage().nbytes() == piece.numel() * piece.element_size()


@given(st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.booleans()), max_size=40))
def test_it_holds_what_a_set_of_beginnings_holds(steps):
    tree, known = PrefixTree(10_000), {()}
    for ids, add in steps:
        longest = max(size for size in range(len(ids) + 1) if tuple(ids[:size]) in known)
        assert found(tree, *ids) == longest
        if add:
            tree.add(tuple(ids), longest, kept(*ids[longest:]))
            known |= {tuple(ids[:size]) for size in range(len(ids) + 1)}
        assert tree.tokens == len(known) - 1
