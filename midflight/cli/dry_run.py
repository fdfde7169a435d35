"""What a recipe will do, before it does it: its resolved keys, the batch arithmetic and the memory it takes.

Invariant: nothing is loaded and nothing is written; torch is imported only to ask for a device that the recipe names.
Counts are exact upper bounds, bytes are estimates.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from midflight.recipe import Recipe, resolved
from midflight.recipe.resuming import read_recipe
from midflight.recipe.rules import EMBEDDED_MODEL, is_task_file
from midflight.recipe.tool_rules import has_frozen_models
from midflight.sandbox.choose import shared_sandbox
from midflight.tools import BUILTIN, ToolContext, options_of
from midflight.tools.options import to_install
from midflight.training.packing import SCORED_AT_ONCE

BYTES = {"float32": 4, "bfloat16": 2}
CACHE = "key-value cache, about"
SAMPLED = "sampling, logits"


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama-like decoder that memory depends on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool

    @property
    def linear(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear maps of one layer."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((self.hidden, query), (self.hidden, key_value), (self.hidden, key_value), (query, self.hidden))
        into, out = (self.hidden, self.feed_forward), (self.feed_forward, self.hidden)
        return (*attention, into, into, out)

    @property
    def parameters(self) -> int:
        """All weights, without biases."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        layer = sum(into * out for into, out in self.linear) + 2 * self.hidden
        return embeddings + self.layers * layer + self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Weights of an adapter of `rank` on every linear map."""
        return self.layers * sum(rank * (into + out) for into, out in self.linear)


EMBEDDED_SHAPE = ModelShape(
    layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, feed_forward=1536, vocabulary=49152, tied=True
)


def shape_of(name: str) -> ModelShape | None:
    """The shape of a model from its config.json on this machine; None when there is none to read."""
    if name == EMBEDDED_MODEL:
        return EMBEDDED_SHAPE
    folder = Path(os.path.expanduser(name))
    if (folder / "recipe.yaml").is_file():
        base = read_recipe(folder / "recipe.yaml").model.name
        return shape_of(base) if base != name else None
    if (folder / "adapter_config.json").is_file():
        return _adapted_shape(folder / "adapter_config.json")
    places = [folder / "config.json"]
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    places += sorted((home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    for place in places:
        if place.is_file():
            return _read_shape(place)
    return None


def _adapted_shape(place: Path) -> ModelShape | None:
    """That of an adapter's base; None where it cannot be read."""
    try:
        return shape_of(str(json.loads(place.read_text(encoding="utf-8"))["base_model_name_or_path"]))
    except (KeyError, TypeError, ValueError):
        return None


def _read_shape(place: Path) -> ModelShape | None:
    """None where the file is damaged or of another kind of model: loading will say more."""
    try:
        config = json.loads(place.read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            feed_forward=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def batch_arithmetic(recipe: Recipe) -> list[tuple[str, int, str]]:
    """Name, number and formula of what one step and the whole run do at most."""
    training, agent = recipe.training, recipe.agent
    queries, group = training.queries_per_step, training.group_size
    most_queries = training.most_queries
    rollouts, most = queries * group, training.most_queries * group
    turns = most * agent.max_turns
    tokens = turns * agent.planner.max_tokens
    llm = ["planner"]
    llm += ["executor"] if agent.executor.kind == "llm" else []
    llm += ["verifier"] if agent.verifier.kind == "llm" else []
    calls = len(llm) * turns
    calls_text = f"{' + '.join(llm)}, each turn"
    if agent.generator.kind == "llm":
        calls, calls_text = calls + most, calls_text + "; + generator, each trajectory"
    if agent.query_analysis:
        calls, calls_text = calls + most, calls_text + "; + query analysis, each trajectory"
    lines = [
        ("rollouts a step", rollouts, f"{queries} queries x {group} trajectories"),
        ("turns a step, at most", turns, f"{most} rollouts x {agent.max_turns} turns"),
        ("rows a step, at most", turns, "one a planner turn"),
        ("trained tokens a step, at most", tokens, f"{turns} rows x {agent.planner.max_tokens} tokens"),
        ("model calls a step, at most", calls, calls_text),
        (
            "optimizer steps, at most",
            training.steps * training.epochs * training.mini_batches,
            f"{training.steps} steps x {training.epochs} epochs x {training.mini_batches} mini-batches",
        ),
        ("rollouts of the run, at most", most * training.steps, f"{most} x {training.steps} steps"),
    ]
    if most_queries > queries:
        formula = f"{most_queries} queries x {group}, while groups lack signal"
        lines.insert(1, ("rollouts a step with refills, at most", most_queries * group, formula))
    return [*lines, *_evaluations(recipe)]


def supervised_arithmetic(recipe: Recipe, demonstrations: int) -> list[tuple[str, int, str]]:
    """The same of a run on demonstrations; some may yet be left out, when they are replayed."""
    epochs, size = recipe.sft.epochs, recipe.sft.batch_size
    batches = math.ceil(demonstrations / size)
    return [
        ("demonstrations, at most", demonstrations, "those that the planner can write"),
        ("demonstrations a step", size, "the last step of an epoch may have fewer"),
        ("optimizer steps, at most", epochs * batches, f"{epochs} epochs x {batches} batches"),
        *_evaluations(recipe),
    ]


def _evaluations(recipe: Recipe) -> list[tuple[str, int, str]]:
    if recipe.eval_tasks is None:
        return []
    count, trials = _questions(recipe), recipe.evaluation.trials
    return [("evaluation trajectories", 2 * count * trials, f"{count} questions x {trials} trials, before and after")]


def _questions(recipe: Recipe) -> int:
    """How many held-out questions there are; a task file is read to count them."""
    held_out = recipe.eval_tasks
    if held_out is None:
        return 0
    if not is_task_file(held_out.family):
        assert held_out.count is not None, "recipe_rules.check lets no endless source through"
        return held_out.count
    from midflight.evaluation.held_out import listed_tasks

    return len(listed_tasks(held_out))


def memory(recipe: Recipe, shape: ModelShape, rollouts: int | None = None) -> list[tuple[str, int, str]]:
    """Name, bytes and formula of what training holds; `rollouts` a step are the recipe's where they are not given."""
    size, lora = BYTES[recipe.model.dtype], recipe.model.lora
    trained = shape.lora_parameters(lora.rank) if lora is not None else shape.parameters
    what = f"LoRA of rank {lora.rank} on every linear map" if lora is not None else "all weights"
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * size
    own = min(recipe.agent.memory_tokens + recipe.agent.planner.max_tokens, recipe.model.context_length)
    shared = recipe.model.context_length - own
    if rollouts is None:
        rollouts = recipe.training.most_queries * recipe.training.group_size
    asked = min(recipe.evaluation.concurrency, _questions(recipe) * recipe.evaluation.trials)
    rows = min(recipe.model.max_batch, max(rollouts, asked))
    kept = recipe.model.prefix_tokens
    pack, scored = recipe.training.pack_tokens, min(recipe.training.pack_tokens, SCORED_AT_ONCE)
    per_token = shape.layers * (22 * shape.hidden + 6 * shape.feed_forward) * size
    lines = [("weights", shape.parameters * size, f"{shape.parameters / 1e6:.1f}M parameters, {recipe.model.dtype}")]
    if lora is not None:
        lines.append(("adapter", trained * 4, f"{trained / 1e6:.2f}M parameters, float32"))
    elif recipe.model.dtype != "float32":
        lines.append(("masters", trained * 4, "float32, which the optimizer moves"))
    if lora is None and (recipe.training.kl_beta > 0 or has_frozen_models(recipe)):
        lines.append(("reference", shape.parameters * size, "a frozen copy, for KL and frozen modules"))
    return [
        *lines,
        ("sampler", shape.parameters * size, "its own copy of the weights"),
        ("gradients", trained * 4, what),
        ("optimizer", trained * 8, "two moments, float32"),
        (
            CACHE,
            (2 * rows * own + shared + kept) * cached,
            f"{rows} rows x {own} tokens, in use and as prefixes of the next turn, + {shared} shared + {kept} kept",
        ),
        (SAMPLED, 3 * rows * shape.vocabulary * 4, f"{rows} rows x {shape.vocabulary} x 3 copies"),
        ("update, activations", pack * per_token, f"{pack} tokens, roughly"),
        ("update, logits", 3 * scored * shape.vocabulary * 4, f"{scored} tokens x {shape.vocabulary} x 3 copies"),
    ]


def peak(rows: list[tuple[str, int, str]]) -> int:
    """Bytes held at once, at least: what sampling takes is free again when the update runs, and the other way round."""
    sampling = sum(size for name, size, _ in rows if name in (CACHE, SAMPLED))
    update = sum(size for name, size, _ in rows if name.startswith("update,"))
    return sum(size for _, size, _ in rows) - min(sampling, update)


def describe(recipe: Recipe, demonstrations: int | None = None) -> str:
    """The whole text of `--dry-run`; `demonstrations` are those of a supervised run."""
    parts = [yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True).rstrip(), "", "Batch"]
    counts = batch_arithmetic(recipe) if demonstrations is None else supervised_arithmetic(recipe, demonstrations)
    parts += _table([(name, f"{number:,}", formula) for name, number, formula in counts])
    shape = shape_of(recipe.model.name)
    parts += ["", "Memory"]
    if shape is None:
        parts.append(f"  not known: {recipe.model.name} has no config.json that can be read on this machine")
    else:
        rows = memory(recipe, shape, None if demonstrations is None else 0)
        rows.append(("at the peak, at least", peak(rows), "sampling and update take turns"))
        parts += _table([(name, _size(number), formula) for name, number, formula in rows])
        parts.append("  not counted: Python and torch (about 0.5 GB), a layer at work, and what the allocator keeps")
    missing = _missing_device(recipe.model.device)
    if missing is not None:
        parts += ["", "Device", f"  {missing}"]
    lacking = _missing_for_tools(recipe)
    if lacking:
        parts += ["", "Tools that cannot be used yet", *(f"  {name}: {what}" for name, what in lacking.items())]
    return "\n".join(parts) + "\n"


def _missing_device(device: str) -> str | None:
    """A line where this machine lacks the device that a recipe names."""
    if device in ("auto", "cpu"):
        return None
    try:
        from midflight.engines.local.models import has_device
    except ModuleNotFoundError as error:
        return f"model.device = {device}: not known without {error.name}"
    if has_device(device):
        return None
    return f"model.device = {device}: torch finds none on this machine; set model.device=auto"


def _missing_for_tools(recipe: Recipe) -> dict[str, str]:
    """What there is to do on this machine before the recipe's built-in tools can be called, by tool."""
    context = ToolContext(sandbox=lambda: shared_sandbox(recipe.agent.sandbox))
    found = {}
    for name in recipe.agent.tools:
        if name in BUILTIN:
            builtin, options = BUILTIN[name], options_of(name, recipe.agent.tool_options)
            packages = builtin.missing_packages()
            lacking = builtin.described(options, context)[1] if builtin.sandboxed else ""
            what = [to_install(packages, builtin.extra)] if packages else []
            found[name] = "; ".join(filter(None, [*what, options.missing(), lacking]))
    return {name: what for name, what in found.items() if what}


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    left, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"  {name:<{left}}  {number:>{middle}}  {formula}" for name, number, formula in rows]
