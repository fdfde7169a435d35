"""Seeds by name."""

from __future__ import annotations

import hashlib

from midflight.seeds import derive


def test_a_seed_is_63_bits_of_the_hash_of_its_names() -> None:
    digest = hashlib.sha256(b"7\x1fplanner\x1f1").hexdigest()
    assert derive(7, "planner", 1) == int(digest[:16], 16) >> 1
    assert (
        len({derive(7, "planner", 1), derive(7, "planner", 11), derive(71, "planner", 1), derive(7, "planner1")}) == 4
    )
    assert 0 <= derive("\udcff") < 2**63
