"""Finds the oldest block for which each upstream of a network has the data that clients read (`core/data_bounds.py`).

Nothing is asked before a client has read an old block: most networks never need it. One process of a host searches, and the
others adopt what it finds. A bound that is known is confirmed with one call now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from proxy.chains.families import family_of
from proxy.chains.lookups import Lookup
from proxy.core.data_bounds import DATA_INDEX, Bound, BoundSearch, DataKind
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.probing import look_up
from proxy.services.rpc.shared_polls import SharedPolls
from proxy.wire.upstream import Upstream

# How often a bound is confirmed; and how soon a search is tried again if the upstream did not answer.
CONFIRM_S: Final = 180.0
AGAIN_S: Final = 20.0
# Each time after so many confirmations, the block before the bound is asked for: an upstream may have got older blocks.
LOOKS_BELOW_EACH: Final = 4
# A block number has 63 bits, so a search needs fewer calls than this. It ends here if an upstream contradicts itself.
MOST_CALLS: Final = 72
# Errors that say that the upstream does not have the data.
_MISSING: Final = frozenset(("missing_data", "behind"))


class BoundChecks:
    """The bounds of one network's upstreams."""

    def __init__(self, state: NetworkState, polls: SharedPolls, clock: Callable[[], float]) -> None:
        self._state = state
        self._polls = polls
        self._clock = clock
        family = family_of(state.network)
        self._lookups = family.head.lookups.bounds
        self._usual_kept = family.kept_blocks
        self._rules = family.error_rules
        # When each bound is due, by the upstream's index and the kind.
        self._due_at: dict[tuple[int, DataKind], float] = {}
        # How often bounds were confirmed.
        self._confirmed = 0

    def __repr__(self) -> str:
        return f"<BoundChecks {self._state.network_id}>"

    def adopt(self) -> None:
        """Take over what other processes have found."""
        reported = [(health, text) for health in self._state.group.members if (text := self._polls.bounds_of(health))]
        for health, text in reported:
            health.bounds.adopt(text)
            for kind in self._lookups:
                if health.bounds.of(kind) is not None:
                    self._due_at[health.index, kind] = self._clock() + CONFIRM_S
        if reported:
            self._state.note_bounds()

    async def check(self) -> None:
        """Search for the bounds that are due, of kinds that clients have asked for."""
        self.adopt()
        for kind in self._lookups:
            if self._state.old_data >> DATA_INDEX[kind] & 1:
                for upstream in self._state.upstreams:
                    await self._check(upstream, kind)

    async def check_all(self) -> None:
        """Search for all bounds of all upstreams, whether or not clients need them."""
        for data in DATA_INDEX.values():
            self._state.old_data_read(data)
        await self.check()

    async def find(self, upstream: Upstream) -> None:
        """Search for all bounds of an upstream that is not in use."""
        number = self._state.head_reader.lookups.number
        head = number.number((await look_up(upstream, number)).values or {})
        if head is None:
            return
        upstream.health.saw_head(head, self._clock())
        for kind in self._lookups:
            if (bound := await self._bound_of(upstream, kind)) is not None:
                upstream.health.bounds.bound_found(kind, bound)

    async def _check(self, upstream: Upstream, kind: DataKind) -> None:
        health, now = upstream.health, self._clock()
        if kind in health.bounds.declared or not health.head or health.withheld or health.silent:
            return
        if now < max(health.rests_until, self._due_at.get((health.index, kind), -math.inf)):
            return
        # No other task of this process searches at the same time.
        self._due_at[health.index, kind] = math.inf
        bound = None
        try:
            bound = await self._bound_of(upstream, kind)
        finally:
            self._due_at[health.index, kind] = self._clock() + (AGAIN_S if bound is None else CONFIRM_S)
        if bound is not None:
            health.bounds.bound_found(kind, bound)
            self._polls.share_bounds(health, self._clock())
            self._state.note_bounds()

    async def _bound_of(self, upstream: Upstream, kind: DataKind) -> Bound | None:
        """The bound; None if it cannot be found now."""
        known, lookup = upstream.health.bounds.of(kind), self._lookups[kind]
        if known is not None:
            self._confirmed += 1
            search = BoundSearch(
                upstream.health.head,
                usual_kept=self._usual_kept,
                known=known,
                looks_below=self._confirmed % LOOKS_BELOW_EACH == 0,
            )
            await self._ask(search, upstream, lookup, most=1)
            if search.is_confirmed:
                return known
            # The head may have moved since the last poll, and a bound that slides has moved with it.
            number = self._state.head_reader.lookups.number
            head = number.number((await look_up(upstream, number)).values or {})
        else:
            head = upstream.health.head
        if head is None:
            return None
        others = [bound for kind in self._lookups if (bound := upstream.health.bounds.of(kind)) is not None]
        search = BoundSearch(head, usual_kept=self._usual_kept, known=known, others=others)
        return search.bound if await self._ask(search, upstream, lookup, most=MOST_CALLS) else None

    async def _ask(self, search: BoundSearch, upstream: Upstream, lookup: Lookup, *, most: int) -> bool:
        """Continue the search with at most this many calls. Returns whether all were answered."""
        while (block := search.next_block) is not None and search.calls < most:
            given = lookup.given(block) | lookup.given(block - 1, "before")
            answer = await look_up(upstream, lookup, given, rules=self._rules)
            if answer.values is None and answer.error not in _MISSING:
                return False
            search.answered(block, is_held=answer.values is not None and "found" in answer.values)
        return True
