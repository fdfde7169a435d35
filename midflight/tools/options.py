"""What a recipe says of a tool under `agent.tool_options`: limits that every tool has, and options of its own.

Invariant: an unknown option, a value out of bounds, or one that would do nothing is an error of one line before the
tool is made. A key is read from the environment alone: no option holds one.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from midflight.engines.base import Engine
from midflight.errors import UserError
from midflight.paths import cache_folder
from midflight.sandbox.base import Sandbox
from midflight.sandbox.workspace import StartFiles
from midflight.section import MOST_SECONDS
from midflight.slips import may_be_secret, stated

SERVICE_KEYS = ("TAVILY_API_KEY", "SERPER_API_KEY", "BRAVE_API_KEY")
"""The environment variables that built-in tools read keys from."""
Options = TypeVar("Options", bound="ToolOptions")


class ToolOptions(BaseModel):
    """Limits of any tool; a subclass adds a tool's own options and may bring other defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cacheable: ClassVar[bool] = True
    """False where equal arguments may have another result tomorrow by the user's own doing: files, an engine."""
    paths: ClassVar[tuple[str, ...]] = ()
    """Options that are paths: in a recipe they are relative to its file."""

    seconds: float | None = Field(default=None, gt=0, le=MOST_SECONDS)
    """Time limit of a call; null: `agent.tool_seconds`."""
    max_calls: int | None = Field(default=None, ge=1, le=100_000)
    """Calls in one trajectory; one more is refused with `call_limit`. Null: `agent.max_calls` alone bounds them."""
    result_characters: int | None = Field(default=None, ge=200, le=1_000_000_000)
    """A longer result keeps its head and its tail; the store has the whole. Null: never cut."""
    retries: int = Field(default=0, ge=0, le=10)
    """Further attempts after a transient failure (`TransientError`), within the time limit."""
    cache_hours: float | None = Field(default=None, gt=0, le=1e6)
    """A call with the same arguments and options is answered from disk for so long. Null: never."""
    calls_per_minute: float | None = Field(default=None, gt=0, le=1e12)
    """Over all trajectories of a run; a call waits for its turn, and so does each retry. Null: no limit."""

    @property
    def limits(self) -> bool:
        """Whether any limit is set."""
        return any(getattr(self, name) for name in ToolOptions.model_fields)

    @property
    def engines(self) -> frozenset[str | None]:
        """The engines that the tool asks, by name; None is `AgentConfig.tools_engine`."""
        return frozenset()

    def missing(self) -> str:
        """What there is to do before the tool can work (set a key, name a file); empty when nothing."""
        return ""


def _no_engine(name: str | None) -> Engine:
    raise UserError("this tool asks a language model, and here is none: use it in a recipe")


def _auto_sandbox() -> Sandbox:
    from midflight.sandbox.choose import shared_sandbox
    from midflight.sandbox.options import SandboxOptions

    return shared_sandbox(SandboxOptions())


@dataclass(frozen=True)
class ToolContext:
    """What a tool gets from around it."""

    engine: Callable[[str | None], Engine] = _no_engine
    """An engine by its name in the recipe; None is `AgentConfig.tools_engine`. Called when needed."""
    sandbox: Callable[[], Sandbox] = _auto_sandbox
    """Where code that a model wrote runs; called when a tool that needs it is made."""
    files: StartFiles | None = None
    """What a workspace in it begins with."""
    keys: tuple[str, ...] = ()
    """Taken out of whatever any tool says."""
    keep: Path | None = None
    """Where a workspace goes at the end."""
    cache_folder: Path = field(default_factory=lambda: cache_folder() / "tools")


def read_options(model: type[Options], data: object, key: str) -> Options:
    """The options in `data`, which stands at `key` of a recipe.

    Raises:
        UserError: one line with the key, the value, and the nearest valid name or the bound.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{stated(key, data)}: must be a section of key: value pairs")
    for name, value in data.items():
        if name not in model.model_fields:
            near = difflib.get_close_matches(str(name), model.model_fields, n=1)
            hint = f"did you mean {key}.{near[0]}?" if near else f"valid keys: {', '.join(model.model_fields)}"
            raise UserError(f"{stated(f'{key}.{name}', value)}: unknown key; {hint}")
    try:
        options = model.model_validate(dict(data), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join([key, *(str(part) for part in first["loc"])])
        if first["type"] == "missing":
            option = f"-o {path.removeprefix(f'{key}.')}=VALUE"
            raise UserError(f"{path}: missing; set it in the recipe, or give 'midflight tools run' {option}") from None
        if first["type"] in ("tuple_type", "list_type"):
            value = "..." if may_be_secret(path, first["input"]) else first["input"]
            raise UserError(f"{path} = {value}: must be a list; write [{value}]") from None
        message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        given = path if not first["loc"] else stated(path, first["input"])  # of a whole section its place alone
        raise UserError(f"{given}: {message}") from None
    if options.cache_hours is not None and not model.cacheable:
        raise UserError(
            f"{key}.cache_hours = {options.cache_hours:g}: an equal call may have another result here; leave it out"
        )
    return options


def installed(package: str) -> bool:
    """Whether a package can be imported, by its import name; it is not."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules says that it is not there
        return False


def to_install(packages: Sequence[str], extra: str) -> str:
    """What to do about packages that are missing; an empty `extra`: the core has them."""
    names = ", ".join(packages)
    return f"pip install 'midflight[{extra}]' ({names})" if extra else f"install {names}"


def key_from(variable: str) -> str:
    """A key from the environment; empty when it is not set."""
    return os.environ.get(variable, "").strip()
