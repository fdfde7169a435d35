"""The system calls that Python 3.11 has no function for. Each raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(name: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def fork_into(namespaces: int) -> int:
    """fork(2) whose child is in new namespaces from its beginning: 0 in the child, its number in the parent.

    The process must have one thread, and Python's own hooks of a fork do not run.
    """
    number = 56 if platform.machine() == "x86_64" else 220  # 220 everywhere else, but on 32 bits
    child = int(_libc.syscall(number, ctypes.c_ulong(namespaces | signal.SIGCHLD), *_zeros(4)))
    if child < 0:
        raise OSError(ctypes.get_errno(), f"clone: {os.strerror(ctypes.get_errno())}")
    return child


def unshare(flags: int) -> None:
    """New namespaces for the calling process, which must have one thread."""
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    """mount(2)."""
    text = [None if one is None else one.encode() for one in (source, target, kind, options)]
    _checked(f"mount {target}", _libc.mount(text[0], text[1], text[2], ctypes.c_ulong(flags), ctypes.c_char_p(text[3])))


def set_dumpable(value: bool) -> None:
    """Whether others of this user may read /proc/PID/mem, environ and the like."""
    _prctl("dumpable", _PR_SET_DUMPABLE, int(value))


def drop_capabilities() -> None:
    """Give up every capability for good, also for programs that are executed later."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), *_zeros(3)) != 0:
            break  # the kernel has no more of them
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def confine(instructions: bytes) -> None:
    """Put this process and all it starts under a seccomp filter: `struct sock_filter`s, 8 bytes each."""

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    program = Filter(len(instructions) // 8, instructions)
    result = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), *_zeros(2))
    _checked("seccomp", result)


def _prctl(name: str, option: int, value: int) -> None:
    _checked(name, _libc.prctl(option, ctypes.c_ulong(value), *_zeros(3)))


def _zeros(count: int) -> list[ctypes.c_ulong]:
    return [ctypes.c_ulong(0)] * count
