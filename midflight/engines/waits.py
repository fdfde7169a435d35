"""How long a trajectory has waited for engines, which is not its own time.

Invariant: a moment counts once, whoever waits in it. Modules are told of by `AgentFlow`; a tool that asks an engine is
found by the trajectory in whose context it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

TOOLS = "tools"
"""Who waits, where a tool does."""


class Waits:
    """Of one trajectory."""

    __slots__ = ("_clock", "_since", "_tools", "_who", "seconds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._who, self._since, self._tools = clock, "", 0.0, 0
        self.seconds: dict[str, float] = {}
        """By who waited, without a wait that has no end yet."""

    @property
    def of_module(self) -> bool:
        """Whether the wait of a module is under way."""
        return self._who not in ("", TOOLS)

    def begin(self, who: str) -> None:
        """Begin a wait; it ends the one that is under way, if there is one."""
        if self._who:
            self.end()
        self._who, self._since = who, self._clock()

    def end(self) -> None:
        """End the wait that is under way, if there is one."""
        if self._who:
            self.seconds[self._who] = self.seconds.get(self._who, 0.0) + self._clock() - self._since
            self._who = ""

    @contextmanager
    def of_tool(self) -> Iterator[None]:
        """What is inside is a tool's wait; of several at once each but the last leaves it to the others to end it."""
        self._tools += 1
        if not self._who:
            self.begin(TOOLS)
        try:
            yield
        finally:
            self._tools -= 1
            if self._tools == 0 and self._who == TOOLS:
                self.end()


OF_TRAJECTORY: ContextVar[Waits | None] = ContextVar("waits of the trajectory", default=None)


@contextmanager
def tool_waits() -> Iterator[None]:
    """What is inside is a tool's wait for an engine."""
    waits = OF_TRAJECTORY.get()
    if waits is None:
        yield
        return
    with waits.of_tool():
        yield
