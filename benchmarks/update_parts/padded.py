"""The update without packing: every row computed whole, rows padded to micro-batches.

It is given its best: rows in order of length, padding behind the rows so that plain causal attention needs no mask,
and the head only where a trained token is predicted. Loss and masks are written again here, so that equal gradients
speak for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from midflight.engines.local.grammar import Masks

from .measures import seconds
from .ours import Bench, Row
from .rows import length


def batches(rows: Sequence[Row], micro_batch: int) -> list[list[Row]]:
    """The rows by length, `micro_batch` at a time."""
    ordered = sorted(rows, key=length)
    return [ordered[start : start + micro_batch] for start in range(0, len(ordered), micro_batch)]


def padded_tokens(made: Sequence[Sequence[Row]]) -> int:
    """Tokens computed for these micro-batches, padding included; a row's last token predicts nothing."""
    return sum(len(part) * (max(map(length, part)) - 1) for part in made)


def score(model: Any, masks: Masks, rows: Sequence[Row]) -> Tensor:
    """Log-probs of the unforced tokens of `rows`, row by row, under what each was drawn from."""
    device = next(model.parameters()).device
    ids = torch.zeros(len(rows), max(map(length, rows)) - 1, dtype=torch.long)
    terms = [(number, position) for number, row in enumerate(rows) for position in _free(row)]
    for number, row in enumerate(rows):
        ids[number, : length(row) - 1] = torch.tensor((row.prompt_ids + row.ids)[:-1])
    hidden = model.get_decoder()(input_ids=ids.to(device), use_cache=False).last_hidden_state
    places = [len(rows[number].prompt_ids) - 1 + position for number, position in terms]
    logits = model.get_output_embeddings()(hidden[[number for number, _ in terms], places]).float()
    heat = torch.tensor([rows[number].temperature for number, _ in terms], device=device)
    blocked = torch.zeros(logits.shape, dtype=torch.bool)
    for index, (number, position) in enumerate(terms):
        row = rows[number]
        if row.supports:  # truncated sampling: drawn from these alone
            blocked[index] = True
            blocked[index, list(row.supports[position])] = False
        elif row.grammar is not None:
            blocked[index] = ~torch.from_numpy(masks.at(row.grammar, row.ids, position))
    logprobs = (logits / heat[:, None]).masked_fill(blocked.to(device), -torch.inf).log_softmax(-1)
    targets = torch.tensor([rows[number].ids[position] for number, position in terms], device=device)
    return logprobs.gather(1, targets[:, None])[:, 0]


def loss(logprobs: Tensor, rows: Sequence[Row], epsilon: float) -> Tensor:
    """-sum w min(rho A, clip(rho, 1 - eps, 1 + eps) A) over the unforced tokens of `rows`."""

    def column(value: Callable[[Row, int], float]) -> Tensor:
        return torch.tensor([value(row, position) for row in rows for position in _free(row)], device=logprobs.device)

    ratio = (logprobs - column(lambda row, position: row.logprobs[position])).exp()
    advantage, weight = column(lambda row, _: row.advantage), column(lambda row, _: row.weight)
    return -(weight * torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)).sum()


def padded_update(
    bench: Bench,
    rows: Sequence[Row],
    micro_batch: int,
    using: Callable[[], AbstractContextManager[Any]],
    max_grad_norm: float,
) -> None:
    """Forward, backward, clip, optimizer step. `using` gives the model: `bench.merged` or `bench.unmerged`."""
    bench.optimizer.zero_grad(set_to_none=True)
    with using() as model:
        for part in batches(rows, micro_batch):
            loss(score(model, bench.masks, part), part, bench.settings.clip_epsilon).backward()
    torch.nn.utils.clip_grad_norm_(bench.policy.parameters(), max_grad_norm)
    bench.optimizer.step()
    bench.masks.forget_replays()


def time_padded(
    bench: Bench, rows: Sequence[Row], micro_batch: int, using: Callable[[], AbstractContextManager[Any]]
) -> float:
    """Seconds of one padded update under the recipe's clipping."""
    return seconds(lambda: padded_update(bench, rows, micro_batch, using, bench.settings.max_grad_norm))


def _free(row: Row) -> list[int]:
    return [position for position, forced in enumerate(row.forced) if not forced]
