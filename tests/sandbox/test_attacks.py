"""Each attack is contained, ends as said, and the session goes on: its next program runs in an empty house."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from midflight.sandbox import Outcome, Python
from midflight.sandbox.bubblewrap import BubblewrapSandbox
from tests.sandbox.attacks import ATTACKS, Attack

SECRET = "sesame-4711"
ABSTRACT = f"midflight-test-{os.getpid()}"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """What an attack would like to reach."""
    secret = tmp_path_factory.mktemp("host") / "secret.txt"
    secret.write_text(SECRET)
    with contextlib.ExitStack() as stack:
        loopback = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + ABSTRACT)
        abstract.listen()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("MIDFLIGHT_TEST_KEY", SECRET)
        yield {"{secret!r}": repr(str(secret)), "{port}": str(loopback.getsockname()[1]), "{name}": ABSTRACT}


@pytest.mark.asyncio
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
async def test_attack(attack: Attack, sandbox: BubblewrapSandbox, host: dict[str, object]) -> None:
    if "libc.syscall(" in attack.code and platform.machine() != "x86_64":
        pytest.skip("call numbers are those of x86-64")
    code = attack.code.replace("{{", "{").replace("}}", "}")
    for word, value in host.items():
        code = code.replace(word, str(value))
    session = await sandbox.open()
    try:
        result = await session.run(Python(code), attack.limits)
        text = result.out + result.err
        assert result.outcome in attack.expected, result
        assert "ESCAPED" not in result.out and SECRET not in text and attack.shows in text, result
        assert (result.problem == "") == (result.outcome is Outcome.OK)
        after = await session.run(Python("import os\nprint(6 * 7, os.listdir('/proc/')[-1].isdigit())"))
        if attack.name in ("many files", "large files", "one large file", "deep folders"):
            return  # the room stays taken, by its own doing
        assert after.out == "42 True\n", after
        processes = await session.run(Python("import os\nprint([one for one in os.listdir('/proc') if one.isdigit()])"))
        assert processes.out.count(",") == 0, processes
        listed = await session.run(Python("import os\nprint(os.path.exists('survived'))"))
        assert listed.out == "False\n"
    finally:
        await session.close()


def test_there_are_enough_of_them() -> None:
    assert len(ATTACKS) >= 40 and len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert os.getpid() != 1 and Path("/proc/self").exists()
