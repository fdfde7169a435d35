"""Text in passages, and those that match a question, by SQLite's BM25.

Invariant: a passage is text as it stood, white space aside; the same text and question always give the same passages.
A question is only ever words, never search syntax.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

TOKENIZER = "porter unicode61"
"""English endings are cut, case and accents folded."""
_COMMON = frozenset(
    "a an and are as at by did do does for from has have how in is it its many much of on or that the there to was "
    "were what when where which who why with".split()
)
_MOST_WORDS = 32


def split_passages(text: str, length: int = 400) -> Iterator[str]:
    """Pieces of about `length` characters, cut after a sentence or a semicolon where there is one."""
    piece = ""
    for sentence in re.split(r"(?<=[.;]) ", text):
        if piece and len(piece) + len(sentence) > length:
            yield piece
            piece = ""
        piece = f"{piece} {sentence}".strip()
        start = 0
        while len(piece) - start > 2 * length:
            yield piece[start : start + length]
            start += length
        piece = piece[start:]
    if piece:
        yield piece


def paragraphs(text: str, length: int = 600) -> list[str]:
    """Passages of running text: short paragraphs are joined, long ones split."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=[-*#|])|(?<=[.:!?])\n", text):
        line = " ".join(block.split())
        if not line:
            continue
        if found and len(found[-1]) + len(line) < length:
            found[-1] = f"{found[-1]}\n{line}"
        else:
            found += split_passages(line, length)
    return found


def match_expression(question: str) -> str:
    """The FTS5 query for any of the question's words, common ones left out where others are left; empty: no words."""
    words = list(dict.fromkeys(re.findall(r"\w+", question.casefold())))[:_MOST_WORDS]
    words = [word for word in words if word not in _COMMON] or words
    return " OR ".join(f'"{word}"' for word in words)


def best_passages(passages: Sequence[str], question: str, count: int) -> list[int]:
    """Indexes of the `count` passages that match best, best first; fewer where fewer match."""
    expression = match_expression(question)
    if not expression:
        return []
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"CREATE VIRTUAL TABLE passages USING fts5(text, tokenize='{TOKENIZER}')")
        rows = ((number, text) for number, text in enumerate(passages))
        connection.executemany("INSERT INTO passages (rowid, text) VALUES (?, ?)", rows)
        ranked = connection.execute(
            "SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
            (expression, count),
        )
        return [int(number) for (number,) in ranked]


def excerpt(text: str, question: str, count: int, most: int) -> str:
    """What of `text` answers `question`: its `count` best passages; all of a short text.

    Without a question, or when no word of it is there, the text from its start, to about `most` characters.
    """
    if len(text) <= most:
        return text
    passages = paragraphs(text)
    chosen = best_passages(passages, question, count)
    return joined(passages, chosen) if chosen else head(text, most)


def head(text: str, most: int) -> str:
    """A text from its start, to about `most` characters."""
    if len(text) <= most:
        return text
    start = text[:most].rsplit(" ", 1)[0]
    return f"{start}\n[... {len(text) - len(start)} characters follow ...]"


def joined(passages: Sequence[str], chosen: Iterable[int]) -> str:
    """The chosen passages, one or more, in the order of the text, with a mark where others are left out."""
    chosen = sorted(chosen)
    lines: list[str] = []
    for before, number in zip([-1, *chosen], chosen, strict=False):
        if number != before + 1:
            lines.append("[...]")
        lines.append(passages[number])
    if chosen[-1] != len(passages) - 1:
        lines.append("[...]")
    return "\n".join(lines)
