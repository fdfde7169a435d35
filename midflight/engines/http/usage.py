"""What engines on servers used and cost, by module, and the budget of a run.

Invariant: every answer a server gave is counted once, whoever asked; of one that is refused, the tokens that it says it
took; of an attempt without an answer, none. The total is the sum over modules.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from midflight.engines.base import BudgetSpent
from midflight.errors import reading

MOST_TOKENS = 10**9
"""Of one request: a server that counts more is not believed."""


@dataclass(frozen=True)
class Prices:
    """Money for a million tokens, in the unit the user thinks in."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, prompt: int, completion: int = 0) -> float:
        """Of so many tokens."""
        return (prompt * self.prompt + completion * self.completion) / 1e6


def _counted(said: object) -> int | None:
    return said if type(said) is int and 0 <= said <= MOST_TOKENS else None


def said_tokens(answer: object) -> tuple[int | None, int | None]:
    """Prompt and completion tokens that a JSON answer says it took; None where it does not, or says that it took none
    at all, which nothing does."""
    said = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(said, dict):
        return None, None
    took, drew = _counted(said.get("prompt_tokens")), _counted(said.get("completion_tokens"))
    total = _counted(said["total_tokens"]) if "total_tokens" in said else None
    if took is not None and drew is not None and total is not None:
        drew = max(drew, total - took)  # some servers count the tokens of a thought in the total alone
    return (took, drew) if took != 0 else (None, drew or None)


@dataclass
class Usage:
    """What was used. `cached` answers came from the response cache: they cost nothing and are no requests."""

    requests: int = 0
    retries: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def add(self, other: Usage) -> None:
        self.requests += other.requests
        self.retries += other.retries
        self.cached += other.cached
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.money += other.money


class Ledger:
    """What a run has used, by module and engine, and the most it may use (None: no bound).

    Requests under way when the budget is spent are finished and counted; no new one is made.
    """

    def __init__(self, *, tokens: int | None = None, money: float | None = None) -> None:
        self.of: dict[tuple[str, str], Usage] = {}
        self.total = Usage()
        self._tokens, self._money = tokens, money

    def check(self) -> None:
        """Let one more request be made.

        Raises:
            BudgetSpent: the budget is spent.
        """
        if self._tokens is not None and self.total.tokens >= self._tokens:
            raise BudgetSpent(f"budget.tokens = {self._tokens}: spent, with {self.total.tokens} tokens")
        if self._money is not None and self.total.money >= self._money:
            raise BudgetSpent(f"budget.money = {self._money:g}: spent, with {self.total.money:.4g}")

    def add(self, module: str, engine: str, usage: Usage) -> None:
        """Count what was used."""
        of = self.of.get((module, engine))
        if of is None:
            of = self.of[module, engine] = Usage()
        of.add(usage)
        self.total.add(usage)

    def save(self, path: Path) -> None:
        """Keep the total, once something was used, so that a run which goes on knows of it: in one move."""
        if self.total == Usage():
            return
        aside = path.with_name(path.name + ".tmp")
        with aside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self.total)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    def load(self, path: Path) -> None:
        """Count what was kept there, if anything was, as used.

        Raises:
            UserError: the file holds something else.
        """
        if not path.is_file():
            return
        with reading(path, "repair it, or remove it: what was spent then counts from 0"):
            kept = Usage(**json.loads(path.read_text(encoding="utf-8")))
            for name, value in asdict(kept).items():
                if type(value) not in (int, float) or not 0 <= value < math.inf:
                    raise ValueError(f"{name} is {value!r:.40}")
        self.total.add(kept)

    def to_json(self) -> dict[str, Any]:
        """Plain values: the total, and by module."""
        modules = [
            {"module": module, "engine": engine, **asdict(usage)} for (module, engine), usage in sorted(self.of.items())
        ]
        return {"total": asdict(self.total), "modules": modules}

    def lines(self) -> list[str]:
        """For people: one line a module; none where nothing was asked."""
        return [f"{module} on {engine}: {_line(usage)}" for (module, engine), usage in sorted(self.of.items())]


def difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """`Ledger.to_json` of what came between two of it, the total alone."""
    return {name: value - before["total"][name] for name, value in now["total"].items()}


def _line(usage: Usage) -> str:
    parts = [
        f"{usage.requests} requests",
        f"{usage.prompt_tokens} prompt + {usage.completion_tokens} completion tokens",
    ]
    parts += [f"{usage.cached} answers from the cache"] if usage.cached else []
    parts += [f"{usage.retries} retries"] if usage.retries else []
    parts += [f"cost {usage.money:.4f}"] if usage.money else []
    return ", ".join(parts)
