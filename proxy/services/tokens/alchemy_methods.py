"""The data methods of Alchemy's JSON-RPC API, answered from the index, so that its SDK and programs written for it work here.

Names and forms are those of Alchemy's reference: numbers in hex, `external` for coins of transactions. Two differences are on
purpose: a category that the service does not keep is an error and not an empty list, and each token of an ERC-1155 batch is a
transfer of its own. Coins of failed transactions are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.chains.evm import abi, address
from proxy.chains.registry import Network
from proxy.core import units, upstream_errors
from proxy.core.iso_time import iso_millis_of_unix
from proxy.core.transfer_history import (
    ERC20,
    ERC721,
    ERC1155,
    INTERNAL,
    NATIVE,
    OF_LOGS,
    PageStart,
    TransferFilter,
    has_failed,
    index_of,
    item_of,
    position_of,
)
from proxy.errors import InvalidRequest, Unavailable
from proxy.services.accounts.metering import meter_of_task
from proxy.services.multicall import Multicall
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.own_methods import OwnMethod
from proxy.services.tokens.address_history import HistoryPage, TransferHistory, TransferSide, described
from proxy.services.tokens.evm_tokens import EvmTokens
from proxy.store.postgres.transfers import StoredTransfer

CATEGORIES = {"external": NATIVE, "internal": INTERNAL, "erc20": ERC20, "erc721": ERC721, "erc1155": ERC1155}
# Alchemy's category for contracts from before the standards, which no standard event shows.
_NO_STANDARD = "specialnft"
_NAMES = {code: name for name, code in CATEGORIES.items()}
# Transfers per reply and per page of the index. The price covers one page.
MOST, PER_PAGE = 1000, 100
PAGE_UNITS = 10
# Contracts of a filter, and of balances: the most that Alchemy takes.
MOST_CONTRACTS, MOST_BALANCES = 100, 1500
# 0x and 64 digits.
_HASH_LENGTH = 66
_MEMBERS = frozenset(
    (
        *("fromBlock", "toBlock", "fromAddress", "toAddress", "contractAddresses", "category"),
        *("excludeZeroValue", "order", "withMetadata", "maxCount", "pageKey"),
    )
)


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """The validated params of `alchemy_getAssetTransfers`."""

    sender: bytes | None
    recipient: bytes | None
    wanted: TransferFilter
    start: PageStart
    has_metadata: bool

    @property
    def direction(self) -> TransferSide:
        return "out" if self.sender is not None else "in"


@dataclass(frozen=True, slots=True, repr=False)
class AlchemyMethods:
    history: TransferHistory
    tokens: EvmTokens
    multicall: Multicall
    calls: InternalCalls

    def __repr__(self) -> str:
        return f"<AlchemyMethods of {self.history!r}>"

    def handlers(self) -> dict[str, OwnMethod]:
        return {
            "alchemy_getAssetTransfers": self._transfers,
            "alchemy_getTokenBalances": self._balances,
            "alchemy_getTokenMetadata": self._metadata,
            "alchemy_getTransactionReceipts": self._receipts,
        }

    # alchemy_getAssetTransfers

    async def _transfers(self, network: Network, params: list[Any]) -> Any:
        asked = await self._asked(network, _object(params))
        transfers: list[dict[str, Any]] = []
        start, page, limit = asked.start, None, asked.start.limit
        while len(transfers) < limit:
            if page is not None:
                await _pay_for_page()
            start = PageStart(start.after, start.newest_first, min(PER_PAGE, limit - len(transfers)))
            page = await self._page(network, asked, start)
            _require_kept(network, page, asked.wanted.categories)
            transfers += [
                _transfer(network, page, each, has_metadata=asked.has_metadata)
                for each in page.transfers
                if (asked.recipient is None or each.recipient == asked.recipient)
                and not has_failed(each.category, each.position.place)
            ]
            if page.next is None:
                break
            start = PageStart(position_of(page.next), start.newest_first, start.limit)
        assert page is not None
        return {"transfers": transfers, **({} if page.next is None else {"pageKey": page.next})}

    async def _page(self, network: Network, asked: TransferRequest, start: PageStart) -> HistoryPage:
        holder = asked.sender if asked.sender is not None else asked.recipient
        if holder is not None:
            return await self.history.of_address(network, holder, asked.direction, asked.wanted, start)
        (contract,) = asked.wanted.contracts
        return await self.history.of_contract(network, contract, asked.wanted, start)

    async def _asked(self, network: Network, given: dict[str, Any]) -> TransferRequest:
        for name in given.keys() - _MEMBERS:
            raise InvalidRequest(f"{name[:64]}: is not a member; use {', '.join(sorted(_MEMBERS))}")
        sender, recipient = _address(given, "fromAddress"), _address(given, "toAddress")
        contracts = _addresses(given.get("contractAddresses") or [], "contractAddresses")
        if sender is None and recipient is None and len(contracts) != 1:
            raise InvalidRequest("fromAddress: give it, or toAddress, or exactly one of contractAddresses")
        order = given.get("order", "asc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: must be asc or desc")
        low, high = (
            await self._block(network, given, "fromBlock", "0x0"),
            await self._block(network, given, "toBlock", "latest"),
        )
        if low > high:
            raise InvalidRequest("toBlock: must not be below fromBlock")
        key = given.get("pageKey")
        after = position_of(key) if isinstance(key, str) else None
        if key is not None and after is None:
            raise InvalidRequest("pageKey: must be the pageKey of an earlier reply")
        wanted = TransferFilter(
            _categories(given),
            contracts,
            recipient if sender is not None else None,
            0 if given.get("excludeZeroValue", True) is False else 1,
            low,
            high,
        )
        return TransferRequest(
            sender,
            recipient,
            wanted,
            PageStart(after, order == "desc", _count(given)),
            bool(given.get("withMetadata", False)),
        )

    async def _block(self, network: Network, given: dict[str, Any], name: str, default: str) -> int:
        text = given.get(name, default)
        if text in ("latest", "indexed", "pending"):
            return TransferFilter(()).high
        if text == "earliest":
            return 0
        heads = self.calls.route(network).heads
        if text in ("finalized", "safe"):
            return max(0, heads.final)
        number = _hex(text, name)
        return min(number, TransferFilter(()).high)

    # Tokens

    async def _balances(self, network: Network, params: list[Any]) -> Any:
        if not 1 <= len(params) <= 3:
            raise InvalidRequest("params: must be an address, and optionally contracts and options")
        holder, which = _parsed(params[0], "params[0]"), params[1] if len(params) > 1 else "erc20"
        options = params[2] if len(params) > 2 and isinstance(params[2], dict) else {}
        if isinstance(which, list):
            contracts = _addresses(which, "params[1]", most=MOST_BALANCES)
            return await self._balances_of(network, holder, contracts)
        if which not in ("erc20", "DEFAULT_TOKENS"):
            raise InvalidRequest("params[1]: must be erc20, DEFAULT_TOKENS or a list of contracts")
        tokens = (await self.tokens.balances(network, holder))["tokens"]
        offset = _hex(options.get("pageKey") or "0x0", "pageKey")
        part = [orjson.loads(bytes(each)) for each in tokens[offset : offset + PER_PAGE]]
        rest = {"pageKey": hex(offset + PER_PAGE)} if offset + PER_PAGE < len(tokens) else {}
        return {
            "address": address.checksum(holder).lower(),
            "tokenBalances": [
                {"contractAddress": each["contract"].lower(), "tokenBalance": _word(int(each["balance"]))}
                for each in part
            ],
            **rest,
        }

    async def _balances_of(self, network: Network, holder: bytes, contracts: Sequence[bytes]) -> Any:
        data = abi.call("balanceOf(address)", holder)
        replies = await self.multicall.read(network, [(contract, data) for contract in contracts])
        return {
            "address": address.checksum(holder).lower(),
            "tokenBalances": [
                _balance(contract, abi.uint(reply)) for contract, reply in zip(contracts, replies, strict=True)
            ],
        }

    async def _metadata(self, network: Network, params: list[Any]) -> Any:
        if len(params) != 1:
            raise InvalidRequest("params: must be the address of a contract")
        metadata = await self.tokens.metadata(network, _parsed(params[0], "params[0]"))
        return {**{name: metadata[name] for name in ("name", "symbol", "decimals")}, "logo": metadata["logo_url"]}

    async def _receipts(self, network: Network, params: list[Any]) -> Any:
        given = _object(params)
        block = given.get("blockNumber") or given.get("blockHash")
        if not isinstance(block, str) or len(given) != 1:
            raise InvalidRequest("params[0]: must have blockNumber or blockHash")
        try:
            receipts = await self.calls.raw(network, "eth_getBlockReceipts", block)
        except RpcError as exc:
            if upstream_errors.classify(exc.error).kind != "unsupported":
                raise
            return {"receipts": await self._one_by_one(network, block)}
        # Receipts of a block are megabytes: they are passed on as they are.
        await asyncio.sleep(0)
        return b"".join((b'{"receipts":', receipts, b"}"))

    async def _one_by_one(self, network: Network, block: str) -> list[Any] | None:
        """The receipts of a block from upstreams that cannot return them together. Each is paid for."""
        method = "eth_getBlockByHash" if len(block) == _HASH_LENGTH else "eth_getBlockByNumber"
        header = await self.calls.call(network, method, block, False)
        if header is None:
            return None
        hashes = header.get("transactions") if isinstance(header, dict) else None
        if not isinstance(hashes, list) or not all(isinstance(each, str) for each in hashes):
            raise Unavailable(f"{network.id} does not answer {method} with a block at the moment; try again shortly")
        calls = [("eth_getTransactionReceipt", (each,)) for each in hashes]
        receipts = await self.calls.raw_many(network, calls)
        for each in receipts:
            if isinstance(each, RpcError):
                raise each
        return [orjson.Fragment(each) for each in receipts if isinstance(each, bytes)]


async def _pay_for_page() -> None:
    meter = meter_of_task.get()
    if meter is not None:
        await meter.pay_beyond(PAGE_UNITS, PAGE_UNITS)


def _require_kept(network: Network, page: HistoryPage, categories: Sequence[int]) -> None:
    for each in categories:
        if each not in page.complete:
            name = _NAMES[each]
            raise InvalidRequest(
                f"category: transfers of {name} are not kept for {network.id}; its operator can add them"
            )


def _transfer(network: Network, page: HistoryPage, moved: StoredTransfer, *, has_metadata: bool) -> dict[str, Any]:
    symbol, decimals = described(network, page.tokens, moved)
    block, place = moved.position
    name, transaction = _NAMES[moved.category], "0x" + moved.transaction.hex()
    is_nft = moved.category in (ERC721, ERC1155)
    token = hex(moved.token_id) if is_nft else None
    return {
        "blockNum": hex(block),
        "uniqueId": f"{transaction}:{_unique(moved.category, place)}",
        "hash": transaction,
        "from": "0x" + moved.sender.hex(),
        "to": "0x" + moved.recipient.hex() if moved.recipient else None,
        "value": None if is_nft or decimals is None else float(units.formatted(moved.amount, decimals)),
        "erc721TokenId": token if moved.category == ERC721 else None,
        "erc1155Metadata": [{"tokenId": token, "value": hex(moved.amount)}] if moved.category == ERC1155 else None,
        "tokenId": token,
        "asset": symbol,
        "category": name,
        "rawContract": {
            "value": None if is_nft else hex(moved.amount),
            "address": "0x" + moved.contract.hex() if moved.contract else None,
            "decimal": None if decimals is None else hex(decimals),
        },
        **({"metadata": {"blockTimestamp": iso_millis_of_unix(moved.time)}} if has_metadata else {}),
    }


def _unique(category: int, place: int) -> str:
    item = item_of(place)
    if category == NATIVE:
        return "external"
    if category not in OF_LOGS:
        return f"internal:{item}"
    return f"log:{index_of(place)}" + (f":{item}" if item else "")


def _balance(contract: bytes, amount: int | None) -> dict[str, Any]:
    shown = "0x" + contract.hex()
    if amount is None:
        return {"contractAddress": shown, "tokenBalance": None, "error": "the contract did not return a balance"}
    return {"contractAddress": shown, "tokenBalance": _word(amount)}


def _word(amount: int) -> str:
    return f"0x{amount:064x}"


def _object(params: list[Any]) -> dict[str, Any]:
    if len(params) != 1 or not isinstance(params[0], dict):
        raise InvalidRequest("params: must have one object")
    return params[0]


def _categories(given: dict[str, Any]) -> tuple[int, ...]:
    names = given.get("category")
    if not isinstance(names, list) or not names or len(names) > len(CATEGORIES) + 1:
        raise InvalidRequest(f"category: must be a list of {', '.join((*CATEGORIES, _NO_STANDARD))}")
    for each in names:
        if each != _NO_STANDARD and (not isinstance(each, str) or each not in CATEGORIES):
            raise InvalidRequest(f"category: must be a list of {', '.join((*CATEGORIES, _NO_STANDARD))}")
    return tuple(sorted({CATEGORIES[each] for each in names if each != _NO_STANDARD}))


def _count(given: dict[str, Any]) -> int:
    text = given.get("maxCount", hex(MOST))
    count = text if isinstance(text, int) else _hex(text, "maxCount")
    if not 1 <= count <= MOST:
        raise InvalidRequest(f"maxCount: must be between 0x1 and {MOST:#x}")
    return count


def _hex(text: Any, name: str) -> int:
    if not isinstance(text, str) or not text.startswith("0x") or len(text) > 66:
        raise InvalidRequest(f"{name}: must be a number in hex, such as 0x1f")
    try:
        return int(text, 16)
    except ValueError:
        raise InvalidRequest(f"{name}: must be a number in hex, such as 0x1f") from None


def _address(given: dict[str, Any], name: str) -> bytes | None:
    return None if given.get(name) is None else _parsed(given[name], name)


def _addresses(given: Any, name: str, most: int = MOST_CONTRACTS) -> tuple[bytes, ...]:
    if not isinstance(given, list) or len(given) > most:
        raise InvalidRequest(f"{name}: must be a list of up to {most} addresses")
    return tuple(_parsed(each, name) for each in given)


def _parsed(text: Any, name: str) -> bytes:
    parsed = address.parse(text) if isinstance(text, str) else None
    if parsed is None:
        raise InvalidRequest(f"{name}: must be an address: 0x and 40 hex digits")
    return parsed
