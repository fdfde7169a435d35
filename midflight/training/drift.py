"""Do sampler and trainer agree on the log-prob of each token that trains?

Invariant: no token trains whose two log-probs differ by more than the bound; one stops the run with both numbers. In
float32 a token can be so ill conditioned that rounding alone takes it there: with a share above 0 a few such tokens are
left out of the update instead (IcePop, Ring-1T, arXiv 2510.18855), and what is reported includes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from midflight.training.packing import Row

FAR = 10.0
"""Times the bound that no rounding explains."""


class DriftError(RuntimeError):
    """Sampler and trainer disagree on the log-prob of a trained token."""


def drift_cause(rows: Sequence[Row], version: int, dtype: torch.dtype) -> str:
    """Why the log-probs of `rows` may differ between sampler and trainer, from what is known of both."""
    causes = []
    stale = sum(row.weights_version != version for row in rows)
    if stale:
        causes.append(f"{stale} of {len(rows)} rows drawn with older weights")
    if dtype is not torch.float32:
        causes.append(f"{str(dtype).removeprefix('torch.')} rounding")
    if any(row.supports for row in rows):
        causes.append("truncated sampling")
    return ", ".join(causes) or "float32 rounding"


@dataclass
class DriftCheck:
    """Compares log-probs, a part of the tokens at a time; `conclude` after the last part.

    Args:
        bound: largest difference of a token that trains.
        share: of all tokens, how many may be left out.
        cause: what the message says of the reason.
    """

    bound: float
    share: float
    cause: str
    largest: float = 0.0
    """Difference of any token, those that are left out too."""
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """Row and position of each token over the bound."""
    _tokens: int = 0
    _worst: tuple[float, str] = (0.0, "")

    def restart(self) -> None:
        """Forget what was compared: the pass is made again."""
        self.largest, self.left_out, self._tokens, self._worst = 0.0, [], 0, (0.0, "")

    def compare(self, ours: torch.Tensor, drawn: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Which tokens may train: boolean [N]. `ours` and `drawn` [N] are the log-probs, `places` as in `left_out`.

        Raises:
            DriftError: a difference is `FAR` over the bound, or no number.
        """
        gaps = (ours - drawn).abs()
        keep = gaps <= self.bound
        self._tokens += len(gaps)
        self.largest = max([self.largest, *gaps.tolist()])
        if not bool(keep.all()):
            index = int(gaps.argmax())  # that of a NaN, if there is one
            gap = float(gaps[index])
            row, position = places[index]
            numbers = (
                f"log-prob {float(drawn[index]):.6f} when drawn, {float(ours[index]):.6f} in the trainer, a drift over "
                f"training.max_drift = {self.bound:g} (row {row}, token {position}; {self.cause})"
            )
            if not gap <= FAR * self.bound:
                raise DriftError(f"sampler and trainer disagree: {numbers}")
            self._worst = max(self._worst, (gap, numbers))
            self.left_out += [place for place, kept in zip(places, keep.tolist(), strict=True) if not kept]
        return keep

    def conclude(self) -> str:
        """What to tell of the tokens that were left out; empty when there are none.

        Raises:
            DriftError: they are more than the share.
        """
        if not self.left_out:
            return ""
        count = f"{len(self.left_out)} of {self._tokens} tokens"
        if len(self.left_out) > self.share * self._tokens:
            raise DriftError(f"sampler and trainer disagree on {count}: {self._worst[1]}")
        return f"{count} left out of the update: {self._worst[1]}"


def without(rows: Sequence[Row], places: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows with these tokens untrained, as forced ones are; a row with no other falls away."""
    forced = [list(row.forced) for row in rows]
    for row, position in places:
        forced[row][position] = True
    marked = [replace(row, forced=tuple(flags)) for row, flags in zip(rows, forced, strict=True)]
    return [row for row in marked if not all(row.forced)]
