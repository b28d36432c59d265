"""/transfers: the history of an address, a contract or a transaction."""

from __future__ import annotations

import datetime
from typing import Any, Protocol

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core.transfer_history import CATEGORIES, PageStart, Position, TransferFilter, position_of
from proxy.errors import InvalidRequest, NotFound
from proxy.services.tokens import address_history
from proxy.services.tokens.address_history import ALL, HistoryPage, TransferSide
from proxy.web.rest.endpoint import RestHandler, RestRequest
from proxy.web.rest.path_address import PathAddresses, not_an_address

_LARGEST = 2**256 - 1


class HistoryReader(Protocol):
    async def of_address(
        self, network: Network, address: bytes, direction: TransferSide, wanted: TransferFilter, start: PageStart
    ) -> HistoryPage: ...
    async def of_contract(
        self, network: Network, contract: bytes, wanted: TransferFilter, start: PageStart
    ) -> HistoryPage: ...
    async def of_transaction(self, network: Network, transaction: bytes) -> HistoryPage: ...
    async def block_at(self, network: Network, time: int) -> int | None: ...


class TransferHandlers:
    def __init__(self, history: HistoryReader, addresses: PathAddresses) -> None:
        self._history = history
        self._addresses = addresses

    def handlers(self) -> dict[str, RestHandler]:
        return {
            "list_transfers": self._of_address,
            "list_contract_transfers": self._of_contract,
            "list_transaction_transfers": self._of_transaction,
        }

    async def _of_address(self, request: RestRequest) -> Any:
        network = _with_transfers(request)
        contracts = _contracts(request, network)
        if not contracts:
            request.require_all_contracts()
        for contract in contracts:
            request.require_contract(network, contract)
        address = await self._addresses.of(request, network)
        wanted = await self._wanted(request, network, contracts)
        page = await self._history.of_address(network, address, request.query["direction"], wanted, _start(request))
        return {
            "address": family_of(network).addresses.show(address),
            **_listed(request, network, page, wanted, of=address),
        }

    async def _of_contract(self, request: RestRequest) -> Any:
        network = _with_transfers(request)
        contract = await self._addresses.contract(request, network)
        wanted = await self._wanted(request, network, ())
        page = await self._history.of_contract(network, contract, wanted, _start(request))
        return {
            "contract": family_of(network).addresses.show(contract),
            **_listed(request, network, page, wanted),
        }

    async def _of_transaction(self, request: RestRequest) -> Any:
        network = _with_transfers(request)
        request.require_all_contracts()
        page = await self._history.of_transaction(network, bytes.fromhex(request.path["hash"][2:]))
        return {"tx_hash": request.path["hash"].lower(), **_listed(request, network, page, TransferFilter(ALL))}

    async def _wanted(self, request: RestRequest, network: Network, contracts: tuple[bytes, ...]) -> TransferFilter:
        query, no_limit = request.query, TransferFilter(ALL)
        low = _either(query["from_block"], await self._block_at(request, network, "from_time"), default=no_limit.low)
        high = query["to_block"]
        if query["to_time"] is not None:
            after = await self._block_at(request, network, "to_time")
            high = _either(high, None if after is None else after - 1, default=no_limit.high, least=True)
        wanted = TransferFilter(
            tuple(CATEGORIES[each] for each in query["category"].split(",")) if query["category"] else ALL,
            contracts,
            _address(request, network, "counterparty"),
            _amount(request),
            low,
            no_limit.high if high is None else high,
        )
        if query["to_block"] is not None and (query["from_block"] or 0) > query["to_block"]:
            raise InvalidRequest("parameter 'to_block': must not be below from_block", param="to_block")
        return wanted

    async def _block_at(self, request: RestRequest, network: Network, name: str) -> int | None:
        """The first block from this time on; for `to_time` the first after it."""
        text = request.query[name]
        if text is None:
            return None
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError:
            raise InvalidRequest(f"parameter {name!r}: is not a time that exists", param=name) from None
        seconds = int(moment.timestamp()) + (name == "to_time")
        block = await self._history.block_at(network, seconds)
        # Nothing is as new as that: the range starts after every block.
        return _BEYOND if block is None and name == "from_time" else block


_BEYOND = TransferFilter(ALL).high


def _either(block: int | None, other: int | None, *, default: int, least: bool = False) -> int:
    """The narrower of two bounds."""
    given = [each for each in (block, other) if each is not None]
    if not given:
        return default
    return min(given) if least else max(given)


def _with_transfers(request: RestRequest) -> Network:
    network = request.network()
    if "follower" not in family_of(network).features:
        raise NotFound(f"transfers are not supported on {network.id}")
    return network


def _contracts(request: RestRequest, network: Network) -> tuple[bytes, ...]:
    text = request.query["contract"]
    return tuple(_parsed(network, each, "contract") for each in text.split(",")) if text else ()


def _address(request: RestRequest, network: Network, name: str) -> bytes | None:
    text = request.query[name]
    return _parsed(network, text, name) if text else None


def _parsed(network: Network, text: str, name: str) -> bytes:
    address = family_of(network).addresses.parse(text)
    if address is None:
        raise not_an_address(network, name)
    return address


def _amount(request: RestRequest) -> int:
    amount = int(request.query["min_value"] or "0")
    if amount > _LARGEST:
        raise InvalidRequest("parameter 'min_value': must be at most 256 bits", param="min_value")
    return amount


def _start(request: RestRequest) -> PageStart:
    cursor = request.query["cursor"]
    after: Position | None = None
    if cursor is not None and (after := position_of(cursor)) is None:
        raise InvalidRequest("parameter 'cursor': must be the `next` of an earlier reply", param="cursor")
    return PageStart(after, request.query["order"] == "desc", request.query["limit"])


def _listed(
    request: RestRequest, network: Network, page: HistoryPage, wanted: TransferFilter, *, of: bytes | None = None
) -> dict[str, Any]:
    chain = request.path["chain"]
    is_whole = page.next is None and request.query.get("cursor") is None
    # The number is not known if none of the categories is kept.
    is_known = any(each in page.complete for each in wanted.categories)
    return {
        "chain": chain,
        "transfers": address_history.listed(network, chain, page, of),
        "next": page.next,
        "total": len(page.transfers) if is_whole and is_known else None,
        "block_number": page.block,
        **address_history.completeness(page, wanted.categories),
    }
