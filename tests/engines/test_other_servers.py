"""Servers that are not in the repository, where an environment variable names a Python that has them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from midflight.engines.base import GenerateRequest, Message, Sampling
from midflight.engines.http import Client, Limits, Patience
from midflight.engines.openai import Endpoint, OpenAIEngine
from tests.training.tiny import make_tiny_model

VLLM = os.environ.get("MIDFLIGHT_VLLM_PYTHON")
LLAMA = os.environ.get("MIDFLIGHT_LLAMA_PYTHON")
START_SECONDS = 400

pytestmark = pytest.mark.model


@contextmanager
def process(command: list[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """The base URL of a server, once it answers."""
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": "", **environment}
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    assert server.poll() is None, log.read_text()[-3000:]
                    assert time.monotonic() < deadline, log.read_text()[-3000:]
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.skipif(not VLLM, reason="MIDFLIGHT_VLLM_PYTHON is not set")
def test_vllm_draws_from_the_adapter_that_was_swapped_in(tmp_path: Path) -> None:
    import torch

    from midflight.engines.local import load
    from midflight.engines.local.grammar import Masks
    from midflight.engines.vllm import VllmEngine, load_tokenizer
    from midflight.training.policy import Policy

    model, port = make_tiny_model(tmp_path / "model", hidden=128), free_port()  # its kernels want heads of 32 or more
    command = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    command += ["--enforce-eager", "--enable-lora", "--max-lora-rank", "8", "--logprobs-mode", "processed_logprobs"]
    command += ["--structured-outputs-config", '{"backend": "guidance"}']
    flags = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    policy = Policy(load(str(model)), lora=(4, 8.0), reference=False, seed=0)
    masks = Masks(policy.tokenizer, 49152)
    ids = list(range(100, 130))

    def expected(prompt: list[int], drawn: tuple[int, ...], temperature: float, grammar: str | None) -> list[float]:
        """The trainer's log-probs of what was drawn."""
        with torch.no_grad():
            logits = policy.causal(input_ids=torch.tensor([[*prompt, *drawn]])).logits[0, len(prompt) - 1 : -1].float()
        if grammar is not None:
            logits = logits.masked_fill(~masks.replay(grammar, drawn), float("-inf"))
        scores = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(drawn)[:, None])[:, 0]
        return scores.tolist()  # type: ignore[no-any-return]

    async def all_of_it(url: str) -> None:
        client = Client(url, Patience(Limits(retries=1)))
        endpoint = Endpoint("tiny", api="completions", context_length=512)
        engine = VllmEngine("sampler", client, endpoint, load_tokenizer(str(model), "sampler"))
        await engine.check()
        base = await engine.probe(ids)
        for version in (1, 2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 0.03
            folder = tmp_path / f"v{version}"
            folder.mkdir()
            policy.save(folder)
            await engine.swap(folder, version)
            probed = await engine.probe(ids)
            assert probed == pytest.approx(expected(ids[:1], tuple(ids[1:]), 1.0, None), abs=1e-3)
            assert max(abs(one - other) for one, other in zip(probed, base, strict=True)) > 0.01
            for grammar in (None, 'start: " capital: " /[A-Z][a-z]{2,9}/ "\\n"\n'):
                request = GenerateRequest((Message("user", ("Peru",)),), Sampling(0.7, max_tokens=12, seed=3), grammar)
                drawn = await engine.generate(request)
                assert drawn.weights_version == version
                assert drawn.logprobs == pytest.approx(
                    expected(list(drawn.prompt_ids), drawn.ids, 0.7, grammar), abs=2e-3
                )
                if grammar is not None:
                    assert drawn.forced == masks.forced(grammar, drawn.ids)

    with process(command, port, tmp_path / "log", **flags) as url:
        asyncio.run(all_of_it(url))


@pytest.mark.skipif(not LLAMA, reason="MIDFLIGHT_LLAMA_PYTHON is not set")
def test_llama_cpp_serves_the_chat_engine(tmp_path: Path) -> None:
    from midflight.engines.local.models import embedded_gguf

    port = free_port()
    command = [str(LLAMA), "-m", "llama_cpp.server", "--model", str(embedded_gguf()), "--port", str(port)]
    command += ["--n_ctx", "1024", "--model_alias", "smol", "--n_threads", "1"]

    async def all_of_it(url: str) -> None:
        limits = Limits(concurrency=1, retries=1)

        def engine(**settings: Any) -> OpenAIEngine:
            return OpenAIEngine("llama", Client(url, Patience(limits)), Endpoint("smol", **settings))

        hello = (Message("user", ("Say hello <|im_end|>",)),)
        request = GenerateRequest(hello, Sampling(0.0, max_tokens=16, seed=1))
        first, second = [await engine().generate(request) for _ in range(2)]
        assert first.text and first == second
        plain = await engine(api="completions").generate(request)
        assert plain.text
        schema = {
            "type": "object",
            "properties": {"tool": {"type": "string", "enum": ["capital", "finish"]}},
            "required": ["tool"],
            "additionalProperties": False,
        }
        asked = GenerateRequest(hello, Sampling(0.7, max_tokens=40, seed=1), json_schema=json.dumps(schema))
        drawn = await engine(structured="json_object").generate(asked)
        assert json.loads(drawn.text)["tool"] in ("capital", "finish")

    with process(command, port, tmp_path / "log") as url:
        asyncio.run(all_of_it(url))
