"""Sends private transactions to the public mempool, if their senders asked for that and no block has included them in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from proxy.errors import Fault
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Route
from proxy.store.postgres.private_transactions import DueTransaction, PrivateTransactionStore

log = logging.getLogger("penstock.relays")

# The pause between two looks, and the transactions of one network that are sent in one.
ROUND_S, AT_ONCE = 2.0, 100
# After how many blocks a transaction that upstreams refuse is tried again.
AGAIN_AFTER = 25
KEEP_DAYS = 7


class PublicFallback:
    def __init__(self, store: PrivateTransactionStore, internal_calls: InternalCalls, routes: Sequence[Route]) -> None:
        """`routes`: the networks that have relays."""
        self._store = store
        self._internal_calls = internal_calls
        self._routes = routes

    def __repr__(self) -> str:
        return f"<PublicFallback of {len(self._routes)} networks>"

    async def run(self) -> None:
        while True:
            for route in self._routes:
                await self.send_due(route)
            await self._purge()
            await asyncio.sleep(ROUND_S)

    async def send_due(self, route: Route) -> None:
        """Send the transactions of one network whose time has come. One that fails does not stop the others."""
        if not route.heads.tip:
            return
        try:
            due = await self._store.due(route.network.id, route.heads.tip, at_once=AT_ONCE)
            for each in due:
                await self._send(route, each)
        except Fault as exc:
            log.warning("sending private transactions publicly failed", extra={"reason": str(exc)})

    async def _send(self, route: Route, due: DueTransaction) -> None:
        network, sent = route.network, due.sent
        try:
            receipt = await self._internal_calls.call(network, "eth_getTransactionReceipt", sent.name, fresh=True)
            if receipt is None:
                await self._internal_calls.call(network, "eth_sendRawTransaction", f"0x{due.raw.hex()}")
            await self._store.end_wait(sent, "done" if receipt else "public")
        except RpcError:
            # The sender's nonce is used, or the fee is too low for now.
            await self._store.postpone(sent, route.heads.tip + AGAIN_AFTER)
        except Fault as exc:
            log.warning(
                "a private transaction could not be sent publicly", extra={"network": network.id, "reason": str(exc)}
            )

    async def _purge(self) -> None:
        try:
            await self._store.purge(keep_days=KEEP_DAYS)
        except Fault as exc:
            log.warning("removing old private transactions failed", extra={"reason": str(exc)})
