"""Which Python and which packages a program finds inside, and where: all read-only, nothing else of the host's.

Bound are the agent's own interpreter without the packages installed in it, and from where they are installed the named
distributions with all that they require.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SITE = "/opt/site-packages"
"""Where the packages are inside."""
BINARIES = "/opt/bin"
"""Where `python` and `python3` are inside."""
_PREFIX = "/opt/python"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Inside:
    """`binds` are (host path, path inside); `hidden` are folders inside that are shown empty."""

    executable: str
    binds: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    packages: tuple[str, ...]
    """Distributions that are bound, in order of their names."""
    library_path: str
    """Where the loader finds libpython; empty where it knows."""


def inside(packages: Iterable[str]) -> Inside:
    """What to bind for programs that may import these distributions, those that are installed of them."""
    prefix = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    at = "/usr" if prefix == Path("/usr") else _PREFIX
    found = closure(packages)
    binds = [] if at == "/usr" else [(str(prefix), at)]
    binds += sorted({bind for one in found.values() for bind in _top_level(one)}, key=lambda bind: bind[1])
    hidden = {f"{at}{place[len(str(prefix)) :]}" for place in _packages_of(prefix)} | set(_packages_of(Path("/usr")))
    shared = at != "/usr" and any((prefix / "lib").glob("libpython*.so*"))
    return Inside(
        executable=f"{at}/bin/{version}",
        binds=tuple(binds),
        hidden=tuple(sorted(hidden)),
        packages=tuple(sorted(found)),
        library_path=f"{at}/lib" if shared else "",
    )


def installed(packages: Iterable[str]) -> tuple[str, ...]:
    """Those of `packages` that are installed, as they are named."""
    return tuple(name for name in packages if closure([name]))


def closure(packages: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed ones of `packages` and what they require without extras, by normal name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(packages)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in found[name].requires or ():
            match = _NAME.match(requirement)
            if match and "extra ==" not in requirement.replace("'", '"').partition(";")[2]:
                waiting.append(match[0])
    return found


def _packages_of(prefix: Path) -> list[str]:
    """Where packages are installed below a prefix."""
    return [str(place) for way in ("lib", "local/lib") for place in prefix.glob(f"{way}/python3*/*-packages")]


def _top_level(distribution: importlib.metadata.Distribution) -> set[tuple[str, str]]:
    """(host path, path inside) of each file or folder that a distribution has in its site-packages."""
    listed = [file.parts[0] for file in distribution.files or ()]
    entries = {*listed, *(distribution.read_text("top_level.txt") or "").split()} - {"..", "__pycache__"}
    places = {entry: os.path.realpath(str(distribution.locate_file(entry))) for entry in entries}
    return {(place, f"{SITE}/{entry}") for entry, place in places.items() if os.path.exists(place)}
