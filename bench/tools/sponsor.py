"""Sponsor operations for some seconds, first sequentially, then concurrently, and print latency and rate.

No upstream is called: EntryPoint 0.7 operations need none. The price is fixed, and every operation has a different sender.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import uvloop

from proxy import settings as settings_room
from proxy.chains.evm.signer import Signer
from proxy.chains.registry import Network
from proxy.core.access import Account, Key
from proxy.core.limits import BucketRates
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.sponsor.account_versions import AccountVersions
from proxy.services.sponsor.costs import SponsorCosts
from proxy.services.sponsor.paymasters import Paymaster, Paymasters
from proxy.services.sponsor.policies import PolicyService
from proxy.services.sponsor.sponsorship import SponsorService
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.ledger import LedgerStore
from proxy.store.postgres.policies import PolicyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.wallets import WalletStore
from proxy.turn_queue import TurnQueue

AT_ONCE = 16
POLICIES = 8
RULES: Mapping[str, Any] = {
    "max_gas_usd": "100",
    "max_total_usd": "1000000000",
    "max_per_user_usd": "1000",
    "max_per_user_per_day": 100,
    "allowed_methods": ["transfer(address,uint256)"],
}
CALL = (
    "0xb61d27f6000000000000000000000000a0b86991c6218b36c1d19d4a2e9eb0ce3606eb480000000000000000000000000000000000000000000000000000"
    "00000000000000000000000000000000000000000000000000000000000000000000000000600000000000000000000000000000000000000000000000000000"
    "000000000044a9059cbb000000000000000000000000fb6916095ca1df60bb79ce92ce3ea74c37c5d359000000000000000000000000000000000000000000"
    "00000000000000000f424000000000000000000000000000000000000000000000000000000000"
)


class TimedSigner(Signer):
    """Records the CPU time spent on signing."""

    __slots__ = ("took_s",)
    took_s: float

    def sign(self, message: bytes) -> bytes:
        began = time.process_time()
        signature = super().sign(message)
        self.took_s += time.process_time() - began
        return signature


class Prices:
    async def usd(self, network: Network, contract: str | None = None) -> Any:
        return SimpleNamespace(usd=Decimal("3000.12"))


class GasPrices:
    async def read(self, network: Network) -> Any:
        return SimpleNamespace(fees=SimpleNamespace(estimates={"fast": SimpleNamespace(max_fee_wei=10**9)}))


class FixedNetworks:
    """Networks with a fixed head, without upstreams."""

    def route(self, network: Network) -> Any:
        return SimpleNamespace(heads=SimpleNamespace(agreed=1_000_064, final=1_000_000))

    async def call(self, network: Network, method: str, *params: Any) -> Any:
        return {"timestamp": hex(int(time.time()))}


@dataclass
class Load:
    """Operations of one key, sponsored one after the other by each sender, until `ends`."""

    service: SponsorService
    key: Key
    network: Network
    policies: list[str]
    ends: float = 0.0
    took: list[float] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def send(self) -> None:
        while time.perf_counter() < self.ends:
            number = next(self._numbers)
            began = time.perf_counter()
            request = await self.service.read(
                self.key,
                self.network,
                operation(number),
                policy_id=self.policies[number % POLICIES],
                entry_point=self.network.chain.entry_points["0.7"],
            )
            await self.service.sponsor(request)
            self.took.append(time.perf_counter() - began)

    async def run(self, seconds: float, senders: int) -> list[float]:
        """How long each operation took."""
        self.took.clear()
        self.ends = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(senders):
                group.create_task(self.send())
        return list(self.took)


async def load_of(pool: Pool, signer: TimedSigner) -> Load:
    network = settings_room.load_tables().chains.find("ethereum", "mainnet")
    assert network is not None
    account = await KeyStore(pool, pepper="p" * 32, plans={"free": 10}).create_account(
        name="b", email=f"{time.time_ns()}@b", plan="free"
    )
    key = Key(
        id="key",
        lineage="key",
        digest=b"",
        live=True,
        scopes=~0,
        rate=BucketRates(0, 1, 1),
        disabled=False,
        expires_at=float("inf"),
        account=Account(id=account["id"], plan="free", day_limit=0),
    )
    entry_point = bytes.fromhex(network.chain.entry_points["0.7"][2:])
    paymasters = Paymasters([Paymaster(network.id, "0.7", b"\x99" * 20, entry_point, 1, signer, (60_000, 0))])
    ledger = LedgerStore(pool)
    policies = PolicyService(PolicyStore(pool), ledger, TurnQueue(asyncio.get_running_loop()), most={"free": POLICIES})
    made = [await policies.create(key, network, name="b", given=RULES) for _ in range(POLICIES)]
    calls = cast(InternalCalls, FixedNetworks())
    market: Any = SponsorCosts(Prices(), GasPrices())
    versions = AccountVersions(WalletStore(pool), calls, paymasters, default="0.7")
    # No daily limit for the account: with one, reservations of an account run one at a time.
    service = SponsorService(policies, ledger, paymasters, versions, market, calls, daily_limits={"free": None})
    return Load(service, key, network, [each.id for each in made])


async def main(url: str, seconds: float) -> None:
    pool = Pool(url, size=10, acquire_timeout_s=5.0)
    await pool.open()
    signer = TimedSigner(b"\x07" * 32)
    signer.took_s = 0.0
    load = await load_of(pool, signer)
    alone = await load.run(seconds, 1)
    signer.took_s, cpu, began = 0.0, time.process_time(), time.perf_counter()
    together = await load.run(seconds, AT_ONCE)
    rate = len(together) / (time.perf_counter() - began)
    signing = signer.took_s / (time.process_time() - cpu)
    print(json.dumps({"p50": median(alone) * 1000, "rate": rate, "signing": signing}))
    await pool.close()


def operation(number: int) -> dict[str, str]:
    return {
        "sender": f"0x{time.time_ns():024x}{number:016x}"[:42],
        "nonce": "0x0",
        "callData": CALL,
        "callGasLimit": "0x13880",
        "verificationGasLimit": "0x186a0",
        "preVerificationGas": "0xc350",
        "maxFeePerGas": "0x3b9aca00",
        "maxPriorityFeePerGas": "0x3b9aca00",
    }


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], float(sys.argv[2])))
