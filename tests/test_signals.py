"""SIGTERM and SIGHUP as Ctrl-C, in small processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import midflight

PROGRAM = """
import asyncio, os, signal, sys, time
from midflight import signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the shell of these tests ignores
{before}
signals.catch()

async def main():
    try:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.{sent})
        await asyncio.sleep(20)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        {cancelled}
        raise

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted by", signals.interrupted_by().name)
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(midflight.__file__).parent.parent)}


def ended(sent: str, before: str = "", cancelled: str = "") -> tuple[int, list[str]]:
    return run(PROGRAM.format(before=before, sent=sent, cancelled=cancelled))


def run(program: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, timeout=15)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_what_runs_is_cancelled_and_then_interrupted(sent: str) -> None:
    assert ended(sent) == (0, ["cancelled", f"interrupted by {sent}"])


def test_sigterm_works_in_a_background_job_whose_sigint_is_ignored() -> None:
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert ended("SIGTERM", ignored) == (0, ["cancelled", "interrupted by SIGTERM"])


def test_what_nohup_ignores_stays_ignored() -> None:
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert ended("SIGTERM", f"{ignored}; os.kill(os.getpid(), signal.SIGHUP)")[1][-1] == "interrupted by SIGTERM"
    assert ended("SIGHUP", f"{ignored}; real = asyncio.sleep; asyncio.sleep = lambda _: real(0.1)") == (0, [])


@pytest.mark.parametrize("second", ["SIGTERM", "SIGHUP"])
def test_a_second_signal_kills(second: str) -> None:
    again = f"os.kill(os.getpid(), signal.{second}); time.sleep(20)"
    assert ended("SIGTERM", cancelled=again) == (-signal.Signals[second], ["cancelled"])


DROPPED = """
import os, signal, time
from midflight import signals
{before}
signals.catch()

class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.{sent})
        time.sleep(0.01)

try:
    Held()
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted by", signals.interrupted_by().name)
"""


@pytest.mark.parametrize(
    ("sent", "before"),
    [("SIGINT", ""), ("SIGTERM", ""), ("SIGTERM", "signal.signal(signal.SIGINT, signal.SIG_IGN)")],
)
def test_what_python_drops_in_a_destructor_comes_again(sent: str, before: str) -> None:
    assert run(DROPPED.format(sent=sent, before=before)) == (0, [f"interrupted by {sent}"])


def test_what_else_is_dropped_is_said_as_ever() -> None:
    program = (
        "from midflight import signals\nsignals.catch()\nsignals.catch()\nclass A:\n  def __del__(self): 1 / 0\nA()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, timeout=15)
    assert done.returncode == 0 and done.stderr.count("ZeroDivisionError: division by zero") == 1
