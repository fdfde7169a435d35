"""The recipe of a run: kept in its folder, and whether a run may start there or go on.

Invariant: a run has one recipe from its first step to its last. The learning rate, the questions and the seeds follow
from it, so a resume with another one is refused, never guessed at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from midflight.engines.config import OPERATION
from midflight.errors import UserError
from midflight.recipe.config import Recipe, resolved
from midflight.recipe.own import check_kept_tools, kept_tools
from midflight.recipe.reading import PATH_KEYS, anchor_paths, path_at, read_yaml, validated
from midflight.recipe.validating import show
from midflight.slips import may_be_secret, stated
from midflight.store.folder import RunFolder


def made_by(run: Path) -> str:
    """The command that made a run: `sft` or `train`."""
    return "sft" if RunFolder(run).demonstrations.is_file() else "train"


def going_on(run: Path, *overrides: str) -> str:
    """What a person runs to let a run go on, with other values of keys as `key=value`."""
    if kept_tools(RunFolder(run)):
        settings = f"overrides=[{', '.join(map(repr, overrides))}], " if overrides else ""
        return f"your program, train_on(..., {settings}resume=True)"
    return " ".join([f"midflight {made_by(run)} {run} --resume", *overrides])


def evaluates(run: Path) -> bool:
    """Whether a run's recipe has held-out questions."""
    file = RunFolder(run).recipe
    return not file.is_file() or read_yaml(file).get("eval_tasks", {}) is not None


def check_run_folder(
    path: Path, recipe: Recipe, *, resume: bool, command: str = "train", own_tools: Collection[str] = ()
) -> None:
    """Refuse a folder in which `command` can neither start nor go on with `recipe` and a program's `own_tools`.

    Raises:
        UserError: one line with what to do.
    """
    _check_place(path)
    if not resume:
        _check_new(path)
        return
    if not path.is_dir():
        runs = sorted(str(file.parent) for file in Path("runs").glob("*/recipe.yaml"))
        raise UserError(
            f"--resume: {path} does not exist; leave out --resume (in Python resume=True) to start it, or name a run "
            f"with --run-dir (runs here: {', '.join(runs) or 'none'})"
        )
    with RunFolder(path).locked():
        pass
    file = RunFolder(path).recipe
    if not file.is_file():
        start = "leave out --resume (in Python resume=True) to start one there, or " if _is_new(path) else ""
        raise UserError(f"--resume: {path} holds no recipe.yaml, so no run; {start}name a run with --run-dir")
    maker = made_by(path)
    if maker != command:
        raise UserError(
            f"--resume: the run in {path} was made by midflight {maker}; go on with midflight {maker} {path} --resume"
        )
    check_kept_tools(RunFolder(path), recipe, own_tools)
    change = first_change(read_recipe(file), recipe)
    if change is not None:
        key, was, now = change
        other = f"the run in {path} has {'another' if may_be_secret(key, [was, now]) else show(was)}"
        raise UserError(
            f"{stated(key, now, show)}: {other}; a run keeps its recipe: go on with {going_on(path)}, or start another "
            "with --run-dir"
        )


def begin(folder: RunFolder) -> None:
    """Take a folder for a new run, under its lock; one killed between here and `save_recipe` can be begun again.

    Raises:
        UserError: since `check_run_folder`, another process made a run there.
    """
    _check_new(folder.path)
    folder.beginning.touch()
    for left in (folder.own_tools, folder.demonstrations, *folder.path.glob(f"{folder.store.name}*")):
        left.unlink(missing_ok=True)  # of a run that was killed before it began


def _is_new(path: Path) -> bool:
    """Whether no run ever began in a folder, and nothing but a run that did not begin left files there."""
    folder = RunFolder(path)
    if folder.beginning.is_file():
        return not folder.recipe.is_file()
    return all(one.is_dir() and not one.is_symlink() for one in path.rglob("*"))


def _check_new(path: Path) -> None:
    if path.is_dir() and not _is_new(path):
        if RunFolder(path).recipe.is_file():
            what = f"exists and is not empty; to go on: {going_on(path)}; or name another folder"
        else:
            what = "exists, is not empty and holds no recipe.yaml, so no run; name another folder"
        raise UserError(f"--run-dir {path}: {what}")


def _check_place(path: Path) -> None:
    """Refuse a path at which no folder can be or be made."""
    try:
        there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
        is_folder = there.is_dir()
    except (OSError, ValueError) as error:
        raise UserError(f"--run-dir {path}: cannot be a folder ({error}); name another") from None
    if not is_folder:
        raise UserError(f"--run-dir {path}: {'' if there == path else f'{there} '}is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--run-dir {path}: {there} cannot be written; name another folder or change its rights")


def read_recipe(file: Path) -> Recipe:
    """The recipe in a file as it is, its paths made absolute; rules between keys are not checked.

    Raises:
        RecipeError: unreadable, or a key or value is wrong.
    """
    data = read_yaml(file)
    anchor_paths(data, file.resolve().parent)
    return validated(data, file)


def save_recipe(recipe: Recipe, folder: RunFolder) -> None:
    """Write the recipe into a run's folder, with copies of the files it names: the run can then be moved."""
    data = resolved(recipe)
    for key in PATH_KEYS:
        section, value = path_at(data, key)
        if section is None or value is None:
            continue
        name = f"{'-'.join(key[:-1])}-{Path(value).name}"
        if Path(value).resolve().parent == folder.inputs.resolve():
            name = Path(value).name
        else:
            folder.inputs.mkdir(parents=True, exist_ok=True)
            if not _same_content(value, str(folder.inputs / name)):  # a full disk could spoil the copy there is
                shutil.copyfile(value, folder.inputs / name)
        section[key[-1]] = f"{folder.inputs.name}/{name}"
    folder.beginning.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(folder.beginning, folder.recipe)


def first_change(old: Recipe, new: Recipe) -> tuple[str, Any, Any] | None:
    """The first dotted key whose value differs, with both values; files are compared by what they hold.

    None where all are the same.
    """
    before, after = resolved(old), resolved(new)
    before["budget"] = after["budget"]  # what a run may cost changes nothing in it, nor where its engines are
    for name, engine in after["engines"].items():
        was = before["engines"].get(name, {})
        was.update({key: engine[key] for key in OPERATION if key in was})  # none of them changes what is drawn
    for key in PATH_KEYS:
        (_, was), (section, now) = path_at(before, key), path_at(after, key)
        if section is not None and was is not None and now is not None and _same_content(was, now):
            section[key[-1]] = was
    return _first_change(before, after, "")


def _same_content(one: str, other: str) -> bool:
    paths = Path(one), Path(other)
    return all(path.is_file() for path in paths) and paths[0].read_bytes() == paths[1].read_bytes()


def _first_change(old: dict[str, Any], new: dict[str, Any], prefix: str) -> tuple[str, Any, Any] | None:
    for name in dict.fromkeys((*new, *old)):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            change = _first_change(before, after, f"{prefix}{name}.")
            if change is not None:
                return change
        elif before != after:
            return f"{prefix}{name}", before, after
    return None
