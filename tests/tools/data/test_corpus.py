"""corpus_search over real folders: what is found, and that the index follows the files."""

from __future__ import annotations

import asyncio
import importlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import UserError
from midflight.tools import ErrorKind, InfrastructureError, Tool, ToolContext, ToolResult, make_toolset
from midflight.tools.data import index as corpus
from midflight.tools.data.index import index_name, search
from tests.tools.pdf import pdf
from tests.tools.reading.test_documents import ARTICLE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = tmp_path / "documents"
    (documents / "lakes").mkdir(parents=True)
    (documents / "rivers.md").write_text("# Rivers\n\nThe Rio Negro is a blackwater river.\n\nThe Amazon is long.\n")
    (documents / "lakes" / "titicaca.html").write_text(ARTICLE)
    (documents / "notes.txt").write_text("A note on mountains.")
    (documents / "picture.png").write_bytes(b"\x89PNG blackwater")
    (documents / ".hidden.txt").write_text("blackwater")
    (tmp_path / "outside.txt").write_text("blackwater outside")
    (documents / "link.txt").symlink_to(tmp_path / "outside.txt")
    return documents


def made(folder: Path, **options: Any) -> Tool:
    settings = {"folder": str(folder), **options}
    context = ToolContext(cache_folder=folder.parent / "cache")
    found = make_toolset(["corpus_search"], {"corpus_search": settings}, context).get("corpus_search")
    assert found is not None
    return found


def look(folder: Path, query: str, document: str = "", **options: Any) -> ToolResult:
    arguments = {"query": query, **({"document": document} if document else {})}
    return asyncio.run(made(folder, **options).call(arguments, 10.0))


def index_of(folder: Path) -> Path:
    return folder.parent / "cache" / "corpora" / index_name(str(folder))


def test_documents_of_all_kinds_are_found_and_nothing_outside(folder: Path) -> None:
    pytest.importorskip("trafilatura")
    pytest.importorskip("pypdf")
    (folder / "depths.pdf").write_bytes(pdf("The greatest depth is 281 metres."))
    assert look(folder, "blackwater river").text == (
        "[rivers.md]\nRivers\n# Rivers\n".replace("Rivers\n# ", "# ")
        + "The Rio Negro is a blackwater river.\nThe Amazon is long."
    )
    assert look(folder, "greatest depth", passages=1).text == "[depths.pdf]\nThe greatest depth is 281 metres."
    assert look(folder, "navigable lakes", passages=1).text.startswith("[lakes/titicaca.html] Lake & Land\n")
    assert look(folder, "mountain", "notes.txt").text == "[notes.txt]\nA note on mountains."
    nothing = look(folder, "zebra OR (")
    assert nothing == ToolResult("nothing in the documents matches 'zebra OR ('; try other words", ErrorKind.TOOL_ERROR)
    assert "there is no document 'x.txt'" in look(folder, "river", "x.txt").text


def test_only_what_has_changed_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lakes" / "titicaca.html").unlink()
    read: list[int] = []
    text_of = corpus.document_text
    monkeypatch.setattr(corpus, "document_text", lambda body, kind: (read.append(len(body)), text_of(body, kind))[1])
    index = str(folder.parent / "i.sqlite")
    assert "[notes.txt]" in search(str(folder), index, "mountains", "", 3)
    assert len(read) == 2
    search(str(folder), index, "mountains", "", 3)
    assert len(read) == 2
    (folder / "notes.txt").write_text("A note on valleys, now.")
    (folder / "new.txt").write_text("Nothing but mountains.")
    (folder / "rivers.md").unlink()
    assert search(str(folder), index, "mountains", "", 3) == "[new.txt]\nNothing but mountains."
    assert len(read) == 4
    assert "valleys" in search(str(folder), index, "valleys", "", 3)
    with pytest.raises(corpus.ToolError, match="nothing"):
        search(str(folder), index, "blackwater", "", 3)
    same = os.stat(folder / "new.txt")
    (folder / "new.txt").write_text("Nothing but mountaint.")
    os.utime(folder / "new.txt", ns=(same.st_atime_ns, same.st_mtime_ns))
    search(str(folder), index, "mountains", "", 3)  # neither size nor time tells
    assert len(read) == 4


def test_what_was_indexed_before_a_stop_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_of = corpus.document_text

    def stops_at_second(body: bytes, kind: str) -> dict[str, str]:
        if b"Rivers" in body:
            raise KeyboardInterrupt
        return text_of(body, kind)

    (folder / "lakes" / "titicaca.html").unlink()
    index = str(folder.parent / "i.sqlite")
    monkeypatch.setattr(corpus, "document_text", stops_at_second)
    with pytest.raises(KeyboardInterrupt):
        search(str(folder), index, "mountains", "", 3)
    with sqlite3.connect(index) as connection:
        assert connection.execute("SELECT path FROM files").fetchall() == [("notes.txt",)]
    monkeypatch.setattr(corpus, "document_text", text_of)
    assert "blackwater" in search(str(folder), index, "blackwater", "", 3)


def test_files_that_cannot_be_read_are_told_in_every_search_until_they_can(folder: Path) -> None:
    for name in "abcdefg":
        (folder / f"{name}.txt").write_bytes(b"mountains\0")
    found = "[notes.txt]\nA note on mountains."
    told = [f"(cannot be read: {name}.txt: it is binary data, not text)" for name in "abcde"]
    for _ in range(2):
        text = look(folder, "mountains").text
        assert text.split("\n\n") == [found, *told, "(cannot be read either: 2 more)"]
    for name in "abcdef":
        (folder / f"{name}.txt").unlink()
    (folder / "g.txt").write_text("valleys, now")
    assert look(folder, "mountains").text == found


def test_a_file_whose_name_is_no_text_is_passed_over_and_told(folder: Path) -> None:
    try:
        (folder / os.fsdecode(b"p\xff.md")).write_text("mountains")
    except OSError:
        pytest.skip("this file system takes no such name")
    for _ in range(2):
        assert look(folder, "mountains").text == (
            "[notes.txt]\nA note on mountains.\n\n(cannot be read: p\\xff.md: its name is not UTF-8; rename it)"
        )


def test_half_a_character_in_a_document_does_not_stop_the_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = importlib.import_module("midflight.tools.reading.documents")
    (folder / "odd.pdf").write_bytes(b"%PDF-1.4")
    monkeypatch.setattr(documents, "_pdf", lambda body: ("Odd \ud800", "peaks \udfff and mountains"))
    (folder / "notes.txt").unlink()
    assert search(str(folder), str(folder.parent / "i.sqlite"), "mountains", "", 3) == (
        "[odd.pdf] Odd ?\npeaks ? and mountains"
    )


def test_a_full_disk_is_what_the_error_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def small(*arguments: Any, **named: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **named)
        connection.execute("PRAGMA max_page_count = 40")  # SQLite ends the transaction, as on a full disk
        return connection

    monkeypatch.setattr(corpus.sqlite3, "connect", small)
    (folder / "large.txt").write_text("\n\n".join(f"mountain {number} " * 40 for number in range(2000)))
    with pytest.raises(InfrastructureError, match="database or disk is full$"):
        search(str(folder), str(folder.parent / "i.sqlite"), "mountains", "", 3)


def test_many_searches_at_once_share_one_index(folder: Path) -> None:
    tool = made(folder)

    async def many() -> list[ToolResult]:
        return await asyncio.gather(*(tool.call({"query": "mountains"}, 60.0) for _ in range(4)))

    assert {result.text for result in asyncio.run(many())} == {"[notes.txt]\nA note on mountains."}


def test_a_folder_is_where_the_program_is_not_the_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(folder, "mountains").error is None  # the workers that are kept are elsewhere
    monkeypatch.chdir(folder.parent)
    context = ToolContext(cache_folder=Path("cache"))
    found = make_toolset(["corpus_search"], {"corpus_search": {"folder": "documents"}}, context).get("corpus_search")
    assert found is not None
    assert "[notes.txt]" in asyncio.run(found.call({"query": "mountains"}, 10.0)).text
    assert [path.name for path in (folder.parent / "cache" / "corpora").glob("*.sqlite")] == [index_of(folder).name]


def test_a_broken_index_is_infrastructure(folder: Path) -> None:
    index_of(folder).parent.mkdir(parents=True)
    index_of(folder).write_text("no database, but long enough to be taken for one" * 100)
    with pytest.raises(InfrastructureError, match="corpus_search: "):
        look(folder, "mountains")


def test_a_folder_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; give another in agent.tool_options.corpus_search.folder"):
        made(tmp_path / "none")
    with pytest.raises(UserError, match="agent.tool_options.corpus_search.folder: missing; the recipe must set it"):
        make_toolset(["corpus_search"])
