"""TRL's update, in a process of TRL's own environment that does a step when told to."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midflight.engines.local.models import resolve
from midflight.errors import UserError
from midflight.recipe import Recipe

from .ours import Row

VARIABLE = "MIDFLIGHT_TRL_PYTHON"
INSTALL = (
    "TRL is not measured; to install it in an environment of its own: python3 -m venv trl && "
    "trl/bin/pip install torch==2.13.0 && trl/bin/pip install trl==1.16.0 peft, then give --trl-python trl/bin/python"
)
SCRIPT = Path(__file__).resolve().parents[1] / "peers" / "trl_update.py"
WAYS = {"trl": ("float32", True), "trl_bfloat16": ("bfloat16", True), "trl_as_shipped": ("float32", False)}
"""Name: dtype, and whether the head scores the completions only; see `peers/trl_update.py`."""


def find_python(given: str | None) -> Path | None:
    """The interpreter that has trl: `given`, or the one the environment names; None where it has none.

    Raises:
        UserError: it is no program.
    """
    named = given or os.environ.get(VARIABLE)
    if not named:
        return None
    try:
        found = subprocess.run([named, "-c", "import trl, peft"], env=_environment(), capture_output=True, check=False)
    except OSError as error:
        raise UserError(f"{'--trl-python' if given else VARIABLE} {named}: cannot be run ({error.strerror})") from None
    return Path(named) if found.returncode == 0 else None


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**own, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


@contextmanager
def trl_update(
    python: Path, recipe: Recipe, rows: Sequence[Row], micro_batch: int, way: str, folder: Path
) -> Iterator[tuple[dict[str, Any], Callable[[], float]]]:
    """What the process of a way says of itself, and a function that does one step and gives its seconds.

    Raises:
        UserError: the process ended; its last line.
    """
    assert recipe.model.lora is not None
    dtype, completions_only = WAYS[way]
    spec = {
        "model": resolve(recipe.model.name),
        "rank": recipe.model.lora.rank,
        "alpha": recipe.model.lora.alpha,
        "rows": [[row.prompt_ids, row.ids, row.advantage] for row in rows],
        "micro_batch": micro_batch,
        "dtype": dtype,
        "completions_only": completions_only,
        "epsilon": recipe.training.clip_epsilon,
        "max_grad_norm": recipe.training.max_grad_norm,
        "temperature": recipe.agent.planner.temperature,
    }
    file, log = folder / f"{way}.json", folder / f"{way}.log"
    file.write_text(json.dumps(spec), encoding="utf-8")
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            [str(python), str(SCRIPT), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(),
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        sent, answers = process.stdin, process.stdout

        def answer() -> dict[str, Any]:
            line = answers.readline()
            if not line:
                process.wait()
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise UserError(f"TRL's process failed: {lines[-1] if lines else f'exit code {process.returncode}'}")
            found: dict[str, Any] = json.loads(line)
            return found

        def step() -> float:
            sent.write("step\n")
            sent.flush()
            return float(answer()["seconds"])

        try:
            yield answer(), step
        finally:
            process.terminate()
