"""A sandbox that is only spoken of: for listing tools on machines that may have none."""

from __future__ import annotations

from midflight.errors import InfrastructureError
from midflight.sandbox.base import Limits, Request, SandboxResult, Session
from midflight.sandbox.options import PACKAGES


class Imagined:
    """Described as bubblewrap is; nothing runs in it."""

    name = "bubblewrap"
    full = True
    packages = PACKAGES
    limits = Limits()

    async def open(self) -> Session:
        """Refuses."""
        raise InfrastructureError("this sandbox is only spoken of")

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """Refuses."""
        raise InfrastructureError("this sandbox is only spoken of")

    def close(self) -> None:
        """Nothing to end."""
