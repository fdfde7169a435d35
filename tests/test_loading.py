"""Models by any name a user may give, with stand-ins for models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midflight import loading
from midflight.engines.local import ModelError
from midflight.errors import UserError
from midflight.recipe import load_recipe
from midflight.store.seals import seal


def test_a_run_stands_for_its_newest_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load_named(recipe: Any, name: str) -> Any:
        loaded.append(name)
        return SimpleNamespace(name=name)

    monkeypatch.setattr(loading, "load_named", load_named)
    recipe = load_recipe("quickstart")
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    said: list[str] = []
    with pytest.raises(ModelError, match="the run has no checkpoint yet; let it train, or name another model"):
        loading.load_trained(recipe, str(tmp_path), said.append)
    for step in (5, 10, 15):
        (tmp_path / f"checkpoints/step-{step:05d}").mkdir(parents=True)
        if step < 15:
            state = tmp_path / f"checkpoints/step-{step:05d}/state.json"
            state.write_text(json.dumps({"step": step, "quality": 0.5, "base": "smollm2-135m"}))
    _, base = loading.load_trained(recipe, str(tmp_path), said.append)
    assert loaded == [str(tmp_path / "checkpoints/step-00010")]
    assert base == "smollm2-135m"
    checkpoints = tmp_path / "checkpoints"
    assert said == [
        f"{checkpoints}/step-00015 is not whole, not used: it has no state.json, which is written last",
        f"{checkpoints}/step-00010 is of an earlier version and has no checksums: taken without comparing its files",
    ]
    assert loading.load_trained(recipe, "nobody/none", said.append)[1] == "nobody/none"
    warm = tmp_path / "warm"
    warm.mkdir()
    (warm / "state.json").write_text(json.dumps({"step": 1, "quality": 0.5, "base": str(checkpoints / "step-00010")}))
    assert loading.load_trained(recipe, str(warm), said.append)[1] == "smollm2-135m"  # what all training began with


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError) as caught:
        loading.load_named(load_recipe("quickstart", ["model.device=cuda:0"]), "smollm2-135m")
    assert str(caught.value) == "model.device = cuda:0: torch finds none on this machine; set model.device=auto"


def test_a_checkpoint_named_by_itself_is_compared_with_its_seal(tmp_path: Path) -> None:
    folder = tmp_path / "step-00001"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    seal(folder, {"step": 1, "quality": 0.5, "base": "x"})
    recipe = load_recipe("quickstart")
    with pytest.raises(ModelError, match="names itself as its base; mend adapter_config.json"):
        loading.load_trained(recipe, str(folder), print)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"step-00001: the checkpoint is not whole \(adapter_config.json has 2 bytes"):
        loading.load_trained(recipe, str(folder), print)
