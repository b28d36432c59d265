"""A process keeps the memory that large bodies leave free, whatever it has freed before."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# The pages that a thousand rounds of four large bodies take from the kernel.
FAULTS = """
import ctypes
import resource
from proxy.processes import worker
ctypes.CDLL(None).mallopt(worker.M_TRIM_THRESHOLD, 131072)  # what a process has before it frees a larger block
{first}
def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        held = [bytes(100_000) for _ in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(20)
print(faults(1000))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the allocator is not glibc's")
def test_pages_of_freed_bodies_are_used_again() -> None:
    assert faults("") > 2_000  # with pages of 64 KB; 36,000 with those of 4 KB
    assert faults("worker.keep_freed_memory()") < 100


def faults(first: str) -> int:
    code = FAULTS.format(first=first)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
