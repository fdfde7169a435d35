"""What memory that ran out looks like."""

from __future__ import annotations

import torch

NO_MEMORY = (
    "out of memory",  # CUDA outside of torch's allocator, MPS
    "alloc_failed",  # cuBLAS and its kin
    "not enough memory",  # the CPU's allocator
    "allocate memory",  # the system: can't, cannot
    "bad_alloc",  # C++
)
"""What errors say, in small letters, when an allocation failed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device; only the allocator of CUDA has a type of its own for that."""
    said = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in said for text in NO_MEMORY)
