"""One update of the planner: packed as the trainer does it, against padded rows and against TRL, on the same rows.

Usage: python benchmarks/update_speed.py [--run RUN_DIR --step N] [--repeats 3] [--micro-batches 2 4 8 16]
           [--peers plain_peft trl trl_bfloat16 trl_as_shipped] [--trl-python PATH] [--no-memory] [--json]
           [key=value ...]
       python benchmarks/update_speed.py --sweep [--plot FILE] [--json] [key=value ...]

The rows are those of a stored step of a run, with the run's recipe; without --run, of one step of the quickstart that
the untrained model makes first. All run on the CPU from the same weights, an adapter moved off zero, with behaviour
log-probs that these weights give. Each way does forward, backward, clipping and the optimizer's step at a rate of 0;
ours packs as well. A round times ours and then another way, and compares these two; figures are medians.

  padded      rows by length, padded to micro-batches, logits at trained tokens only, the same masks, loss and merged
              weights: the ratio is what packing gives
  plain_peft  the same on the adapter as PEFT applies it
  trl         GRPOTrainer in its own environment (--trl-python, or MIDFLIGHT_TRL_PYTHON), without grammar masks and
              without gradient checkpointing, its head at the completions only; also in bfloat16 (autocast), and as
              shipped, which on a CPU scores all of the prompts too

Each runs at the fastest of the micro-batches, found on SAMPLE rows. --peers names those timed beside padded. What a
round found goes to standard error as it ends, so that a run cut off is not for nothing.

Prints one object (as text without --json); a peer that is not installed gives null:
  speedup_vs_padded, speedup_vs_plain_peft, speedup_vs_trl, speedup_vs_trl_bfloat16, speedup_vs_trl_as_shipped
                                their seconds over ours
  rows, trained_tokens
  total_tokens, unique_tokens   what the rows take unpacked, and packed
  padded_tokens                 what the padded rows take, in order of length and in their own, and TRL's
  share_of_matmul_rate          FLOPs of our matrix products over our seconds, as a share of the machine's rate
  gflop, matmul_gflops          those FLOPs (10^9), and the rate: float32 products of the model's linear maps,
                                pack_tokens at a time, measured beside each update (10^9 a second); attention is not
                                counted
  gradient_gap                  |theirs - ours| / |ours| of all gradients, before any timing; over MAX_GAP is an error
  micro_batch, seconds, versions   by way, by way, of the peer's packages
  peak_gb                       by how much resident memory rises in an update, over that with both models loaded, in a
                                fresh process (10^9 bytes; null with --no-memory)
  peak_gb_padded                the same of the padded rows
  peak_gb_by_pack               the same of ours, for 1 and 4 times the rows at 1 and 2 times the pack
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml
from common import parse
from update_parts import sweep
from update_parts.measures import MatmulRate, fastest, matmul_flops, peak_in_child, release, seconds
from update_parts.ours import Bench, Row, load_bench, on_policy, packed, packed_update
from update_parts.padded import batches, padded_tokens, padded_update, time_padded
from update_parts.rows import made_rows, save_rows, spread, stored_rows
from update_parts.trl import INSTALL, WAYS, find_python, trl_update

from midflight.errors import UserError
from midflight.evaluation.text import table
from midflight.recipe import Recipe, load_recipe, resolved

SAMPLE = 16
"""Rows that the micro-batch is chosen on."""
MAX_GAP = 1e-4
PEERS = ("plain_peft", *WAYS)
PLOT = Path(__file__).resolve().parent.parent / "docs" / "plots" / "update_speed.png"


class OneLine(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def arguments() -> argparse.ArgumentParser:
    parser = OneLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument("--run", type=Path, help="a run folder")
    parser.add_argument("--step", type=positive, help="the run's step")
    parser.add_argument("--recipe", default="quickstart", help="where no run is given")
    parser.add_argument("--repeats", type=positive, default=3, help="rounds")
    parser.add_argument("--micro-batches", nargs="+", type=positive, default=[2, 4, 8, 16])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="what is timed beside padded")
    parser.add_argument("--trl-python", help="the python of an environment that has trl and peft")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory, which only Linux tells")
    parser.add_argument("--sweep", action="store_true", help="cost by group size, turns and memory, and its plot")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where --sweep draws")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    return parser


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def checked_gaps(bench: Bench, rows: Sequence[Row], micro_batch: int) -> dict[str, float]:
    """The relative gap between the padded gradients, merged and plain, and ours.

    Raises:
        UserError: one is over MAX_GAP.
    """
    packed_update(bench, rows, max_grad_norm=1e9)
    ours = bench.gradients()
    gaps = {}
    for name, using in (("padded", bench.merged), ("plain_peft", bench.unmerged)):
        padded_update(bench, rows, micro_batch, using, 1e9)
        gaps[name] = float((bench.gradients() - ours).norm() / ours.norm())
        note(f"gradients, {name} against ours: {gaps[name]:.2e} apart")
        if not gaps[name] <= MAX_GAP:
            raise UserError(f"gradients of {name} are {gaps[name]:.2e} from ours, more than {MAX_GAP:g}: nothing timed")
    return gaps


def choose_padded(
    bench: Bench, rows: Sequence[Row], sizes: Sequence[int], using: Callable[[], AbstractContextManager[Any]]
) -> int:
    """The fastest micro-batch on a sample."""
    few = spread(rows, SAMPLE)
    return fastest({size: partial(time_padded, bench, few, size, using) for size in sizes})


def choose_trl(python: Path, recipe: Recipe, rows: Sequence[Row], sizes: Sequence[int], way: str, folder: Path) -> int:
    """The same for TRL, each in a process that takes two steps."""
    few = spread(rows, SAMPLE)

    def best_of_two(size: int) -> float:
        with trl_update(python, recipe, few, size, way, folder) as (_, step):
            return min(step(), step())

    return fastest({size: partial(best_of_two, size) for size in sizes}, rounds=1)


@dataclass
class Rounds:
    """What was timed: seconds of each way, ratios of each peer to ours just before it, shares and rates of ours."""

    ours: Callable[[], float]
    rate: Callable[[], float]
    flops: float
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"ours": []})
    ratios: dict[str, list[float]] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def time(self, way: str, peer: Callable[[], float], repeats: int) -> None:
        """`repeats` times: the machine's rate, ours, the rate again, the peer."""
        for number in range(repeats):
            note(f"{way}: round {number + 1} of {repeats}")
            before = self.rate()
            mine = self.ours()
            now = (before + self.rate()) / 2
            theirs = peer()
            self.seconds["ours"].append(mine)
            self.seconds.setdefault(way, []).append(theirs)
            self.ratios.setdefault(way, []).append(theirs / mine)
            self.shares.append(self.flops / mine / now)
            self.rates.append(now)
            note(f"{way}: {theirs:.1f} s, ours {mine:.1f} s just before: {theirs / mine:.2f} x")

    def speedup(self, way: str) -> float | None:
        return statistics.median(self.ratios[way]) if way in self.ratios else None


def compare(recipe: Recipe, given: Sequence[Row], options: argparse.Namespace) -> dict[str, Any]:
    """The object of the module's docstring."""
    wanted = any(way in options.peers for way in WAYS)
    python = find_python(options.trl_python) if wanted else None
    bench = load_bench(recipe)
    if wanted and python is None:
        note(INSTALL)
    rows = on_policy(bench, given)
    gaps = checked_gaps(bench, rows, min(options.micro_batches))
    flops = matmul_flops(lambda: packed_update(bench, rows))
    rate = MatmulRate(bench.sampler, bench.settings.pack_tokens)
    rate.measure()  # the first is slower
    rounds = Rounds(lambda: seconds(lambda: packed_update(bench, rows)), rate.measure, flops)
    sizes: dict[str, int] = {}
    for way, using in (("padded", bench.merged), ("plain_peft", bench.unmerged)):
        if way != "padded" and way not in options.peers:
            continue
        note(f"{way}: choosing the micro-batch")
        sizes[way] = choose_padded(bench, rows, options.micro_batches, using)
        rounds.time(way, partial(time_padded, bench, rows, sizes[way], using), options.repeats)
        release()
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if python is not None:
            for way in filter(options.peers.__contains__, WAYS):  # one process at a time: each holds gigabytes
                note(f"{way}: choosing the micro-batch")
                sizes[way] = choose_trl(python, recipe, rows, options.micro_batches, way, folder)
                with trl_update(python, recipe, rows, sizes[way], way, folder) as (said, step):
                    rounds.time(way, step, options.repeats)
        memory = {} if options.no_memory else peak_memory(recipe, bench, rows, sizes["padded"], folder)
    return {**report(bench, rows, rounds, sizes, said), "gflop": flops / 1e9, "gradient_gap": gaps, **memory}


def report(
    bench: Bench, rows: Sequence[Row], found: Rounds, sizes: Mapping[str, int], said: Mapping[str, Any]
) -> dict[str, Any]:
    """The object, less what was measured before and after the rounds; a peer that was not timed has null."""
    batch, size = packed(rows, bench.settings), sizes["padded"]
    return {
        "speedup_vs_padded": found.speedup("padded"),
        "speedup_vs_plain_peft": found.speedup("plain_peft"),
        "speedup_vs_trl": found.speedup("trl"),
        "speedup_vs_trl_bfloat16": found.speedup("trl_bfloat16"),
        "speedup_vs_trl_as_shipped": found.speedup("trl_as_shipped"),
        "rows": len(rows),
        "trained_tokens": sum(row.forced.count(False) for row in rows),
        "unique_tokens": batch.unique_tokens,
        "total_tokens": batch.total_tokens,
        "padded_tokens": {
            "by_length": padded_tokens(batches(rows, size)),
            "in_order": padded_tokens([rows[start : start + size] for start in range(0, len(rows), size)]),
            "trl": said.get("padded_tokens"),
        },
        "share_of_matmul_rate": statistics.median(found.shares),
        "matmul_gflops": statistics.median(found.rates) / 1e9,
        "micro_batch": dict(sizes),
        "seconds": found.seconds,
        "versions": {name: said.get(name) for name in ("trl", "transformers", "torch")},
        "peak_gb": None,
        "peak_gb_padded": None,
        "peak_gb_by_pack": None,
    }


def peak_memory(recipe: Recipe, bench: Bench, rows: Sequence[Row], micro_batch: int, folder: Path) -> dict[str, Any]:
    """`peak_gb`, `peak_gb_padded` and `peak_gb_by_pack`, each from processes of their own."""
    recipe_file, rows_file = folder / "recipe.yaml", folder / "rows.pickle"
    recipe_file.write_text(yaml.safe_dump(resolved(recipe)), encoding="utf-8")
    save_rows(rows, rows_file)

    def peak(pack_tokens: int, copies: int, micro_batch: int | None = None) -> float:
        note(f"memory: {copies} x {len(rows)} rows, {'padded' if micro_batch else f'packs of {pack_tokens}'}")
        spec = {"recipe": str(recipe_file), "rows": str(rows_file), "copies": copies}
        return peak_in_child({**spec, "pack_tokens": pack_tokens, "micro_batch": micro_batch}, folder)["peak_gb"]

    pack = bench.settings.pack_tokens
    by_pack = [
        {"pack_tokens": size, "batch": times, "peak_gb": peak(size, times)}
        for size in (pack, 2 * pack)
        for times in (1, 4)
    ]
    padded = peak(pack, 1, micro_batch)
    return {"peak_gb": by_pack[0]["peak_gb"], "peak_gb_padded": padded, "peak_gb_by_pack": by_pack}


def render(found: Mapping[str, Any]) -> str:
    """The object as text."""
    rows = []
    for way, taken in found["seconds"].items():
        ratio = 1.0 if way == "ours" else found[f"speedup_vs_{way}"]
        size = found["micro_batch"].get(way)
        rows.append([way, f"{statistics.median(taken):.2f}", f"{ratio:.2f}", str(size) if size else "-"])
    lines = [table(["way", "seconds", "over ours", "micro-batch"], rows)]
    lines.append(
        f"{found['rows']} rows, {found['trained_tokens']} trained tokens; {found['total_tokens']} tokens, "
        f"{found['unique_tokens']} packed, {found['padded_tokens']['by_length']} padded"
    )
    lines.append(
        f"{found['gflop']:.0f} GFLOP at {found['share_of_matmul_rate']:.2f} of {found['matmul_gflops']:.0f} GFLOP/s"
    )
    gaps = ", ".join(f"{name} {gap:.1e}" for name, gap in found["gradient_gap"].items())
    lines.append(f"gradients from ours: {gaps}")
    if found["peak_gb"] is not None:
        lines.append(f"peak memory: {found['peak_gb']:.2f} GB over the models, padded {found['peak_gb_padded']:.2f}")
        lines += [
            f"  packs of {one['pack_tokens']}, {one['batch']} x the rows: {one['peak_gb']:.2f} GB"
            for one in found["peak_gb_by_pack"]
        ]
    return "\n".join(lines)


def rows_for(options: argparse.Namespace) -> tuple[Recipe, list[Row]]:
    """The recipe and the rows that the options name.

    Raises:
        UserError: they name none.
    """
    if (options.run is None) != (options.step is None):
        raise UserError("--run and --step: give both, or neither to make the rows now")
    recipe = load_recipe(str(options.run or options.recipe), [*options.overrides, "model.device=cpu"])
    if options.run is not None:
        return recipe, stored_rows(options.run, options.step, recipe.training)
    return recipe, made_rows(recipe)


def main(given: Sequence[str] | None = None) -> int:
    options = parse(arguments(), given)
    try:
        if options.sweep:
            recipe = load_recipe(str(options.run or options.recipe), [*options.overrides, "model.device=cpu"])
            points = sweep.sweep(recipe, options.micro_batches, options.repeats)
            sweep.draw(points, options.plot)
            found, text = {"sweep": points}, sweep.render(points)
        else:
            found = compare(*rows_for(options), options)
            text = render(found)
    except UserError as error:
        note(f"update_speed: {error}")
        return 2
    print(json.dumps(found, indent=2) if options.as_json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
