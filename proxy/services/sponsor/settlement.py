"""What the chain has decided, written into the ledger.

Two ways, of which each alone would do. `Settlements` is the follower's part: in the transaction of a block what its operations
cost, and back again when the block is dropped. `Settling` has the last word: once a block is final that is younger than what
was signed, or that holds it, the chain itself is asked what has landed; what has is closed at its cost, what has not is free.

Both know an operation by its sender and nonce, of which an EntryPoint takes each once. Its hash says less: that of entry point
0.8 covers what the sender delegates to in the moment of landing (EIP-7702), and its owner can change that after we signed.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import groupby
from typing import Protocol

from proxy import telemetry
from proxy.chains.evm import operations
from proxy.chains.evm.facts import BlockFacts, Header
from proxy.chains.evm.operations import IncludedOperation
from proxy.chains.registry import Network
from proxy.store import ledger as ledger_room
from proxy.store.blocks import BlockMark, Followed
from proxy.store.ledger import CLAIMED_AT_ONCE, DueReservation, LandedOperation, LedgerStore
from proxy.store.pool import DatabaseConnection

log = logging.getLogger("penstock.sponsor")

TOPICS = frozenset((operations.INCLUDED,))
# How often it is looked whether something is final.
EVERY_S = 3.0


class SettlementSink:
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

    async def write(self, connection: DatabaseConnection, network: Followed, found: Sequence[BlockFacts]) -> None:
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
        for event, paying in zip(events, settled, strict=True):
            if paying is None and self._chains[known.facts.chain_id] == 1:
                telemetry.unknown_payments_total.labels(network.id).inc()
                log.warning(
                    "a paymaster paid for an operation that is in no ledger",
                    extra={"network": network.id, "operation": "0x" + event.hash.hex(), "block": event.place.block},
                )

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockMark, removed: Sequence[BlockMark]
    ) -> None:
        await ledger_room.reopen_above(connection, network.id, stays.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """Nothing is kept for taking back."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await ledger_room.reopen_unsettled(connection, network.id)


class SettlementChain(Protocol):
    """One network, as far as it is asked here. `final`: its newest final block, below 0 while that is not known."""

    @property
    def network(self) -> Network: ...
    @property
    def final(self) -> int: ...
    async def header(self, number: int) -> Header | None: ...
    async def blocks(self, first: int, last: int) -> BlockFacts: ...


# An operation by what is unique on the chain: its entry point, sender and nonce.
OperationNonce = tuple[bytes, bytes, int]


class SettlementLoop:
    def __init__(
        self,
        ledger: LedgerStore,
        chains: Sequence[SettlementChain],
        payers: Mapping[str, Set[bytes]],
        *,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        """`payers`: the addresses of our paymasters, by network."""
        self._ledger = ledger
        self._chains = {chain.network.id: chain for chain in chains}
        self._payers = payers
        self._now = now

    def __repr__(self) -> str:
        return f"<SettlementLoop {', '.join(self._chains) or 'nothing'}>"

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Close all that is final, network by network."""
        for name in await self._ledger.unsettled_networks():
            if (chain := self._chains.get(name)) is not None:
                with _apart(name):
                    await self._settle(chain)

    async def _settle(self, chain: SettlementChain) -> None:
        final = chain.final
        header = await chain.header(final) if final >= 0 else None
        if header is None:
            return
        time = int(header.timestamp, 16)
        is_more = True
        while is_more:
            due = await self._ledger.claim_due(chain.network.id, final_block=final, final_time=time, at=self._now())
            for group in _near(due, final):
                with _apart(chain.network.id):
                    await self._close_all(chain, group, final_block=final, final_time=time)
            is_more = len(due) == CLAIMED_AT_ONCE

    async def _close_all(
        self, chain: SettlementChain, due: Sequence[DueReservation], *, final_block: int, final_time: int
    ) -> None:
        landed = await self._landed(chain, min(each.since_block for each in due) + 1, final_block)
        for each in due:
            event = landed.get((each.entry_point, each.sender, each.nonce))
            if event is not None and await self._pays(chain, each, event):
                await self._ledger.close(each.id, final_block=final_block)
            elif each.state == "spent":
                # Its block was dropped and nobody has told.
                await self._ledger.reopen(each.id)
            else:
                await self._ledger.release(each.id, final_time=final_time)

    async def _landed(self, chain: SettlementChain, first: int, last: int) -> dict[OperationNonce, IncludedOperation]:
        if first > last:
            return {}
        found = await chain.blocks(first, last)
        return {(event.place.contract, event.sender, event.nonce): event for event in events_of(chain.network, found)}

    async def _pays(self, chain: SettlementChain, due: DueReservation, event: IncludedOperation) -> bool:
        """Whether it is this reservation that pays: another policy may have signed for the nonce, or a stranger have paid."""
        if event.hash not in due.hashes and event.paymaster not in self._payers.get(chain.network.id, ()):
            return False
        return await self._ledger.settle(chain.network.id, _event(event), coin=coin_of(chain.network)) == due.id


@contextmanager
def _apart(network: str) -> Iterator[None]:
    """Whatever fails inside, the money of others is not to wait for it."""
    try:
        yield
    except Exception as exc:
        log.warning("not settled", extra={"network": network, "reason": str(exc)[:300]})


def _near(due: Iterable[DueReservation], final: int) -> Iterator[list[DueReservation]]:
    """In groups, by how far they go back: one that is far off makes nobody else's logs many, and few are read twice."""

    def distance(each: DueReservation) -> int:
        return max(0, final - each.since_block).bit_length()

    for _, group in groupby(sorted(due, key=distance), distance):
        yield list(group)


def events_of(network: Network, found: BlockFacts) -> list[IncludedOperation]:
    """Of its entry points: anybody may emit such an event."""
    trusted = {bytes.fromhex(text[2:]) for text in network.chain.entry_points.values()}
    events = (operations.included(log_) for log_ in found.logs)
    return [event for event in events if event is not None and event.place.contract in trusted]


def coin_of(network: Network) -> int:
    """One whole coin in its smallest units."""
    coin: int = 10**network.chain.native.decimals
    return coin


def _event(event: IncludedOperation) -> LandedOperation:
    place = event.place
    return LandedOperation(
        place.contract,
        event.sender,
        event.nonce,
        event.hash,
        event.cost_wei,
        place.block,
        place.block_hash,
        place.transaction,
    )
