"""The largest holders of a contract, from the sums of its transfers.

All holders are read and sorted, which takes longer the more there are. So the result is kept for a while, and a request that
has to read many pays for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.chains.evm import address
from proxy.chains.registry import Network
from proxy.core import units
from proxy.core.paging import Page
from proxy.errors import InvalidRequest
from proxy.services.accounts.metering import meter_of_task
from proxy.services.tokens.token_contracts import TokenContracts
from proxy.store.postgres.holdings import HoldingStore
from proxy.store.valkey.cache import DataCache

# How many of the largest are listed, and for how long a list is kept.
LISTED, KEPT_S = 1000, 30.0
# Rows that the price covers, rows for each further unit, and the most that are sorted for one request: about two seconds.
PAID_ROWS, ROWS_PER_UNIT, MOST_ROWS = 100_000, 2_000, 3_000_000


@dataclass(frozen=True, slots=True, repr=False)
class TokenHolders:
    contracts: TokenContracts
    holdings: HoldingStore
    cache: DataCache

    def __repr__(self) -> str:
        return f"<TokenHolders of {self.contracts!r}>"

    async def listed(self, network: Network, contract: bytes, page: Page) -> dict[str, Any]:
        """A page of the largest holders."""

        async def read() -> dict[str, Any]:
            return await self._read(network, contract)

        ranking = await self.cache.once(network.id, "holders", contract.hex(), make=read, ttl_s=KEPT_S)
        return {**ranking, "holders": ranking["holders"][page.offset : page.offset + page.limit]}

    async def _read(self, network: Network, contract: bytes) -> dict[str, Any]:
        rows, is_fungible = await self.holdings.holder_rows(network.id, contract, most=MOST_ROWS + 1)
        if rows > MOST_ROWS:
            raise InvalidRequest(
                f"parameter 'contract': has more than {MOST_ROWS:,} holders, too many to sort", param="contract"
            )
        meter = meter_of_task.get()
        if meter is not None and rows > PAID_ROWS:
            await meter.pay_beyond(meter.paid, (rows - PAID_ROWS) // ROWS_PER_UNIT)
        (shares, total), block = await self.contracts.at_one_block(
            network,
            lambda: self.holdings.largest_holders(network.id, contract, is_fungible=is_fungible, limit=LISTED),
        )
        token = (await self.contracts.known(network, [contract], block))[contract]
        decimals = token.decimals if is_fungible else 0
        return {
            "contract": token.contract,
            "symbol": token.symbol,
            "decimals": token.decimals if is_fungible else None,
            "holders": [
                {
                    "address": address.checksum(each.holder),
                    "balance": str(each.amount),
                    "formatted_balance": None if decimals is None else units.formatted(each.amount, decimals),
                }
                for each in shares
            ],
            "total": total,
            "as_of_block": block,
        }
