"""A language model by any name a user may give: the embedded one, a Hub name, a folder, a checkpoint, a run.

torch is imported where a model is loaded, and nowhere else.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midflight.errors import UserError, reading
from midflight.recipe import Recipe
from midflight.store.folder import RunFolder
from midflight.store.seals import STATE, fault, newest_whole

if TYPE_CHECKING:
    from midflight.engines.local import LoadedModel

TRIES = 3
"""How often the newest checkpoint of a run is taken, where the run drops it before it is read."""


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide PEFT's FutureWarning about transformers: no reader can act on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def load_named(recipe: Recipe, name: str) -> LoadedModel:
    """A plain model with the recipe's dtype and device.

    Raises:
        UserError: it cannot be loaded, or this machine has no such device.
    """
    from midflight.engines.local import load
    from midflight.engines.local.models import has_device

    device = recipe.model.device
    if not has_device(device):
        raise UserError(f"model.device = {device}: torch finds none on this machine; set model.device=auto")
    model = recipe.model
    return load(name, dtype=model.dtype, device=model.device, context_length=model.context_length)


def load_trained(recipe: Recipe, name: str, say: Callable[[str], None]) -> tuple[LoadedModel, str]:
    """A model by any name a user may give, adapters taken in; and the name of the model all training began with.

    `say` gets a line for each checkpoint of a run that is passed over, or that the run drops while it is read.

    Raises:
        UserError: there is none of this name, or it cannot be read.
    """
    from midflight.engines.local import ModelError

    runs, lost = RunFolder(Path(name)).recipe.is_file(), None
    for _ in range(TRIES if runs else 1):
        folder = trained_folder(Path(name), say) if runs else Path(name)
        try:
            if not _dropped(folder):
                return _load(recipe, name, folder, say)
        except Exception as error:  # each reader has an error of its own for files that go away under it
            if not _dropped(folder):
                raise
            lost = error
        if runs:
            say(f"{folder} was dropped by its run before it was read")
    raise ModelError(
        f"model.name={folder}: not there; a run that trains on keeps its newest checkpoints and drops others; name the "
        f"run, {folder.parent.parent}, for the newest"
    ) from lost


def _dropped(folder: Path) -> bool:
    """Whether it was, or would have been, a checkpoint of a run, which has removed it."""
    run = RunFolder(folder.parent.parent)
    return folder.parent == run.checkpoints and run.recipe.is_file() and not os.path.lexists(folder)


def _load(recipe: Recipe, name: str, folder: Path, say: Callable[[str], None]) -> tuple[LoadedModel, str]:
    """`load_trained` of a `folder`, or of a `name` that is none."""
    from midflight.engines.local import ModelError

    if folder == Path(name) and (folder / STATE).is_file() and (reason := fault(folder)):
        raise ModelError(f"model.name={name}: the checkpoint is not whole ({reason}); name another, or its run")
    base = _base_of(folder)
    if base is not None and Path(base).resolve() == folder.resolve():
        raise ModelError(f"model.name={name}: it names itself as its base; mend adapter_config.json")
    if not (folder / "adapter_config.json").is_file():
        name = str(folder) if folder.is_dir() else name
        return load_named(recipe, name), _root_of(base) if base is not None else name
    from peft import PeftModel

    from midflight.engines.local import LoadedModel

    assert base is not None, "an adapter names its base"
    loaded, root = load_trained(recipe, base, say)
    with quiet_peft():
        taken = _taken_in(PeftModel.from_pretrained(loaded.model, str(folder)))
    return LoadedModel(str(folder), taken.eval().requires_grad_(False), loaded.tokenizer, loaded.device), root


def _taken_in(adapted: Any) -> Any:
    """The plain model of a PEFT model, its adapter merged in or, in 16 bits and on linear maps, beside the weights."""
    import torch
    from peft.tuners.lora import LoraLayer

    from midflight.engines.local.beside import factors, put

    model = adapted.get_base_model()
    layers = [] if model.dtype == torch.float32 else list(model.named_modules())
    for name, layer in layers:
        if isinstance(layer, LoraLayer) and isinstance(base := layer.get_base_layer(), torch.nn.Linear):
            put(base, base, *factors(layer))
            model.set_submodule(name, base)
    return adapted.merge_and_unload()


def trained_folder(run: Path, say: Callable[[str], None]) -> Path:
    """The newest whole checkpoint of a run folder.

    Raises:
        UserError: it has none.
    """
    newest = newest_whole(RunFolder(run).checkpoints, say)
    if newest is None:
        from midflight.engines.local import ModelError

        raise ModelError(f"--model {run}: the run has no checkpoint yet; let it train, or name another model")
    return newest


def _base_of(folder: Path) -> str | None:
    """What a checkpoint or an adapter was trained from; None for a plain model."""
    for file, key in (("adapter_config.json", "base_model_name_or_path"), ("state.json", "base")):
        if (folder / file).is_file():
            with reading(folder / file, "repair it, or name another model"):
                return str(json.loads((folder / file).read_text(encoding="utf-8"))[key])
    return None


def _root_of(name: str) -> str:
    """The model all training began with, from one that was trained from another."""
    base = _base_of(Path(name))
    return name if base is None else _root_of(base)
