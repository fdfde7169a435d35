"""Where code that a model wrote runs: never in the agent's process, never unconfined (docs/sandbox.md)."""

from __future__ import annotations

from midflight.sandbox.base import (
    Command,
    File,
    Limits,
    ListFiles,
    Outcome,
    Python,
    ReadFile,
    Request,
    RunTests,
    Sandbox,
    SandboxResult,
    Session,
    TestOutcome,
    WriteFile,
)

__all__ = [
    "Command",
    "File",
    "Limits",
    "ListFiles",
    "Outcome",
    "Python",
    "ReadFile",
    "Request",
    "RunTests",
    "Sandbox",
    "SandboxResult",
    "Session",
    "TestOutcome",
    "WriteFile",
]
