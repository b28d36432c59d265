"""Settles reservations in the ledger by what landed on the chain.

There are two independent ways, and each alone would be enough. `SettlementSink` is part of the follower: it books the cost of a
block's operations in the transaction of that block, and reverts it if the block is dropped. `SettlementLoop` is authoritative:
once a final block is younger than the signature, or includes the operation, it reads the chain's logs, closes reservations
that landed at their cost, and releases the others.

Both identify an operation by its sender and nonce, since an EntryPoint accepts each pair once. The hash is not enough: for
entry point 0.8 it covers what the sender delegates to when the operation lands (EIP-7702), and the owner can change that after
the signature.
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
from proxy.store.postgres import ledger as ledger_room
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.blocks import BlockId, Followed
from proxy.store.postgres.ledger import CLAIMED_AT_ONCE, DueReservation, LandedOperation, LedgerStore
from proxy.store.postgres.pool import DatabaseConnection

log = logging.getLogger("penstock.sponsor")

TOPICS = frozenset((operations.INCLUDED,))
# How often the loop checks for reservations that a final block decides.
EVERY_S = 3.0


class SettlementSink:
    """A sink of the follower: see services/follower/sinks."""

    topics: frozenset[str] | None = TOPICS
    blocks = False
    transactions = False
    receipts = False

    def __init__(self, networks: Iterable[Network], payers: Mapping[str, Set[bytes]]) -> None:
        """`payers`: the addresses of our paymasters, by network."""
        self._networks = {network.id: network for network in networks}
        self._payers = payers
        # Two networks can share one chain, as in development. Each then sees operations that the other one signed.
        self._chains = Counter(network.facts.chain_id for name, network in self._networks.items() if payers.get(name))
        self._bad = BadRows("operation")

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        known = self._networks.get(network.id)
        payers = self._payers.get(network.id)
        if known is None or not payers:
            return
        events = [event for piece in facts for event in events_of(known, piece) if event.paymaster in payers]
        if not events:
            return
        settled: list[tuple[IncludedOperation, int | None]] = []

        async def settle(part: Sequence[IncludedOperation]) -> None:
            async with connection.transaction():
                paying = await ledger_room.settle(
                    connection, network.id, [_event(e) for e in part], coin=coin_of(known)
                )
            settled.extend(zip(part, paying, strict=True))

        await self._bad.write(events, settle)
        for event, paying in settled:
            if paying is None and self._chains[known.facts.chain_id] == 1:
                telemetry.unknown_payments_total.labels(network.id).inc()
                log.warning(
                    "a paymaster paid for an operation that is not in the ledger",
                    extra={"network": network.id, "operation": "0x" + event.hash.hex(), "block": event.position.block},
                )

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        await ledger_room.reopen_above(connection, network.id, stays.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """Nothing to do: no undo records are kept."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await ledger_room.reopen_unsettled(connection, network.id)


class SettlementChain(Protocol):
    """The part of a network that settlement reads. `final`: its newest final block, negative while unknown."""

    @property
    def network(self) -> Network: ...
    @property
    def final(self) -> int: ...
    async def header(self, number: int) -> Header | None: ...
    async def blocks(self, first: int, last: int) -> BlockFacts: ...


# Identifies an operation on the chain: its entry point, sender and nonce.
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
        self._bad = BadRows("operation")

    def __repr__(self) -> str:
        return f"<SettlementLoop {', '.join(self._chains) or 'nothing'}>"

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Settle every reservation that is decided by a final block, network by network."""
        for name in await self._ledger.unsettled_networks():
            if (chain := self._chains.get(name)) is not None:
                with _logged(name):
                    await self._settle(chain)

    async def _settle(self, chain: SettlementChain) -> None:
        final = chain.final
        header = await chain.header(final) if final >= 0 else None
        if header is None:
            return
        time = int(header.timestamp, 16)
        has_more = True
        while has_more:
            due = await self._ledger.claim_due(chain.network.id, final_block=final, final_time=time, at=self._now())
            for group in _by_age(due, final):
                with _logged(chain.network.id):
                    await self._close_all(chain, group, final_block=final, final_time=time)
            has_more = len(due) == CLAIMED_AT_ONCE

    async def _close_all(
        self, chain: SettlementChain, due: Sequence[DueReservation], *, final_block: int, final_time: int
    ) -> None:
        landed = await self._landed(chain, min(each.since_block for each in due) + 1, final_block)
        for each in due:
            event = landed.get((each.entry_point, each.sender, each.nonce))
            with self._bad.skipped(reservation=each.id):
                if event is not None and await self._pays(chain, each, event):
                    await self._ledger.close(each.id, final_block=final_block)
                elif each.state == "spent":
                    # Its block was dropped while no follower was running.
                    await self._ledger.reopen(each.id)
                else:
                    await self._ledger.release(each.id, final_time=final_time)

    async def _landed(self, chain: SettlementChain, first: int, last: int) -> dict[OperationNonce, IncludedOperation]:
        if first > last:
            return {}
        facts = await chain.blocks(first, last)
        return {
            (event.position.contract, event.sender, event.nonce): event for event in events_of(chain.network, facts)
        }

    async def _pays(self, chain: SettlementChain, due: DueReservation, event: IncludedOperation) -> bool:
        """Whether this reservation pays for the operation. Another policy may have signed for the same nonce, or a foreign
        paymaster may have paid."""
        if event.hash not in due.hashes and event.paymaster not in self._payers.get(chain.network.id, ()):
            return False
        return await self._ledger.settle(chain.network.id, _event(event), coin=coin_of(chain.network)) == due.id


@contextmanager
def _logged(network: str) -> Iterator[None]:
    """Log a failure and carry on: it must not delay the settlement of other reservations."""
    try:
        yield
    except Exception as exc:
        log.warning("not settled", extra={"network": network, "reason": str(exc)[:300]})


def _by_age(due: Iterable[DueReservation], final: int) -> Iterator[list[DueReservation]]:
    """Group reservations by the magnitude of their age in blocks. An old one then does not widen the range of logs that the
    young ones need, and few blocks are read twice."""

    def distance(each: DueReservation) -> int:
        return max(0, final - each.since_block).bit_length()

    for _, group in groupby(sorted(due, key=distance), distance):
        yield list(group)


def events_of(network: Network, facts: BlockFacts) -> list[IncludedOperation]:
    """Operations included by the network's entry points. Other contracts may emit the same event, so they are ignored."""
    trusted = {bytes.fromhex(text[2:]) for text in network.chain.entry_points.values()}
    events = (operations.included(log_) for log_ in facts.logs)
    return [event for event in events if event is not None and event.position.contract in trusted]


def coin_of(network: Network) -> int:
    """One whole coin in its smallest units."""
    coin: int = 10**network.chain.native.decimals
    return coin


def _event(event: IncludedOperation) -> LandedOperation:
    position = event.position
    return LandedOperation(
        position.contract,
        event.sender,
        event.nonce,
        event.hash,
        event.cost_wei,
        position.block,
        position.block_hash,
        position.transaction,
    )
