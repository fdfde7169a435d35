"""Sessions: apart from each other, bounded and fair together, and nothing of them left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from midflight.errors import InfrastructureError
from midflight.sandbox import (
    Command,
    Limits,
    ListFiles,
    Outcome,
    Python,
    ReadFile,
    WriteFile,
)
from midflight.sandbox.bubblewrap import Box, BubblewrapSandbox
from midflight.sandbox.bubblewrap.inside import files, frames
from tests.sandbox.attacks import ATTACKS
from tests.sandbox.processes import children, host_processes, wait_until_gone
from tests.sandbox.ready import need_bubblewrap

ROOT = Path(__file__).resolve().parents[2]
NAP = 100_000 + os.getpid()
"""Seconds that a command of this run sleeps; by them its processes are found."""


@pytest.mark.asyncio
async def test_two_trajectories_share_nothing(sandbox: BubblewrapSandbox) -> None:
    one, other = await sandbox.open(), await sandbox.open()
    spread = Python(
        "import numpy, os, socket, subprocess, builtins\n"
        "for place in ('/workspace', '/tmp', '/dev/shm'): open(place + '/mark', 'w').write('1')\n"
        "numpy.pi = builtins.mark = 3\nos.environ['MARK'] = '1'\n"
        "taken = socket.socket(socket.AF_UNIX)\ntaken.bind('\\0mark')\ntaken.listen()\n"
        "subprocess.Popen(['sleep', '60'])\nimport time; time.sleep(1)"
    )
    look = Python(
        "import numpy, os, socket\n"
        "places = ('/workspace', '/tmp', '/dev/shm')\n"
        "print([os.listdir(place) for place in places], numpy.pi == 3, 'MARK' in os.environ)\n"
        "print([name for name in os.listdir('/proc') if name.isdigit()], 'mark' in vars(__builtins__))\n"
        "socket.socket(socket.AF_UNIX).bind('\\0mark')\nprint('free')"
    )
    spreading = asyncio.create_task(one.run(spread))
    await asyncio.sleep(0.4)
    seen = await other.run(look)
    assert (await spreading).ok and seen.out == "[[], [], []] False False\n['2'] False\nfree\n", seen
    again = await one.run(look)  # files and nothing else stay in a session
    assert "[['mark'], ['mark'], ['mark']] False False" in again.out and again.out.endswith("free\n"), again
    await one.close()
    await other.close()


@pytest.mark.asyncio
async def test_chance_differs_from_program_to_program(sandbox: BubblewrapSandbox) -> None:
    draw = Python("import random, numpy, uuid\nprint(random.random(), numpy.random.random(), uuid.uuid4())")
    drawn = [(await sandbox.run(draw)).out.split() for _ in range(3)]
    assert all(len(set(column)) == 3 for column in zip(*drawn, strict=True)), drawn


@pytest.mark.asyncio
async def test_a_closed_session_has_no_process_left(sandbox: BubblewrapSandbox) -> None:
    session = await sandbox.open()
    running = asyncio.create_task(session.run(Command(("sleep", f"{NAP}.25"))))
    while not host_processes(f"{NAP}.25"):
        await asyncio.sleep(0.01)
    await session.close()
    assert host_processes(f"{NAP}.25") == [] and session.lost
    with pytest.raises(InfrastructureError, match="the sandbox was closed during this call"):
        await running
    assert (await session.run(Python("1"))).outcome is Outcome.KILLED


@pytest.mark.asyncio
async def test_cancelling_a_call_ends_its_processes(sandbox: BubblewrapSandbox) -> None:
    running = asyncio.create_task(sandbox.run(Command(("sleep", f"{NAP}.5"))))
    while not host_processes(f"{NAP}.5"):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert wait_until_gone(f"{NAP}.5") == []


AGENT = """
import asyncio, sys
from midflight.sandbox import Command, Python
from midflight.sandbox.bubblewrap import BubblewrapSandbox
async def main():
    sandbox = BubblewrapSandbox()
    print((await sandbox.run(Python("print(6 * 7)"))).out, flush=True)
    if sys.argv[1] != "end":
        await sandbox.run(Command(("sleep", sys.argv[1])))
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_an_agent_that_is_gone_leaves_nothing(how: str, tmp_path: Path) -> None:
    need_bubblewrap()
    marker = f"{NAP}.75"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    before = set(os.listdir("/tmp"))
    command = [sys.executable, "-c", AGENT, marker if how == "killed" else "end"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as agent:
        assert agent.stdout is not None and agent.stdout.readline() == "42\n"
        boxes = [int(line) for line in children(agent.pid)]
        assert boxes
        if how == "killed":
            while not host_processes(marker):
                time.sleep(0.01)
            agent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 5
    while any(Path(f"/proc/{box}").exists() for box in boxes) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{box}").exists() for box in boxes)
    assert wait_until_gone(f"sleep\0{marker}") == []
    assert os.listdir(tmp_path) == []
    assert not [name for name in set(os.listdir("/tmp")) - before if "midflight" in name or "bwrap" in name]


@pytest.mark.asyncio
async def test_at_most_so_many_run_and_the_first_to_come_runs_first() -> None:
    need_bubblewrap()
    code = "import time\nbegan = time.monotonic()\ntime.sleep(0.3)\nprint(began, time.monotonic())"
    with BubblewrapSandbox(box=Box(preload=()), warm=1, running=2) as sandbox:
        results = await asyncio.gather(*(sandbox.run(Python(code)) for _ in range(6)))
    spans = [tuple(map(float, result.out.split())) for result in results]
    assert max(sum(began <= point < ended for began, ended in spans) for point, _ in spans) == 2
    pairs = [min(began for began, _ in spans[index : index + 2]) for index in (0, 2, 4)]
    assert pairs == sorted(pairs) and all(
        earlier[0] < later[0] for earlier, later in zip(spans, spans[2:], strict=False)
    )


@pytest.mark.asyncio
async def test_open_sessions_run_no_more_at_a_time() -> None:
    need_bubblewrap()
    code = "import time\nbegan = time.monotonic()\ntime.sleep(0.3)\nprint(began, time.monotonic())"
    with BubblewrapSandbox(box=Box(preload=()), warm=1, running=1) as sandbox:
        sessions = [await sandbox.open() for _ in range(3)]
        results = await asyncio.gather(*(session.run(Python(code)) for session in sessions))
    spans = sorted(tuple(map(float, result.out.split())) for result in results)
    assert all(earlier[1] <= later[0] for earlier, later in zip(spans, spans[1:], strict=False))


@pytest.mark.asyncio
async def test_waiting_for_others_is_not_its_time() -> None:
    need_bubblewrap()
    limits = Limits(wall_seconds=0.6)
    with BubblewrapSandbox(limits, Box(preload=()), warm=1, running=1) as sandbox:
        results = await asyncio.gather(*(sandbox.run(Python("import time\ntime.sleep(0.3)")) for _ in range(4)))
    assert [result.outcome for result in results] == [Outcome.OK] * 4


@pytest.mark.asyncio
async def test_files_do_not_wait_for_programs() -> None:
    need_bubblewrap()
    with BubblewrapSandbox(box=Box(preload=()), warm=2, running=1) as sandbox:
        busy, other = await sandbox.open(), await sandbox.open()
        running = asyncio.create_task(busy.run(Python("import time\ntime.sleep(30)")))
        await asyncio.sleep(0.3)
        assert (await asyncio.wait_for(other.run(WriteFile("a", b"text")), 10)).ok
        assert (await asyncio.wait_for(other.run(ReadFile("a")), 10)).data == b"text"
        assert (await asyncio.wait_for(sandbox.run(ListFiles()), 10)).files == ()
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        core = sandbox._core
        while not busy.lost:
            await asyncio.sleep(0.01)
        assert core is not None and len(core._open) == 2
        for session in (busy, other):
            await session.close()
        assert not core._open


@pytest.mark.asyncio
async def test_hundreds_of_sessions_may_be_asked_for_at_once() -> None:
    need_bubblewrap()
    with BubblewrapSandbox(box=Box(preload=()), warm=2) as sandbox:
        opened = await asyncio.gather(*(sandbox.open() for _ in range(350)))
        assert (await opened[-1].run(Python("6 * 7"))).out == "42\n"


@pytest.mark.asyncio
async def test_where_no_file_can_be_opened_no_session_can_be_had() -> None:
    need_bubblewrap()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with BubblewrapSandbox(box=Box(preload=()), warm=0) as sandbox:
        await sandbox.ready()  # its thread is there
        for what in ("the bubblewrap sandbox", "a bubblewrap session"):
            held: list[int] = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 9, limits[1]))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        held.append(os.dup(0))
                (problem,) = await asyncio.gather(sandbox.open(), return_exceptions=True)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in held:
                    os.close(descriptor)
            assert isinstance(problem, InfrastructureError)
            assert str(problem).startswith(f"{what} does not start: ") and "Too many open files" in str(problem)
            assert (await sandbox.run(Python("6 * 7"))).out == "42\n"  # and the outer box


@pytest.mark.asyncio
async def test_sessions_that_ended_with_the_outer_box_are_not_handed_out() -> None:
    need_bubblewrap()
    before = host_processes("bwrap")
    with BubblewrapSandbox(box=Box(preload=()), warm=3) as sandbox:
        await sandbox.ready()
        session, other = await sandbox.open(), await sandbox.open()
        running = asyncio.create_task(other.run(Python("import time\ntime.sleep(30)")))
        await asyncio.sleep(0.3)
        ours = set(map(int, children(os.getpid()))) & set(host_processes("bwrap"))
        os.kill(min(ours.difference(before)), signal.SIGKILL)
        for ended in (running, session.run(Python("1"))):
            with pytest.raises(InfrastructureError, match="the bubblewrap sandbox ended, and every session with it"):
                await ended
        results = await asyncio.gather(*(sandbox.run(Python(f"{number} + 1")) for number in range(6)))
        assert [result.out for result in results] == [f"{number + 1}\n" for number in range(6)]


def test_one_sandbox_serves_many_event_loops_and_starts_again_after_close() -> None:
    need_bubblewrap()
    sandbox = BubblewrapSandbox(box=Box(preload=()), warm=1)
    outs: list[str] = []

    def ask() -> None:
        outs.append(asyncio.run(sandbox.run(Python("print(1)"))).out)

    ask()
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    old = asyncio.run(sandbox.open())
    sandbox.close()
    sandbox.close()
    ask()
    assert asyncio.run(old.run(Python("1"))).outcome is Outcome.KILLED
    asyncio.run(old.close())
    sandbox.close()
    assert outs == ["1\n"] * 5


@pytest.mark.asyncio
async def test_closing_ends_what_runs_and_what_waits() -> None:
    need_bubblewrap()
    sandbox = BubblewrapSandbox(box=Box(preload=()), warm=1, running=1)
    asked = [asyncio.create_task(sandbox.run(Command(("sleep", f"{NAP}.125")))) for _ in range(2)]
    while not host_processes(f"{NAP}.125"):
        await asyncio.sleep(0.01)
    await asyncio.to_thread(sandbox.close)
    ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
    assert [type(one) for one in ended] == [InfrastructureError] * 2  # no program is to blame
    assert host_processes(f"{NAP}.125") == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("busy", "limits", "outcome"),
    [
        ("x = bytearray(150 * 2**20)", Limits(60, memory_bytes=64 * 2**20), Outcome.MEMORY_LIMIT),
        ("while True: pass", Limits(60, cpu_seconds=1), Outcome.CPU_LIMIT),
        ("time.sleep(60)", Limits(1), Outcome.WALL_LIMIT),
        ("os.write(3, answer)\ntime.sleep(60)", Limits(60), Outcome.OK),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)
async def test_an_interpreter_that_does_not_read_its_next_program_is_held_to_the_limits(
    sandbox: BubblewrapSandbox, busy: str, limits: Limits, outcome: Outcome
) -> None:
    forked = "for _ in range(4):\n    if os.fork() == 0:\n        x = bytearray(40 * 2**20)\n        time.sleep(60)\n"
    forged = (
        "import json, os, time\nbody = json.dumps(dict(code=0, files=[])).encode()\n"
        "answer = len(body).to_bytes(4, 'big') + body\nos.write(3, answer)\ntime.sleep(0.3)\n"
        f"{forked if 'bytearray' in busy else ''}{busy}\ntime.sleep(60)"
    )
    session = await sandbox.open()
    assert (await session.run(Python(forged, keep_state=True))).state_kept
    long = await session.run(Python("#" + "x" * 2**20, keep_state=True), limits)
    assert (long.outcome, long.state_kept) == (outcome, False) and long.seconds < 15
    assert (await session.run(Python("2 * 3", keep_state=True))).out == "6\n"
    await session.close()


@pytest.mark.asyncio
async def test_descriptors_do_not_grow(sandbox: BubblewrapSandbox) -> None:
    for _ in range(2):
        await asyncio.gather(*(sandbox.run(Python("1")) for _ in range(8)))
        await sandbox.ready()
        await asyncio.sleep(0.2)
        count = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await asyncio.gather(*(sandbox.run(Python("1")) for _ in range(8)))
    await sandbox.ready()
    end = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > count and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert len(os.listdir("/proc/self/fd")) <= count


@pytest.mark.asyncio
async def test_files_stay_in_the_workspace(sandbox: BubblewrapSandbox) -> None:
    session = await sandbox.open()
    assert (await session.run(WriteFile("a/b/c.txt", b"one\n"))).ok
    assert (await session.run(WriteFile("/workspace/a/b/c.txt", "zwei €".encode()))).ok
    assert (await session.run(ReadFile("a/./b//c.txt"))).data == "zwei €".encode()
    assert (await session.run(Python("print(open('a/b/c.txt').read())"))).out == "zwei €\n"
    links = "import os\nos.symlink('/etc/passwd', 'l')\nos.symlink('/', 'a/root')\nos.mkfifo('pipe')"
    assert (await session.run(Python(links))).ok
    refused = {
        WriteFile("../x", b""): "outside the workspace",
        WriteFile("/etc/x", b""): "outside the workspace",
        WriteFile("a/../../x", b""): "outside the workspace",
        WriteFile("/workspace/../tmp/x", b""): "outside the workspace",
        ReadFile("l"): "l: a symbolic link",
        WriteFile("l", b""): "l: a symbolic link",
        ReadFile("a/root/usr/bin/env"): "a/root: a symbolic link",
        WriteFile("a/root/workspace/x", b""): "a/root: a symbolic link",
        ReadFile("a"): "a: a folder",
        ReadFile("pipe"): "pipe: not a regular file",
        ReadFile("none"): "none: No such file",
        WriteFile("a", b""): "a: Is a directory",
        WriteFile("a/b/c.txt/d", b""): "a/b/c.txt: Not a directory",
        ReadFile("a/b/c.txt", most=3): "8 bytes, more than 3",
        ReadFile("x\0y"): "embedded null",
        ListFiles("../"): "outside the workspace",
    }
    for request, problem in refused.items():
        result = await session.run(request)
        assert result.outcome is Outcome.ERROR and problem in result.problem, (request, result)
    listed = await session.run(ListFiles())
    assert [(file.path, file.size, file.kind) for file in listed.files] == [
        ("l", 11, "link"),
        ("pipe", 0, "other"),
        ("a/root", 1, "link"),
        ("a/b/c.txt", 8, "file"),
    ]
    assert [file.path for file in (await session.run(ListFiles("a/b"))).files] == ["a/b/c.txt"]
    assert (await session.run(WriteFile("big", bytes(2**20)))).ok
    full = await session.run(WriteFile("big", bytes(2 * 2**20)), Limits(file_bytes=2**20))
    assert full.outcome is Outcome.FILE_LIMIT
    await session.close()


def test_a_path_that_changes_meanwhile_does_not_lead_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder, text in ((root / "d", "inside"), (outside, "outside")):
        (folder / "e").mkdir(parents=True)
        (folder / "e" / "f").write_text(text)
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            (root / "d").rename(root / "x")
            (root / "d").symlink_to(outside)
            time.sleep(0)  # let the reader in
            (root / "d").unlink()
            (root / "x").rename(root / "d")

    swapping = threading.Thread(target=swap)
    swapping.start()
    request = {"kind": "read", "path": "d/e/f", "most": 99, "start": None}
    seen: set[str] = set()
    end = time.monotonic() + 20
    while not {"inside", "d: a symbolic link, which is not followed"} <= seen and time.monotonic() < end:
        answer = files.answer(request, str(root))
        seen.add(frames.to_bytes(answer["data"]).decode() if "data" in answer else answer["problem"])
    ended.set()
    swapping.join()
    missed = {"d: No such file or directory", "d: Not a directory"}
    assert seen - missed == {"inside", "d: a symbolic link, which is not followed"}


AS_NOBODY = """
import asyncio, json, os
from midflight.sandbox import Limits, Python
from midflight.sandbox.bubblewrap import BubblewrapSandbox
from tests.sandbox.attacks import ATTACKS

async def main():
    with BubblewrapSandbox(Limits(wall_seconds=20)) as sandbox:
        works = await sandbox.run(Python("import numpy, sympy\\nprint(sympy.sqrt(8), numpy.arange(3).sum())"))
        runs = (sandbox.run(Python(one.code.replace("{{", "{").replace("}}", "}")), one.limits) for one in ATTACKS)
        ended = await asyncio.gather(*runs)
        after = await sandbox.run(Python("print(6 * 7)"))
    print(json.dumps([os.getuid(), works.out, after.out, [[one.outcome, one.out + one.err] for one in ended]]))

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="everything ran as an ordinary user already")
def test_every_attack_on_an_agent_that_is_an_ordinary_user(tmp_path: Path) -> None:
    need_bubblewrap()
    tmp_path.chmod(0o755)
    (tmp_path / "script.py").write_text(AS_NOBODY)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    trees = [sys.base_prefix, sys.prefix, str(ROOT), str(tmp_path)]
    trees += [path for path in packages if not any(Path(path).is_relative_to(tree) for tree in trees)]
    command = [sys.executable, str(Path(__file__).with_name("as_nobody.py")), json.dumps(sorted(set(trees)))]
    command += [os.pathsep.join([str(ROOT), *packages]), str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    user, works, after, ended = json.loads(done.stdout)
    assert (user, works, after) == (65534, "2*sqrt(2) 3\n", "42\n")
    for attack, (outcome, text) in zip(ATTACKS, ended, strict=True):
        assert outcome in attack.expected or "{" in attack.code, (attack, outcome, text)
        assert "ESCAPED" not in text.replace("'ESCAPED'", ""), (attack, text)
