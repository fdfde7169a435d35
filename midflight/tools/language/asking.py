"""How a tool asks a language model: greedily, with what is foreign fenced, and an engine's errors as a tool's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from pydantic import Field

from midflight.engines.base import (
    Engine,
    EngineError,
    EngineGaveUp,
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    PromptTooLong,
    Sampling,
)
from midflight.engines.thoughts import said
from midflight.engines.waits import tool_waits
from midflight.errors import GivenUp
from midflight.section import MOST_SECONDS
from midflight.tools.base import InfrastructureError, ToolError
from midflight.tools.options import ToolOptions


class EngineOptions(ToolOptions):
    cacheable: ClassVar[bool] = False

    engine: str | None = None
    """Name of the language model that it asks; null: that of the generator, else the verifier, else the executor, else
    the analyst, whichever is a language model, else the planner's as it was before training."""
    max_tokens: int = Field(default=512, ge=1, le=100_000_000)
    """Most new tokens of an answer."""
    seconds: float | None = Field(default=120.0, gt=0, le=MOST_SECONDS)

    @property
    def engines(self) -> frozenset[str | None]:
        return super().engines | {self.engine}


@contextmanager
def asking_an_engine() -> Iterator[None]:
    """An engine's errors as those of a tool, and the wait for it as one for an engine.

    Raises:
        ToolError: the text is too long for it.
        InfrastructureError: the engine failed; GivenUp where it gave up.
        BudgetSpent: the run's budget is spent, which ends the trajectory.
    """
    try:
        with tool_waits():
            yield
    except PromptTooLong as error:
        raise ToolError(f"the text is too long for the language model: {error}") from error
    except EngineGaveUp as error:
        raise GivenUp(str(error)) from error
    except EngineError as error:
        raise InfrastructureError(str(error)) from error


async def drawn(engine: Engine, system: str, question: str, sampling: Sampling) -> Generation:
    """What the engine draws behind `system` and `question`.

    Raises: as `asking_an_engine` has it.
    """
    messages = (Message("system", (system,)), Message("user", (question,)))
    with asking_an_engine():
        return await engine.generate(GenerateRequest(messages, sampling))


async def ask(engine: Engine, system: str, question: str, max_tokens: int) -> str:
    """What the engine answers, at temperature 0; see also `said`.

    Raises:
        ToolError: the answer is empty; and as `drawn`.
    """
    generation = await drawn(engine, system, question, Sampling(temperature=0.0, max_tokens=max_tokens))
    text = said(generation.text).strip()
    if generation.finish_reason is FinishReason.LENGTH:
        return f"{text}\n[... cut off after {max_tokens} tokens]"
    if not text:
        raise ToolError("the language model gave an empty answer")
    return text


def fenced(text: str) -> str:
    """`text` between lines of backticks, more than any run of them inside, so that it cannot end the fence."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
