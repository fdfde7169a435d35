"""Other providers through LiteLLM (an optional extra): its model names say which.

LiteLLM's own retries are off: `Patience` is the one place that asks again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from midflight.engines.base import EngineGaveUp, PromptTooLong
from midflight.engines.http import Malformed, Patience, Transient
from midflight.engines.http.client import FOR_GOOD, MOST_SAID, TRANSIENT, retry_after
from midflight.engines.openai import TextEngine
from midflight.engines.served import Endpoint
from midflight.errors import UserError
from midflight.redacting import redact, redact_all

T = TypeVar("T")


class LiteLLMEngine(TextEngine):
    """`TextEngine` over `litellm.acompletion`.

    Raises:
        UserError: litellm is not installed.
    """

    def __init__(
        self,
        name: str,
        patience: Patience,
        endpoint: Endpoint,
        *,
        key: str | None = None,
        others: Iterable[str] = (),
        base_url: str | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(name, patience, endpoint, where=f"litellm {base_url or ''}", **shared)
        try:
            import litellm
        except ModuleNotFoundError:
            raise UserError(
                f"engines.{name}.provider = litellm: not installed; run pip install 'midflight[litellm]'"
            ) from None
        litellm.suppress_debug_info = True  # it prints where to give feedback
        self._litellm: Any = litellm
        self._keys = (key, *others)
        self._fixed = {"api_key": key, "base_url": base_url, "num_retries": 0, "drop_params": False}

    def _asked(self, body: dict[str, Any], tokens: int, read: Callable[[Any], T], waited: float) -> Awaitable[T]:
        return self._patience.run(lambda: self._attempt(body, read), tokens, self._before, waited)

    async def _attempt(self, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        try:
            said = (await self._litellm.acompletion(**body, **self._fixed)).model_dump()
        except self._litellm.exceptions.ContextWindowExceededError as error:
            raise PromptTooLong(self._hidden(error)) from None
        except Exception as error:  # the boundary: LiteLLM has a class for each provider's failures, with a status
            status = getattr(error, "status_code", None)
            for_good, wait = _said(error)
            if status in TRANSIENT and not for_good:
                raise Transient(self._hidden(error), wait) from None
            raise EngineGaveUp(f"{self.name}: {self._hidden(error)}") from None
        try:
            return read(redact_all(said, self._keys))
        except Malformed as error:
            raise Transient(f"{self.name}: the answer has {error}") from None

    def _hidden(self, error: Exception) -> str:
        return " ".join(redact(f"{type(error).__name__}: {error}", self._keys).split())[:MOST_SAID]


def _said(error: BaseException | None) -> tuple[bool, float]:
    """Whether waiting does not help, and the seconds to wait: LiteLLM's error has neither, those it came of have.

    The code of a failure is in the text of some, and in the JSON body alone of others.
    """
    for_good, wait = False, 0.0
    while error is not None:
        said = f"{error} {getattr(error, 'body', None)}"
        for_good = for_good or any(code in said for code in FOR_GOOD)
        headers = getattr(getattr(error, "response", None), "headers", None) or {}
        wait = wait or retry_after(headers.get("retry-after") or "")
        error = error.__context__
    return for_good, wait
