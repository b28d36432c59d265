"""What the chain has decided, written into the ledger.

Two ways, of which each alone would do. `Settlements` is the follower's part: in the transaction of a block what its operations
cost, and back again when the block is dropped. `Settling` has the last word: once a block is final that is younger than what
was signed, or that holds it, the chain itself is asked what has landed; what has is closed at its cost, what has not is free.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Protocol

from proxy import telemetry
from proxy.chains.evm import operations
from proxy.chains.evm.facts import Facts, Header
from proxy.chains.evm.operations import Included
from proxy.chains.registry import Network
from proxy.store import ledger as ledger_room
from proxy.store.blocks import Followed, Mark
from proxy.store.ledger import Due, Event, LedgerStore
from proxy.store.pool import Connection

log = logging.getLogger("penstock.sponsor")

TOPICS = frozenset((operations.INCLUDED,))
# How often it is looked whether something is final.
EVERY_S = 3.0


class Settlements:
    """A sink of the follower's: see services/follower/sinks."""

    topics: frozenset[str] | None = TOPICS
    blocks = False
    transactions = False

    def __init__(self, networks: Iterable[Network], payers: Mapping[str, Set[bytes]]) -> None:
        """`payers`: the addresses of our paymasters, by network."""
        self._networks = {network.id: network for network in networks}
        self._payers = payers
        # Two networks that are one chain, as the development chain's are, see what the other has signed.
        self._chains = Counter(network.facts.chain_id for name, network in self._networks.items() if payers.get(name))

    async def write(self, connection: Connection, network: Followed, found: Sequence[Facts]) -> None:
        known = self._networks.get(network.id)
        payers = self._payers.get(network.id)
        if known is None or not payers:
            return
        events = [event for piece in found for event in events_of(known, piece) if event.paymaster in payers]
        if not events:
            return
        settled = await ledger_room.settle(
            connection, network.id, [_event(each) for each in events], coin=coin_of(known)
        )
        for event, is_ours in zip(events, settled, strict=True):
            if not is_ours and self._chains[known.facts.chain_id] == 1:
                telemetry.unknown_payments_total.labels(network.id).inc()
                log.warning(
                    "a paymaster paid for an operation that is in no ledger",
                    extra={"network": network.id, "operation": "0x" + event.hash.hex(), "block": event.place.block},
                )

    async def undo(self, connection: Connection, network: Followed, stays: Mark, removed: Sequence[Mark]) -> None:
        await ledger_room.reopen_above(connection, network.id, stays.number)

    async def settle(self, connection: Connection, network: Followed, below: int) -> None:
        """Nothing is kept for taking back."""

    async def forget(self, connection: Connection, network: Followed) -> None:
        await ledger_room.reopen_unsettled(connection, network.id)


class Chain(Protocol):
    """One network, as far as it is asked here. `final`: its newest final block, below 0 while that is not known."""

    @property
    def network(self) -> Network: ...
    @property
    def final(self) -> int: ...
    async def header(self, number: int) -> Header | None: ...
    async def blocks(self, first: int, last: int) -> Facts: ...


class Settling:
    def __init__(
        self,
        ledger: LedgerStore,
        chains: Sequence[Chain],
        *,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._ledger = ledger
        self._chains = {chain.network.id: chain for chain in chains}
        self._now = now

    def __repr__(self) -> str:
        return f"<Settling {', '.join(self._chains) or 'nothing'}>"

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Close all that is final, network by network."""
        for name in await self._ledger.unsettled_networks():
            if (chain := self._chains.get(name)) is None:
                continue
            try:
                await self._settle(chain)
            except Exception as exc:  # whatever fails on one network, the others' money is not to wait for it
                log.warning("not settled", extra={"network": name, "reason": str(exc)[:300]})

    async def _settle(self, chain: Chain) -> None:
        final = chain.final
        header = await chain.header(final) if final >= 0 else None
        if header is None:
            return
        time = int(header.timestamp, 16)
        due = await self._ledger.claim_due(chain.network.id, final_block=final, final_time=time, at=self._now())
        if not due:
            return
        landed = await self._landed(chain, min(each.since_block for each in due) + 1, final)
        for each in due:
            await self._close(chain, each, landed, final_block=final, final_time=time)

    async def _landed(self, chain: Chain, first: int, last: int) -> dict[bytes, Included]:
        if first > last:
            return {}
        found = await chain.blocks(first, last)
        return {event.hash: event for event in events_of(chain.network, found)}

    async def _close(
        self, chain: Chain, due: Due, landed: Mapping[bytes, Included], *, final_block: int, final_time: int
    ) -> None:
        event = next((landed[name] for name in due.hashes if name in landed), None)
        if event is not None:
            await self._ledger.settle(chain.network.id, [_event(event)], coin=coin_of(chain.network))
            await self._ledger.close(due.id, final_block=final_block)
        elif due.state == "spent":
            # Its block was dropped and nobody has told.
            await self._ledger.reopen(due.id)
        else:
            await self._ledger.release(due.id, final_time=final_time)


def events_of(network: Network, found: Facts) -> list[Included]:
    """Of its entry points: anybody may emit such an event."""
    trusted = {bytes.fromhex(text[2:]) for text in network.chain.entry_points.values()}
    events = (operations.included(log_) for log_ in found.logs)
    return [event for event in events if event is not None and event.place.contract in trusted]


def coin_of(network: Network) -> int:
    """One whole coin in its smallest units."""
    coin: int = 10**network.chain.native.decimals
    return coin


def _event(event: Included) -> Event:
    place = event.place
    return Event(event.hash, event.cost_wei, place.block, place.block_hash, place.transaction)
