"""Models by any name a user may give, with stand-ins for models."""

from __future__ import annotations

import json
import shutil
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


def test_a_checkpoint_that_its_run_drops_is_taken_anew_from_a_run_and_one_line_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    checkpoints = tmp_path / "checkpoints"
    loaded: list[str] = []
    drops = 0

    def save(step: int) -> Path:
        folder = checkpoints / f"step-{step:05d}"
        folder.mkdir(parents=True)
        seal(folder, {"step": step, "quality": 0.5, "base": "smollm2-135m"})
        return folder

    def load_named(recipe: Any, name: str) -> Any:
        loaded.append(Path(name).name)
        if len(loaded) <= drops:
            save(len(loaded) + 1)
            shutil.rmtree(name)
            raise ValueError("a reader's own words")
        return SimpleNamespace(name=name)

    monkeypatch.setattr(loading, "load_named", load_named)
    recipe, said, first = load_recipe("quickstart"), list[str](), save(1)
    drops = loading.TRIES - 1
    assert loading.load_trained(recipe, str(tmp_path), said.append)[1] == "smollm2-135m"
    assert loaded == ["step-00001", "step-00002", "step-00003"]
    assert said == [f"{checkpoints / name} was dropped by its run before it was read" for name in loaded[:-1]]
    drops = 99
    with pytest.raises(ModelError) as caught:
        loading.load_trained(recipe, str(tmp_path), said.append)
    assert len(loaded) == 3 + loading.TRIES
    for name in (str(first), str(checkpoints / loaded[-1])):
        with pytest.raises(ModelError) as caught:
            loading.load_trained(recipe, name, said.append)
        assert str(caught.value) == (
            f"model.name={name}: not there; a run that trains on keeps its newest checkpoints and drops others; name "
            f"the run, {tmp_path}, for the newest"
        )
    assert len(loaded) == 3 + loading.TRIES  # what is not there is not looked for on the Hub
    with pytest.raises(ModelError, match="not there; a run that trains on"):
        loading.load_trained(recipe, str(newest := sorted(checkpoints.iterdir())[-1]), said.append)
    assert loaded[-1] == newest.name  # dropped while it was read

    def broken(recipe: Any, name: str) -> Any:
        raise ValueError("a fault of its own")

    monkeypatch.setattr(loading, "load_named", broken)
    with pytest.raises(ValueError, match="a fault of its own"):
        loading.load_trained(recipe, str(tmp_path), said.append)
