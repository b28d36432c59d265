"""Calls that wait for a block: with X-Min-Block, until an upstream has reached it.

While calls wait, the heads are polled more often than usual, as long as one of the waiting accounts has polls left: upstreams
limit the calls of all accounts together. A call that waits for too long, or that is one too many, gets a 503 with the newest
block, never a result from before the block.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable

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

    def __init__(self, dispatcher: Dispatcher, look: Callable[[], Awaitable[None]], tasks: Tasks) -> None:
        """`look` polls the heads of all upstreams."""
        self._dispatcher = dispatcher
        self._look = look
        self._tasks = tasks
        self._deadlines: dict[Flight, float] = {}
        self._of_account: Counter[str] = Counter()
        # For each account that has caused polls: when it will have all of them again.
        self._polls_until: dict[str, float] = {}
        self._is_running = False

    def __repr__(self) -> str:
        return f"<BlockWaits {len(self._deadlines)} on {self._dispatcher.state.network_id}>"

    def __len__(self) -> int:
        return len(self._deadlines)

    def take(self, flight: Flight) -> None:
        """Let the flight wait until an upstream that takes calls has its block, or end it."""
        assert flight.directives is not None
        deadline = flight.began + flight.directives.min_block_wait
        is_full = len(self) >= MOST_WAITING or self._of_account[flight.client] >= MOST_OF_ACCOUNT
        if is_full or time.monotonic() >= deadline:
            self._give_up(flight)
            return
        self._deadlines[flight] = deadline
        self._of_account[flight.client] += 1
        if not self._is_running:
            self._is_running = True
            self._tasks.start(f"block wait {next(_serial)}", self._run)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while self._deadlines:
                    began = time.monotonic()
                    pause_s = POLL_S if self._take_poll(began) else SLOW_POLL_S
                    looking = group.create_task(_awaited(self._look()))
                    while self._deadlines and (not looking.done() or time.monotonic() - began < pause_s):
                        await asyncio.wait([looking], timeout=CHECK_S)
                        self._release(time.monotonic())
                        if looking.done() and self._deadlines:
                            await asyncio.sleep(CHECK_S)
                    looking.cancel()
        finally:
            self._is_running = False

    def _take_poll(self, now: float) -> bool:
        """Take a quick poll from one of the waiting accounts, if one has any left."""
        self._polls_until = {account: until for account, until in self._polls_until.items() if until > now}
        for account in self._of_account:
            until = max(self._polls_until.get(account, now), now) + 1.0
            if until <= now + MOST_POLLS:
                self._polls_until[account] = until
                return True
        return False

    def _release(self, now: float) -> None:
        """Send the calls whose block is there, and end those that have waited for too long."""
        dispatcher = self._dispatcher
        newest = max((member.head for member in dispatcher.state.group.members), default=0)
        for flight, deadline in [*self._deadlines.items()]:
            has_left = flight.done
            assert flight.directives is not None
            is_reached = flight.directives.min_block <= newest
            upstream = dispatcher.choose(flight, now, flight.tried) if is_reached and not has_left else None
            if not has_left and upstream is None and now < deadline:
                continue
            del self._deadlines[flight]
            self._of_account[flight.client] -= 1
            if upstream is not None:
                dispatcher.send(flight, upstream, now)
            elif not has_left:
                self._give_up(flight)
        self._of_account = +self._of_account

    def _give_up(self, flight: Flight) -> None:
        assert flight.directives is not None
        state = self._dispatcher.state
        newest = max([state.heads.tip, *[member.head for member in state.group.members]])
        self._dispatcher.complete_with_fault(flight, BehindBlock(state.network_id, flight.directives.min_block, newest))


async def _awaited(work: Awaitable[None]) -> None:
    await work
