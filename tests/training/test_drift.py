"""Which tokens may train, which are left out, and what stops the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from midflight.training.drift import DriftCheck, DriftError, drift_cause, without
from midflight.training.packing import Row

ROW = Row((1,), (2, 3), (0.0, 0.0), (False, False), 1.0, None, weights_version=3)


def test_the_cause_of_drift_is_what_is_known_of_both_sides() -> None:
    assert drift_cause([ROW], 3, torch.float32) == "float32 rounding"
    assert drift_cause([ROW, replace(ROW, weights_version=2)], 3, torch.bfloat16) == (
        "1 of 2 rows drawn with older weights, bfloat16 rounding"
    )


def check(share: float = 0.0) -> DriftCheck:
    return DriftCheck(1e-4, share, "float32 rounding")


def test_tokens_within_the_bound_train_and_their_largest_difference_is_kept() -> None:
    made = check()
    first = made.compare(torch.tensor([-1.0, -2.0]), torch.tensor([-1.00005, -2.0]), [(0, 0), (0, 1)])
    assert first.tolist() == [True, True]
    made.compare(torch.tensor([-3.0]), torch.tensor([-3.0]), [(1, 0)])
    assert made.largest == pytest.approx(5e-5, rel=1e-2)
    assert (made.left_out, made.conclude()) == ([], "")


def test_a_few_over_the_bound_are_left_out_and_told_with_both_numbers() -> None:
    made = check(share=0.5)
    ours, drawn = torch.tensor([-1.0, -2.0, -4.0, -5.0]), torch.tensor([-1.0002, -2.0, -4.0004, -5.00001])
    kept = made.compare(ours, drawn, [(0, 0), (0, 1), (3, 0), (3, 1)])
    assert kept.tolist() == [False, True, False, True]
    assert made.left_out == [(0, 0), (3, 0)]
    assert made.largest == pytest.approx(4e-4, rel=1e-3)
    assert made.conclude() == (
        "2 of 4 tokens left out of the update: log-prob -4.000400 when drawn, -4.000000 in the trainer, a drift over "
        "training.max_drift = 0.0001 (row 3, token 0; float32 rounding)"
    )
    made.restart()
    assert (made.largest, made.left_out, made.conclude()) == (0.0, [], "")


def test_more_than_the_share_stop_the_run() -> None:
    made = check(share=0.49)
    made.compare(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0002, -2.0]), [(0, 0), (0, 1)])
    with pytest.raises(DriftError, match="disagree on 1 of 2 tokens: log-prob -1.000200 when drawn"):
        made.conclude()


@pytest.mark.parametrize("value", [-1.0011, float("nan"), float("-inf")])
def test_one_that_is_far_off_stops_it_at_once(value: float) -> None:
    with pytest.raises(DriftError, match=r"-1\.000000 when drawn, .* in the trainer.*\(row 7, token 1; float32"):
        check(share=0.9).compare(torch.tensor([-1.0002, value]), torch.tensor([-1.0, -1.0]), [(7, 0), (7, 1)])


def test_what_is_left_out_is_as_forced_and_a_row_without_tokens_falls_away() -> None:
    assert without([ROW, ROW], [(1, 1)]) == [ROW, replace(ROW, forced=(False, True))]
    assert without([ROW, ROW], [(0, 0), (0, 1)]) == [ROW]
