"""How many calls a second an upstream takes before it answers 429: `upstreams certify --rate N`.

Each step sends calls for a second, at twice the pace of the one before, up to the given one. The first that is refused ends it.
The calls ask for the newest block, because that is cheap at every provider.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from proxy.chains.lookups import LookupCall
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.probing import result_of
from proxy.wire.upstream import Upstream

FIRST_PACE: Final = 10
STEP_S: Final = 1.0
MOST_RATE: Final = 10_000


async def rate_ceiling(upstream: Upstream, call: LookupCall, most: int) -> str:
    """What the report says."""
    taken, pace = 0, min(FIRST_PACE, most)
    while True:
        probes = await _step(upstream, call, pace)
        if any(probe.is_limited for probe in probes):
            return f"takes {taken} calls a second, and refuses some of {pace} with a 429"
        if lost := sum(not probe.is_answered for probe in probes):
            return f"takes {taken} calls a second; of {pace}, {lost} were not answered"
        taken = pace
        if pace == most:
            return f"takes {most} calls a second; more were not tried"
        pace = min(2 * pace, most)


async def _step(upstream: Upstream, call: LookupCall, pace: int) -> list[Probe]:
    """Calls for a second. Those that wait for a reply do not delay the next one."""
    began = time.monotonic()
    probes: list[Probe] = []
    async with asyncio.TaskGroup() as group:
        for number in range(pace):
            await asyncio.sleep(max(0.0, began + number * STEP_S / pace - time.monotonic()))
            probe = Probe(upstream, *call.with_values({}))
            probes.append(probe)
            group.create_task(result_of(probe, beside=True))
            if probe.is_limited:
                break
    return probes
