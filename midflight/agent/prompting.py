"""What the modules share when they ask an engine: templates, one-line text, fences and per-request seeds.

Invariant: text that an engine or a tool produced is never substituted into a template; it enters a prompt only as
a single line (`one_line`) or inside a fence (`fenced`), so it cannot start a line of ours or close its own fence. The
question, which is the user's, enters as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from string import Template

from midflight.seeds import derive

__all__ = ["cut_middle", "fenced", "field", "one_line", "query_part", "request_seed", "template", "template_fault"]

REQUIRED = {"tools", "schema", "format", "references", "context", "turns_left"}
_SECTION = re.compile(r"^\[(\w+)\][ \t]*\n", re.MULTILINE)
_BUILT_IN = {
    file.name.removesuffix(".txt"): file.read_text(encoding="utf-8")
    for file in (resources.files("midflight.agent") / "prompts").iterdir()
    if file.name.endswith(".txt")
}
"""Read with the module, so that no trajectory reads a file on the event loop."""


@lru_cache(maxsize=64)
def template(name: str, own: str = "") -> Mapping[str, Template]:
    """The sections of a template: each starts with a line `[section]`; surrounding line breaks are cut.

    `own` is the text of the caller's template, in place of `prompts/{name}.txt`; see `template_fault`.

    Raises:
        KeyError: there is no such template.
    """
    _, *pieces = _SECTION.split(own or _BUILT_IN[name])
    return {section: Template(body.strip("\n")) for section, body in zip(pieces[::2], pieces[1::2], strict=True)}


def template_fault(name: str, own: str) -> str | None:
    """Why a text cannot stand in for the template `name`, on one line; None when it can.

    It has the same sections, and in each of them placeholders of the built-in one; `$tools`, `$schema`, `$format`,
    `$references`, `$context` and `$turns_left` have to be where they are there.
    """
    known = template(name)
    first, names = _SECTION.search(own), _SECTION.findall(own)
    if first is None or own[: first.start()].strip():
        return f"does not begin with a line such as [{next(iter(known))}]"
    twice = sorted({section for section in names if names.count(section) > 1})
    if twice:
        return f"has the section [{twice[0]}] twice"
    sections = template(name, own)
    for section in known:
        if section not in sections:
            return f"lacks the section [{section}]"
    for section, text in sections.items():
        if section not in known:
            return f"has the section [{section}], which nothing reads; sections: {', '.join(known)}"
        if not text.is_valid():
            return f"has a $ in [{section}] that is no placeholder; write $$ for the sign"
        there, allowed = set(text.get_identifiers()), set(known[section].get_identifiers())
        for placeholder in sorted(there - allowed):
            return f"has ${placeholder} in [{section}], which is not filled in; placeholders there: {_listed(allowed)}"
        for placeholder in sorted((allowed - there) & REQUIRED):
            return f"lacks ${placeholder} in [{section}]"
    return None


def _listed(names: set[str]) -> str:
    return ", ".join(f"${name}" for name in sorted(names)) or "none"


def request_seed(seed: int | None, module: str, turn: int) -> int | None:
    """The seed of one engine request, from trajectory seed, module and turn; None (draw freely) stays None."""
    return None if seed is None else derive(seed, module, turn)


def one_line(text: str) -> str:
    """`text` with every line break (Unicode ones too) replaced by a space."""
    return " ".join(text.splitlines()).strip()


def fenced(text: str) -> str:
    """`text` between two lines of backticks, at least three and more than any run of backticks inside it."""
    longest = max(map(len, re.findall(r"`+", text))) if "`" in text else 0
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def field(name: str, text: str) -> str:
    """`text` under its name: behind it where it is a line, else fenced."""
    lines = text.splitlines()
    return f"{name}:\n{fenced(text)}" if len(lines) > 1 else f"{name}: {lines[0].strip() if lines else ''}".rstrip()


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
    return f"Question: {text}\n" + (f"{field('Analysis', analysis)}\n" if analysis else "")
