"""Comparing large replies, which would take the event loop's time, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

T = TypeVar("T")
# Larger results are read in the thread.
SMALL: Final = 1 << 14
# Checks take turns in one thread of their own: more threads would starve the loop, and the default ones compress replies for
# other clients.
_checks = ThreadPoolExecutor(1, "checks")


async def off_loop(check: Callable[..., T], *values: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_checks, check, *values)
