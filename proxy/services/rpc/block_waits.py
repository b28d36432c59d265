"""Calls that wait for a block: with X-Min-Block, until an upstream has reached it.

While calls wait, the heads are polled more often than usual, as long as one of the waiting accounts has polls left: upstreams
limit the calls of all accounts together. A call that waits for too long, or for which there is no place, gets a 503 with the
newest block, or one that says that no upstream takes calls, but never a result from before the block.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

from proxy.core.fair_permits import FairPermits
from proxy.errors import BehindBlock
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight
from proxy.tasks import Tasks

# Pause between two polls of the heads while calls wait, and when none of their accounts has polls left.
POLL_S, SLOW_POLL_S = 0.1, 1.0
# Quick polls that an account may cause at once, enough for a call that waits for the usual time; it gets one more each second.
MOST_POLLS = 20
# How long to wait for a slow poll before the blocks of the other upstreams are checked.
CHECK_S = 0.02
# Calls that wait on one network in this worker, in all and of one account.
MOST_WAITING = 4096
MOST_OF_ACCOUNT = 512
_serial = itertools.count(1)


class BlockWaits:
    """The waiting calls of one network."""

    def __init__(self, look: Callable[[], Awaitable[None]], tasks: Tasks) -> None:
        """`look` polls the heads of all upstreams."""
        self._look = look
        self._tasks = tasks
        # The deadline of each flight, and the account that made it: a flight can pass to another account that has joined it.
        self._deadlines: dict[Flight, tuple[float, str]] = {}
        self._permits = FairPermits(MOST_WAITING, per_client=MOST_OF_ACCOUNT)
        # For each account that has caused polls: when it will have all of them again.
        self._polls_until: dict[str, float] = {}
        self._is_running = False

    def __repr__(self) -> str:
        return f"<BlockWaits {len(self._deadlines)}>"

    def __len__(self) -> int:
        return len(self._deadlines)

    def take(self, dispatcher: Dispatcher, flight: Flight) -> None:
        """Let the flight wait until an upstream that takes calls has its block, or end it."""
        assert flight.call.directives is not None
        deadline = flight.began + flight.call.directives.min_block_wait
        if time.monotonic() >= deadline or not self._permits.take(flight.client):
            _give_up(dispatcher, flight)
            return
        self._deadlines[flight] = deadline, flight.client
        if not self._is_running:
            self._is_running = True
            self._tasks.start("block wait", lambda: self._run(dispatcher), of=next(_serial))

    async def _run(self, dispatcher: Dispatcher) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while self._deadlines:
                    began = time.monotonic()
                    pause_s = POLL_S if self._take_poll(began) else SLOW_POLL_S
                    looking = group.create_task(_awaited(self._look()))
                    while self._deadlines and (not looking.done() or time.monotonic() - began < pause_s):
                        await asyncio.wait([looking], timeout=CHECK_S)
                        self._release(dispatcher, time.monotonic())
                        if looking.done() and self._deadlines:
                            await asyncio.sleep(CHECK_S)
                    looking.cancel()
        finally:
            self._is_running = False

    def _take_poll(self, now: float) -> bool:
        """Take a quick poll from one of the waiting accounts, if one has any left."""
        self._polls_until = {account: until for account, until in self._polls_until.items() if until > now}
        for account in self._permits.clients():
            until = max(self._polls_until.get(account, now), now) + 1.0
            if until <= now + MOST_POLLS:
                self._polls_until[account] = until
                return True
        return False

    def _release(self, dispatcher: Dispatcher, now: float) -> None:
        """Send the calls whose block is there, and end those that have waited for too long."""
        newest = max(_credible_heads(dispatcher, now), default=0)
        for flight, (deadline, client) in [*self._deadlines.items()]:
            has_left = flight.done
            assert flight.call.directives is not None
            is_reached = flight.call.directives.min_block <= newest
            upstream = dispatcher.choose(flight.call, now, flight.tried) if is_reached and not has_left else None
            if not has_left and upstream is None and now < deadline:
                continue
            del self._deadlines[flight]
            self._permits.give_back(client)
            if upstream is not None:
                dispatcher.send(flight, upstream, now)
            elif not has_left:
                _give_up(dispatcher, flight)


def _credible_heads(dispatcher: Dispatcher, now: float) -> list[int]:
    """The heads that upstreams report, without those that cannot be true."""
    heads = [member.head for member in dispatcher.state.group.members]
    return [head for head in heads if dispatcher.state.heads.is_plausible(head, now)]


def _give_up(dispatcher: Dispatcher, flight: Flight) -> None:
    assert flight.call.directives is not None
    state = dispatcher.state
    min_block = flight.call.directives.min_block
    # Other hosts may know a newer tip. It does not count: the upstreams of this one have not reported it yet.
    newest = max(_credible_heads(dispatcher, time.monotonic()), default=state.heads.tip)
    if min_block <= newest:
        dispatcher.refuse(flight)  # The block is there, but no upstream that has it takes calls.
    else:
        dispatcher.complete_with_fault(flight, BehindBlock(state.network_id, min_block, newest))


async def _awaited(work: Awaitable[None]) -> None:
    await work
