"""The arithmetic of `--dry-run`, by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from midflight.cli.dry_run import (
    CACHE,
    EMBEDDED_SHAPE,
    SAMPLED,
    batch_arithmetic,
    describe,
    memory,
    peak,
    shape_of,
    supervised_arithmetic,
)
from midflight.errors import UserError
from midflight.recipe import load_recipe
from midflight.sandbox.options import SandboxOptions
from midflight.sandbox.unsafe import UnsafeSandbox


def test_the_embedded_model_has_its_published_size() -> None:
    assert EMBEDDED_SHAPE.parameters == 134_515_008


def test_batch_arithmetic() -> None:
    recipe = load_recipe(
        "four-llm",
        [
            "training.queries_per_step=3",
            "training.group_size=4",
            "training.refill_factor=2.5",
            "training.steps=10",
            "training.epochs=2",
            "training.pack_tokens=1000",
            "agent.max_turns=5",
            "agent.planner.max_tokens=50",
            "eval_tasks.count=100",
        ],
    )
    counts = {name: number for name, number, _ in batch_arithmetic(recipe)}
    assert counts == {
        "rollouts a step": 12,
        "rollouts a step with refills, at most": 28,
        "turns a step, at most": 140,
        "rows a step, at most": 140,
        "trained tokens a step, at most": 7000,
        "model calls a step, at most": 3 * 140 + 28,
        "optimizer steps, at most": 20,
        "rollouts of the run, at most": 280,
        "evaluation trajectories": 200,
    }


def test_memory_of_lora_and_of_full_training() -> None:
    lora = {name: size for name, size, _ in memory(load_recipe("quickstart", ["model.lora.rank=8"]), EMBEDDED_SHAPE)}
    adapter = 30 * 8 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert lora["weights"] == lora["sampler"] == 134_515_008 * 4
    assert (lora["adapter"], lora["gradients"], lora["optimizer"]) == (4 * adapter, 4 * adapter, 8 * adapter)
    recipe = load_recipe("quickstart", ["model.lora=null", "training.kl_beta=0.001"])
    full = {name: size for name, size, _ in memory(recipe, EMBEDDED_SHAPE)}
    assert (full["reference"], full["optimizer"]) == (134_515_008 * 4, 134_515_008 * 8)


def test_another_model_is_read_from_its_config(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(str(tmp_path))
    assert shape is not None and round(shape.parameters / 1e9, 2) == 7.62
    assert "7615.5M parameters" in describe(load_recipe("four-llm", [f"model.name={tmp_path}"]))


def test_a_model_that_is_not_here_has_no_size() -> None:
    text = describe(load_recipe("four-llm", ["model.name=nobody/none"]))
    assert "not known: nobody/none has no config.json that can be read on this machine" in text


@pytest.mark.parametrize("config", ["{", "[]", '{"num_attention_heads": "x"}', '{"num_attention_heads": 0}', "{}"])
def test_a_damaged_model_has_no_size(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert shape_of(str(tmp_path)) is None
    assert "has no config.json that can be read" in describe(load_recipe("quickstart", [f"model.name={tmp_path}"]))


def test_the_cache_holds_the_shared_prefix_once_and_the_peak_counts_the_larger_phase() -> None:
    overrides = ["model.max_batch=10", "model.context_length=1000", "agent.memory_tokens=200"]
    rows = memory(load_recipe("quickstart", [*overrides, "agent.planner.max_tokens=40"]), EMBEDDED_SHAPE)
    sizes = {name: size for name, size, _ in rows}
    assert sizes[CACHE] == (2 * 10 * 240 + 760 + 8192) * 2 * 30 * 3 * 64 * 4
    assert sizes[SAMPLED] == 3 * 10 * 49152 * 4
    assert peak(rows) == sum(sizes.values()) - sizes[CACHE] - sizes[SAMPLED]
    rows = memory(load_recipe("quickstart"), EMBEDDED_SHAPE)
    sizes = {name: size for name, size, _ in rows}
    assert sizes[CACHE] == (2 * 128 * 280 + 1768 + 8192) * 2 * 30 * 3 * 64 * 4
    assert peak(rows) == sum(sizes.values()) - sizes["update, activations"] - sizes["update, logits"]
    assert "  at the peak, at least    4.99 GB  sampling and update take turns\n  not counted: " in describe(
        load_recipe("quickstart")
    )


def test_no_more_rows_than_questions_are_asked_at_a_time() -> None:
    few = ["eval_tasks.count=70", "evaluation.trials=1", "training.group_size=2"]
    (cache,) = (formula for name, _, formula in memory(load_recipe("quickstart", few), EMBEDDED_SHAPE) if name == CACHE)
    assert cache.startswith("70 rows x 280 tokens")


@pytest.mark.parametrize(("count", "asked"), [("null", 3), ("2", 2), ("9", 3)])
def test_the_questions_of_a_task_file_are_counted(tmp_path: Path, count: str, asked: int) -> None:
    file = tmp_path / "q.jsonl"
    row = {"question": "a", "answer": "b", "checker": "exact"}
    file.write_text("".join(json.dumps({"id": str(number), **row}) + "\n" for number in range(3)))
    overrides = [f"eval_tasks.family={file}", f"eval_tasks.count={count}"]
    counts = {name: number for name, number, _ in batch_arithmetic(load_recipe("quickstart", overrides))}
    assert counts["evaluation trajectories"] == 2 * asked


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_said(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("quickstart", [f"model.device={device}"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = f"\nDevice\n  model.device = {device}: torch finds none on this machine; set model.device=auto\n"
    assert describe(recipe).endswith(said)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "Device" not in describe(recipe)


def test_what_tools_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sandbox(options: SandboxOptions) -> None:
        raise UserError(f"no {options.kind} here; install it")

    monkeypatch.setitem(sys.modules, "rdkit", None)
    monkeypatch.setattr("midflight.cli.dry_run.shared_sandbox", no_sandbox)
    changes = ["agent.tools=[predict_logp, capital, python, shell]", "agent.sandbox.kind=wasi"]
    assert describe(load_recipe("coding", changes)).endswith(
        "\nTools that cannot be used yet\n"
        "  predict_logp: pip install 'midflight[chemistry]' (rdkit)\n"
        "  python: no wasi here; install it\n"
        "  shell: no wasi here; install it\n"
    )
    monkeypatch.setattr("midflight.cli.dry_run.shared_sandbox", lambda options: UnsafeSandbox())
    monkeypatch.setattr("midflight.sandbox.choose.bubblewrap_problem", lambda: "install it")
    assert describe(load_recipe("coding", changes[:1])).endswith(
        "\n  shell: the sandbox none (unsafe) runs Python programs alone; shell takes bubblewrap: install it\n"
    )
    assert "Tools that" not in describe(load_recipe("quickstart"))


def test_an_adapter_has_the_shape_of_its_base(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "smollm2-135m"}))
    assert shape_of(str(tmp_path)) == EMBEDDED_SHAPE
    config.write_text("[]")
    assert shape_of(str(tmp_path)) is None


def test_arithmetic_of_demonstrations() -> None:
    recipe = load_recipe("quickstart", ["sft.epochs=3", "sft.batch_size=10", "eval_tasks.count=7"])
    assert {name: number for name, number, _ in supervised_arithmetic(recipe, 41)} == {
        "demonstrations, at most": 41,
        "demonstrations a step": 10,
        "optimizer steps, at most": 15,
        "evaluation trajectories": 14,
    }
    rows = [f"{rollouts} rows" for rollouts in (64, 128)]
    recipe = load_recipe("quickstart", ["evaluation.concurrency=64", "training.group_size=16"])
    for rollouts, expected in ((0, rows[0]), (None, rows[1])):
        (cache,) = (formula for name, _, formula in memory(recipe, EMBEDDED_SHAPE, rollouts) if name == CACHE)
        assert cache.startswith(expected)
