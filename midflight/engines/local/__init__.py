"""The local engine: transformers on CPU or CUDA."""

from midflight.engines.local.engine import LocalEngine
from midflight.engines.local.models import EMBEDDED, LoadedModel, ModelError, load

__all__ = ["EMBEDDED", "LoadedModel", "LocalEngine", "ModelError", "load"]
