"""Waits for calls of our own to one upstream: one by one, or all of a lookup."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.chains.lookups import Lookup, Values
from proxy.core.upstream_errors import ErrorRule
from proxy.services.rpc.probe import Probe
from proxy.wire.upstream import Upstream

# How long an upstream may take to reply.
REPLY_S = 3.0


async def result_of(probe: Probe, within_s: float = REPLY_S, *, beside: bool = False) -> bytes | None:
    """Send the probe. Returns None if it failed. `beside`: see `Probe.begin`."""
    done = asyncio.Event()
    probe.begin(done.set, beside=beside)
    try:
        async with asyncio.timeout(within_s):
            await done.wait()
    except TimeoutError:
        pass
    finally:
        # A probe that nobody awaits any more, because its task was cancelled, would hold its connection for ever.
        if not done.is_set():
            probe.give_up()
    return probe.result


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The answer of an upstream to a lookup. `values`: None if a call failed. `lacked`: methods that it does not serve.
    `is_answered`: whether it replied to all calls, even with an error. `error`: the kind of that error."""

    values: Values | None
    is_answered: bool
    lacked: tuple[str, ...] = ()
    error: str = ""


async def look_up(
    upstream: Upstream,
    lookup: Lookup,
    values: Values | None = None,
    *,
    within_s: float = REPLY_S,
    skips_errors: bool = False,
    rules: Sequence[ErrorRule] = (),
) -> LookupAnswer:
    """Make the calls of a lookup one after the other. `values`: those that are given. `skips_errors`: a call that the upstream
    refuses does not end the lookup. `rules`: what errors mean in the chain's family."""
    known, lacked = dict(values or {}), list[str]()
    for call in lookup.calls:
        probe = Probe(upstream, *call.with_values(known), rules=rules)
        result = await result_of(probe, within_s)
        if result is None and skips_errors and probe.is_answered:
            continue
        if result is None:
            return LookupAnswer(None, probe.is_answered, error=probe.error)
        known |= call.values_in(result)
        lacked += call.lacked_in(result)
    return LookupAnswer(known, is_answered=True, lacked=tuple(lacked))
