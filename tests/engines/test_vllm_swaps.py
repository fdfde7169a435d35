"""What the vLLM engine finds out about its server before it trains, and how the weights there change."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from midflight.engines.base import EngineGaveUp, GenerateRequest, Message, Sampling
from midflight.engines.http import Ledger, Prices, Usage
from midflight.errors import UserError
from tests.engines.serving import error, ok, remote, served
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


MODELS = ok({"data": [{"id": "tiny"}]})
FORCED = ok({"choices": [{"token_ids": [1, 0], "logprobs": {"token_logprobs": [0.0, 0.0]}}]})
RAW = ok({"choices": [{"token_ids": [1, 0], "logprobs": {"token_logprobs": [-3.0, -2.0]}}]})
NOWHERE = error(404, "Loading lora tiny-none failed: No adapter found for /midflight/no-adapter-is-here")
GUIDANCE = """start it with --structured-outputs-config '{"backend": "guidance"}'"""
NO_IDS = ok({"choices": [{"logprobs": {"token_logprobs": [0.0]}}]})


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([ok({"data": [{"id": "other"}]})], "engines.sampler.model = tiny: the server has other; set one of these"),
        ([MODELS, error(400, "no grammar"), NO_IDS], GUIDANCE),
        ([MODELS, error(500, "Internal"), NO_IDS], GUIDANCE),
        ([MODELS, error(500, "Internal"), error(503, "busy")], None),  # without the grammar too
        ([MODELS, error(503, "busy")], None),
        ([MODELS, NO_IDS], "gives no token ids or log-probs; use vLLM 0.10.2 or newer"),
        ([MODELS, RAW], "start it with --logprobs-mode processed_logprobs"),
        ([MODELS, FORCED, error(404)], "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, --enable"),
        ([MODELS, FORCED, error(500, "Use --enable-lora")], "loads no adapters: sampler: "),
        ([MODELS, FORCED, error(400, "LoRA is not enabled")], "started with --enable-lora and --max-lora-rank of at"),
        ([MODELS, FORCED, error(503, "busy")], None),
        ([MODELS, FORCED, NOWHERE, error(404)], "start it with VLLM_SERVER_DEV_MODE=1 in its environment"),
    ],
)
def test_the_start_up_check_names_the_missing_flag(model: Path, answers: list[Any], message: str | None) -> None:
    """None: the server is out of order, which no flag mends."""

    async def all_of_it() -> None:
        async with served(*answers) as double:
            with pytest.raises(EngineGaveUp if message is None else UserError) as caught:
                await remote(double.base_url, model).check()
            assert (message or "HTTP 503: busy (1 attempts") in str(caught.value) and "\n" not in str(caught.value)
            assert message is not None or "start" not in str(caught.value)
        async with served(MODELS, FORCED, NOWHERE, ok({"success": True})) as double:
            await remote(double.base_url, model).check()
            assert double.bodies[0]["structured_outputs"] == {"grammar": '%llguidance {}\nstart: "a"\n'}
            assert double.bodies[1] == {"lora_name": "tiny-none", "lora_path": "/midflight/no-adapter-is-here"}
            assert [request.path for request in double.requests] == [
                "/v1/models",
                "/v1/completions",
                "/v1/load_lora_adapter",
                "/reset_prefix_cache",
            ]

    asyncio.run(all_of_it())


def test_a_swap_goes_on_where_the_answer_to_it_was_lost(model: Path, tmp_path: Path) -> None:
    lost = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nSucc"
    gone, there = error(404, "The lora adapter 'x' cannot be found."), error(400, "'x' has already been loaded.")
    done, emptied = ok("Success"), ok({"success": True})

    async def all_of_it() -> None:
        async with served(
            *(done, emptied),  # a first version
            *(done, lost, gone, emptied),  # a second; the first is unloaded, its answer lost
            *(lost, gone, done, emptied),  # the second again: that one is unloaded first
            *(lost, there, lost, gone, done, done, emptied),  # a third, loaded, its answer lost
        ) as double:
            engine = remote(double.base_url, model, retries=1)
            for version, count in ((1, 2), (2, 6), (2, 10), (3, 17)):
                await engine.swap(tmp_path / "run" / str(version), version)
                assert (engine.weights_version, len(double.requests)) == (version, count)
            assert [request.path.rpartition("/")[2].partition("_")[0] for request in double.requests[10:]] == [
                *("load", "load", "unload", "unload", "load", "unload", "reset")
            ]

    asyncio.run(all_of_it())


def test_an_adapter_that_is_gone_is_said_to_be_lost_and_a_model_that_never_was_is_not(
    model: Path, tmp_path: Path
) -> None:
    request = GenerateRequest((Message("user", ("abc",)),), Sampling(max_tokens=3))
    gone = error(404, "The model does not exist.")

    async def all_of_it() -> None:
        async with served(gone, ok("Success"), ok({"success": True}), gone) as double:
            engine = remote(double.base_url, model)
            with pytest.raises(EngineGaveUp, match="HTTP 404: The model does not exist.; .* often ends in /v1"):
                await engine.generate(request)
            await engine.swap(tmp_path / "v1", 1)
            with pytest.raises(EngineGaveUp, match="^sampler: the server has lost the adapter .* with --resume$"):
                await engine.generate(request)

    asyncio.run(all_of_it())


def test_an_adapter_that_the_server_cannot_take_names_the_flags(model: Path, tmp_path: Path) -> None:
    async def all_of_it() -> None:
        async with served(error(500, "LoRA rank 16 is greater than max_lora_rank 8.")) as double:
            with pytest.raises(EngineGaveUp, match="rank 8. .*--max-lora-rank of at least model.lora.rank"):
                await remote(double.base_url, model).swap(tmp_path, 1)

    asyncio.run(all_of_it())


def test_a_cache_that_is_not_emptied_is_an_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.engines.vllm.RESET_ATTEMPTS", 3)

    async def all_of_it() -> None:
        async with served(
            ok("Success"), ok({"success": False}), ok({"success": False}), ok({"success": True})
        ) as double:
            await remote(double.base_url, model).swap(tmp_path, 1)
            assert len(double.requests) == 4
        async with served(ok({"success": False})) as double:
            with pytest.raises(EngineGaveUp, match="does not empty its prefix cache"):
                await remote(double.base_url, model).swap(tmp_path, 1)

    asyncio.run(all_of_it())


def test_a_generation_is_of_the_weights_that_were_there_when_it_was_asked_for(model: Path, tmp_path: Path) -> None:
    async def all_of_it() -> None:
        drawn = {"token_ids": [98], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}

        def answer(request: Any) -> Any:
            if request.path != "/v1/completions":
                return ok({"success": True})
            return ok({"model": json.loads(request.body)["model"], "choices": [drawn]})

        async with served(answer, delay=0.1) as double:
            engine = remote(double.base_url, model)
            request = GenerateRequest((Message("user", ("abc",)),), Sampling(max_tokens=3))
            under_way = asyncio.create_task(engine.generate(request))
            while not double.requests:
                await asyncio.sleep(0.001)
            double.delay = 0.0
            await engine.swap(tmp_path / "v5", 5)
            assert not under_way.done()
            before, after = await under_way, await engine.generate(request)
            assert (before.weights_version, after.weights_version) == (0, 5)
            assert double.bodies[0]["model"] == "tiny" and double.bodies[-1]["model"].endswith("-v5")

    asyncio.run(all_of_it())


def test_a_probe_that_another_adapter_answered_is_none(model: Path) -> None:
    async def all_of_it() -> None:
        scores = [None, {"2": {"logprob": -0.5}}]
        choices = [{"prompt_logprobs": scores}]
        stale = ok({"model": "tiny-old-v1", "choices": choices})
        async with served(stale, ok({"model": "tiny", "choices": choices})) as double:
            with pytest.raises(EngineGaveUp, match="weights of 'tiny-old-v1', not of 'tiny'"):
                await remote(double.base_url, model).probe([1, 2])
            assert await remote(double.base_url, model).probe([1, 2]) == [-0.5]

    asyncio.run(all_of_it())


def test_check_and_probe_are_counted_and_a_spent_budget_stops_the_check(model: Path) -> None:
    def said(answer: Any, prompt: int, drawn: int) -> Any:
        return ok({**answer, "usage": {"prompt_tokens": prompt, "completion_tokens": drawn}})

    async def all_of_it() -> None:
        forced, choices = json.loads(FORCED.body), [{"prompt_logprobs": [None, {"2": {"logprob": -0.5}}]}]
        stale = said({"model": "old", "choices": choices}, 3, 1)
        good = ok({"model": "tiny", "choices": choices})
        answers = (said(forced, 12, 2), NOWHERE, ok({"success": True}), stale, good)
        ledger = Ledger(tokens=14)
        async with served(MODELS, *answers, MODELS) as double:
            engine = remote(double.base_url, model, ledger=ledger, retries=1, prices=Prices(1e6, 2e6))
            await engine.check()
            assert await engine.probe([1, 2]) == [-0.5]  # the budget is spent by now
            assert ledger.of == {
                ("check", "sampler"): Usage(1, 0, 0, 12, 2, 16.0),
                ("probe", "sampler"): Usage(1, 1, 0, 5, 2, 9.0),  # by the request where the answer does not say
            }
            with pytest.raises(UserError) as caught:
                await engine.check()
            assert str(caught.value) == (
                "budget.tokens = 14: spent, with 21 tokens; the check of the server takes more, so set a larger one"
            )
            assert len(double.requests) == 7

    asyncio.run(all_of_it())
