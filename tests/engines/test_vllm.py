"""The vLLM engine: against the in-repo server in a process of its own, and against servers that lack something."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midflight.engines.base import (
    EngineError,
    EngineGaveUp,
    FinishReason,
    GenerateRequest,
    Message,
    PromptTooLong,
    Sampling,
)
from midflight.engines.config import EngineConfig
from midflight.engines.http import Ledger, Prices, Usage
from midflight.engines.remote import remote_engine
from midflight.engines.served import GUIDANCE
from midflight.errors import UserError
from tests.engines.serving import ok, remote, served
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model

GRAMMAR = 'start: "ab" /[cd]/ "e"\n'
MESSAGES = (Message("system", ("abc",)), Message("user", ("<end>d",)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    """The base URL of a server process."""
    command = [sys.executable, "-m", "midflight.server", "--model", str(model), "--name", "tiny", "--port", "0"]
    command += ["--key-variable", "TINY_KEY", "--no-chat-template"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TINY_KEY": "k1"})
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    assert process.wait(20) == 143


def local(model: Path) -> Any:
    from midflight.engines.local import LocalEngine, load

    return LocalEngine(load(str(model)), chat_template=False)


def test_it_draws_what_the_local_engine_draws(server: str, model: Path) -> None:
    requests = [
        GenerateRequest(MESSAGES, Sampling(0.8, max_tokens=12, seed=2**62 + seed), grammar)
        for seed in range(6)
        for grammar in (None, GRAMMAR)
    ]
    ledger = Ledger()

    async def drawn(engine: Any) -> list[Any]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    own = local(model)
    there, here = asyncio.run(drawn(remote(server, model, ledger=ledger))), asyncio.run(drawn(own))
    own.close()
    for one, other in zip(there, here, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        for field in ("text", "finish_reason", "prompt_ids", "ids", "forced", "sampling", "grammar"):
            assert getattr(one, field) == getattr(other, field), field
    held = [one for one in there if one.grammar]
    assert {one.text for one in held} == {"abce", "abde"}
    assert all(one.forced == (True, True, False, True) for one in held)
    assert ledger.total.requests == 12
    assert ledger.total.completion_tokens == sum(len(one.ids) for one in there)


def test_a_swap_changes_the_weights_the_version_and_nothing_stale_stays(
    server: str, model: Path, tmp_path: Path
) -> None:
    import torch

    from midflight.engines.local import load
    from midflight.training.policy import Policy

    policy = Policy(load(str(model)), lora=(4, 8.0), reference=False, seed=0)
    ids = list(range(1, 20))

    def trained(amount: float, folder: Path) -> list[float]:
        """Change the adapter, save it, and say what the trainer has for `ids`."""
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += amount
        folder.mkdir()
        policy.save(folder)
        with torch.no_grad():
            logits = policy.causal(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()  # type: ignore[no-any-return]

    async def all_of_it() -> None:
        engine = remote(server, model)
        view = engine.for_module("planner")
        request = GenerateRequest(MESSAGES, Sampling(1.0, max_tokens=30, seed=1))
        await engine.check()
        base = await engine.probe(ids)
        before = await view.generate(request)
        assert before.weights_version == 0
        for version, amount in ((1, 0.05), (2, 0.05), (2, 0.02)):
            expected = trained(amount, tmp_path / f"{version}-{amount}")
            await engine.swap(tmp_path / f"{version}-{amount}", version)
            probed = await view.probe(ids)
            assert probed == pytest.approx(expected, abs=1e-4)
            assert max(abs(one - other) for one, other in zip(probed, base, strict=True)) > 0.01
            drawn = await view.generate(request)
            assert drawn.weights_version == version and drawn.ids != before.ids
        served_models = await engine.client.ask("/models", None, lambda answer: answer["data"], method="GET")
        assert [one["id"] for one in served_models] == ["tiny", engine._weights.model]
        assert re.fullmatch("tiny-[0-9a-f]{8}-v2", engine._weights.model)
        await remote(server, model).swap(tmp_path / "2-0.02", 2)  # another process finds what one before it left
        other = remote(server, model)
        (tmp_path / "other").mkdir()
        policy.save(tmp_path / "other")
        shutil.copytree(tmp_path / "other", tmp_path / "run" / "v2")
        await other.swap(tmp_path / "run" / "v2", 2)  # another run has an adapter of its own
        assert other._weights.model != engine._weights.model
        with pytest.raises(EngineGaveUp, match="no adapter there"):
            await engine.swap(tmp_path / "none", 3)
        assert (await view.generate(request)).weights_version == 2

    asyncio.run(all_of_it())


def test_engines_of_grammars_say_that_they_take_no_schema(model: Path) -> None:
    async def all_of_it() -> None:
        request = GenerateRequest(MESSAGES, Sampling(max_tokens=9), json_schema="{}")
        own = local(model)
        for engine in (own, remote("http://127.0.0.1:1/v1", model)):
            with pytest.raises(EngineError, match="takes a grammar, not a JSON schema"):
                await engine.generate(request)
        own.close()

    asyncio.run(all_of_it())


def test_what_the_server_refuses_is_not_tried_again(server: str, model: Path) -> None:
    async def all_of_it() -> None:
        with pytest.raises(PromptTooLong, match="10 prompt tokens"):
            await remote(server, model, context_length=10).generate(GenerateRequest(MESSAGES, Sampling(max_tokens=9)))
        with pytest.raises(PromptTooLong, match="maximum context length"):
            await remote(server, model, context_length=9999).generate(
                GenerateRequest(MESSAGES, Sampling(max_tokens=2048))
            )
        with pytest.raises(EngineGaveUp, match="HTTP 400: grammar does not compile"):
            await remote(server, model).generate(GenerateRequest(MESSAGES, Sampling(max_tokens=9), "start: nonsense"))
        wrong = remote(server, model)
        wrong.client._headers = wrong.client._headers.replace("k1", "k2")
        with pytest.raises(EngineGaveUp, match="HTTP 401: wrong or missing key"):
            await wrong.generate(GenerateRequest(MESSAGES, Sampling(max_tokens=9)))

    asyncio.run(all_of_it())


@pytest.mark.parametrize("first", [-2e-3, -2.3])
def test_a_choice_where_the_grammar_leaves_none_is_no_answer(model: Path, first: float) -> None:
    """An `a` that is forced, and a letter of two."""

    async def all_of_it() -> None:
        grammar = 'start: "a" /[cd]/\n'
        ids = remote("http://127.0.0.1:1/v1", model)._encoder.encode_text("ac")
        answers = [
            ok(
                {
                    "model": "tiny",
                    "choices": [{**GOOD, "token_ids": ids, "logprobs": {"token_logprobs": [forced, -0.7]}}],
                }
            )
            for forced in (first, -5e-4)
        ]
        async with served(*answers) as double:
            request = GenerateRequest(MESSAGES, Sampling(max_tokens=3), grammar)
            engine = remote(double.base_url, model)
            with pytest.raises(EngineGaveUp, match="a choice where its grammar leaves none: the server draws under an"):
                await engine.generate(request)
            drawn = await engine.generate(request)
            assert (drawn.forced, drawn.logprobs, drawn.grammar) == ((True, False), (0.0, -0.7), grammar)
            assert [body["structured_outputs"] for body in double.bodies] == [
                {"grammar": f"%llguidance {{}}\n{grammar}"}
            ] * 2

    asyncio.run(all_of_it())


def test_what_vllm_is_sent_is_the_same_grammar_to_us(model: Path) -> None:
    masks = remote("http://127.0.0.1:1/v1", model)._masks
    for grammar in (GRAMMAR, "start: X\nX: /[a-f]+/ & /a[^d]*/\n", 'start: %json {"type": "object"}\n'):
        own, sent = masks.start(grammar), masks.start(GUIDANCE + grammar)
        for token in (98, 99, 99):
            assert (masks.allowed(own) == masks.allowed(sent)).all()
            own.consume_token(token)
            sent.consume_token(token)


def test_an_answer_that_is_refused_is_paid_for(model: Path) -> None:
    async def all_of_it() -> None:
        refused = {"model": "other", "choices": [GOOD], "usage": {"prompt_tokens": 60, "completion_tokens": 40}}
        filtered = {"model": "tiny", "choices": [{**GOOD, "finish_reason": "abort"}], "usage": {"prompt_tokens": 5}}
        ledger = Ledger()
        async with served(ok(refused), ok({"model": "tiny", "choices": [GOOD]}), ok(filtered)) as double:
            engine = remote(double.base_url, model, ledger=ledger, retries=1, prices=Prices(1e4, 1e4))
            request = GenerateRequest(MESSAGES, Sampling(max_tokens=3))
            drawn = await engine.generate(request)
            length = len(drawn.prompt_ids)
            assert ledger.total == Usage(1, 1, 0, 60 + length, 42, pytest.approx(1.02 + length / 100))
            with pytest.raises(EngineGaveUp, match="ended for the reason 'abort'"):
                await engine.generate(request)
            assert (ledger.total.requests, ledger.total.tokens) == (1, 107 + length)

    asyncio.run(all_of_it())


GOOD = {"token_ids": [98, 99], "logprobs": {"token_logprobs": [-0.5, -1]}, "finish_reason": "length"}


@pytest.mark.parametrize(
    ("model_name", "change", "message"),
    [
        ("tiny-midflight-v3", {}, "weights of 'tiny-midflight-v3', not of 'tiny'"),
        ("tiny", {"token_ids": [98]}, "2 log-probs for 1 tokens"),
        ("tiny", {"token_ids": None}, "no token_ids"),
        ("tiny", {"token_ids": ["98", 99]}, "no token_ids"),
        ("tiny", {"token_ids": [98, -1]}, "no token_ids"),
        ("tiny", {"logprobs": None}, "no token_logprobs"),
        ("tiny", {"logprobs": {"token_logprobs": [0.5, -1]}}, "no token_logprobs"),
        ("tiny", {"logprobs": {"token_logprobs": [-(10**400), -1]}}, "no token_logprobs"),
        ("tiny", {"logprobs": {"token_logprobs": [-float("inf"), -1]}}, "no token_logprobs"),
        ("tiny", {"token_ids": [98] * 4, "logprobs": {"token_logprobs": [-1] * 4}}, "4 tokens where 1 to 3 were asked"),
        ("tiny", {"token_ids": [], "logprobs": {"token_logprobs": []}}, "0 tokens where 1 to 3 were asked for"),
        ("tiny", {"prompt_token_ids": [1]}, "another prompt's ids"),
    ],
)
def test_an_answer_that_does_not_add_up_is_none(
    model: Path, model_name: str, change: dict[str, Any], message: str
) -> None:
    async def all_of_it() -> None:
        request = GenerateRequest(MESSAGES, Sampling(max_tokens=3))
        good = {"model": "tiny", "choices": [GOOD]}
        async with served(ok({"model": model_name, "choices": [{**GOOD, **change}]}), ok(good)) as double:
            with pytest.raises(EngineGaveUp) as caught:
                await remote(double.base_url, model).generate(request)
            assert f"the answer has {message}" in str(caught.value)
            drawn = await remote(double.base_url, model, retries=1).generate(request)
            assert double.bodies[0] == {
                "model": "tiny",
                "prompt": list(drawn.prompt_ids),
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "max_tokens": 3,
                "logprobs": 0,
                "return_token_ids": True,
                "skip_special_tokens": False,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            }
            assert (drawn.ids, drawn.logprobs, drawn.finish_reason) == ((98, 99), (-0.5, -1.0), FinishReason.LENGTH)

    asyncio.run(all_of_it())


def test_a_tokenizer_without_a_fit_chat_template_is_for_completions(model: Path, tmp_path: Path) -> None:
    from midflight.engines.vllm import load_tokenizer

    def made(api: str, tokenizer: Path) -> Any:
        settings = {"provider": "vllm", "model": "m", "base_url": "http://127.0.0.1:1", "tokenizer": str(tokenizer)}
        return remote_engine("sampler", EngineConfig.model_validate({**settings, "api": api}), Ledger())[0]

    with pytest.raises(UserError) as caught:
        made("chat", model)
    assert str(caught.value) == (
        "engines.sampler.api = chat: the model's tokenizer has no chat template; set engines.sampler.api=completions"
    )
    assert made("completions", model).endpoint.api == "completions"
    tokenizer = load_tokenizer(str(model), "sampler")
    users = "{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}"
    for template, fault in (
        (users, "the model's chat template drops the message with role 'system'"),
        ("{{ raise_exception('no') }}", "the model's chat template takes no system and user (no)"),
        ("{% for one in messages %}{{ one.content }}{% endfor %}", None),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        if fault is None:
            assert made("chat", tmp_path).endpoint.api == "chat"
            continue
        with pytest.raises(UserError) as caught:
            made("chat", tmp_path)
        assert str(caught.value) == f"engines.sampler.api = chat: {fault}; set engines.sampler.api=completions"


@pytest.mark.parametrize("vocabulary", [100, None])
def test_a_token_outside_of_the_vocabulary_is_no_answer(model: Path, vocabulary: int | None) -> None:
    """Known to whoever trains; else there is a bound that no vocabulary reaches."""

    async def all_of_it() -> None:
        request = GenerateRequest(MESSAGES, Sampling(max_tokens=3))
        least = vocabulary or 2**24
        answers = [{"model": "tiny", "choices": [{**GOOD, "token_ids": [least - less, 99]}]} for less in (0, 1)]
        async with served(*map(ok, answers)) as double:
            engine = remote(double.base_url, model)
            if vocabulary is not None:
                engine.vocabulary = vocabulary
            view = engine.for_module("planner")
            with pytest.raises(EngineGaveUp, match="the answer has a token id outside the model's vocabulary"):
                await view.generate(request)
            assert (await view.generate(request)).ids == (least - 1, 99)

    asyncio.run(all_of_it())


def test_a_token_that_its_grammar_forbids_is_no_answer(model: Path) -> None:
    async def all_of_it() -> None:
        async with served(ok({"model": "tiny", "choices": [GOOD]})) as double:
            with pytest.raises(EngineGaveUp, match="a token at position 0 that its grammar forbids"):
                await remote(double.base_url, model).generate(
                    GenerateRequest(MESSAGES, Sampling(max_tokens=3), GRAMMAR)
                )

    asyncio.run(all_of_it())
