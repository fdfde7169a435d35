"""Which sandbox, whether it starts, and what is said where it does not."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.cli import doctor
from midflight.errors import InfrastructureError, UserError
from midflight.recipe import RecipeError, load_recipe
from midflight.sandbox import (
    Limits,
    Outcome,
    Python,
    SandboxResult,
)
from midflight.sandbox.bubblewrap import Box, BubblewrapSandbox, zygote
from midflight.sandbox.bubblewrap.inside.holder import writable_mounts
from midflight.sandbox.choose import choose_sandbox, shared_sandbox
from midflight.sandbox.options import SandboxOptions
from tests.sandbox.processes import children
from tests.sandbox.ready import need_bubblewrap

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.asyncio
async def test_a_zygote_that_died_is_replaced() -> None:
    need_bubblewrap()
    with BubblewrapSandbox(box=Box(preload=()), warm=0) as sandbox:
        assert (await sandbox.run(Python("print(1)"))).out == "1\n"
        assert sandbox._core is not None and sandbox._core._zygote._attempt is not None
        first = sandbox._core._zygote._attempt.result()._process
        first.kill()
        first.wait()
        assert (await sandbox.run(Python("print(2)"))).out == "2\n"
        assert sandbox._core._zygote._attempt.result()._process.pid != first.pid


@pytest.mark.asyncio
async def test_who_gives_up_on_the_start_does_not_undo_it() -> None:
    need_bubblewrap()
    with BubblewrapSandbox(warm=0) as sandbox:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.run(Python("1")), 0.05)
        assert sandbox._core is not None
        starting = sandbox._core._zygote._attempt
        assert starting is not None and not starting.done()
        assert (await sandbox.run(Python("print(1)"))).out == "1\n" and sandbox._core._zygote._attempt is starting
    others = set(children(os.getpid()))
    early = BubblewrapSandbox(warm=0)
    asked = asyncio.create_task(early.run(Python("1")))
    while not (boxes := set(children(os.getpid())) - others):
        await asyncio.sleep(0.001)
    asked.cancel()
    await asyncio.to_thread(early.close)
    assert not any(Path(f"/proc/{box}").exists() for box in boxes)


@pytest.mark.asyncio
async def test_a_sandbox_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setattr(zygote, "command", lambda *_: ["/bin/sh", "-c", "echo setting up uid map: no >&2; exit 1"])
    with (
        BubblewrapSandbox() as sandbox,
        pytest.raises(InfrastructureError, match="the bubblewrap sandbox does not start: setting up uid map: no"),
    ):
        await sandbox.run(Python("1"))


@pytest.mark.asyncio
async def test_a_session_that_cannot_be_furnished_is_an_infrastructure_failure() -> None:
    need_bubblewrap()
    with (
        BubblewrapSandbox(box=Box(preload=(), disk_files=-1)) as sandbox,
        pytest.raises(InfrastructureError, match="session does not start: .*mount /scratch: Invalid argument"),
    ):
        await sandbox.run(Python("1"))


def test_every_mount_that_can_be_written_is_found() -> None:
    line = "1 0 0:1 / {} {} - tmpfs tmpfs rw"
    mounts = [
        ("/", "ro,nosuid"),
        ("/tmp", "rw"),
        ("/dev/null", "rw"),
        ("/opt", "rw,nosuid"),
        ("/proc", "ro"),
        ("/x", "rw"),
        ("/x", "ro"),
    ]
    assert writable_mounts("\n".join(line.format(*mount) for mount in mounts)) == ["/opt"]


def test_no_sandbox_only_by_a_flag_that_says_unsafe() -> None:
    with pytest.raises(UserError, match="takes agent.sandbox.unsafe_no_sandbox = true too"):
        choose_sandbox("none")
    with pytest.raises(UserError, match="unsafe_no_sandbox"):
        choose_sandbox("auto", unsafe_no_sandbox=True)
    with pytest.raises(UserError, match="agent.sandbox.kind = docker: choose one of auto, bubblewrap, wasi, none"):
        choose_sandbox("docker")
    assert choose_sandbox("none", unsafe_no_sandbox=True).name == "none (unsafe)"


def test_options_choose_one_sandbox_for_all_tools() -> None:
    need_bubblewrap()
    options = SandboxOptions(wall_seconds=3, memory_mb=64, disk_mb=8, packages=("numpy",), running=2)
    shared = shared_sandbox(options)
    assert shared_sandbox(options.model_copy(update={"files": "a", "keep": "b"})) == shared
    assert shared_sandbox(SandboxOptions()) != shared
    sandbox = shared.inner
    assert isinstance(sandbox, BubblewrapSandbox) and sandbox.limits == Limits(wall_seconds=3, memory_bytes=64 * 2**20)
    assert sandbox.box == Box(("numpy",), ("numpy", "numpy.random"), disk_bytes=8 * 2**20)
    code = "import importlib.util as u\nprint([u.find_spec(name) is not None for name in ('numpy', 'sympy')])"
    assert sandbox.run_blocking(Python(code)).out == "[True, False]\n"
    sandbox.close()


PACKAGE = "agent.sandbox.packages.0 = {}: must be the name of a distribution alone, such as numpy"
NO_FOLDER = "is no folder; name one, or leave it out"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("agent.sandbox.cpu_seconds=0", "agent.sandbox.cpu_seconds = 0: must be greater than 0"),
        ("agent.sandbox.memory=3", "agent.sandbox.memory = 3: unknown key; did you mean agent.sandbox.memory_mb?"),
        ("agent.sandbox.kind=docker", "agent.sandbox.kind = docker: must be 'auto', 'bubblewrap', 'wasi' or 'none'"),
        ("agent.sandbox.packages=['numpy>=1']", PACKAGE.format("numpy>=1")),
        ("agent.sandbox.packages=['']", PACKAGE.format("''")),
        ("agent.sandbox.files=''", "agent.sandbox.files = '': must be the path of a folder"),
        ('agent.sandbox.keep="/a\\0b"', 'agent.sandbox.keep = "/a\\0b": must be the path of a folder'),
        ("agent.sandbox.files=/nope", "agent.sandbox.files = /nope: no such folder; name one, or leave it out"),
        (
            f"agent.sandbox.keep={ROOT}/README.md/a",
            f"agent.sandbox.keep = {ROOT}/README.md/a: {ROOT}/README.md {NO_FOLDER}",
        ),
    ],
)
def test_a_wrong_option_is_one_line(override: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("coding", [override])
    assert str(caught.value) == said


@pytest.mark.asyncio
async def test_a_shared_sandbox_ends_with_the_last_that_uses_it() -> None:
    need_bubblewrap()
    options = SandboxOptions(packages=(), disk_mb=9)
    one, other, unused = (shared_sandbox(options) for _ in range(3))
    session = await one.open()
    assert (await other.run(Python("print(1)"))).out == "1\n"
    running = asyncio.create_task(session.run(Python("import time\ntime.sleep(1)\nprint(2)")))
    await asyncio.sleep(0.3)
    for _ in range(2):
        await asyncio.to_thread(other.close)
        await asyncio.to_thread(unused.close)
    assert (await running).out == "2\n"
    assert (await other.run(Python("print(3)"))).out == "3\n"  # it shares again
    await asyncio.to_thread(one.close)
    assert (await other.run(Python("print(4)"))).out == "4\n" and not session.lost
    await asyncio.to_thread(other.close)
    assert session.lost
    assert (await one.run(Python("print(5)"))).out == "5\n"
    await asyncio.to_thread(one.close)


def test_doctor_says_whether_there_is_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "bubblewrap_problem", lambda: "bubblewrap is not ready: apt-get install bubblewrap")
    (check,) = (one for one in doctor.diagnose() if one.name == "sandbox")
    assert check.ok == (not doctor.wasi.missing())
    monkeypatch.setattr(doctor.wasi, "missing", lambda: "pip install")
    (check,) = (one for one in doctor.diagnose() if one.name == "sandbox")
    assert not check.ok and not check.required and "apt-get install bubblewrap" in check.line()


def test_a_machine_without_bubblewrap_is_told_what_to_install(tmp_path: Path) -> None:
    code = "from midflight.sandbox.choose import choose_sandbox\nchoose_sandbox('bubblewrap')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no sandbox for code that a model writes" in done.stderr
    assert "apt-get install bubblewrap" in done.stderr


def test_the_example_of_the_page_runs() -> None:
    need_bubblewrap()
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sandbox.md").read_text(), re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "{2: 3, 3: 2, 5: 1}\n\n"


def test_limits_are_above_nothing() -> None:
    with pytest.raises(ValueError, match="processes = 0 must be above 0"):
        Limits(processes=0)


def test_results_compare_by_value() -> None:
    assert SandboxResult(Outcome.OK) == SandboxResult(Outcome.OK) and SandboxResult(Outcome.OK).ok
