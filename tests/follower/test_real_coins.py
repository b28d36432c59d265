"""Native and internal transfers of real chains, Hardhat's and geth's: kept by the follower and by a back-fill alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from eth_account import Account

from proxy.chains.evm.address import checksum
from proxy.compose.background import Background
from proxy.dev.funded_accounts import FUNDED
from proxy.services.follower.backfill import Backfill
from proxy.services.follower.block_reader import BlockReader
from proxy.services.follower.network_follower import NetworkFollower
from proxy.services.rpc.traces import TraceReader
from proxy.settings import load
from tests.follower.harness import NETWORK, indexed_transfers, settings_of
from tests.real_harness import real_nodes
from tests.real_nodes import CHAIN_ID, PlannedBlock, RealNode
from tests.shipped_tables import TABLES

# Passes the coins that it gets on to the address in its calldata; and one that refuses them.
FORWARDS = "6000600060006000" + "34" + "600035" + "5a" + "f1" + "00"
REFUSES = "60006000fd"
FORWARDER, REFUSER = "0x5FbDB2315678afecb367f032d93F642f64180aa3", "0xe7f1725E7734CE288F8367e1Bb143E90bb3F0512"
PAYEE = checksum(bytes.fromhex("7a" * 20))
ALL = ["native", "internal", "erc20"]


def deploys(code: str) -> str:
    size = len(code) // 2
    return f"0x{0x5F + size:02x}{code}600052{'60'}{size:02x}{'60'}{32 - size:02x}f3"


def signed(nonce: int, **fields: Any) -> tuple[str, str]:
    given = {"type": 2, "chainId": CHAIN_ID, "nonce": nonce, "gas": 200_000, "value": 0}
    fees = {"maxFeePerGas": 10**12, "maxPriorityFeePerGas": 10**9}
    found = Account.sign_transaction({**given, **fees, **fields}, FUNDED.private_key)
    return found.raw_transaction.to_0x_hex(), found.hash.to_0x_hex()


TRANSACTIONS = [
    [signed(0, data=deploys(FORWARDS)), signed(1, data=deploys(REFUSES))],
    [
        signed(2, to=PAYEE, value=5),
        signed(3, to=FORWARDER, value=7, data="0x" + "00" * 12 + PAYEE[2:]),
        signed(4, to=REFUSER, value=9),
        signed(5, to=FORWARDER, value=0, data="0x" + "00" * 12 + PAYEE[2:]),
    ],
    [],
    # The call inside is refused, so that the forwarder keeps the coins.
    [signed(6, to=FORWARDER, value=11, data="0x" + "00" * 12 + REFUSER[2:])],
]


def raw(text: str) -> bytes:
    return bytes.fromhex(text[2:])


# Block, transaction, category, item, from, to, amount.
EXPECTED = [
    (2, TRANSACTIONS[1][0][1], 1, 0, raw(FUNDED.address), raw(PAYEE), 5),
    (2, TRANSACTIONS[1][1][1], 1, 0, raw(FUNDED.address), raw(FORWARDER), 7),
    (2, TRANSACTIONS[1][2][1], 1, 1, raw(FUNDED.address), raw(REFUSER), 9),
    (2, TRANSACTIONS[1][1][1], 2, 0, raw(FORWARDER), raw(PAYEE), 7),
    (4, TRANSACTIONS[3][0][1], 1, 0, raw(FUNDED.address), raw(FORWARDER), 11),
]


@pytest.fixture(params=["hardhat", "geth"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    with real_nodes(request.param, 1, tmp_path_factory.mktemp("nodes")) as (found,):
        yield found


async def kept(database: str) -> list[tuple[Any, ...]]:
    return [(row[0], row[3], row[6], row[5], row[8], row[9], row[11]) for row in await indexed_transfers(database)]


async def test_coins_of_a_real_chain_are_kept(database: str, node: RealNode) -> None:
    async with aiohttp.ClientSession() as session:
        node.session = session
        for number, transactions in enumerate(TRANSACTIONS, 1):
            await node.extend(PlannedBlock(number, "0x" + "00" * 12 + f"{number:016x}", tuple(transactions)))
        given = settings_of(database, [node.url], transfers={NETWORK: ALL})
        running = Background(load(environ={}, overrides=given), TABLES)
        await running.open()
        try:
            await _check(running, database)
        finally:
            await running.close()


async def _check(running: Background, database: str) -> None:
    route = running.networks.routes[NETWORK]
    sinks = [*running.sinks, running.transfers(route)]
    follower = NetworkFollower(running.reader(route, sinks), running.blocks, sinks, start=3, keep=16)
    async with running.blocks.lead(NETWORK) as term:
        await follower.step(term)
        assert await running.events(route).tracer.trace()
    assert await kept(database) == EXPECTED[-1:]
    fill = Backfill(
        BlockReader(route, topics=frozenset()),
        TraceReader(route.network, running.internal_calls),
        running.blocks,
        None,
        categories=running.transfers(route).categories,
    )
    await fill.run(0, None, lambda progress: None)
    assert await kept(database) == EXPECTED
