"""What the JSON answers of a vLLM server say, as far as it adds up; all else is Malformed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midflight.engines.http import Malformed

ROUNDING = 1e-4
"""By so much a log-prob may exceed 0."""
LEAST = -1e6
"""Far below the log-prob of any token that is drawn; vLLM gives -9999 in place of minus infinity."""


def served_names(answer: Any) -> list[str]:
    """Of the models."""
    models = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(models, list) or not all(isinstance(one, Mapping) for one in models):
        raise Malformed("no list of models")
    names = [name for one in models if isinstance(name := one.get("id"), str)]
    if len(names) < len(models):
        raise Malformed("no name of each model")
    return names


def shown(value: object) -> str:
    """What a server said in place of a word: only of a text more than its type, the rest may be nested deep."""
    return repr(value[:80]) if isinstance(value, str) else "none" if value is None else f"a {type(value).__name__}"


def only_choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise Malformed("no list of one choice")
    return choices[0]


def stopped_at(choice: Mapping[str, Any]) -> int | None:
    """The end token that vLLM names: one of generation_config.json beside the tokenizer's, or None."""
    token = choice.get("stop_reason")
    return token if type(token) is int else None


def drawn_tokens(choice: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and the log-prob of each."""
    ids = choice.get("token_ids")
    said = choice.get("logprobs")
    logprobs = said.get("token_logprobs") if isinstance(said, Mapping) else None
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise Malformed("no token_ids")
    if not isinstance(logprobs, list) or not all(
        isinstance(one, int | float) and LEAST <= one <= ROUNDING for one in logprobs
    ):
        raise Malformed("no token_logprobs")
    if len(ids) != len(logprobs):
        raise Malformed(f"{len(logprobs)} log-probs for {len(ids)} tokens")
    return tuple(ids), tuple(min(float(one), 0.0) for one in logprobs)
