"""Programs that try to break out or to bring the machine down, each with how it has to end.

Each prints ESCAPED where it got what it must not get. `{secret}` is a file of the host, `{port}` a port that listens on
the host's loopback, `{name}` the abstract socket that listens there.
"""

from __future__ import annotations

from dataclasses import dataclass

from midflight.sandbox import Outcome
from midflight.sandbox.base import Limits

OK, ERROR = Outcome.OK, Outcome.ERROR
QUICK = Limits(wall_seconds=2.0)
SYSCALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@dataclass(frozen=True)
class Attack:
    """`expected`: the outcomes that may come of it; `shows`: what standard output or error has to hold."""

    name: str
    code: str
    expected: tuple[Outcome, ...]
    shows: str = ""
    limits: Limits = Limits(wall_seconds=15.0)


def refused(name: str, call: str, error: str = "EPERM") -> Attack:
    """A system call that must fail with `error`."""
    code = SYSCALL + (
        f"import errno\nresult = {call}\nassert result == -1, 'ESCAPED'\nprint(errno.errorcode[ctypes.get_errno()])"
    )
    return Attack(name, code, (OK,), error)


FILES = [
    Attack("host file", "print('ESCAPED', open({secret!r}).read())", (ERROR,), "FileNotFoundError"),
    Attack("password file", "print('ESCAPED', open('/etc/shadow').read())", (ERROR,), "FileNotFoundError"),
    Attack("home folders", "import os\nprint('ESCAPED', os.listdir('/root'), os.listdir('/home'))", (ERROR,)),
    Attack(
        "keys in any environment",
        "import glob\n"
        "for file in glob.glob('/proc/*/environ'):\n"
        "    try:\n        text = open(file).read()\n    except OSError:\n        continue\n"
        "    assert 'MIDFLIGHT_TEST_KEY' not in text, 'ESCAPED'\n"
        "print(sorted(glob.glob('/proc/[0-9]*')))",
        (OK,),
        "['/proc/2']",
    ),
    Attack("environment of process 1", "print('ESCAPED', open('/proc/1/environ').read())", (ERROR,)),
    Attack("memory of process 1", "open('/proc/1/mem', 'r+b').seek(0)\nprint('ESCAPED')", (ERROR,)),
    Attack("files of process 1", "import os\nprint('ESCAPED', os.listdir('/proc/1/fd'))", (ERROR,)),
    Attack("root of process 1", "import os\nprint('ESCAPED', os.listdir('/proc/1/root'))", (ERROR,)),
    Attack("write to /usr", "open('/usr/bin/x', 'w').write('ESCAPED')", (ERROR,)),
    Attack("write to /", "open('/x', 'w').write('ESCAPED')", (ERROR,)),
    Attack("write to /dev", "open('/dev/x', 'w').write('ESCAPED')", (ERROR,)),
    Attack("write to /opt", "open('/opt/midflight/inside/holder.py', 'w').write('ESCAPED')", (ERROR,)),
    Attack(
        "change numpy for the others",
        "import numpy\nopen(numpy.__file__, 'a').write('ESCAPED')",
        (ERROR,),
    ),
    Attack("write to /scratch", "open('/scratch/x', 'w').write('ESCAPED')", (ERROR,)),
    Attack("the kernel's settings", "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')", (ERROR,)),
    Attack("not the first to be killed", "open('/proc/self/oom_score_adj', 'w').write('-999')", (ERROR,), "Read-only"),
    Attack("sysrq", "open('/proc/sysrq-trigger', 'w').write('b')", (ERROR,)),
    Attack(
        "own memory map",
        "import os\nos.write(os.open('/proc/self/uid_map', os.O_WRONLY), b'0 0 1')\nprint('ESCAPED')",
        (ERROR,),
    ),
    Attack(
        "a link out of the workspace",
        "import os\nos.symlink({secret!r}, 'link')\nprint('ESCAPED', open('link').read())",
        (ERROR,),
        "FileNotFoundError",
    ),
    Attack("up and out", "print('ESCAPED', open('../' * 50 + {secret!r}).read())", (ERROR,), "FileNotFoundError"),
    Attack(
        "through an inherited descriptor",
        "import os\n"
        "for number in range(4, 1024):\n"
        "    try:\n        os.fstat(number)\n    except OSError:\n        continue\n"
        "    print('ESCAPED', os.readlink(f'/proc/self/fd/{number}'))\n"
        "print('none')",
        (OK,),
        "none",
    ),
    Attack("block devices", "import os\nos.mknod('disk', 0o60600, os.makedev(254, 0))\nprint('ESCAPED')", (ERROR,)),
]

NETWORK = [
    *(
        Attack(
            f"socket of family {family}",
            f"import socket\nsocket.socket({family}, socket.{kind})\nprint('ESCAPED')",
            (ERROR,),
            "PermissionError",
        )
        for family, kind in (
            ("socket.AF_INET", "SOCK_STREAM"),
            ("socket.AF_INET6", "SOCK_DGRAM"),
            ("socket.AF_NETLINK", "SOCK_RAW"),
            ("socket.AF_PACKET", "SOCK_RAW"),
            ("socket.AF_VSOCK", "SOCK_STREAM"),
            ("socket.AF_ALG", "SOCK_SEQPACKET"),
            ("31", "SOCK_RAW"),
        )
    ),
    Attack(
        "the host's loopback",
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('ESCAPED')",
        (ERROR,),
    ),
    Attack("names", "import socket\nprint('ESCAPED', socket.gethostbyname('example.org'))", (ERROR,)),
    Attack("a web page", "import urllib.request\nurllib.request.urlopen('http://1.1.1.1')\nprint('ESCAPED')", (ERROR,)),
    Attack(
        "an abstract socket of the host",
        "import socket\none = socket.socket(socket.AF_UNIX)\none.connect('\\0{name}')\nprint('ESCAPED')",
        (ERROR,),
        "ConnectionRefusedError",
    ),
    refused("socket by number, high bits set", "libc.syscall(41, ctypes.c_ulong(2**32 | 2), 1, 0)", "EACCES"),
]

BOMBS = [
    Attack(
        "fork bomb",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        (Outcome.WALL_LIMIT, Outcome.CPU_LIMIT),
        limits=QUICK,
    ),
    Attack(
        "fork until refused", "import os\nwhile os.fork() == 0 or True: pass", (Outcome.PROCESS_LIMIT,), limits=QUICK
    ),
    Attack(
        "shell fork bomb",
        "import subprocess\nsubprocess.run(['sh', '-c', 'f() {{ f | f & }}; f; wait; sleep 9'])",
        (OK, Outcome.WALL_LIMIT, Outcome.CPU_LIMIT),
        limits=QUICK,
    ),
    Attack(
        "thread bomb",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        (Outcome.PROCESS_LIMIT,),
    ),
    Attack("memory at once", "bytearray(2**34)", (Outcome.MEMORY_LIMIT,), "MemoryError"),
    Attack("memory in steps", "kept = []\nwhile True: kept.append(bytearray(2**24))", (Outcome.MEMORY_LIMIT,)),
    Attack("memory of a list", "kept = [0]\nwhile True: kept *= 2", (Outcome.MEMORY_LIMIT,)),
    Attack(
        "memory of many processes",
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n        kept = bytearray(b'x' * 2**27)\n        time.sleep(30)\n        os._exit(0)\n"
        "time.sleep(30)",
        (Outcome.MEMORY_LIMIT,),
    ),
    Attack(
        "shared memory",
        "import mmap\nkept = []\n"
        "while True:\n    one = mmap.mmap(-1, 2**26)\n    one.write(b'x' * 2**26)\n    kept.append(one)",
        (Outcome.MEMORY_LIMIT,),
    ),
    Attack(
        "memory of sockets",
        "import os, socket, time\nkept = []\nfor _ in range(3): os.fork()\n"
        "while True:\n"
        "    try:\n        kept.append(socket.socketpair())\n        kept[-1][0].setblocking(False)\n"
        "        while True: kept[-1][0].send(bytes(65536))\n"
        "    except BlockingIOError:\n        pass\n"
        "    except OSError:\n        time.sleep(9)",
        (Outcome.MEMORY_LIMIT,),
    ),
    refused("memory files", "libc.syscall(319, b'x', 0)"),
    Attack("infinite loop", "while True: pass", (Outcome.CPU_LIMIT,), limits=Limits(wall_seconds=15, cpu_seconds=1)),
    Attack(
        "processor time of many processes",
        "import os\nfor _ in range(4): os.fork()\nwhile True: pass",
        (Outcome.CPU_LIMIT,),
        limits=Limits(wall_seconds=15, cpu_seconds=1.5),
    ),
    Attack("sleep", "import time\ntime.sleep(60)", (Outcome.WALL_LIMIT,), limits=Limits(wall_seconds=0.5)),
    Attack(
        "slow pattern",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        (Outcome.CPU_LIMIT,),
        limits=Limits(cpu_seconds=1),
    ),
    Attack("huge power", "9 ** 9 ** 9 ** 9", (Outcome.CPU_LIMIT, Outcome.MEMORY_LIMIT), limits=Limits(cpu_seconds=1)),
    Attack("infinite output", "while True: print('x' * 1000)", (Outcome.OUTPUT_LIMIT,), "xxx"),
    Attack("infinite errors", "import sys\nwhile True: sys.stderr.write('y' * 1000)", (Outcome.OUTPUT_LIMIT,), "yyy"),
    Attack(
        "output of a child",
        "import subprocess\nsubprocess.run(['yes'])",
        (Outcome.OUTPUT_LIMIT,),
        "y\ny\n",
    ),
    Attack(
        "one large file",
        "with open('x', 'wb') as file:\n    while True: file.write(bytes(2**20))",
        (Outcome.FILE_LIMIT,),
    ),
    Attack(
        "large files",
        "for index in range(99):\n    open(f'/tmp/{index}', 'wb').write(bytes(2**24))",
        (Outcome.FILE_LIMIT,),
        "No space left",
    ),
    Attack(
        "many files", "for index in range(10**6): open(str(index), 'w').close()", (Outcome.FILE_LIMIT,), "No space left"
    ),
    Attack("deep folders", "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')", (Outcome.FILE_LIMIT,)),
    Attack(
        "many descriptors", "import os\nkept = []\nwhile True: kept.append(os.pipe())", (ERROR,), "Too many open files"
    ),
    Attack(
        "deep recursion",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        (Outcome.MEMORY_LIMIT, Outcome.KILLED),
    ),
    Attack("crash", "import ctypes\nctypes.string_at(0)", (Outcome.KILLED,)),
    Attack("abort", "import os\nos.abort()", (Outcome.KILLED,)),
]

KERNEL = [
    refused("ptrace", "libc.syscall(101, 16, 1, 0, 0)"),
    refused("read another's memory", "libc.syscall(310, 1, 0, 0, 0, 0, 0)"),
    refused("unshare", "libc.unshare(0x10000000)"),
    refused("clone a namespace", "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)"),
    refused("clone3", "libc.syscall(435, 0, 0)", "ENOSYS"),
    refused("setns", "libc.setns(0, 0)"),
    refused("mount", "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)"),
    refused("unmount", "libc.umount2(b'/proc', 2)"),
    refused("pivot_root", "libc.syscall(155, b'/', b'/')"),
    refused("chroot", "libc.chroot(b'/tmp')"),
    refused("io_uring", "libc.syscall(425, 8, 0)"),
    refused("bpf", "libc.syscall(321, 0, 0, 0)"),
    refused("kernel keys", "libc.syscall(250, 0, -3, 0)"),
    refused("userfaultfd", "libc.syscall(323, 0)"),
    refused("System V shared memory", "libc.shmget(0, 4096, 0o1600)"),
    refused("inotify", "libc.inotify_init()"),
    refused("set the clock", "libc.syscall(227, 0, 0)"),
    refused("reboot", "libc.reboot(0)"),
    refused("a call that no kernel has", "libc.syscall(4000)", "ENOSYS"),
    refused("become root", "libc.setuid(0)", "EINVAL"),
    Attack(
        "a call of 32 bits",
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('b814000000cd80c3'))\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(address)())",
        (Outcome.KILLED,),
    ),
    Attack(
        "setuid programs",
        "import os\nprint(os.stat('/usr/bin/su').st_mode & 0o4000 != 0)\n"
        "print(open('/proc/self/status').read().split('NoNewPrivs:')[1].split()[0])\n"
        "import subprocess\nprint(subprocess.run(['/usr/bin/su', '-c', 'id'], capture_output=True).returncode != 0)",
        (OK,),
        "1\nTrue",
    ),
    Attack(
        "no capability is left",
        "status = open('/proc/self/status').read()\n"
        "for line in status.splitlines():\n"
        "    assert not line.startswith('Cap') or line.split()[1].strip('0') == '', 'ESCAPED'\n"
        "print('none')",
        (OK,),
        "none",
    ),
    Attack(
        "raise a limit", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('ESCAPED')", (ERROR,)
    ),
    Attack(
        "lower the holder's limits",
        "import resource\nassert resource.prlimit(0, resource.RLIMIT_NOFILE)\n"
        "resource.prlimit(1, resource.RLIMIT_NOFILE, (30, 30))\nprint('ESCAPED')",
        (ERROR,),
        "PermissionError",
    ),
    *(
        Attack(
            f"have others wait: {name}",
            "import fcntl, os\nopen('a', 'w').close()\nfile = os.open('a', os.O_RDONLY)\n"
            f"fcntl.flock(file, fcntl.LOCK_EX)\nfcntl.fcntl(file, fcntl.{name}, fcntl.F_RDLCK)\nprint('ESCAPED')",
            (ERROR,),
            "PermissionError",
        )
        for name in ("F_SETLEASE", "F_NOTIFY")
    ),
    Attack("priority", "import os\nos.nice(-5)\nprint('ESCAPED')", (ERROR,)),
]

SIGNALS = [
    Attack(
        "kill the parent",
        "import os, signal\n"
        "for number in set(signal.Signals) - {signal.SIGCONT}: os.kill(os.getppid(), number)\nprint('alive')",
        (OK,),
        "alive",
    ),
    Attack("kill everything", "import os, signal\nos.kill(-1, signal.SIGKILL)", (ERROR,), "ProcessLookupError"),
    Attack("kill the group", "import os, signal\nos.killpg(0, signal.SIGKILL)", (Outcome.KILLED,)),
    Attack(
        "stop itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", (Outcome.WALL_LIMIT,), limits=QUICK
    ),
    Attack(
        "ignore every signal",
        "import signal, time\n"
        "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)\n"
        "time.sleep(60)",
        (Outcome.WALL_LIMIT,),
        limits=QUICK,
    ),
    Attack(
        "outlive the call",
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.5)\n        open('survived', 'w').close()\n        os._exit(0)\n"
        "    os._exit(0)\n"
        "print('left')",
        (OK,),
        "left",
    ),
    Attack("hold the output open", "import os, time\nif os.fork() == 0: time.sleep(60)\nprint('done')", (OK,), "done"),
    Attack(
        "flood of timers",
        "import signal\nsignal.signal(14, lambda *_: None)\nsignal.setitimer(0, 1e-6, 1e-6)\nwhile True: pass",
        (Outcome.CPU_LIMIT,),
        limits=Limits(cpu_seconds=1),
    ),
    Attack(
        "flood of clock readings",
        "import time\nwhile True: time.time_ns()",
        (Outcome.CPU_LIMIT,),
        limits=Limits(cpu_seconds=1),
    ),
]

TALK = [
    Attack(
        "terminal escapes",
        r"print('\x1b[2J\x1b]0;owned\x07\x9b31m\u202e')",
        (OK,),
        r"\x1b[2J\x1b]0;owned\x07\x9b31m\u202e",
    ),
    Attack(
        "type into a terminal",
        "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSTI, b'x')\nprint('ESCAPED')",
        (ERROR,),
    ),
    Attack("no terminal", "open('/dev/tty')\nprint('ESCAPED')", (ERROR,)),
    Attack(
        "forge the answer",
        "import os\nos.write(3, b'\\x00\\x00\\x00\\x02{{}}' + b'\\xff' * 50)\n1 / 0",
        (ERROR,),
        "ZeroDivisionError",
    ),
    Attack("garbage for an answer", "import os\nos.write(3, b'\\xff' * 10000)\nos._exit(0)", (OK,)),
    Attack(
        "wrong types in an answer",
        "import json, os\nforged = dict(number=[1], exception={{}}, problem=[], files=[1], tests={{}}, code='')\n"
        "data = json.dumps(forged).encode()\nos.write(3, len(data).to_bytes(4, 'big') + data)\nos._exit(1)",
        (ERROR,),
    ),
    Attack("no end of an answer", "import os\nwhile True: os.write(3, bytes(65536))", (Outcome.OUTPUT_LIMIT,)),
    Attack("an object in an answer", "import os\nos.write(3, b'\\0\\0\\0\\x40' + b'[' * 64)\nos._exit(3)", (ERROR,)),
]

ATTACKS = [*FILES, *NETWORK, *BOMBS, *KERNEL, *SIGNALS, *TALK]
