"""Smart wallets: an address before anything is on the chain, and what the chain says of it afterwards.

Nothing is asked of a chain to create one: the address is computed. Whether it is deployed the follower writes down
(`Births`), and a read looks again, because the follower may be behind, or not there at all; what it finds is written down as
well. The chain has the last word: a wallet whose code is gone is counterfactual again.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.chains.evm import abi, address, factories, operations
from proxy.chains.evm.factories import Factory
from proxy.chains.evm.facts import Facts
from proxy.chains.registry import Network, Registry
from proxy.core.access import Key
from proxy.core.paging import Page
from proxy.errors import Fault, Forbidden, InternalError, InvalidRequest, NotFound
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.questions import Questions
from proxy.store import wallets as store_room
from proxy.store.blocks import Followed, Mark
from proxy.store.pool import Connection
from proxy.store.wallets import Deployment, Wallet, WalletStore

__all__ = ("Births", "Seen", "Wallet", "Wallets")

# Where the follower has not told of a deployment, so many of the newest blocks are searched for it before any older one.
RECENT_BLOCKS = 2_000


@dataclass(frozen=True, slots=True)
class Seen:
    """A wallet as it is on the chain now."""

    wallet: Wallet
    is_deployed: bool
    nonce: int


class Wallets:
    def __init__(
        self,
        store: WalletStore,
        questions: Questions,
        chains: Registry,
        *,
        proxies: Mapping[str, bytes],
        default: str,
        most: Mapping[str, int],
    ) -> None:
        """`default`: the version of wallets whose creator names none. `most`: wallets of an account, by plan."""
        self._store = store
        self._questions = questions
        self._default = default
        self._most = most
        self._factories = {chain.name: factories.of_chain(chain, proxies) for chain in chains.chains.values()}

    def __repr__(self) -> str:
        return f"<Wallets {self._store!r}, {self._default} by default>"

    async def create(
        self, key: Key, network: Network, *, owner: bytes, salt: str | None, version: str | None
    ) -> tuple[Wallet, bool]:
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
        return found, outcome == "new"

    def _factory(self, network: Network, version: str | None) -> Factory:
        known = self._factories[network.chain.name]
        if not known:
            raise NotFound(f"there are no smart wallets on {network.id}: no factory is known there")
        if version is None:
            return known.get(self._default) or known[max(known)]
        if version not in known:
            raise InvalidRequest(f"version: {network.id} has factories for {', '.join(known)}, not for {version}")
        return known[version]

    async def page(self, key: Key, page: Page, network: Network | None) -> tuple[list[Wallet], int]:
        return await self._store.page(key.lineage, page, network=None if network is None else network.id)

    async def find(self, key: Key, at: bytes) -> list[Wallet]:
        """The key's wallets at this address, one for each network."""
        return await self._store.find(key.lineage, at)

    # What the chain says

    async def look(self, network: Network, wallet: Wallet) -> Seen:
        """The wallet as it is now. A Fault where the chain cannot be asked."""
        nonce_call = {
            "to": network.chain.entry_points[wallet.version],
            "data": "0x" + abi.call("getNonce(address,uint192)", wallet.address, 0).hex(),
        }
        asked: list[tuple[str, list[Any]]] = [
            ("eth_getCode", [_text(wallet.address), "latest"]),
            ("eth_call", [nonce_call, "latest"]),
        ]
        code, nonce = await self._questions.ask_many(network, asked, fresh=True)
        if isinstance(code, RpcError):
            raise InternalError(f"{network.id} does not tell what code is at an address")
        is_deployed = code != "0x"
        if not is_deployed and wallet.deploy_tx is not None:
            await self._store.lost(network.id, wallet.address)
        elif is_deployed and (wallet.deploy_tx is None or wallet.deployed_at is None):
            wallet = await self._located(network, wallet)
        return Seen(wallet, is_deployed, abi.uint(abi.unhex(nonce)) or 0)

    async def _ask(self, network: Network, method: str, *params: Any) -> Any:
        """None where the upstream itself says no, as one that has no old state does."""
        try:
            return await self._questions.ask(network, method, *params, fresh=True)
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
        await self._store.found(network.id, found)
        return dataclasses.replace(wallet, deployed_at=found.at, deploy_tx=found.transaction, deploy_block=found.block)

    async def _search(self, network: Network, wallet: Wallet) -> Deployment | None:
        place = await self._birth(network, wallet)
        if place is None:
            return None
        block = await self._ask(network, "eth_getBlockByNumber", hex(place.block), False)
        seconds = int(block["timestamp"], 16) if isinstance(block, dict) and "timestamp" in block else None
        at = None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        return Deployment(wallet.address, place.transaction, place.block, place.block_hash, at)

    async def _birth(self, network: Network, wallet: Wallet) -> operations.Place | None:
        """The event of its initialisation: among the newest blocks, else in the block in which its code came to be."""
        head = int(await self._questions.ask(network, "eth_blockNumber", fresh=True), 16)
        at = wallet.deploy_block
        if at is not None and at <= head and (found := await self._events(network, wallet, at, at)):
            return found
        if found := await self._events(network, wallet, max(0, head - RECENT_BLOCKS), head):
            return found
        first = await self._first_block(network, wallet, head)
        return None if first is None else await self._events(network, wallet, first, first)

    async def _events(self, network: Network, wallet: Wallet, first: int, last: int) -> operations.Place | None:
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
            code = await self._ask(network, "eth_getCode", _text(wallet.address), hex(middle))
            if code is None:
                return None
            low, high = (middle + 1, high) if code == "0x" else (low, middle)
        return low


class Births:
    """The follower's part: wallets that a block has deployed."""

    topics: frozenset[str] | None = frozenset((operations.INITIALIZED,))
    blocks = False
    transactions = False

    async def write(self, connection: Connection, network: Followed, found: Sequence[Facts]) -> None:
        deployed: list[Deployment] = []
        for piece in found:
            # Of a range only the last block's time is known: a read adds the others'.
            at = None if piece.header is None else datetime.datetime.fromtimestamp(piece.time, datetime.UTC)
            places = (place for log in piece.logs if (place := operations.born(log)) is not None)
            deployed += [Deployment(p.contract, p.transaction, p.block, p.block_hash, at) for p in places]
        if deployed:
            await store_room.mark_deployed(connection, network.id, deployed)

    async def undo(self, connection: Connection, network: Followed, stays: Mark, removed: Sequence[Mark]) -> None:
        await store_room.take_back(connection, network.id, stays.number)

    async def settle(self, connection: Connection, network: Followed, below: int) -> None:
        """Nothing is kept for taking back."""

    async def forget(self, connection: Connection, network: Followed) -> None:
        """The chain was begun anew, and nothing of what was deployed is there."""
        await store_room.take_back(connection, network.id, -1)


def _text(at: bytes) -> str:
    return address.checksum(at)
