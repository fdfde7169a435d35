"""Sandboxes whose workspace is a folder of the host: how their processes end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from midflight.errors import InfrastructureError
from midflight.looping import run
from midflight.sandbox import Limits, ListFiles, Outcome, Python, Sandbox, WriteFile
from midflight.sandbox.folder import run_bounded
from midflight.sandbox.folder import session as implementation
from midflight.sandbox.unsafe import UnsafeSandbox
from midflight.sandbox.wasi import WasiSandbox
from tests.sandbox.processes import wait_until_gone
from tests.sandbox.ready import wasi_sandbox

sandbox = pytest.fixture(scope="module")(wasi_sandbox)


KILLED = """
import asyncio, os, signal
from midflight.sandbox.unsafe import UnsafeSandbox
session = asyncio.run(UnsafeSandbox().open())
print(session._root, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.asyncio
async def test_what_a_killed_agent_left_is_gone_when_the_next_sandbox_starts(sandbox: WasiSandbox) -> None:
    def killed() -> Path:
        done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == -signal.SIGKILL
        return Path(done.stdout.strip())

    left = killed()
    assert left.parent == Path(tempfile.gettempdir()) and (left / "workspace").is_dir()
    live = await UnsafeSandbox().open()
    assert not left.exists()
    left = killed()
    other = WasiSandbox()
    try:
        assert (await other.run(Python("6 * 7"))).out == "42\n"
        assert not left.exists()
    finally:
        other.close()
    assert (await live.run(WriteFile("a.txt", b"x"))).outcome == Outcome.OK  # a living one stays
    await live.close()


@pytest.mark.asyncio
async def test_no_sandbox_still_has_a_folder_a_clock_and_an_empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_TEST_KEY", "sesame")
    made = UnsafeSandbox(Limits(wall_seconds=5))
    session = await made.open()
    await session.run(WriteFile("a", b"b"))
    result = await session.run(
        Python("import os\nprint(open('a').read(), 'MIDFLIGHT_TEST_KEY' in os.environ, input())", "c\n")
    )
    assert result.out == "b False c\n" and result.ok
    late = await session.run(Python("import time\ntime.sleep(60)"), Limits(wall_seconds=0.5))
    assert late.outcome is Outcome.WALL_LIMIT
    failed = await session.run(Python("import sys\nsys.exit(2)"))
    assert (failed.outcome, failed.exit_code) == (Outcome.ERROR, 2)
    await session.close()
    assert sys.executable  # the agent's own interpreter ran it


BUSY = """
import asyncio, sys
from midflight.sandbox import Limits, Python
from midflight.sandbox import unsafe
from midflight.sandbox.wasi import sandbox as wasi
async def main():
    unsafe.GRACE_SECONDS = wasi.GRACE_SECONDS = 0.5
    kinds = {"wasi": wasi.WasiSandbox, "none": unsafe.UnsafeSandbox}
    session = await kinds[sys.argv[1]](Limits(wall_seconds=float(sys.argv[2]))).open()
    print(getattr(session, "_session", session)._root, flush=True)
    await session.run(Python("import time; open('started', 'w').close(); time.sleep(99)"))
asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "seconds"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 4)])
@pytest.mark.parametrize("kind", ["wasi", "none"])
def test_a_program_ends_without_its_agent(kind: str, how: signal.Signals, seconds: float, sandbox: WasiSandbox) -> None:
    """The agent is killed; or it hangs, so that nobody but the program itself keeps its time limit."""
    command = [sys.executable, "-c", BUSY, kind, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        root = Path(agent.stdout.readline().strip())
        end = time.monotonic() + 20
        while not (root / "workspace" / "started").exists() and time.monotonic() < end:
            time.sleep(0.02)
        agent.send_signal(how)
        try:
            assert (root / "workspace" / "started").exists() and wait_until_gone(str(root), 15) == []
        finally:
            agent.kill()
    assert asyncio.run(UnsafeSandbox().run(Python("1"))).ok and not root.exists()


@pytest.mark.asyncio
async def test_deep_folders_are_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: WasiSandbox
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = "import os\nfor _ in range(200):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w').close()"
    for place, ended in ((UnsafeSandbox(), Outcome.OK), (sandbox, Outcome.FILE_LIMIT)):
        session = await place.open()
        refused = await session.run(WriteFile("a/" * 100 + "x", b"1"))
        assert (refused.outcome, refused.problem) == (Outcome.ERROR, "a path of 101 parts; at most 100")
        assert (await session.run(WriteFile("a/" * 99 + "x", b"1"))).ok
        listed = await session.run(ListFiles())
        assert [file.path for file in listed.files] == ["a/" * 99 + "x"] and not listed.more_files
        assert [file.path for file in (await session.run(ListFiles("a/a"))).files] == ["a/" * 99 + "x"]
        assert (await session.run(Python(deep))).outcome is ended
        listed = await session.run(ListFiles())
        assert len(listed.files) == 1 and listed.more_files
        assert len(list(tmp_path.iterdir())) == 1
        await session.close()
        assert list(tmp_path.iterdir()) == []


def test_without_a_sandbox_nobody_waits_for_who_left_the_group() -> None:
    leaves = "import subprocess\nsubprocess.Popen(['sleep', '9'], start_new_session=True)\nprint('x' * 70_000)"

    async def asked() -> None:
        session = await UnsafeSandbox().open()
        result = await session.run(Python(leaves, "unread" * 2**20), Limits(wall_seconds=5))
        assert (result.outcome, result.out) == (Outcome.OK, "x" * 70_000 + "\n") and result.seconds < 5
        late = await session.run(Python(leaves + "\nwhile True: pass"), Limits(wall_seconds=1))
        assert late.outcome is Outcome.WALL_LIMIT and late.seconds < 4
        await session.close()

    asyncio.run(asked())
    run(asked())  # the loop of a run, which may be another


@pytest.mark.asyncio
async def test_without_a_sandbox_programs_are_what_they_are_in_one() -> None:
    place: Sandbox = UnsafeSandbox(Limits(wall_seconds=20))
    text = "ascii(input())" + " " * 200_000
    assert (await place.run(Python(text, "\ud800é\n"))).out == "\"'\\\\ud800\\\\xe9'\"\n"
    assert (await place.run(Python("{}['a']"))).exception == "KeyError"
    assert (await place.run(Python("'\ud800'"))).exception == "UnicodeEncodeError"
    ends = "import atexit, threading, time\n_ = atexit.register(print, 2)\n"
    ends += "threading.Thread(target=lambda: (time.sleep(0.3), print(1))).start()"
    assert (await place.run(Python(ends))).out == "1\n2\n"
    assert (await place.run(Python("print('x' * 99, end='')"), Limits(output_bytes=98))).out == "x" * 98


@pytest.mark.asyncio
async def test_a_host_without_room_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    session = await UnsafeSandbox().open()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(implementation, "remove_tree", full)
    with pytest.raises(InfrastructureError, match="cannot run a program: .*No space left"):
        await session.run(Python("1"))
    monkeypatch.setattr(implementation.shutil, "copy", full)
    with pytest.raises(InfrastructureError, match="no session of the sandbox none .unsafe.: .*No space left"):
        await UnsafeSandbox().open()
    await session.close()


@pytest.mark.asyncio
async def test_a_program_that_ends_between_two_looks_is_looked_at(tmp_path: Path) -> None:
    done = tmp_path / "done"
    ended = await run_bounded(("/bin/sh", "-c", "> done"), {}, tmp_path, b"", Limits(), lambda _: done.exists())
    assert (ended.cause, ended.status) == ("disk", None)
    ended = await run_bounded(("/bin/sh", "-c", "kill -9 $$"), {}, tmp_path, b"", Limits())
    assert (ended.cause, ended.status) == ("exit", -9)


@pytest.mark.asyncio
async def test_a_link_in_place_of_the_reply_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    session = await UnsafeSandbox().open()
    code = f"import os\nos.rmdir('../reply')\nos.symlink({str(tmp_path / 'kept')!r}, '../reply')"
    await session.run(Python(code))
    assert (await session.run(Python("6 * 7"))).out == "42\n"
    assert (tmp_path / "kept" / "file").read_text() == "x"
    await session.run(Python(code))
    await session.close()
    assert (tmp_path / "kept" / "file").read_text() == "x"
