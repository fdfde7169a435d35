"""The key of a server that a training run asks is in nothing that the run leaves."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from midflight.progress import Progress
from midflight.store import RunFolder, Store
from tests.engines.serving import chat
from tests.tools.web.serving import Received, Reply, serving
from tests.training.test_trainer import TASKS, pick, recipe

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("no_plots")]

KEY = "sk-very-secret-0123456789"


def test_no_file_no_log_record_and_no_line_of_a_run_has_the_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from midflight.training.trainer import train

    monkeypatch.setenv("STRONG_KEY", KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.DEBUG)

    def answer(received: Received) -> Reply:
        echo = received.headers["authorization"]
        if len(server.received) % 3 == 0:
            return Reply({"error": {"message": f"not for {echo}"}}, 400)
        return Reply(chat(f"Answer: {echo} [turn 1]\n"))

    said = io.StringIO()
    with serving(answer) as server:
        engine = f"{{provider: openai, model: m, base_url: '{server.url}/v1', key_variable: STRONG_KEY, cache: true}}"
        settings = [f"engines.strong={engine}", "agent.generator={kind: llm, engine: strong}", "training.group_size=2"]
        asked = recipe(model, *settings, steps=1)
        train(asked, tmp_path / "run", progress=Progress(said), tools=[pick], tasks=TASKS)
    assert {received.headers["authorization"] for received in server.received} == {f"Bearer {KEY}"}
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    run = RunFolder(tmp_path / "run")
    assert {run.recipe, run.metrics, run.store, run.usage} <= files.keys()
    assert not [file for file, content in files.items() if KEY.encode() in content]
    assert b"Bearer [key]" in files[tmp_path / "cache" / "midflight" / "responses.sqlite"]
    with Store(run.store) as store:
        kept = repr(store.trajectories(store.runs()[-1].id))
    assert KEY not in kept and "not for Bearer [key]" in kept and "text='Bearer [key]'" in kept
    assert KEY not in said.getvalue() and KEY not in repr([vars(record) for record in caplog.records])
