"""From an engine's settings to the engine, for those that are on a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from midflight.engines.config import EngineConfig
from midflight.engines.embeddings import EmbeddingEngine
from midflight.engines.http import Client, Ledger, Limits, Patience, Prices, ResponseCache
from midflight.engines.litellm import LiteLLMEngine
from midflight.engines.openai import OpenAIEngine
from midflight.engines.served import Endpoint, ServedEngine
from midflight.errors import UserError
from midflight.paths import cache_folder
from midflight.redacting import is_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def remote_engine(
    name: str,
    settings: EngineConfig,
    ledger: Ledger,
    others: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[ServedEngine, Sequence[ResponseCache]]:
    """The engine, and what is to be closed behind it.

    `others` are keys that it takes out of what comes back, too; `say` is told what goes wrong without harm.

    Raises:
        UserError: the key's environment variable is not set, or a package is missing.
    """
    key = key_of(name, settings)
    patience = Patience(
        Limits(
            concurrency=settings.concurrency,
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
            retries=settings.retries,
            attempt_seconds=settings.attempt_seconds,
            total_seconds=settings.total_seconds,
        ),
        name=name,
    )
    endpoint = Endpoint(
        settings.model,
        api=settings.api,
        structured=settings.structured,
        context_length=settings.context_length,
        max_tokens_field=settings.max_tokens_field,
    )
    cache = ResponseCache(cache_folder() / "responses.sqlite", say) if settings.cache else None
    prices = Prices(settings.prompt_price, settings.completion_price)
    closing = [] if cache is None else [cache]
    if settings.provider == "litellm":
        engine: ServedEngine = LiteLLMEngine(
            name,
            patience,
            endpoint,
            key=key,
            others=others,
            base_url=settings.base_url,
            ledger=ledger,
            prices=prices,
            cache=cache,
        )
        return engine, closing
    assert settings.base_url is not None, "engine_rules lets no server without an address through"
    client = Client(settings.base_url, patience, key=key, others=others)
    if settings.api == "embeddings":
        return EmbeddingEngine(name, client, endpoint, ledger=ledger, prices=prices), closing
    if settings.provider == "vllm":
        from midflight.engines.vllm import VllmEngine, load_tokenizer  # tokenizer and grammars come with torch

        tokenizer = load_tokenizer(settings.tokenizer or settings.model, name)
        return VllmEngine(name, client, endpoint, tokenizer, ledger=ledger, prices=prices), closing
    return OpenAIEngine(name, client, endpoint, ledger=ledger, prices=prices, cache=cache), closing


def key_of(name: str, settings: EngineConfig) -> str | None:
    """The key, from the environment.

    Raises:
        UserError: the variable is not set, or its value can be no key.
    """
    variable = settings.key_variable
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"engines.{name}.key_variable = {variable}: not set in the environment; export {variable}=...")
    if not key.isascii() or not key.isprintable() or " " in key:
        shown = "a space" if " " in key else "a line break or a sign that is not of ASCII"
        bearer = ", without Bearer" if key.lower().startswith("bearer ") else ""
        said = f"its value has {shown}, which no key has; set it to the key alone{bearer}"
        raise UserError(f"engines.{name}.key_variable = {variable}: {said}")
    return key


def unhidden(engines: Iterable[EngineConfig]) -> list[str]:
    """A line for each of their variables whose value is sent as a key and, being none, shown where it comes back."""
    variables = dict.fromkeys(settings.key_variable for settings in engines)
    return [
        f"warning: key_variable = {variable}: its value is too short, or too usual, for a key: it is sent, but not "
        "taken out of what comes back"
        for variable in variables
        if variable is not None and (value := os.environ.get(variable, "").strip()) and not is_secret(value)
    ]
