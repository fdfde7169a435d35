"""corpus_search over real folders: what is found, and that the index follows the files."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import UserError
from midflight.tools import ErrorKind, InfrastructureError, Tool, ToolContext, ToolError, ToolResult, make_toolset
from midflight.tools.base import TransientError
from midflight.tools.data import index as corpus
from midflight.tools.data import reader
from midflight.tools.data.index import index_name, search
from midflight.tools.data.reader import Reading
from midflight.tools.reading.documents import document_text
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


@pytest.fixture
def plain(folder: Path) -> Path:
    """Without HTML, which takes long to read."""
    (folder / "lakes" / "titicaca.html").unlink()
    return folder


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


def found_in(folder: Path, query: str, count: int = 3, seconds: float = 60.0) -> str:
    """What a search of `seconds` finds, in this process, with an index of its own."""
    return search(str(folder), str(folder.parent / "i.sqlite"), query, "", count, seconds)


def reading_by(monkeypatch: pytest.MonkeyPatch, read: Callable[[bytes], None]) -> None:
    """Have `read` called with what each document holds, in the process that reads it."""
    text_of = document_text
    monkeypatch.setattr(reader, "document_text", lambda body, kind: (read(body), text_of(body, kind))[1])


@pytest.fixture
def read(plain: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What each document that was read since the last call begins with."""
    log = plain.parent / "read"

    def note(body: bytes) -> None:
        with open(log, "a") as text:
            text.write(body.splitlines()[0][:9].decode() + "\n")

    def noted() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    reading_by(monkeypatch, note)
    return noted


def test_only_what_has_changed_is_read_again(plain: Path, read: Callable[[], list[str]]) -> None:
    assert "[notes.txt]" in found_in(plain, "mountains")
    assert read() == ["A note on", "# Rivers"]
    found_in(plain, "mountains")
    assert read() == []
    (plain / "notes.txt").write_text("A note on valleys, now.")
    (plain / "new.txt").write_text("Nothing but mountains.")
    (plain / "rivers.md").unlink()
    assert found_in(plain, "mountains") == "[new.txt]\nNothing but mountains."
    assert read() == ["Nothing b", "A note on"]
    assert "valleys" in found_in(plain, "valleys")
    with pytest.raises(ToolError, match="nothing"):
        found_in(plain, "blackwater")
    same = os.stat(plain / "new.txt")
    (plain / "new.txt").write_text("Nothing but mountaint.")
    os.utime(plain / "new.txt", ns=(same.st_atime_ns, same.st_mtime_ns))
    found_in(plain, "mountains")  # neither size nor time tells
    assert read() == []


def test_what_was_indexed_before_a_stop_stays(
    plain: Path, read: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops_at_second(files: Sequence[Path], seconds: float, processor: float) -> Generator[Reading, None, None]:
        yield Reading(passages=("A note on mountains.",))
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "read_each", stops_at_second)
    with pytest.raises(KeyboardInterrupt):
        found_in(plain, "mountains")
    monkeypatch.setattr(corpus, "read_each", reader.read_each)
    assert "blackwater" in found_in(plain, "blackwater")
    assert read() == ["# Rivers"]


@pytest.mark.parametrize("busy", [True, False])
def test_a_document_that_takes_too_long_is_told_and_the_others_are_found(
    busy: bool, plain: Path, read: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(body: bytes) -> None:
        while body.startswith(b"deep"):
            if not busy:
                time.sleep(1)

    monkeypatch.setattr(corpus, "DOCUMENT_SECONDS", 0.02 if busy else 60.0)
    (plain / "deep.txt").write_text("deep")
    with monkeypatch.context() as slow:
        reading_by(slow, late)
        text = found_in(plain, "mountain blackwater", seconds=1.0)
    told = "(cannot be read: deep.txt: to read it takes more than 0.5 seconds)"
    assert "[rivers.md]" in text and "[notes.txt]" in text and text.endswith(told)
    assert read() == []
    if busy:
        assert found_in(plain, "mountain", seconds=1.0).endswith(told) and read() == []  # it is not tried twice
        monkeypatch.setattr(corpus, "DOCUMENT_SECONDS", 0.03)
        assert found_in(plain, "deep") == "[deep.txt]\ndeep"  # it has longer now
    else:  # not its own doing
        assert found_in(plain, "deep") == "[deep.txt]\ndeep"
    assert read() == ["deep"]


def test_a_document_is_bounded_in_processor_time(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def for_ever(body: bytes) -> None:
        while body.startswith(b"deep"):
            pass

    (plain / "deep.txt").write_text("deep")
    reading_by(monkeypatch, for_ever)
    monkeypatch.setattr(corpus, "DOCUMENT_SECONDS", 0.25)
    told = "(cannot be read: deep.txt: to read it takes more than 0.25 seconds of a processor)"
    assert found_in(plain, "mountain").endswith(told)


@pytest.mark.parametrize(
    ("number", "how", "again"),
    [
        (signal.SIGSEGV, "SIGSEGV", []),
        (signal.SIGKILL, "SIGKILL", []),
        (signal.SIGTERM, "SIGTERM", ["deep"]),  # somebody else's doing
        (None, "exit code 0", []),
    ],
)
def test_a_document_that_ends_its_process_is_told_and_the_others_are_found(
    number: signal.Signals | None,
    how: str,
    again: list[str],
    plain: Path,
    read: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends(body: bytes) -> None:
        if body.startswith(b"deep") and number is None:
            raise SystemExit(3)
        if body.startswith(b"deep") and number is not None:
            os.kill(os.getpid(), number)

    for name in ("a.txt", "z.txt"):
        (plain / name).write_text("deep")
    with monkeypatch.context() as fatal:
        reading_by(fatal, ends)
        text = found_in(plain, "mountain blackwater")
    told = [f"(cannot be read: {name}: to read it ended the process ({how}))" for name in ("a.txt", "z.txt")]
    assert "[rivers.md]" in text and "[notes.txt]" in text and text.split("\n\n")[-2:] == told
    found_in(plain, "mountain")
    assert read() == again * 2


@pytest.mark.parametrize(
    "passing", [PermissionError(13, "Permission denied"), ModuleNotFoundError("No module named x")]
)
def test_what_may_pass_is_tried_in_every_search(
    passing: Exception, plain: Path, read: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(body: bytes) -> None:
        if body.startswith(b"A note"):
            raise passing

    with monkeypatch.context() as failing:
        reading_by(failing, fails)
        for _ in range(2):
            told = f"(cannot be read: notes.txt: {type(passing).__name__}: {passing})"
            assert found_in(plain, "river").endswith(told)
    assert found_in(plain, "mountain") == "[notes.txt]\nA note on mountains."
    assert found_in(plain, "mountain") == "[notes.txt]\nA note on mountains." and read() == ["A note on"]


def test_what_reads_a_document_holds_no_file_of_the_search(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(body: bytes) -> None:
        numbers = [number for number in os.listdir("/proc/self/fd") if int(number) > 2]
        links = [f"/proc/self/fd/{number}" for number in numbers if os.path.lexists(f"/proc/self/fd/{number}")]
        (plain.parent / "held").write_text("\n".join(map(os.readlink, links)))

    reading_by(monkeypatch, files)
    found_in(plain, "mountains")  # a lock that it held would outlive a search that is stopped
    assert re.fullmatch(r"pipe:\[\d+\]", (plain.parent / "held").read_text())


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


@pytest.mark.parametrize(("start", "size"), [(0, 600), (4096, 8192)], ids=["header", "pages"])
def test_a_damaged_index_is_made_anew(folder: Path, tmp_path: Path, start: int, size: int) -> None:
    place = tmp_path / "corpora" / "one.sqlite"
    asked = (str(folder), str(place), "mountains", "", 3, 60.0)
    found = search(*asked)
    with place.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * size)
    with pytest.raises(TransientError, match=r"one\.sqlite was damaged \(.*\); it is removed, the next"):
        search(*asked)
    assert search(*asked) == found


def test_a_file_whose_name_is_no_text_is_passed_over_and_told(folder: Path) -> None:
    try:
        (folder / os.fsdecode(b"p\xff.md")).write_text("mountains")
    except OSError:
        pytest.skip("this file system takes no such name")
    for _ in range(2):
        assert look(folder, "mountains").text == (
            "[notes.txt]\nA note on mountains.\n\n(cannot be read: p\\xff.md: its name is not UTF-8; rename it)"
        )


def test_half_a_character_in_a_document_does_not_stop_the_index(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = importlib.import_module("midflight.tools.reading.documents")
    (plain / "odd.pdf").write_bytes(b"%PDF-1.4")
    monkeypatch.setattr(documents, "_pdf", lambda body: ("Odd \ud800", "peaks \udfff and mountains"))
    (plain / "notes.txt").unlink()
    assert found_in(plain, "mountains") == "[odd.pdf] Odd ?\npeaks ? and mountains"


def test_a_full_disk_is_what_the_error_says(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def small(*arguments: Any, **named: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **named)
        connection.execute("PRAGMA max_page_count = 40")  # SQLite ends the transaction, as on a full disk
        return connection

    monkeypatch.setattr(corpus.sqlite3, "connect", small)
    (plain / "large.txt").write_text("\n\n".join(f"mountain {number} " * 40 for number in range(2000)))
    with pytest.raises(InfrastructureError, match="database or disk is full$"):
        found_in(plain, "mountains")


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
    with pytest.raises(UserError, match="agent.tool_options.corpus_search.folder: missing; set it in the recipe"):
        make_toolset(["corpus_search"])
