"""The cache of results: it answers for one tool alone, and whatever is wrong with it costs no call."""

from __future__ import annotations

import errno
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import UserError
from midflight.tools import (
    ErrorKind,
    LimitedTool,
    ToolContext,
    ToolOptions,
    ToolResult,
    limits,
    make_toolset,
)
from tests.agent.doubles import BoxTool
from tests.tools import factories
from tests.tools.counting import Counting, call, limited


def test_what_holds_something_for_a_trajectory_is_not_answered_from_the_cache() -> None:
    options = {"box": {"cache_hours": 2}}
    with pytest.raises(UserError) as refused:
        make_toolset(["box"], options, given=[BoxTool()])
    assert str(refused.value) == (
        "agent.tool_options.box.cache_hours = 2: box holds something for a trajectory, which an answer from the cache "
        "would leave as it is; leave it out"
    )
    assert make_toolset(["box"], {"box": {"max_calls": 2}}, given=[BoxTool()]).holds("box")


def test_the_cache_holds_every_argument_tool_and_option_and_only_what_succeeded(tmp_path: Path) -> None:
    inner = Counting(lambda n: n)
    made = limited(inner, tmp_path, cache_hours=1)
    assert [call(made).text, call(made).text, call(made, "b").text, call(made).text] == ["a 1", "a 1", "b 2", "a 1"]
    again = limited(Counting(lambda n: "new"), tmp_path, cache_hours=1, retries=2, max_calls=9)
    assert call(again).text == "a 1"  # limits are no part of the key

    class Own(ToolOptions):
        depth: int = 1

    deeper = LimitedTool(Counting(lambda n: "deep"), Own(cache_hours=1, depth=2), tmp_path)
    assert call(deeper).text == "a deep"
    failing = Counting(lambda n: ToolResult("no", ErrorKind.TOOL_ERROR))
    for _ in range(2):
        assert call(limited(failing, tmp_path, cache_hours=1), "c").error is ErrorKind.TOOL_ERROR
    assert failing.calls == 2
    for entry in (tmp_path / "results" / "counting").iterdir():
        import os

        os.utime(entry, (0, time.time() - 3601))
    assert call(made).text == "a 3"


def test_another_version_of_midflight_answers_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = limited(Counting(lambda n: n), tmp_path, cache_hours=1)
    assert [call(made).text, call(made).text] == ["a 1", "a 1"]
    monkeypatch.setattr(limits, "__version__", "another")
    assert call(made).text == "a 2"


@pytest.mark.parametrize("key", ["", "k-12345678"])
@pytest.mark.parametrize(
    "kind", ["lookup_in", "lookup_by_default", "lookup_through", "Lookup", "Slotted", "lookup_of", "either", "Told"]
)
def test_what_a_tool_holds_is_part_of_the_key(
    kind: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", key)
    make = getattr(factories, kind)

    def answer(value: str) -> str:
        context = ToolContext(cache_folder=tmp_path / "cache")
        made = make_toolset(["lookup"], {"lookup": {"cache_hours": 1}}, context, given=[make({"a": value})])
        return call(made.get("lookup")).text

    assert [answer("old"), answer("new"), answer("old")] == ["old", "new", "old"]
    assert len(list((tmp_path / "cache" / "results" / "lookup").iterdir())) == 2


@pytest.mark.parametrize("kind", ["Client", "lookup_with"])
def test_what_holds_something_that_does_not_tell_is_not_cached(kind: str) -> None:
    given = getattr(factories, kind)(object())
    with pytest.raises(UserError) as refused:
        make_toolset(["lookup"], {"lookup": {"cache_hours": 1}}, given=[given])
    assert str(refused.value) == (
        "agent.tool_options.lookup.cache_hours = 1: lookup holds client of type object, which does not tell what the "
        "answers depend on; give the tool an attribute cache_state that does (JSON), or leave it out"
    )
    assert make_toolset(["lookup"], {"lookup": {"retries": 1}}, given=[given]).get("lookup") is not None


@pytest.mark.parametrize("key", ["", "k-12345678"])  # what is hidden is so by a layer around the tool
def test_tools_of_one_name_share_no_answers(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", key)
    code = "from midflight.tools import tool\n\n@tool\ndef area(text: str) -> str:\n    'area'\n    return {!r}\n"
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(code.format(name))

    def answer(place: str) -> str:
        options = {"area": {"cache_hours": 1}}
        made = make_toolset([place], options, ToolContext(cache_folder=tmp_path / "cache")).get("area")
        assert made is not None
        return call(made).text

    places = [f"{tmp_path}/{name}.py:area" for name in ("one", "other")]
    assert [answer(place) for place in places] == ["one", "other"]
    (tmp_path / "one.py").write_text(code.format("edited"))
    monkeypatch.delitem(sys.modules, f"midflight_own:{(tmp_path / 'one.py').resolve()}")
    assert [answer(place) for place in places] == ["edited", "other"]
    assert len(list((tmp_path / "cache" / "results" / "area").iterdir())) == 3


def test_the_cache_is_not_touched_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    for name in ("_read", "_write"):
        inner = getattr(limits, name)

        def seen(*arguments: Any, inner: Any = inner) -> Any:
            threads.append(threading.get_ident())
            return inner(*arguments)

        monkeypatch.setattr(limits, name, seen)
    made = limited(Counting(lambda n: n), tmp_path, cache_hours=1)
    assert [call(made).text for _ in range(2)] == ["a 1", "a 1"]
    assert len(threads) == 3 and threading.get_ident() not in threads


def test_a_cache_that_cannot_be_written_costs_no_result_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(one: object, other: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(limits.os, "replace", full)
    made = limited(Counting(lambda number: number), tmp_path, cache_hours=1)
    assert [call(made).text, call(made).text] == ["a 1", "a 2"]
    folder = tmp_path / "results" / "counting"
    assert capsys.readouterr().err == (
        f"counting: the cache of results {folder} cannot be written: [Errno 28] No space left on device\n"
    )
    assert list(folder.iterdir()) == []


def test_a_damaged_entry_is_made_anew_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = limited(Counting(lambda number: number), tmp_path, cache_hours=1)
    assert call(made).text == "a 1"
    (entry,) = (tmp_path / "results" / "counting").iterdir()
    whole = entry.read_bytes()
    for number, damaged in enumerate((b"", b"\xff\xfe", whole[:-1], whole[:-1] + b"2", whole + b"\0"), start=2):
        entry.write_bytes(damaged)
        assert [call(made).text, call(made).text] == [f"a {number}"] * 2
    assert capsys.readouterr().err == (
        f"counting: the cache of results {entry.parent} cannot be read: {entry.name} is damaged; it is made anew\n"
    )


def test_a_cache_that_cannot_be_read_costs_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    made = limited(Counting(lambda number: number), file, cache_hours=1)
    assert [call(made).text, call(made).text] == ["a 1", "a 2"]
    first, second = capsys.readouterr().err.splitlines()
    folder = file / "results" / "counting"
    assert first.startswith(f"counting: the cache of results {folder} cannot be read: [Errno 20] Not a directory: ")
    assert second.startswith(f"counting: the cache of results {folder} cannot be written: [Errno 20] Not a directory: ")


def test_a_cache_that_hangs_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()
    for name in ("_read", "_write"):
        monkeypatch.setattr(limits, name, lambda *arguments: release.wait(30))
    monkeypatch.setattr(limits, "CACHE_SECONDS", 0.05)
    made = limited(Counting(lambda number: number), tmp_path, cache_hours=1)
    assert [call(made).text, call(made).text] == ["a 1", "a 2"]
    release.set()
    folder = tmp_path / "results" / "counting"
    assert capsys.readouterr().err == "".join(
        f"counting: the cache of results {folder} cannot be {done}: takes longer than 0.05 seconds\n"
        for done in ("read", "written")
    )
