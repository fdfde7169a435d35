"""Sandboxes whose workspace is a folder and whose programs are processes of the host: WASI, and none at all."""

from __future__ import annotations

from midflight.sandbox.folder.process import GRACE_SECONDS, Ended, run_bounded
from midflight.sandbox.folder.session import FOLDERS, FolderSession

__all__ = ["FOLDERS", "GRACE_SECONDS", "Ended", "FolderSession", "run_bounded"]
