"""The sandbox of WASI: CPython compiled to WebAssembly, in a process of its own; for systems without bubblewrap.

WebAssembly reaches nothing but what it is handed: one folder, its standard streams, a clock and random numbers. No
network, processes or threads exist in it, nor packages: programs have the standard library alone.
"""

from __future__ import annotations

from midflight.sandbox.wasi.sandbox import WasiSandbox, missing

__all__ = ["WasiSandbox", "missing"]
