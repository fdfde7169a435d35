"""What memory that ran out is known by."""

from __future__ import annotations

import pytest

from midflight.engines.local.memory import is_out_of_memory


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "MPS backend out of memory (MPS allocated: 9.01 GB, other allocations: 1 MB, max allowed: 9.07 GB)",
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
        "unable to mmap 8 bytes from file <x>: Cannot allocate memory (12)",
        "std::bad_alloc",
    ],
)
def test_memory_that_ran_out_is_known_by_what_each_device_says(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


def test_other_errors_are_no_lack_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    for text in ("CUDA error: an illegal memory access was encountered", "Expected a contiguous memory format"):
        assert not is_out_of_memory(RuntimeError(text))
