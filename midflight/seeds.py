"""Seeds derived by name: the same names give the same seed on every machine, and different names unrelated ones."""

from __future__ import annotations

import hashlib


def derive(*names: object) -> int:
    """A seed in [0, 2**63) from any values with a stable text."""
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1
