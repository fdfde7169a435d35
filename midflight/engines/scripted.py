"""An engine that answers from a script, for tests and examples: no model, no randomness.

Invariant: the n-th request gets the n-th answer of a list (or what the function says of it), and every request
is kept in `requests` in the order of arrival, so a test can read the exact prompt a module sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from midflight.engines.base import EngineError, FinishReason, GenerateRequest, Generation, PromptTooLong

__all__ = ["Script", "ScriptedAnswer", "ScriptedEngine"]

ScriptedAnswer = str | Generation | Exception
Script = Iterable[ScriptedAnswer] | Callable[[GenerateRequest], ScriptedAnswer]


class ScriptedEngine:
    """Answers from a list, or from a function of the request.

    An answer is a text, a whole `Generation`, or an exception, which is raised. A list that runs out
    raises EngineError.

    Args:
        script: the answers in order, or a function from a request to its answer.
        delay: seconds to wait before each answer.
        context_length: most tokens of prompt and continuation, counted by `count_tokens`.
        name: what to call it in a report.
    """

    def __init__(
        self, script: Script, *, delay: float = 0.0, context_length: int = 1_000_000, name: str = "scripted"
    ) -> None:
        self._answer = script if callable(script) else _in_order(script)
        self._delay = delay
        self._context_length = context_length
        self._name = name
        self.requests: list[GenerateRequest] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def context_length(self) -> int:
        return self._context_length

    async def generate(self, request: GenerateRequest) -> Generation:
        """The scripted answer to `request`, after `delay` seconds.

        Raises:
            PromptTooLong: the prompt plus `max_tokens` exceed `context_length`.
            EngineError: the script ran out of answers.
            Exception: whatever exception the script holds at this place.
        """
        self.requests.append(request)
        prompt_tokens = sum(self.count_tokens(part) for message in request.messages for part in message.parts)
        if prompt_tokens + request.sampling.max_tokens > self._context_length:
            raise PromptTooLong(
                f"{prompt_tokens} prompt tokens + {request.sampling.max_tokens} new exceed {self._context_length}"
            )
        answer = self._answer(request)
        await asyncio.sleep(self._delay)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Generation):
            return answer
        return Generation(answer, FinishReason.STOP, sampling=request.sampling, grammar=request.grammar)

    def count_tokens(self, text: str) -> int:
        """One token for every four characters begun."""
        return (len(text) + 3) // 4


def _in_order(answers: Iterable[ScriptedAnswer]) -> Callable[[GenerateRequest], ScriptedAnswer]:
    remaining = iter(answers)

    def answer(request: GenerateRequest) -> ScriptedAnswer:
        return next(remaining, EngineError("the script has no more answers"))

    return answer
