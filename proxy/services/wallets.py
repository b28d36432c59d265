"""Smart wallets: their computed addresses, and whether they are deployed.

Creating a wallet needs no chain: its address is computed. The follower records deployments (`DeploymentSink`), but it may be
behind or not running, so every read also checks the chain and records a deployment it finds. The chain is authoritative: a
wallet whose block was dropped is counterfactual again. An upstream that finds no code is not proof of that, since it may be
behind. A deployment counts as dropped only if another block has taken the place of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.chains.evm import abi, address, factories, operations
from proxy.chains.evm.factories import Factory
from proxy.chains.evm.facts import BlockFacts, read_header
from proxy.chains.registry import Network, Registry
from proxy.core.access import Key
from proxy.core.paging import Page
from proxy.errors import Fault, Forbidden, InternalError, InvalidRequest, NotFound
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store.postgres import wallets as store_room
from proxy.store.postgres.blocks import BlockId, Followed
from proxy.store.postgres.pool import DatabaseConnection
from proxy.store.postgres.wallets import Deployment, Wallet, WalletStore

__all__ = ("DeploymentSink", "Wallet", "WalletService", "WalletState")

log = logging.getLogger("penstock.wallets")

# If the follower has not recorded a deployment, this many of the newest blocks are searched before older ones.
RECENT_BLOCKS = 2_000
# How long a list or a creation waits for the chain before it returns the recorded state.
CHECK_S = 3.0


@dataclass(frozen=True, slots=True)
class WalletState:
    """A wallet's current state on the chain; `nonce` only if it was read."""

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
        """`default`: the version of wallets created without one. `most`: the most wallets of an account, by plan."""
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
            raise InvalidRequest(f"salt: {exc}", param="salt") from None
        wallet = Wallet(
            network=network.id,
            address=factory.wallet(owner, number),
            owner=owner,
            salt=number,
            version=factory.version,
            factory=factory.address,
            created_at=datetime.datetime.now(datetime.UTC),
        )
        most = self._most[key.account.plan]
        outcome, stored = await self._store.create(
            account=key.account.id, lineage=key.lineage, wallet=wallet, most=most
        )
        if outcome == "full" or stored is None:
            raise Forbidden(f"this account's plan allows {most} wallets, and all of them exist already", reason="plan")
        (state,) = await self._states([stored])
        return state, outcome == "new"

    def _factory(self, network: Network, version: str | None) -> Factory:
        known = self._factories[network.chain.name]
        if not known:
            raise NotFound(f"smart wallets are not available on {network.id}: no factory is configured there")
        if version is None:
            return known.get(self._default) or known[max(known)]
        if version not in known:
            raise InvalidRequest(
                f"version: {network.id} has factories for {', '.join(known)}, not for {version}", param="version"
            )
        return known[version]

    async def page(self, key: Key, page: Page, network: Network | None) -> tuple[list[WalletState], int]:
        networks = key.only_networks if network is None else [network.id]
        wallets, total = await self._store.page(key.lineage, page, networks=networks)
        return await self._states(wallets), total

    async def find(self, key: Key, at: bytes) -> list[Wallet]:
        """The key's wallets at this address, one for each network."""
        return await self._store.find(key.lineage, at)

    # Reads of the chain

    async def state(self, network: Network, wallet: Wallet) -> WalletState:
        """The wallet's current state, with its nonce. Raises a Fault if the chain cannot be read."""
        nonce_call = {
            "to": network.chain.entry_points[wallet.version],
            "data": "0x" + abi.call("getNonce(address,uint192)", wallet.address, 0).hex(),
        }
        calls: list[tuple[str, list[Any]]] = [
            ("eth_getCode", [_text(wallet.address), "latest"]),
            ("eth_call", [nonce_call, "latest"]),
        ]
        code, word = await self._internal_calls.call_many(network, calls, fresh=True)
        has_code, nonce = _has_code(code), abi.uint(abi.unhex(word))
        if has_code is None:
            raise InternalError(f"the code at an address on {network.id} cannot be read", reason="upstream")
        if nonce is None:
            raise InternalError(f"the nonce of a wallet on {network.id} cannot be read", reason="upstream")
        if has_code and (wallet.deploy_tx is None or wallet.deployed_at is None):
            wallet = await self._with_deployment(network, wallet)
        return dataclasses.replace(await self._reconciled(network, wallet, has_code), nonce=nonce)

    async def _states(self, wallets: Sequence[Wallet]) -> list[WalletState]:
        """The current state of each wallet, or its recorded state if the chain does not reply in time."""
        states = {wallet: WalletState(wallet, wallet.deploy_tx is not None) for wallet in wallets}
        async with asyncio.TaskGroup() as group:
            for network in {wallet.network: self._networks.get(wallet.network) for wallet in wallets}.values():
                if network is not None:
                    group.create_task(self._check_code(network, states))
        return [states[wallet] for wallet in wallets]

    async def _check_code(self, network: Network, states: dict[Wallet, WalletState]) -> None:
        """Update the network's wallets by whether there is code at their addresses. Final deployments are not checked."""
        try:
            async with asyncio.timeout(CHECK_S):
                final = self._internal_calls.route(network).heads.final
                unsure = [w for w in states if w.network == network.id and not _is_final(w, final)]
                calls = [("eth_getCode", [_text(wallet.address), "latest"]) for wallet in unsure]
                for wallet, code in zip(unsure, await self._internal_calls.call_many(network, calls), strict=True):
                    if (has_code := _has_code(code)) is not None:
                        states[wallet] = await self._reconciled(network, wallet, has_code)
        except (Fault, TimeoutError) as exc:
            log.info("recorded wallet states returned", extra={"network": network.id, "why": type(exc).__name__})

    async def _reconciled(self, network: Network, wallet: Wallet, has_code: bool) -> WalletState:
        """The state that follows from the code at the address and the recorded deployment."""
        if has_code or wallet.deploy_block is None:
            return WalletState(wallet, has_code)
        block = await self._call(network, "eth_getBlockByNumber", hex(wallet.deploy_block), False)
        block_hash = abi.unhex(block.get("hash")) if isinstance(block, dict) else None
        if block_hash is None or block_hash == wallet.deploy_block_hash:
            return WalletState(wallet, is_deployed=True)
        await self._store.unmark_deployed(wallet)
        gone = dataclasses.replace(wallet, deployed_at=None, deploy_tx=None, deploy_block=None, deploy_block_hash=None)
        return WalletState(gone, is_deployed=False)

    async def _call(self, network: Network, method: str, *params: Any) -> Any:
        """The result, or None if the upstream returns an error, as one without old state does."""
        try:
            return await self._internal_calls.call(network, method, *params, fresh=True)
        except RpcError:
            return None

    async def _with_deployment(self, network: Network, wallet: Wallet) -> Wallet:
        """The wallet with its deployment, if that can be found on the chain; it is then also recorded."""
        try:
            deployment = await self._find_deployment(network, wallet)
        except Fault:
            deployment = None
        if deployment is None:
            return wallet
        await self._store.mark_deployed(network.id, deployment)
        return dataclasses.replace(
            wallet,
            deployed_at=deployment.at,
            deploy_tx=deployment.transaction,
            deploy_block=deployment.block,
            deploy_block_hash=deployment.block_hash,
        )

    async def _find_deployment(self, network: Network, wallet: Wallet) -> Deployment | None:
        position = await self._find_event(network, wallet)
        if position is None:
            return None
        at = await self._time_of(network, position.block)
        return Deployment(wallet.address, position.transaction, position.block, position.block_hash, at)

    async def _time_of(self, network: Network, number: int) -> datetime.datetime | None:
        try:
            raw = await self._internal_calls.raw(network, "eth_getBlockByNumber", hex(number), False, fresh=True)
            header = read_header(raw)
        except (RpcError, msgspec.DecodeError):
            return None
        return None if header is None else datetime.datetime.fromtimestamp(int(header.timestamp, 16), datetime.UTC)

    async def _find_event(self, network: Network, wallet: Wallet) -> operations.LogPosition | None:
        """The position of the wallet's initialisation event: in the recorded block, else among the newest blocks, else in the
        first block that has the wallet's code."""
        head = await self._internal_calls.quantity(network, "eth_blockNumber", fresh=True)
        at = wallet.deploy_block
        if at is not None and at <= head and (event := await self._first_event(network, wallet, at, at)):
            return event
        if event := await self._first_event(network, wallet, max(0, head - RECENT_BLOCKS), head):
            return event
        first = await self._first_block(network, wallet, head)
        return None if first is None else await self._first_event(network, wallet, first, first)

    async def _first_event(
        self, network: Network, wallet: Wallet, first: int, last: int
    ) -> operations.LogPosition | None:
        log_filter = {
            "address": _text(wallet.address),
            "topics": [operations.INITIALIZED],
            "fromBlock": hex(first),
            "toBlock": hex(last),
        }
        logs = operations.read_logs(await self._call(network, "eth_getLogs", log_filter))
        positions = [position for log in logs if (position := operations.born(log)) is not None]
        return positions[0] if positions else None

    async def _first_block(self, network: Network, wallet: Wallet, head: int) -> int | None:
        """The first block with the wallet's code, by bisection; None if no upstream has state that old."""
        low, high = 0, head
        while low < high:
            middle = (low + high) // 2
            has_code = _has_code(await self._call(network, "eth_getCode", _text(wallet.address), hex(middle)))
            if has_code is None:
                return None
            low, high = (low, middle) if has_code else (middle + 1, high)
        return low


class DeploymentSink:
    """A sink of the follower: records the wallets that a block deployed, and removes deployments that reads had recorded in the
    block but that it does not contain."""

    topics: frozenset[str] | None = frozenset((operations.INITIALIZED,))
    blocks = False
    transactions = False
    receipts = False

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        deployed: list[Deployment] = []
        for piece in facts:
            # In a range only the time of the last block is known: a later read adds the others.
            at = None if piece.header is None else datetime.datetime.fromtimestamp(piece.time, datetime.UTC)
            positions = (position for log in piece.logs if (position := operations.born(log)) is not None)
            deployed += [Deployment(p.contract, p.transaction, p.block, p.block_hash, at) for p in positions]
        born = [deployment.address for deployment in deployed]
        await store_room.keep_only(connection, network.id, born, blocks=(facts[0].first, facts[-1].last))
        if deployed:
            await store_room.mark_deployed(connection, network.id, deployed)

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        await store_room.take_back(connection, network.id, stays.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """Nothing to do: no undo records are kept."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        """The chain was reset: none of its deployments exist any more."""
        await store_room.take_back(connection, network.id, -1)


def _is_final(wallet: Wallet, final: int) -> bool:
    return wallet.deploy_block is not None and wallet.deploy_block <= final


def _has_code(code: object) -> bool | None:
    """None if the reply is not code: an error or a null."""
    raw = abi.unhex(code)
    return None if raw is None else bool(raw)


def _text(at: bytes) -> str:
    return address.checksum(at)
