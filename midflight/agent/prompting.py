"""What the modules share when they ask an engine: templates, one-line text, fences and per-request seeds.

Invariant: text that an engine or a tool produced is never substituted into a template; it enters a prompt only as
a single line (`one_line`) or inside a fence (`fenced`), so it cannot start a line of ours or close its own fence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from string import Template

from midflight.seeds import derive

__all__ = ["cut_middle", "fenced", "one_line", "query_part", "request_seed", "template"]

_SECTION = re.compile(r"^\[(\w+)\]\n", re.MULTILINE)


@cache
def template(name: str) -> Mapping[str, Template]:
    """The sections of `prompts/{name}.txt`: each starts with a line `[section]`; surrounding line breaks are cut.

    Raises:
        FileNotFoundError: there is no such template.
    """
    text = (resources.files("midflight.agent") / "prompts" / f"{name}.txt").read_text(encoding="utf-8")
    _, *pieces = _SECTION.split(text)
    return {section: Template(body.strip("\n")) for section, body in zip(pieces[::2], pieces[1::2], strict=True)}


def request_seed(seed: int | None, module: str, turn: int) -> int | None:
    """The seed of one engine request, from trajectory seed, module and turn; None (draw freely) stays None."""
    return None if seed is None else derive(seed, module, turn)


def one_line(text: str) -> str:
    """`text` with every line break (Unicode ones too) replaced by a space."""
    return " ".join(text.splitlines()).strip()


def fenced(text: str) -> str:
    """`text` between two lines of backticks, at least three and more than any run of backticks inside it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def cut_middle(text: str, limit: int) -> str:
    """`text` if it has at most `limit` characters, else its two ends around a marker that counts what was cut."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return f"{text[:head]} [... {len(text) - limit} characters cut ...] {text[len(text) - tail :]}"


def query_part(text: str, analysis: str, single_line: bool = False) -> str:
    """The part of a prompt that states the question, with its analysis when there is one."""
    if single_line:
        text, analysis = one_line(text), one_line(analysis)
    return f"Question: {text}\n" + (f"Analysis: {analysis}\n" if analysis else "")
