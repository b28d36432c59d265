"""Whether upstreams that carry subscriptions only are of our chain.

Each is asked for its chain, like any other upstream. The PubSub port of a Solana validator refuses that call, so its slots are
compared with those of the upstreams that take calls: clusters are millions of slots apart.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from proxy.chains.lookups import Lookup
from proxy.core.upstream_health import Standing, UpstreamHealth
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.probing import look_up
from proxy.wire.upstream import Upstream
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused
from proxy.wire.websocket_upstream import WebSocketUpstream

# How often a stream is checked, and how often one that is not known to be good.
CHECK_S, CHECK_AGAIN_S = 60.0, 5.0
# How long a stream may take to report a slot.
REPORT_S = 3.0
# Upstreams of one chain are not further apart than this.
APART_S = 3600.0


class StreamChecks:
    def __init__(self, state: NetworkState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._lookups = state.head_reader.lookups
        self._clock = clock
        self._most_apart = APART_S / state.network.facts.block_time_s
        self._checked_at: dict[UpstreamHealth, float] = {}

    def __repr__(self) -> str:
        return f"<StreamChecks {self._state.network.id}, {len(self._state.streams)} streams>"

    async def verdicts(self) -> dict[UpstreamHealth, Standing]:
        """The standing of each stream that is due and replies."""
        due = [each for each in self._state.streams if self._is_due(each.health)]
        standings = await asyncio.gather(*(self._check(each) for each in due))
        return {each.health: standing for each, standing in zip(due, standings, strict=True) if standing is not None}

    def _is_due(self, health: UpstreamHealth) -> bool:
        is_good = health.standing == "good" and not health.silent
        since = self._clock() - self._checked_at.get(health, -math.inf)
        return bool(self._state.network.identity) and since >= (CHECK_S if is_good else CHECK_AGAIN_S)

    async def _check(self, upstream: Upstream) -> Standing | None:
        began = self._checked_at[upstream.health] = self._clock()
        is_ours = await self._names_our_chain(upstream)
        if is_ours is None:
            upstream.health.head_poll_failed(self._clock())
            return None
        upstream.health.head_reported(self._clock() - began, self._clock())
        return "good" if is_ours else "wrong_chain"

    async def _names_our_chain(self, upstream: Upstream) -> bool | None:
        """None: it does not reply."""
        assert self._lookups.chain is not None
        lookup = self._lookups.chain
        answer = await look_up(upstream, lookup, lookup.given(self._state.network.facts.genesis_at, "at"))
        if answer.values is not None:
            return lookup.identity(answer.values) == self._state.network.identity
        return await self._is_near(upstream) if answer.is_answered else None

    async def _is_near(self, upstream: Upstream) -> bool | None:
        """Whether its blocks are near those of the upstreams that take calls. A stream of a network without any is trusted."""
        agreed = self._state.heads.agreed
        if self._lookups.slots is None or not agreed:
            return True
        slot = await self._newest(upstream, self._lookups.slots)
        return None if slot is None else abs(slot - agreed) <= self._most_apart

    async def _newest(self, upstream: Upstream, lookup: Lookup) -> int | None:
        """The first block that it reports."""
        assert isinstance(upstream, WebSocketUpstream)
        reported: asyncio.Queue[bytes] = asyncio.Queue()
        stream = upstream.stream(lambda: None)
        try:
            async with asyncio.timeout(REPORT_S):
                await stream.open()
                await stream.subscribe(*lookup.first, reported.put_nowait)
                return lookup.number(lookup.calls[0].values_in(await reported.get()))
        except (StreamLost, SubscriptionRefused, TimeoutError):
            return None
        finally:
            await stream.close()
