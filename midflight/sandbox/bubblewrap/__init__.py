"""The sandbox of bubblewrap: one outer box with a zygote in it, and in the box a box of its own for each session.

The outer box keeps programs from the host: other namespaces, no network, an empty environment, a file system of
read-only binds. The inner ones keep them from each other and from the zygote (`inside/holder.py`). A session serves one
trajectory and is thrown away.
"""

from __future__ import annotations

from midflight.sandbox.bubblewrap.sandbox import BubblewrapSandbox, BubblewrapSession
from midflight.sandbox.bubblewrap.zygote import PRELOAD, Box, missing

__all__ = ["PRELOAD", "BubblewrapSandbox", "BubblewrapSession", "Box", "missing"]
