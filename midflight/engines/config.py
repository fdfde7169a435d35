"""A recipe's `engines` and `budget`: language models beside the one of the section `model`, and what they may cost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from midflight.section import MOST_SECONDS, Section

OPERATION = (
    "base_url",
    "key_variable",
    "concurrency",
    "requests_per_minute",
    "tokens_per_minute",
    "retries",
    "attempt_seconds",
    "total_seconds",
    "prompt_price",
    "completion_price",
    "cache",
)
"""Keys of how a server is reached, how much at a time and at what price: none changes what is drawn."""


class EngineConfig(Section):
    """One language model that modules name by `engine`; any number of them, each under a name of your choice. See
    docs/engines.md."""

    provider: Literal["openai", "vllm", "litellm", "local"]
    """`openai`: any server with OpenAI's protocol, text in and out. `vllm`: a vLLM server, token ids in and out with
    log-probs: the only server whose draws can train. `litellm`: whatever LiteLLM knows (extra `litellm`). `local`: a
    model in this process, like `model`."""
    model: str
    """As the server calls it; with `litellm` its provider/name; with `local` as `model.name`."""
    base_url: str | None = None
    """Where the server is, with `/v1` where it has that, such as http://127.0.0.1:8000/v1."""
    key_variable: str | None = None
    """Name of the environment variable with the key; the key itself never stands in a recipe. Null: no key."""
    api: Literal["chat", "completions", "embeddings"] = "chat"
    """`chat`: in the model's chat template. `completions`: as plain text. `embeddings` (with `openai`): an embedding
    model, which tools name as `embeddings` and no module can."""
    structured: Literal["none", "json_schema", "json_object", "grammar"] = "none"
    """What the server holds a text to: a JSON schema in `response_format`, as OpenAI has it (`json_schema`) or as
    llama.cpp has it (`json_object`); Lark grammars in `structured_outputs` (vLLM with its guidance backend); or
    nothing. Modules parse strictly either way, and an answer off the format is
    invalid. With `vllm` and `local` it is always grammars."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls the most new tokens."""
    tokenizer: str | None = None
    """Used by `vllm`: where the model's tokenizer is, a folder, a Hub name or `smollm2-135m`; null: `model`."""
    context_length: int = Field(default=32_768, ge=64, le=100_000_000)
    """Most tokens of prompt and answer."""
    concurrency: int = Field(default=64, ge=1, le=1_000_000)
    """Requests under way at a time."""
    requests_per_minute: float | None = Field(default=None, ge=1e-6, le=1e12)
    """Null: as many as come."""
    tokens_per_minute: float | None = Field(default=None, ge=1e-6, le=1e12)
    """Prompt and answer, by estimate. Null: as many as come."""
    retries: int = Field(default=4, ge=0, le=1000)
    """Further attempts after a failure that may pass: no connection, 408, 409, 425, 429, 5xx, a broken answer."""
    attempt_seconds: float = Field(default=60.0, gt=0, le=MOST_SECONDS)
    """Time limit of one attempt."""
    total_seconds: float = Field(default=100.0, gt=0, le=MOST_SECONDS)
    """Time limit of a request: all attempts, the waits between them and those the server asks for; below
    `agent.max_seconds`. Waiting by `concurrency`, `requests_per_minute` or `tokens_per_minute` does not use it up."""
    prompt_price: float = Field(default=0.0, ge=0, le=1e12)
    """Money for a million prompt tokens, in your unit."""
    completion_price: float = Field(default=0.0, ge=0, le=1e12)
    """Money for a million new tokens."""
    cache: bool = False
    """Keep answers on disk and give them again to the same request. Requests that draw without a seed are not kept."""


class BudgetConfig(Section):
    """The most that engines on servers may use in one run; then trajectories end as `budget`, without a reward."""

    tokens: int | None = Field(default=None, ge=1, le=10**15)
    """Prompt and new tokens together; null: no bound."""
    money: float | None = Field(default=None, gt=0, le=1e15)
    """By the engines' prices; null: no bound."""
