"""Attention over a trunk and suffixes, in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midflight.engines.local import attention


@pytest.mark.parametrize("merge", [attention._merged, attention._joined], ids=["fused", "written out"])
def test_in_16_bits_what_is_rounded_is_the_output_alone(merge: Any) -> None:
    """With shares rounded too 0.0026 of it is off, with scores and weights rounded 0.0042."""
    torch.manual_seed(0)
    own, key, value = (3 * torch.randn(2, 2, count, 16).bfloat16() for count in (4, 5, 5))
    trunk_key, trunk_value = (3 * torch.randn(2, 7, 16).bfloat16() for _ in range(2))
    mask = torch.zeros(2, 1, 4, 5, dtype=torch.bfloat16)
    parts = (own, key, value, trunk_key, trunk_value, mask)
    right = attention._joined(*(part.double() for part in parts), 0.25)
    assert float((merge(*parts, 0.25) - right).norm() / right.norm()) < 2e-3
