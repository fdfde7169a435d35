"""How fast a program runs in the sandbox, beside a bare interpreter, in one run.

Usage: python benchmarks/sandbox_speed.py [--rounds 5] [--calls 20] [--cold 5] [--json]

A round is a block of `calls` of each kind, one call after the other without a pause; rounds alternate the order. So a
warm call is not spared the making of the session that replaces the one before. A figure is the median over all rounds.

Prints one object (as a table without --json):
  bare_ms           `python3 -c pass` with the agent's interpreter, started and waited for
  warm_ms           the program `pass` in a warm session of its own, thrown away behind it
  warm_numpy_ms     the same for a program that imports numpy and sympy and uses both
  cold_ms           the first program of a new sandbox that has nothing warm: bubblewrap, zygote with numpy and sympy,
                    session, program
  calls_per_second  programs `print(1)` a second, 200 asked for at once
Exit code 2 when there is no sandbox on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

from midflight.sandbox import Python
from midflight.sandbox.bubblewrap import BubblewrapSandbox
from midflight.sandbox.choose import bubblewrap_problem

USE = "import numpy, sympy\nprint(numpy.arange(9).sum(), sympy.factorint(360))"
AT_ONCE = 200
ORDER = ("bare_ms", "warm_ms", "cold_ms", "warm_numpy_ms")


async def bare() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def program(sandbox: BubblewrapSandbox, code: str) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        result = await sandbox.run(Python(code))
        if not result.ok:
            raise RuntimeError(f"{result.problem}\n{result.err}")

    return call


async def cold() -> None:
    with BubblewrapSandbox(warm=0) as sandbox:
        await program(sandbox, USE)()


async def seconds_of(call: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


async def measure(rounds: int, calls: int, colds: int) -> dict[str, float]:
    """The five figures."""
    with BubblewrapSandbox() as sandbox:
        await sandbox.ready()
        kinds = {"bare_ms": bare, "warm_ms": program(sandbox, "pass"), "warm_numpy_ms": program(sandbox, USE)}
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(rounds):
            for name in list(kinds) if number % 2 == 0 else reversed(kinds):
                await sandbox.ready()
                taken[name] += [await seconds_of(kinds[name]) for _ in range(calls)]
        one = program(sandbox, "print(1)")
        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
        rate = AT_ONCE / (time.perf_counter() - began)
    taken["cold_ms"] = [await seconds_of(cold) for _ in range(colds)]
    figures = {name: round(1000 * median(taken[name]), 2) for name in ORDER}
    return {**figures, "calls_per_second": round(rate, 1)}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--cold", type=int, default=5)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    options = parser.parse_args(given)
    if min(options.rounds, options.calls, options.cold) < 1:
        parser.error("--rounds, --calls and --cold are 1 or more")
    problem = bubblewrap_problem()
    if problem:
        print(f"sandbox_speed: {problem}", file=sys.stderr)
        return 2
    figures = asyncio.run(measure(options.rounds, options.calls, options.cold))
    if options.as_json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<18}{value:>10}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
