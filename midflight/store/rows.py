"""Turns and generations as rows of the store's tables, and rows as turns and generations.

Invariant: each `*_row` lists its values in the order of `schema`'s columns.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from midflight.agent.types import Action, Answer, Claim, Query, StopReason, Trajectory, Turn, Verdict
from midflight.engines.base import FinishReason, Generation, Sampling
from midflight.store.codec import (
    decode_flags,
    decode_floats,
    decode_id_sets,
    decode_ids,
    decode_object,
    decode_text,
    encode_flags,
    encode_floats,
    encode_ids,
    encode_json,
    encode_text,
    grammar_hash,
)
from midflight.tools.base import ErrorKind, ToolCall, ToolResult

Row = tuple[Any, ...]
NUMBERS = frozenset("step member seconds reward advantage turn position weights_version first_step last_step".split())
"""Columns of which all values are finite numbers, or none."""


def checked(row: sqlite3.Row) -> sqlite3.Row:
    """The row itself, once its numbers are some: SQLite keeps in a column whatever it is given.

    Raises:
        ValueError: one is something else.
    """
    for name in NUMBERS.intersection(row.keys()):
        value = row[name]
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ValueError(f"{name} is {value!r:.40}, not a number")
    return row


def placeholders(row: Row) -> str:
    """`?, ?, ?` for as many values as `row` holds."""
    return ", ".join("?" * len(row))


def grammar_of(turn: Turn) -> Iterator[str]:
    """The grammars of a turn's generations, repeats included."""
    for generation in (turn.generation, *(other for _, other in turn.other_generations)):
        if generation.grammar is not None:
            yield generation.grammar


def generation_row(generation: Generation) -> Row:
    return (
        encode_text(generation.text),
        generation.finish_reason.value,
        encode_ids(generation.prompt_ids),
        encode_ids(generation.ids),
        encode_floats(generation.logprobs),
        encode_flags(generation.forced),
        generation.weights_version,
        encode_json(asdict(generation.sampling), "sampling"),
        None if generation.grammar is None else grammar_hash(generation.grammar),
    )


def other_generation_row(module: str, generation: Generation) -> Row:
    return (encode_text(module), *generation_row(generation))


def turn_row(turn: Turn) -> Row:
    action, call = turn.action, turn.call
    return (
        turn.index,
        *generation_row(turn.generation),
        None if action is None else encode_text(action.sub_goal),
        None if action is None else encode_text(action.tool),
        None if action is None else encode_text(action.context),
        None if call is None else encode_text(call.tool),
        None if call is None else encode_json(dict(call.arguments), f"arguments of {call.tool}"),
        encode_text(turn.result.text),
        None if turn.result.error is None else turn.result.error.value,
        int(turn.verdict.stop),
        encode_text(turn.verdict.reason),
        turn.seconds,
    )


def judgement_row(verdict: Verdict) -> Row | None:
    """What a verdict holds beside `stop` and `reason`; None where that is nothing."""
    if verdict.valid is None and verdict.sufficient is None and not verdict.contradictions:
        return None
    flags = (None if flag is None else int(flag) for flag in (verdict.valid, verdict.sufficient))
    return (*flags, encode_json(list(verdict.contradictions), "contradictions"))


def _verdict(row: sqlite3.Row) -> Verdict:
    valid, sufficient = (None if row[name] is None else bool(row[name]) for name in ("valid", "sufficient"))
    contradictions = () if row["contradictions"] is None else tuple(json.loads(row["contradictions"]))
    reason = decode_text(row["verdict_reason"])
    return Verdict(bool(row["verdict_stop"]), reason, valid, sufficient, contradictions)


def trajectory_row(trajectory: Trajectory) -> Row:
    answer = trajectory.answer
    claims = [] if answer is None else [[claim.text, list(claim.turns), list(claim.sources)] for claim in answer.claims]
    seed = trajectory.query.seed
    return (
        encode_text(trajectory.query.text),
        encode_text(trajectory.query.id),
        None if seed is None else str(seed),  # as text: seeds may take 64 bits, SQLite's integers are signed
        trajectory.stop_reason.value,
        None if answer is None else encode_text(answer.text),
        encode_json(claims, "claims"),
        encode_text(trajectory.analysis),
        encode_text(trajectory.error),
        trajectory.seconds,
    )


def generation_from_row(row: sqlite3.Row, grammars: Mapping[str, str], sets: bytes | None = None) -> Generation:
    sampling, grammar = decode_object(checked(row)["sampling"]), row["grammar"]
    if grammar not in (None, *grammars):
        raise ValueError(f"grammar {grammar!r:.20} is missing")
    return Generation(
        text=decode_text(row["text"]),
        finish_reason=FinishReason(row["finish_reason"]),
        prompt_ids=decode_ids(row["prompt_ids"]),
        ids=decode_ids(row["ids"]),
        logprobs=decode_floats(row["logprobs"]),
        forced=decode_flags(row["forced"]),
        supports=() if sets is None else decode_id_sets(sets),
        weights_version=row["weights_version"],
        sampling=Sampling(**{**sampling, "stop": tuple(sampling["stop"])}),
        grammar=None if grammar is None else grammars[grammar],
    )


def turn_from_row(row: sqlite3.Row, others: Sequence[tuple[str, Generation]], grammars: Mapping[str, str]) -> Turn:
    action = call = None
    if row["tool"] is not None:
        action = Action(decode_text(row["sub_goal"]), decode_text(row["tool"]), decode_text(row["context"]))
    if row["called_tool"] is not None:
        call = ToolCall(decode_text(row["called_tool"]), decode_object(row["arguments"]))
    error = None if row["error_kind"] is None else ErrorKind(row["error_kind"])
    whole = None if row["whole"] is None else decode_text(row["whole"])
    return Turn(
        index=row["turn"],
        generation=generation_from_row(row, grammars, row["sets"]),
        action=action,
        call=call,
        result=ToolResult(decode_text(row["result"]), error, whole),
        verdict=_verdict(row),
        seconds=row["seconds"],
        other_generations=tuple(others),
    )


def trajectory_from_rows(
    row: sqlite3.Row, turns: Sequence[sqlite3.Row], others: Sequence[sqlite3.Row], grammars: Mapping[str, str]
) -> Trajectory:
    """Join a row of `trajectories` with its rows of `turns` (by position) and of `other_generations` (by place).

    Raises:
        ValueError, LookupError, TypeError, zlib.error: a row is damaged, or missing.
    """
    for place, turn in enumerate(turns):
        if (turn["position"], turn["turn"]) != (place, place + 1):
            raise ValueError(f"turn {place + 1} is missing")
    others_of: dict[int, list[tuple[str, Generation]]] = {}
    for other in others:
        pair = (decode_text(other["module"]), generation_from_row(other, grammars))
        others_of.setdefault(other["position"], []).append(pair)
    written = json.loads(row["claims"])  # earlier versions knew no sources
    claims = tuple(Claim(text, tuple(turns), *map(tuple, sources)) for text, turns, *sources in written)
    seed = None if row["query_seed"] is None else int(row["query_seed"])
    return Trajectory(
        query=Query(decode_text(row["query_text"]), decode_text(row["query_id"]), seed),
        turns=tuple(turn_from_row(turn, others_of.get(turn["position"], []), grammars) for turn in turns),
        stop_reason=StopReason(row["stop_reason"]),
        answer=None if row["answer"] is None else Answer(decode_text(row["answer"]), claims),
        analysis=decode_text(row["analysis"]),
        error=decode_text(row["error"]),
        seconds=row["seconds"],
    )
