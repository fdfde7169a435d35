"""Stop strings of the local engine: what is drawn is what would be drawn without one, up to where it is spelt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midflight.agent import LLMPlanner, Memory
from midflight.agent.actions import parse_action
from midflight.agent.types import Action, Query
from midflight.engines.base import FinishReason, GenerateRequest, Generation, Message, Sampling
from midflight.engines.local import LocalEngine, load
from midflight.engines.local import engine as engine_module
from midflight.engines.local.engine import before
from midflight.tools.base import Toolset
from tests.agent.doubles import LookupTool
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model

LETTERS = "start: /[a-z ]{200}/\n"
WARM = Sampling(temperature=0.8, max_tokens=40, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(params=["batches", "continuous", "plain"])
def engine(folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    made = LocalEngine(load(str(folder)), chat_template=False, continuous=request.param == "continuous")
    if request.param == "plain":
        monkeypatch.setattr(engine_module, "is_ours", lambda _: False)
    yield made
    made.close()


def ask(engine: LocalEngine, *requests: GenerateRequest) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(all_of_them())


def asked(grammar: str | None = LETTERS, **sampling: Any) -> GenerateRequest:
    return GenerateRequest((Message("user", ("A question: ",)),), replace(WARM, **sampling), grammar)


def test_a_text_ends_where_its_stop_string_is_spelt(engine: LocalEngine) -> None:
    (whole,) = ask(engine, asked())
    assert whole.finish_reason is FinishReason.LENGTH and len(whole.text) == 40
    first, second = whole.text[10:12], whole.text[20:23]
    stops = [(first,), (second, first), ("B",), (whole.text[0],)]
    for stop, drawn in zip(stops, ask(engine, *(asked(stop=stop) for stop in stops)), strict=True):
        text = before(whole.text, stop)
        ends = [whole.text.find(one) + len(one) for one in stop if one in whole.text]
        count = min(ends, default=40)
        assert drawn.text == text
        assert drawn.ids == whole.ids[:count]
        assert drawn.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-5)
        assert drawn.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)


def test_forced_tokens_end_at_one_too(engine: LocalEngine) -> None:
    (drawn,) = ask(engine, asked('start: "one\\ntwo"\n', stop=("\n",)))
    assert (drawn.text, len(drawn.ids), drawn.finish_reason) == ("one", 4, FinishReason.STOP)
    assert engine.tokenizer.decode(drawn.ids) == "one\n"


def test_the_one_that_is_spelt_first_counts() -> None:
    assert before("abcd", ("abc", "b")) == "a"
    assert before("abcd", ("bc", "abc")) == ""
    assert before("abcd", ("x",)) == before("abcd", ()) == "abcd"


def test_a_compact_planner_without_grammar_writes_one_line(engine: LocalEngine) -> None:
    """The tiny model knows no action, so a grammar holds it to two lines of them."""
    planner = LLMPlanner(engine, format="compact", grammar=False, sampling=Sampling(max_tokens=30))
    wanted = planner.request(Query("Q", seed=1), Toolset([LookupTool("look", {})]), Memory(1000), 2, "")
    (drawn,) = ask(engine, replace(wanted, grammar='start: "look: Peru\\nlook: Chad\\n"\n'))
    assert parse_action(drawn, "compact") == (Action("", "look", "Peru"), "")
