"""Smart wallets: an address before anything is on the chain, and what the chain says of it afterwards.

No chain is needed to create one: the address is computed. Whether it is deployed the follower writes down (`Births`), and
whoever asks is told by a look at the chain, because the follower may be behind, or not there at all; what a read finds is
written down as well. The chain has the last word: a wallet whose block is gone is counterfactual again. One upstream that finds
no code there has not, for it may be behind: a deployment is gone when another block stands in the place of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.chains.evm import abi, address, factories, operations
from proxy.chains.evm.factories import Factory
from proxy.chains.evm.facts import BlockFacts
from proxy.chains.registry import Network, Registry
from proxy.core.access import Key
from proxy.core.paging import Page
from proxy.errors import Fault, Forbidden, InternalError, InvalidRequest, NotFound
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store import wallets as store_room
from proxy.store.blocks import BlockMark, Followed
from proxy.store.pool import DatabaseConnection
from proxy.store.wallets import Deployment, Wallet, WalletStore

__all__ = ("DeploymentSink", "Wallet", "WalletService", "WalletState")

log = logging.getLogger("penstock.wallets")

# Where the follower has not told of a deployment, so many of the newest blocks are searched for it before any older one.
RECENT_BLOCKS = 2_000
# A list and a creation wait so long for a chain to say what is deployed; then they tell what is written down.
PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class WalletState:
    """A wallet as it is on the chain now; its nonce where that was asked for."""

    wallet: Wallet
    is_deployed: bool
    nonce: int | None = None


class WalletService:
    def __init__(
        self,
        store: WalletStore,
        internal_calls: InternalCalls,
        chains: Registry,
        *,
        proxies: Mapping[str, bytes],
        default: str,
        most: Mapping[str, int],
    ) -> None:
        """`default`: the version of wallets whose creator names none. `most`: wallets of an account, by plan."""
        self._store = store
        self._internal_calls = internal_calls
        self._default = default
        self._most = most
        self._networks = {network.id: network for network in chains.networks()}
        self._factories = {chain.name: factories.of_chain(chain, proxies) for chain in chains.chains.values()}

    def __repr__(self) -> str:
        return f"<WalletService {self._store!r}, {self._default} by default>"

    async def create(
        self, key: Key, network: Network, *, owner: bytes, salt: str | None, version: str | None
    ) -> tuple[WalletState, bool]:
        """The wallet, and whether it is new."""
        factory = self._factory(network, version)
        try:
            number = factories.salt_of(salt)
        except ValueError as exc:
            raise InvalidRequest(f"salt: {exc}") from None
        wallet = Wallet(
            network=network.id,
            address=factory.wallet(owner, number),
            owner=owner,
            version=factory.version,
            factory=factory.address,
            created_at=datetime.datetime.now(datetime.UTC),
        )
        most = self._most[key.account.plan]
        outcome, found = await self._store.create(
            account=key.account.id, lineage=key.lineage, wallet=wallet, salt=number, most=most
        )
        if outcome == "full" or found is None:
            raise Forbidden(f"this account's plan has room for {most} wallets, and they are taken")
        (seen,) = await self._glances([found])
        return seen, outcome == "new"

    def _factory(self, network: Network, version: str | None) -> Factory:
        known = self._factories[network.chain.name]
        if not known:
            raise NotFound(f"there are no smart wallets on {network.id}: no factory is known there")
        if version is None:
            return known.get(self._default) or known[max(known)]
        if version not in known:
            raise InvalidRequest(f"version: {network.id} has factories for {', '.join(known)}, not for {version}")
        return known[version]

    async def page(self, key: Key, page: Page, network: Network | None) -> tuple[list[WalletState], int]:
        found, total = await self._store.page(key.lineage, page, network=None if network is None else network.id)
        return await self._glances(found), total

    async def find(self, key: Key, at: bytes) -> list[Wallet]:
        """The key's wallets at this address, one for each network."""
        return await self._store.find(key.lineage, at)

    # What the chain says

    async def look(self, network: Network, wallet: Wallet) -> WalletState:
        """The wallet as it is now. A Fault where the chain cannot be asked."""
        nonce_call = {
            "to": network.chain.entry_points[wallet.version],
            "data": "0x" + abi.call("getNonce(address,uint192)", wallet.address, 0).hex(),
        }
        asked: list[tuple[str, list[Any]]] = [
            ("eth_getCode", [_text(wallet.address), "latest"]),
            ("eth_call", [nonce_call, "latest"]),
        ]
        code, word = await self._internal_calls.call_many(network, asked, fresh=True)
        has_code, nonce = _has_code(code), abi.uint(abi.unhex(word))
        if has_code is None:
            raise InternalError(f"{network.id} does not tell what code is at an address")
        if nonce is None:
            raise InternalError(f"{network.id} does not tell the nonce of a wallet")
        if has_code and (wallet.deploy_tx is None or wallet.deployed_at is None):
            wallet = await self._located(network, wallet)
        return dataclasses.replace(await self._weighed(network, wallet, has_code), nonce=nonce)

    async def _glances(self, wallets: Sequence[Wallet]) -> list[WalletState]:
        """Each as it is now, as far as its chain says so in time; else as it is written down."""
        seen = {wallet: WalletState(wallet, wallet.deploy_tx is not None) for wallet in wallets}
        async with asyncio.TaskGroup() as group:
            for network in {wallet.network: self._networks.get(wallet.network) for wallet in wallets}.values():
                if network is not None:
                    group.create_task(self._glance(network, seen))
        return [seen[wallet] for wallet in wallets]

    async def _glance(self, network: Network, seen: dict[Wallet, WalletState]) -> None:
        """Whether there is code at their addresses. What is final stays, and is not asked for."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                final = self._internal_calls.route(network).heads.final
                open_ = [w for w in seen if w.network == network.id and not _is_final(w, final)]
                asked = [("eth_getCode", [_text(wallet.address), "latest"]) for wallet in open_]
                for wallet, code in zip(open_, await self._internal_calls.call_many(network, asked), strict=True):
                    if (has_code := _has_code(code)) is not None:
                        seen[wallet] = await self._weighed(network, wallet, has_code)
        except (Fault, TimeoutError) as exc:
            log.info("wallets are told as they were", extra={"network": network.id, "why": type(exc).__name__})

    async def _weighed(self, network: Network, wallet: Wallet, has_code: bool) -> WalletState:
        """What there is at an address against what is written down of it."""
        if has_code or wallet.deploy_block is None:
            return WalletState(wallet, has_code)
        block = await self._ask(network, "eth_getBlockByNumber", hex(wallet.deploy_block), False)
        found = abi.unhex(block.get("hash")) if isinstance(block, dict) else None
        if found is None or found == wallet.deploy_block_hash:
            return WalletState(wallet, is_deployed=True)
        await self._store.unmark_deployed(wallet)
        gone = dataclasses.replace(wallet, deployed_at=None, deploy_tx=None, deploy_block=None, deploy_block_hash=None)
        return WalletState(gone, is_deployed=False)

    async def _ask(self, network: Network, method: str, *params: Any) -> Any:
        """None where the upstream itself says no, as one that has no old state does."""
        try:
            return await self._internal_calls.call(network, method, *params, fresh=True)
        except RpcError:
            return None

    async def _located(self, network: Network, wallet: Wallet) -> Wallet:
        """The wallet with where it was deployed, as far as that can be found; what is found stays known."""
        try:
            found = await self._search(network, wallet)
        except Fault:
            found = None
        if found is None:
            return wallet
        await self._store.mark_deployed(network.id, found)
        return dataclasses.replace(
            wallet,
            deployed_at=found.at,
            deploy_tx=found.transaction,
            deploy_block=found.block,
            deploy_block_hash=found.block_hash,
        )

    async def _search(self, network: Network, wallet: Wallet) -> Deployment | None:
        place = await self._birth(network, wallet)
        if place is None:
            return None
        block = await self._ask(network, "eth_getBlockByNumber", hex(place.block), False)
        seconds = int(block["timestamp"], 16) if isinstance(block, dict) and "timestamp" in block else None
        at = None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        return Deployment(wallet.address, place.transaction, place.block, place.block_hash, at)

    async def _birth(self, network: Network, wallet: Wallet) -> operations.LogPlace | None:
        """The event of its initialisation: among the newest blocks, else in the block in which its code came to be."""
        head = int(await self._internal_calls.call(network, "eth_blockNumber", fresh=True), 16)
        at = wallet.deploy_block
        if at is not None and at <= head and (found := await self._events(network, wallet, at, at)):
            return found
        if found := await self._events(network, wallet, max(0, head - RECENT_BLOCKS), head):
            return found
        first = await self._first_block(network, wallet, head)
        return None if first is None else await self._events(network, wallet, first, first)

    async def _events(self, network: Network, wallet: Wallet, first: int, last: int) -> operations.LogPlace | None:
        asked = {
            "address": _text(wallet.address),
            "topics": [operations.INITIALIZED],
            "fromBlock": hex(first),
            "toBlock": hex(last),
        }
        logs = operations.read_logs(await self._ask(network, "eth_getLogs", asked))
        places = [place for log in logs if (place := operations.born(log)) is not None]
        return places[0] if places else None

    async def _first_block(self, network: Network, wallet: Wallet, head: int) -> int | None:
        """By halves, from the code at a block; None where no upstream has state that old."""
        low, high = 0, head
        while low < high:
            middle = (low + high) // 2
            has_code = _has_code(await self._ask(network, "eth_getCode", _text(wallet.address), hex(middle)))
            if has_code is None:
                return None
            low, high = (low, middle) if has_code else (middle + 1, high)
        return low


class DeploymentSink:
    """The follower's part: wallets that a block has deployed, and those that it has not, whatever a reader had seen."""

    topics: frozenset[str] | None = frozenset((operations.INITIALIZED,))
    blocks = False
    transactions = False

    async def write(self, connection: DatabaseConnection, network: Followed, found: Sequence[BlockFacts]) -> None:
        deployed: list[Deployment] = []
        for piece in found:
            # Of a range only the last block's time is known: a read adds the others'.
            at = None if piece.header is None else datetime.datetime.fromtimestamp(piece.time, datetime.UTC)
            places = (place for log in piece.logs if (place := operations.born(log)) is not None)
            deployed += [Deployment(p.contract, p.transaction, p.block, p.block_hash, at) for p in places]
        born = [deployment.address for deployment in deployed]
        await store_room.keep_only(connection, network.id, born, blocks=(found[0].first, found[-1].last))
        if deployed:
            await store_room.mark_deployed(connection, network.id, deployed)

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockMark, removed: Sequence[BlockMark]
    ) -> None:
        await store_room.take_back(connection, network.id, stays.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """Nothing is kept for taking back."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        """The chain was begun anew, and nothing of what was deployed is there."""
        await store_room.take_back(connection, network.id, -1)


def _is_final(wallet: Wallet, final: int) -> bool:
    return wallet.deploy_block is not None and wallet.deploy_block <= final


def _has_code(code: object) -> bool | None:
    """None where this is no code at all: an error, or a null."""
    found = abi.unhex(code)
    return None if found is None else bool(found)


def _text(at: bytes) -> str:
    return address.checksum(at)
