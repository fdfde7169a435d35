"""Search over the real Factbook, and what a broken cache or a hostile query does."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from midflight.tools import ErrorKind, InfrastructureError
from midflight.tools.facts import factbook
from midflight.tools.facts.factbook import factbook_search, find_passages, index_path
from midflight.tools.reading.passages import split_passages


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("XDG_CACHE_HOME")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


def test_search_finds_the_field_of_the_country() -> None:
    found = find_passages("highest point Nepal")
    assert found[0][:2] == ("Nepal", "Elevation")
    assert found[0][2].startswith("highest point: Mount Everest")
    assert len(found) == 3
    result = asyncio.run(factbook_search.call({"query": "What is the highest point in Nepal?"}, 30.0))
    assert result.error is None
    assert result.text.splitlines()[0].startswith("Nepal, Elevation: highest point: Mount Everest")


@pytest.mark.parametrize(
    "query",
    ['"', '" OR "', "NEAR(a b)", "country:peru AND NOT", "'; DROP TABLE passages; --", "a*", "^x", "\x00", "(((", "-"],
)
def test_hostile_queries_are_only_words(query: str) -> None:
    result = asyncio.run(factbook_search.call({"query": query}, 30.0))
    assert result.error in (None, ErrorKind.TOOL_ERROR)
    assert "sqlite" not in result.text.lower() and "syntax" not in result.text.lower()
    assert find_passages("highest point Nepal")[0][0] == "Nepal"


def test_nothing_found_is_a_tool_error() -> None:
    result = asyncio.run(factbook_search.call({"query": "zzzzqq"}, 30.0))
    assert (result.text, result.error) == ("nothing in the Factbook matches 'zzzzqq'", ErrorKind.TOOL_ERROR)


def test_a_damaged_index_is_built_again_and_nothing_is_left_aside() -> None:
    index_path().write_bytes(b"not a database, but long enough to be read as a header" * 4)
    assert find_passages("highest point Nepal")[0][0] == "Nepal"
    assert [path.name for path in index_path().parent.iterdir()] == [index_path().name]


def test_a_cache_that_cannot_be_written_is_infrastructure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InfrastructureError, match="XDG_CACHE_HOME"):
        asyncio.run(factbook_search.call({"query": "peru"}, 30.0))


def test_long_fields_are_split_and_whole() -> None:
    text = " ".join(f"Sentence number {i} says something." for i in range(60))
    pieces = list(split_passages(text))
    assert " ".join(pieces) == text
    assert max(map(len, pieces)) <= factbook.PASSAGE_LENGTH + 1
