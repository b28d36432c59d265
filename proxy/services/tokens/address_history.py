"""The transfers of an address, a contract or a transaction, with the symbols and decimals of their tokens.

Transfers come from the index, descriptions of tokens from their contracts. A page belongs to one block of the index: if the
index moves while a page is read, the page is read again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxy.chains.evm import address as addresses
from proxy.chains.registry import Network
from proxy.core import units
from proxy.core.iso_time import iso_of_unix
from proxy.core.portfolio import TokenInfo
from proxy.core.transfer_history import (
    CATEGORIES,
    NAMES,
    OF_LOGS,
    PageStart,
    TransferFilter,
    cursor_of,
    has_failed,
    index_of,
)
from proxy.errors import NotFound, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.tokens.token_contracts import TokenContracts
from proxy.store.postgres.transfers import CompleteBlocks, StoredTransfer, TransferPage, TransferStore

TransferSide = Literal["in", "out", "both"]
_SIDES: dict[TransferSide, tuple[bool, bool]] = {"in": (False, True), "out": (True, False), "both": (True, True)}
ALL = tuple(CATEGORIES.values())
STANDARDS = {20: "ERC20", 721: "ERC721", 1155: "ERC1155"}
_FUNGIBLE = 20


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Transfers, and how far the index goes. `next`: the cursor of the next page. `complete`: by category."""

    transfers: list[StoredTransfer]
    tokens: Mapping[bytes, TokenInfo]
    next: str | None
    block: int
    final: int
    complete: Mapping[int, CompleteBlocks]


@dataclass(frozen=True, slots=True, repr=False)
class TransferHistory:
    contracts: TokenContracts
    store: TransferStore
    calls: InternalCalls

    def __repr__(self) -> str:
        return f"<TransferHistory in {self.store!r}>"

    async def of_address(
        self, network: Network, address: bytes, direction: TransferSide, wanted: TransferFilter, start: PageStart
    ) -> HistoryPage:
        return await self._page(
            network,
            lambda _: self.store.of_address(network.id, address, _SIDES[direction], wanted, start),
        )

    async def of_contract(
        self, network: Network, contract: bytes, wanted: TransferFilter, start: PageStart
    ) -> HistoryPage:
        return await self._page(
            network, lambda head: self.store.of_contract(network.id, contract, wanted, start, head=head)
        )

    async def of_transaction(self, network: Network, transaction: bytes) -> HistoryPage:
        """Raises NotFound for a transaction that is not on the chain, and Unavailable if its block is not indexed yet."""
        name = "0x" + transaction.hex()
        try:
            receipt = await self.calls.call(network, "eth_getTransactionReceipt", name)
        except RpcError as exc:
            raise Unavailable("no upstream has returned the transaction's receipt") from exc
        if not isinstance(receipt, dict):
            raise NotFound(f"there is no transaction {name} on {network.id}", param="hash", reason="resource")
        block, block_hash = _block_of(receipt)

        async def read(head: int) -> TransferPage:
            transfers = None
            if 0 <= block <= head:
                transfers = await self.store.of_transaction(network.id, transaction, block=block, block_hash=block_hash)
            if transfers is None:
                raise Unavailable(f"block {block} of the transaction is not indexed yet; try again shortly")
            return TransferPage(transfers, None)

        return await self._page(network, read)

    async def block_at(self, network: Network, time: int) -> int | None:
        """The first block with transfers at this time or later."""
        await self.contracts.indexed(network)
        return await self.store.block_at(network.id, time)

    async def _page(self, network: Network, read: Callable[[int], Awaitable[TransferPage]]) -> HistoryPage:
        async def both() -> tuple[TransferPage, Mapping[int, CompleteBlocks]]:
            head = (await self.contracts.indexed(network)).block
            return await read(head), await self.store.coverage(network.id)

        (page, complete), block = await self.contracts.at_one_block(network, both)
        tokens = await self._tokens(network, page.transfers, block)
        final = self.calls.route(network).heads.final
        after = None if page.next is None else cursor_of(page.next)
        return HistoryPage(page.transfers, tokens, after, block, final, complete)

    async def _tokens(
        self, network: Network, transfers: Sequence[StoredTransfer], block: int
    ) -> Mapping[bytes, TokenInfo]:
        contracts = sorted({each.contract for each in transfers if each.contract})
        return await self.contracts.known(network, contracts, block) if contracts else {}


def _block_of(receipt: Mapping[str, Any]) -> tuple[int, bytes]:
    """The number and hash of the block. Some upstreams leave them out while the transaction is pending."""
    try:
        return int(receipt["blockNumber"], 16), bytes.fromhex(receipt["blockHash"][2:])
    except (KeyError, TypeError, ValueError):
        raise Unavailable("the receipt does not name the transaction's block; try again shortly") from None


def completeness(page: HistoryPage, categories: Iterable[int]) -> dict[str, dict[str, int | None]]:
    """The first and last block between which each category is complete; null if it is not kept."""
    blocks = {NAMES[each]: page.complete.get(each) for each in sorted(categories)}
    return {
        "complete_from": {name: None if span is None else span.first for name, span in blocks.items()},
        "complete_to": {name: None if span is None else span.last for name, span in blocks.items()},
    }


def listed(network: Network, chain: str, page: HistoryPage, of: bytes | None = None) -> list[dict[str, Any]]:
    """The transfers as the API returns them. `of`: the address whose directions are shown."""
    return [_item(network, chain, page, each, of) for each in page.transfers]


def _item(network: Network, chain: str, page: HistoryPage, moved: StoredTransfer, of: bytes | None) -> dict[str, Any]:
    symbol, decimals = described(network, page.tokens, moved)
    block, place = moved.position
    return {
        "chain": chain,
        "block_number": block,
        "block_hash": "0x" + moved.block_hash.hex(),
        "timestamp": iso_of_unix(moved.time),
        "tx_hash": "0x" + moved.transaction.hex(),
        "log_index": index_of(place) if moved.category in OF_LOGS else None,
        "from": addresses.checksum(moved.sender),
        "to": addresses.checksum(moved.recipient) if moved.recipient else None,
        "contract": addresses.checksum(moved.contract) if moved.contract else None,
        "token_id": str(moved.token_id) if moved.category in (721, 1155) else None,
        "value": str(moved.amount),
        "formatted_value": None if decimals is None else units.formatted(moved.amount, decimals),
        "symbol": symbol,
        "decimals": decimals,
        "category": NAMES[moved.category],
        "standard": STANDARDS.get(moved.category),
        "direction": None if of is None else _direction(moved, of),
        "status": _status(page, moved),
    }


def _status(page: HistoryPage, moved: StoredTransfer) -> str:
    block, place = moved.position
    if has_failed(moved.category, place):
        return "failed"
    return "final" if block <= page.final else "included"


def described(
    network: Network, tokens: Mapping[bytes, TokenInfo], moved: StoredTransfer
) -> tuple[str | None, int | None]:
    """The symbol of the token or coin, and its decimals; None where unknown, and for NFTs, which have none."""
    if not moved.contract:
        return network.chain.native.symbol, network.chain.native.decimals
    token = tokens.get(moved.contract)
    if token is None:
        return None, None
    return token.symbol, token.decimals if moved.category == _FUNGIBLE else None


def _direction(moved: StoredTransfer, of: bytes) -> str:
    if moved.sender == moved.recipient:
        return "self"
    return "out" if moved.sender == of else "in"
