"""Ordinary programs do what they do anywhere, and each runs exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from midflight.sandbox import Command, Limits, ListFiles, Outcome, Python, ReadFile, RunTests, WriteFile
from midflight.sandbox.base import MOST_OUTPUT, MOST_READ, Request, printable
from midflight.sandbox.bubblewrap import BubblewrapSandbox
from midflight.sandbox.bubblewrap.answers import result as result_of
from midflight.sandbox.bubblewrap.inside import frames


@dataclass(frozen=True)
class Program:
    name: str
    code: str
    out: str
    stdin: str = ""
    exit_code: int = 0
    err: str = ""


PROGRAMS = [
    Program("recursion", "def f(n): return 1 if n < 2 else n * f(n - 1)\nf(20)", "2432902008176640000\n"),
    Program("an import used in a function", "import math\ndef f(): return math.sqrt(9)\nprint(f())", "3.0\n"),
    Program("an import in a function", "def f():\n    import json\n    return json.dumps([1])\nf()", "'[1]'\n"),
    Program("a helper in a comprehension", "def g(x): return x * x\n[g(x) for x in range(4)]", "[0, 1, 4, 9]\n"),
    Program(
        "a generator and a class",
        "class A:\n    b = 2\n    def c(self): return sum(A.b for _ in 'ab')\nA().c()",
        "4\n",
    ),
    Program("sys.exit", "import sys\nprint('a')\nsys.exit(3)\nprint('b')", "a\n", exit_code=3),
    Program("sys.exit with words", "import sys\nsys.exit('no good')", "", exit_code=1, err="no good\n"),
    Program("sys.exit with nothing", "import sys\nsys.exit()", ""),
    Program("exit", "exit(4)", "", exit_code=4),
    Program("raise SystemExit in a function", "def f(): raise SystemExit(5)\nf()", "", exit_code=5),
    Program("input", "a = input()\nb = input('b? ')\nprint(int(a) + int(b))", "b? 7\n", stdin="3\n4\n"),
    Program("all of stdin", "import sys\nprint(sys.stdin.read().split())", "['ä', 'b']\n", stdin="ä\nb"),
    Program(
        "threads",
        "from threading import *\nl = []\nt = Thread(target=lambda: l.append(1))\nt.start()\nt.join()\nl",
        "[1]\n",
    ),
    Program(
        "a thread that is not waited for",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()\n"
        "print('end')",
        "end\nlate\n",
    ),
    Program(
        "a pool of threads",
        "from concurrent.futures import *\nlist(ThreadPoolExecutor(4).map(abs, [-1, 2]))",
        "[1, 2]\n",
    ),
    Program(
        "processes",
        "from multiprocessing import Pool\ndef f(x): return x + 1\nwith Pool(2) as p: print(p.map(f, [1, 2]))",
        "[2, 3]\n",
    ),
    Program(
        "a command",
        "import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)",
        "hi\n\n",
    ),
    Program(
        "asyncio",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 8\nasyncio.run(f())",
        "8\n",
    ),
    Program("unicode", "x = 'ß→😀'\nprint(x, len(x))", "ß→😀 3\n"),
    Program("unicode names", "größe = 3\ngröße", "3\n"),
    Program("half a character", "print('\\ud800')", "\\ud800\n"),
    Program("main", "if __name__ == '__main__':\n    print('main')", "main\n"),
    Program("atexit", "import atexit\natexit.register(print, 'bye')\nprint('hi')", "hi\nbye\n"),
    Program(
        "a future",
        "from __future__ import annotations\ndef f(a: nothing): pass\nf.__annotations__",
        "{'a': 'nothing'}\n",
    ),
    Program("only a value", "6 * 7", "42\n"),
    Program("the value of a last expression alone", "1\n2\nx = 3\n'four'", "'four'\n"),
    Program("None is not shown", "print(1)", "1\n"),
    Program("a last statement that is none", "x = 1", ""),
    Program("nothing", "", ""),
    Program("a comment", "# nothing", ""),
    Program("pickling", "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A())).__class__.__name__", "'A'\n"),
    Program("its source", "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))", "def f(): return 1\n\n"),
    Program("numpy", "import numpy as np\nnp.linalg.solve([[2, 0], [0, 4]], [1, 1])", "array([0.5 , 0.25])\n"),
    Program(
        "sympy",
        "from sympy import *\nx = Symbol('x')\nprint(solve(x**2 - 2), integrate(cos(x), x))",
        "[-sqrt(2), sqrt(2)] sin(x)\n",
    ),
    Program("files", "open('a', 'w').write('b')\nimport os\nos.getcwd(), os.listdir()", "('/workspace', ['a'])\n"),
    Program("a temporary folder", "import tempfile\nwith tempfile.TemporaryDirectory() as d: print(d[:5])", "/tmp/\n"),
    Program("a module of the workspace", "open('m.py', 'w').write('v = 5')\nimport m\nm.v", "5\n"),
    Program(
        "the environment",
        "import os\nos.environ['HOME'], 'PATH' in os.environ, os.getenv('USER')",
        "('/workspace', True, None)\n",
    ),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name.replace(" ", "-"))
async def test_program(program: Program, sandbox: BubblewrapSandbox) -> None:
    result = await sandbox.run(Python(program.code, program.stdin))
    assert (result.out, result.err, result.exit_code) == (program.out, program.err, program.exit_code), result
    assert result.outcome is (Outcome.OK if program.exit_code == 0 else Outcome.ERROR)


@pytest.mark.asyncio
async def test_each_program_runs_exactly_once(sandbox: BubblewrapSandbox) -> None:
    session = await sandbox.open()
    add = "open('count', 'a').write('x')"
    for index, code in enumerate((add, f"{add}\nprint(1)", f"{add}\n1 / 0", f"{add}\nimport sys\nsys.exit(1)")):
        await session.run(Python(code, keep_state=index % 2 == 1))
        assert (await session.run(ReadFile("count"))).data == b"x" * (index + 1)
    await session.close()


@pytest.mark.asyncio
async def test_an_error_is_told_as_python_tells_it(sandbox: BubblewrapSandbox) -> None:
    result = await sandbox.run(Python("def f():\n    return {}['ä']\nf()"))
    assert (result.exception, result.problem) == ("KeyError", "exit code 1")
    assert result.err.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<program>", line 3, in <module>',
        "    f()",
        '  File "<program>", line 2, in f',
        "    return {}['ä']",
        "           ~~^^^^^",
        "KeyError: 'ä'",
    ]
    result = await sandbox.run(Python("x = = 1"))
    assert result.exception == "SyntaxError" and result.err.startswith('  File "<program>", line 1\n    x = = 1\n')
    result = await sandbox.run(Python("input()"))
    assert result.exception == "EOFError"


@pytest.mark.asyncio
async def test_what_was_written_before_the_end_is_kept(sandbox: BubblewrapSandbox) -> None:
    code = "print('first')\nimport time\ntime.sleep(60)"
    result = await sandbox.run(Python(code), Limits(wall_seconds=0.5))
    assert (result.outcome, result.out, result.exit_code) == (Outcome.WALL_LIMIT, "first\n", None)
    assert result.problem == "killed after 0.5 s" and 0.5 <= result.seconds < 2


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "outcome"), [(5000, Outcome.OK), (5001, Outcome.OUTPUT_LIMIT)])
async def test_output_has_a_limit_to_the_byte(sandbox: BubblewrapSandbox, size: int, outcome: Outcome) -> None:
    code = f"import os\nwritten = os.write(1, b'x' * {size})"
    result = await sandbox.run(Python(code), Limits(output_bytes=5000))
    assert (result.outcome, result.out) == (outcome, "x" * 5000)


@pytest.mark.asyncio
async def test_state_is_kept_within_a_session_when_asked(sandbox: BubblewrapSandbox) -> None:
    session, other = await sandbox.open(), await sandbox.open()

    async def out(code: str, **more: object) -> str:
        return (await session.run(Python(code, keep_state=True, **more))).out  # type: ignore[arg-type]

    assert await out("import math\nx = 3\ndef f(): return x + 1") == ""
    assert await out("x += 1\nf()") == "5\n"
    assert await out("1 / 0\nx = 9") == ""
    assert await out("x, input()", stdin="ü\n") == "(4, 'ü')\n"
    assert await out("import sys\nsys.exit(2)") == ""
    assert await out("_, math.floor(x)") == "((4, 'ü'), 4)\n"
    assert (await session.run(Python("x"))).exception == "NameError"  # without keep_state: a fresh interpreter
    assert (await other.run(Python("x", keep_state=True))).exception == "NameError"
    assert (await session.run(Command(("sh", "-c", "sleep 60 & echo on")))).state_kept
    assert await out("x") == "4\n"
    late = await session.run(Python("while True: pass", keep_state=True), Limits(wall_seconds=0.4))
    assert late.outcome is Outcome.WALL_LIMIT and not late.state_kept
    gone = await session.run(Python("x", keep_state=True))
    assert gone.exception == "NameError" and gone.state_kept
    await session.close()
    await other.close()


@pytest.mark.asyncio
async def test_what_kept_state_started_does_not_run_between_calls(sandbox: BubblewrapSandbox) -> None:
    session = await sandbox.open()
    start = (
        "import threading, time, subprocess\nticks = []\n"
        "def tick():\n    while True:\n        ticks.append(1)\n        time.sleep(0.01)\n"
        "threading.Thread(target=tick, daemon=True).start()\n"
        "child = subprocess.Popen(['sleep', '60'])\ntime.sleep(0.1)\nlen(ticks)"
    )
    first = int((await session.run(Python(start, keep_state=True))).out)
    await session.run(Command(("sleep", "1.5")))
    seen = await session.run(Python("print(len(ticks), child.wait())", keep_state=True))
    ticks, child = map(int, seen.out.split())
    assert first >= 2 and ticks - first < 75 and child == -9
    await session.close()


@pytest.mark.asyncio
async def test_figures_become_files(sandbox: BubblewrapSandbox) -> None:
    pytest.importorskip("matplotlib")
    session = await sandbox.open()
    code = "from matplotlib import pyplot as plt\nplt.plot([1, 2])\nplt.figure()\nplt.plot([2, 1]);"
    saved = [(await session.run(Python(code, figures=True))).files for _ in range(2)]
    assert [[file.path for file in files] for files in saved] == [
        ["figure-1.png", "figure-2.png"],
        ["figure-3.png", "figure-4.png"],
    ]
    assert (await session.run(ReadFile("figure-1.png"))).data.startswith(b"\x89PNG")
    assert len((await session.run(ListFiles())).files) == 4
    for end, kept in (("sys.exit()", 1), ("sys.exit(0)", 1), ("sys.exit(3)", 0), ("sys.exit('no')", 0), ("1 / 0", 0)):
        one = f"import sys\nfrom matplotlib import pyplot as plt\nplt.plot([1])\n{end}"
        assert len((await session.run(Python(one, figures=True))).files) == kept, end
    drawn = [await session.run(Python(code, keep_state=True, figures=True)) for code in (one, "plt.figure();", "1;")]
    assert [len(result.files) for result in drawn] == [0, 2, 0]  # each is saved once
    await session.close()


@pytest.mark.asyncio
async def test_a_command_with_input(sandbox: BubblewrapSandbox) -> None:
    result = await sandbox.run(Command(("sh", "-c", "cat; echo err >&2; exit 7"), "in\n"))
    assert (result.out, result.err, result.exit_code, result.outcome) == ("in\n", "err\n", 7, Outcome.ERROR)
    missing = await sandbox.run(Command(("no-such-command",)))
    assert missing.exit_code == 127 and missing.err == "no-such-command: No such file or directory\n"
    python = await sandbox.run(Command(("python", "-c", "import sys, numpy; print(sys.executable, numpy.e)")))
    assert python.out == "/opt/bin/python 2.718281828459045\n"


@pytest.mark.asyncio
async def test_tests_are_run_and_told_apart(sandbox: BubblewrapSandbox) -> None:
    session = await sandbox.open()
    tests = (
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'because'\n"
        "@pytest.mark.skip(reason='later')\ndef test_later(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError('gone')\n"
        "def test_set_up(broken): pass\n"
        "@pytest.mark.parametrize('x', [1, 2])\ndef test_each(x): assert x == 1\n"
    )
    await session.run(WriteFile("test_a.py", tests.encode()))
    result = await session.run(RunTests())
    assert result.exit_code == 1 and [(test.name.partition("::")[2], test.outcome) for test in result.tests] == [
        ("test_good", "passed"),
        ("test_bad", "failed"),
        ("test_later", "skipped"),
        ("test_set_up", "error"),
        ("test_each[1]", "passed"),
        ("test_each[2]", "failed"),
    ]
    assert result.test_counts == {"passed": 2, "failed": 2, "skipped": 1, "error": 1}
    assert "AssertionError: because" in result.tests[1].message and result.tests[2].message == "Skipped: later"
    assert "OSError: gone" in result.tests[3].message
    one = await session.run(RunTests(("test_a.py::test_good",)))
    assert one.ok and [test.outcome for test in one.tests] == ["passed"]
    await session.run(WriteFile("test_b.py", b"import nothing_such\n"))
    broken = await session.run(RunTests(("test_b.py",)))
    assert [(test.name, test.outcome) for test in broken.tests] == [("test_b.py", "error")]
    assert (await session.run(RunTests(("none.py",)))).exit_code == 4
    await session.close()


def test_text_of_a_program_cannot_speak_to_a_terminal() -> None:
    assert printable(b"a\tb\r\nc\n") == "a\tb\nc\n"
    assert printable(b"\x1b[31m\x07\x00\r\x7f") == "\\x1b[31m\\x07\\x00\\r\\x7f"
    assert printable("\u202e\u2028\x9b ä €".encode() + b"\xff") == "\\u202e\\u2028\\x9b ä € \ufffd".replace("€ ", "€")


@pytest.mark.asyncio
async def test_any_text_goes_in_and_comes_out(sandbox: BubblewrapSandbox) -> None:
    session = await sandbox.open()
    given = "\ud800é\udc80\n"
    for keep in (False, True):
        result = await session.run(Python("ascii(input())", given, keep_state=keep))
        assert result.out == "\"'\\\\ud800\\\\xe9\\\\udc80'\"\n", result
    assert (await session.run(Command(("wc", "-c"), given))).out == "9\n"
    for words, said in (
        (
            ("echo", "\ud800"),
            "echo: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed\n",
        ),
        (("echo", "a\0b"), "echo: embedded null byte\n"),
    ):
        result = await session.run(Command(words))
        assert (result.exit_code, result.err) == (127, said)
    await session.run(WriteFile("test_a.py", b"def test_a(): assert False, '\\ud800'"))
    (test,) = (await session.run(RunTests())).tests
    assert "AssertionError: \\ud800" in test.message
    forged = (
        "import json, os\nbody = json.dumps({}).encode()\nos.write(3, len(body).to_bytes(4, 'big') + body)\nos._exit(1)"
    )
    for key, told in (("problem", ("exit code 1", "")), ("exception", ("exit code 1", "\\ud800"))):
        result = await session.run(Python(forged.replace("{}", repr({key: "\ud800"}).replace("\ud800", "\\ud800"))))
        assert (result.problem, result.exception) == told
    await session.close()


@pytest.mark.parametrize("request_", [Python("", keep_state=True), Python(""), Command(("a",)), RunTests()])
def test_a_forged_answer_says_no_more_than_there_is_to_say(request_: Request) -> None:
    row = {"path": "p" * 40_000, "bytes": 1, "kind": "file"}
    test = {"name": "n", "outcome": "failed", "message": "m" * 2**17}
    for forged in (
        {"problem": "A" * 4_000_000, "data": frames.to_text(b"b" * 3_000_000), "more": True},
        {"problem": "A", "data": frames.to_text(b"b"), "more": True},
        {"files": [row, row]},
        {"exception": "E" * 70_000},
        {"tests": [test] * 9},
    ):
        reply = frames.to_text(frames.pack({"code": 3, **forged}))
        answer = {
            "cause": "exit",
            "status": 0,
            "out": "",
            "err": "",
            "reply": reply,
            "seconds": 1.0,
            "state_kept": True,
        }
        told = result_of(request_, answer, Limits())
        most = 2 * 2**17 if isinstance(request_, RunTests) else 0
        assert len(repr(told)) < most + 1000 and told.problem in ("", "exit code 3", "exit code 1")
        assert (told.data, told.more_files, told.files, told.exception) == (b"", False, (), "")


@pytest.mark.asyncio
async def test_an_answer_has_room_for_all_it_may_hold(sandbox: BubblewrapSandbox) -> None:
    session = await sandbox.open()
    wide = Limits(wall_seconds=30, output_bytes=MOST_OUTPUT, file_bytes=2**26)
    code = f"import os\nfor stream in (1, 2):\n    assert os.write(stream, b'x' * {MOST_OUTPUT}) == {MOST_OUTPUT}"
    result = await session.run(Python(code), wide)
    assert result.outcome is Outcome.OK and len(result.out) == len(result.err) == MOST_OUTPUT
    large = await session.run(WriteFile("a", bytes(2**26)), wide)
    assert large.outcome is Outcome.ERROR and large.problem.startswith("a request too large: ")
    write = f"_ = open('a', 'wb').write(b'x' * {MOST_READ})"
    assert (await session.run(Python(write), wide)).ok
    assert len((await session.run(ReadFile("a", most=2**40), wide)).data) == MOST_READ
    assert (await session.run(Python("_ = open('a', 'ab').write(b'yz')"), wide)).ok
    assert (
        f"{MOST_READ + 2} bytes, more than {MOST_READ}" in (await session.run(ReadFile("a", most=2**40), wide)).problem
    )
    assert (await session.run(ReadFile("a", 9, start=MOST_READ - 1))).data == b"xyz"
    assert (await session.run(ReadFile("a", 2, start=MOST_READ - 1))).data == b"xy"
    await session.close()
    with pytest.raises(ValueError, match="output_bytes = 16777217 must be at most 16777216"):
        Limits(output_bytes=MOST_OUTPUT + 1)
