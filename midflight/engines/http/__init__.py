"""Asking a model server: connections, limits and retries, what was spent, answers that are known already."""

from midflight.engines.http.cache import ResponseCache
from midflight.engines.http.client import Client, Malformed, NotThere, PromptRefused
from midflight.engines.http.patience import Limits, Patience, Transient
from midflight.engines.http.usage import Ledger, Prices, Usage, said_tokens

__all__ = [
    "Client",
    "Ledger",
    "Limits",
    "Malformed",
    "NotThere",
    "Patience",
    "Prices",
    "PromptRefused",
    "ResponseCache",
    "Transient",
    "Usage",
    "said_tokens",
]
