"""Forward and backward over packs on a tiny model: what is alive at a time, and how deep the stack is."""

from __future__ import annotations

import traceback
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from midflight.engines.local import attention
from midflight.engines.local.batch_invariant import make_batch_invariant
from midflight.engines.local.grammar import Masks
from midflight.engines.local.support import adopt
from midflight.training import update
from midflight.training.packing import Row, pack_rows
from tests.training.tiny import byte_tokenizer


def model_of(width: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).eval()
    attention.register()
    assert adopt(model) == ""
    return model


def rows_of(length: int, members: int = 1) -> list[Row]:
    """Members part after three quarters of `length`; each trains a token in its middle too."""
    common = [(7 * place) % 251 for place in range(3 * length // 4)]
    rows = []
    for member in range(members):
        ids = tuple((11 * place + member) % 251 for place in range(length - len(common)))
        forced = tuple(place not in (len(ids) // 2, len(ids) - 1) for place in range(len(ids)))
        rows.append(Row(tuple(common), ids, (0.0,) * len(ids), forced, 1.0, None, weight=0.5 + member))
    return rows


class Saved:
    """Counts the bytes that graphs hold: `peak` at any time, of each storage once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._users: dict[int, int] = {}

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self._hooks.__exit__(*problem)

    def _pack(self, tensor: torch.Tensor) -> Any:
        held = type("Held", (), {})()
        held.tensor = tensor.detach()  # a saved output would hold its own graph
        storage = tensor.untyped_storage()
        where, size = storage.data_ptr(), storage.nbytes()
        self._users[where] = self._users.get(where, 0) + 1
        if self._users[where] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(held, self._gone, where, size)
        return held

    def _gone(self, where: int, size: int) -> None:
        self._users[where] -= 1
        if not self._users[where]:
            self.now -= size


Terms = dict[tuple[int, int], float]
"""Log-prob by row and position."""


def gradients(model: Any, rows: list[Row], budget: int, *, exact: bool = False) -> tuple[torch.Tensor, int, Terms]:
    """Of the weighted log-probs; with the most bytes that graphs held, and the terms that were scored."""
    model.zero_grad()
    batch = pack_rows(rows, budget)
    met: Terms = {}

    def loss(pack: Any, scores: update.Scores) -> torch.Tensor:
        terms = [pack.terms[number] for number in scores.terms]
        for term, logprob in zip(terms, scores.logprobs.tolist(), strict=True):
            assert (term.row, term.position) not in met  # also where its pack is computed again
            met[term.row, term.position] = logprob
        return -(scores.logprobs * torch.tensor([batch.rows[term.row].weight for term in terms])).sum()

    with Saved() as saved:
        update.run(model, None, batch, loss, exact=exact)  # type: ignore[arg-type]  # no row has a grammar
    assert saved.now == 0
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), saved.peak, met


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_the_smaller_the_packs_the_less_their_graphs_hold_also_within_one_row(members: int, exact: bool) -> None:
    model, rows = model_of(64, 2), rows_of(1024, members)
    assert not exact or make_batch_invariant(model)
    whole, peak, scored = gradients(model, rows, 4096, exact=exact)
    assert len(scored) == 2 * members
    peaks = [peak]
    for budget in (1024, 512, 256, 128, 64):
        cut, peak, again = gradients(model, rows, budget, exact=exact)
        assert float((cut - whole).norm() / whole.norm()) < 1e-5
        assert again == (scored if exact else pytest.approx(scored, abs=1e-5))
        peaks.append(peak)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 4


drawn = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=12)
"""Ids, and whether each is forced."""
a_row = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), drawn, st.sampled_from([0.7, 1.0]))


@settings(max_examples=12, deadline=None)
@given(st.lists(a_row, min_size=1, max_size=5), st.sampled_from([0, 40]), st.integers(8, 64))
def test_the_gradient_in_packs_is_the_sum_of_those_of_the_rows_alone(found: Any, stem: int, budget: int) -> None:
    model = model_of(16, 2)
    rows = [
        Row(
            prompt_ids=(*range(stem), *prompt),
            ids=tuple(token for token, _ in ids),
            logprobs=(0.0,) * len(ids),
            forced=(*(forced for _, forced in ids[:-1]), False),
            temperature=temperature,
            grammar=None,
            weight=0.5 + number,
        )
        for number, (prompt, ids, temperature) in enumerate(found)
    ]
    alone = [gradients(model, [row], 4096) for row in rows]
    packed, _, scored = gradients(model, rows, budget)
    most = sum(float(gradient.norm()) for gradient, *_ in alone)
    assert float((packed - sum(gradient for gradient, *_ in alone)).norm()) < 1e-5 * most
    expected = {(n, place): value for n, (*_, one) in enumerate(alone) for (_, place), value in one.items()}
    assert scored == pytest.approx(expected, abs=1e-5)


def test_terms_of_one_place_are_scored_apart_where_they_were_drawn_otherwise() -> None:
    tokenizer = byte_tokenizer()
    masks = Masks(tokenizer, 257)
    p, q, a, b, nine = tokenizer("pqab9")["input_ids"]
    grammar = "start: /[a-z][a-z0-9]{2}[a-z]/\n"

    def row(prompt: tuple[int, ...], ids: tuple[int, ...], **drawn: Any) -> Row:
        return Row(prompt, ids, (0.0,) * len(ids), (False,) * len(ids), **{"temperature": 1.0, "grammar": None} | drawn)

    rows = [
        row((p,), (q, a, b)),
        row((p,), (q, a, b), temperature=0.5),
        row((p,), (q, a, b), grammar=grammar),
        row((p,), (q, a, b), grammar="start: /[a-z]{3}/\n"),
        row((q, p), (q, a, b, q), grammar=grammar),  # another beginning: no place is shared
        row((p, q), (a, b), grammar=grammar),  # its first token is the grammar's first
        row((p,), (q, a, b), supports=((q,), (a, nine), (b,))),
        row((p,), (q, a, b), supports=((q,), (a, b), (b,))),
    ]
    model = model_of(64, 2)
    together = update.score_rows(model, masks, pack_rows(rows, 256))
    assert len(pack_rows(rows, 256).packs) == 1
    for one, found in zip(rows, together, strict=True):
        assert found == pytest.approx(update.score_rows(model, masks, pack_rows([one], 256))[0], abs=1e-5)
    assert len(set(together)) == len(rows)


def test_packs_behind_others_are_computed_no_deeper_in_the_stack() -> None:
    model, rows = model_of(4, 1), rows_of(64)
    depths = []
    model.get_decoder().register_forward_hook(lambda *_: depths.append(len(traceback.extract_stack())))
    gradients(model, rows, 4)
    assert len(depths) == 16 + 15  # each but the last is computed twice
    assert len(set(depths)) == 1
