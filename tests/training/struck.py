"""The command line in a process of its own, struck at a chosen place by a signal or by a disk that fills up."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Children are forked from a server that has imported everything and computed nothing: a fresh run without the imports.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["midflight.cli", "midflight.training.trainer", "matplotlib.figure"])

SECONDS_IN_A_FORWARD = 30.0


@dataclass(frozen=True)
class Strike:
    """What happens, and when: at the `call`-th call of `place` after `steps` steps were logged."""

    place: str
    how: str
    """A signal: `SIGTERM`, `SIGTERM unseen` (as the main thread falls asleep), `SIGTERM twice`. Or, from then on, a
    disk that is `full`, or a `limit` on the size of files."""
    steps: int = 1
    call: int = 1
    disk: Path | None = None
    """What `full` fills."""


@dataclass(frozen=True)
class Ended:
    code: int
    lines: list[str]
    """Of standard output and standard error."""
    seconds: float


def midflight(arguments: Sequence[str], log: Path, strike: Strike | None = None, *, limit: float = 120.0) -> Ended:
    """Run one command line to its end, for at most `limit` seconds."""
    process = _PROCESSES.Process(target=_main, args=(list(arguments), log, strike))
    began = time.monotonic()
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"still running after {limit} s: {log.read_text()}")
    return Ended(process.exitcode, log.read_text().splitlines(), time.monotonic() - began)


def _main(arguments: list[str], log: Path, strike: Strike | None) -> None:
    from midflight import cli
    from midflight.training import session

    session.write_plots = lambda _: []  # they take longer than all the rest
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["midflight", *arguments]
    if strike is not None:
        if strike.how.endswith(" unseen"):
            signal.pthread_sigmask(signal.SIG_BLOCK, [_number(strike)])
        _arm(strike)
    cli.main()


def _arm(strike: Strike) -> None:
    from midflight.store import MetricsWriter

    owner, name, prepare = _PLACES[strike.place]()
    real, write = getattr(owner, name), MetricsWriter.write
    logged = calls = 0

    def written(self: MetricsWriter, record: Any) -> None:
        nonlocal logged
        write(self, record)
        logged += 1

    def struck(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += logged == strike.steps
        if logged == strike.steps and calls == strike.call:
            prepare(*arguments)
            _HOW[strike.how](strike)
        return real(*arguments, **named)

    setattr(owner, name, struck)
    MetricsWriter.write = written  # type: ignore[method-assign]


def _rollouts() -> Any:
    from midflight.engines.local import engine

    return engine, "generate", _nothing  # on the engine's worker thread


def _reward() -> Any:
    from midflight.training import trainer

    return trainer, "score", _nothing


def _backward() -> Any:
    import torch

    return torch.autograd, "backward", _nothing  # the loss's, then the pack's


def _saving() -> Any:
    from midflight.training import checkpoints

    def half(_: Any, path: Path) -> None:
        path.write_bytes(b"half of it")

    return checkpoints.torch, "save", half


def _renamed() -> Any:
    from midflight.training import checkpoints

    return checkpoints, "_prune", _nothing


def _removing() -> Any:
    from midflight.training import checkpoints

    def half(folder: Path) -> None:
        (folder / "optimizer.pt").unlink()

    return checkpoints.shutil, "rmtree", half


def _storing() -> Any:
    from midflight.store import Store

    return Store, "add_trajectories", _nothing


def _evaluated() -> Any:
    from midflight.evaluation import EvaluationResult

    return EvaluationResult, "save", _nothing


def _nothing(*_: Any) -> None:
    pass


_PLACES: dict[str, Callable[[], Any]] = {
    "rollouts": _rollouts,
    "reward": _reward,
    "backward": _backward,
    "saving": _saving,
    "renamed": _renamed,
    "removing": _removing,
    "storing": _storing,
    "evaluated": _evaluated,
}


def _number(strike: Strike) -> signal.Signals:
    return signal.Signals[strike.how.split()[0]]


def _signal(strike: Strike) -> None:
    """The signal; in the rollouts the model is then in a long forward, on the worker thread."""
    os.kill(os.getpid(), _number(strike))
    if strike.place == "rollouts":
        time.sleep(SECONDS_IN_A_FORWARD)


def _signal_unseen(strike: Strike) -> None:
    """The signal goes to this thread, so the main one is not woken by it."""
    assert threading.current_thread() is not threading.main_thread()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [_number(strike)])
    _signal(strike)


def _signal_twice(strike: Strike) -> None:
    """The second while what the first began (here: keeping what has finished) takes long."""
    from midflight.store import Store

    def slow(*_: Any) -> None:
        os.kill(os.getpid(), _number(strike))
        time.sleep(SECONDS_IN_A_FORWARD)

    Store.add_trajectories = slow  # type: ignore[assignment, method-assign]
    _signal(strike)


def _limit(_: Strike) -> None:
    """No file may grow over 4 KB from here on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def _fill(strike: Strike) -> None:
    """Fill the disk to its last byte, with a file `ballast`."""
    assert strike.disk is not None
    with (strike.disk / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(b"0" * size)
            except OSError:
                continue


_HOW: dict[str, Callable[[Strike], None]] = {
    **{name: _signal for name in ("SIGKILL", "SIGINT", "SIGTERM", "SIGHUP")},
    "SIGTERM unseen": _signal_unseen,
    **{f"{name} twice": _signal_twice for name in ("SIGINT", "SIGTERM")},
    "full": _fill,
    "limit": _limit,
}
