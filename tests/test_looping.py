"""The event loop of a run: what runs on it, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import gc
import importlib.util

import pytest

from midflight import looping


async def seen() -> tuple[str, int]:
    return type(asyncio.get_running_loop()).__module__, gc.get_threshold()[0]


def test_a_run_has_the_loop_that_is_named_and_its_own_collector_settings() -> None:
    before = gc.get_threshold()
    module, young = looping.run(seen())
    assert module.startswith(looping.loop_name()) and young == looping.YOUNG_OBJECTS
    assert gc.get_threshold() == before


def test_settings_come_back_after_an_error_too() -> None:
    before = gc.get_threshold()

    async def fails() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError, match="x"):
        looping.run(fails())
    assert gc.get_threshold() == before


@pytest.mark.parametrize("there", [True, False])
def test_without_uvloop_it_is_asyncios_loop(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there and name == "uvloop" else None)
    assert looping.loop_name() == ("uvloop" if there else "asyncio")
    if not there:
        assert looping.run(seen())[0].startswith("asyncio")
