"""Wallet states that reads find on the chain themselves, while the follower is behind or not running."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.chains.evm import operations
from proxy.services.rpc.tracker import Tracker
from tests.bundler_harness import BundlerHarness, bundler_harness
from tests.database import connected
from tests.http_client import Reply, request
from tests.rpc_upstreams import Refused
from tests.web.worker import LIVE, on_uvloop

OWNER = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
TX = "0x" + "dd" * 32
HEAD = 1_000_000


class WalletHarness:
    def __init__(self, under: BundlerHarness) -> None:
        self.under = under
        self.chain = under.chain
        self.chain.chain.head = HEAD
        # The deployment block, by address.
        self.deployed: dict[str, int] = {}
        self.oldest_state = 0
        self.chain.answers["eth_getCode"] = self._code
        self.chain.answers["eth_call"] = self._call
        self.chain.answers["eth_getLogs"] = self._logs
        self.chain.answers["eth_getBlockByNumber"] = self._block

    def _code(self, params: list[Any]) -> str:
        block = self.chain.head if params[1] == "latest" else int(params[1], 16)
        if block < self.oldest_state:
            raise Refused(-32000, "missing trie node")
        return "0xfe" if self.deployed.get(params[0], HEAD + 1) <= block else "0x"

    def _call(self, params: list[Any]) -> str:
        assert params[0]["to"] == "0x0000000071727De22E5E9d8BAf0edAc6f37da032"
        assert params[0]["data"].startswith("0x35567e1a")  # getNonce(address,uint192)
        return "0x" + f"{5:064x}"

    def _logs(self, params: list[Any]) -> list[dict[str, Any]]:
        wanted = params[0]
        block = self.deployed.get(wanted["address"], -1)
        if wanted["topics"] != [operations.INITIALIZED]:
            return []
        if not int(wanted["fromBlock"], 16) <= block <= int(wanted["toBlock"], 16):
            return []
        return [
            {
                "address": wanted["address"],
                "topics": [operations.INITIALIZED, "0x" + "00" * 32, "0x" + "00" * 32],
                "data": "0x",
                "blockNumber": hex(block),
                "blockHash": self.chain.chain.hash_of(block),
                "transactionHash": TX,
                "logIndex": "0x2",
            }
        ]

    def _block(self, params: list[Any]) -> dict[str, Any] | None:
        number = self.chain.head if params[0] == "latest" else int(params[0], 16)
        return None if number > self.chain.head else {**self.chain.chain.block(number), "timestamp": hex(1_768_555_523)}

    def reorganise(self) -> None:
        """Replace the newest blocks by others in which nothing is deployed."""
        self.chain.chain.reorganise(depth=5)
        self.deployed.clear()

    async def send(self, method: str, path: str, body: Any = None, *, key: str = "main") -> Reply:
        data = b"" if body is None else orjson.dumps(body)
        return await self.under.raw(request(method, f"/v1{path}", data, key=self.under.worker.keys[key]))

    async def create(self, status: int = 201, **more: Any) -> dict[str, Any]:
        reply = await self.send("POST", "/wallets/create", {"owner": OWNER, "chain": "ethereum", **more})
        assert reply.status == status, reply
        found: dict[str, Any] = reply.json
        return found

    async def deploy(self, block: int, **more: Any) -> str:
        """Create a wallet, and deploy it in this block."""
        address: str = (await self.create(**more))["address"]
        self.deployed[address] = block
        return address

    async def read(self, address: str, query: str = "") -> dict[str, Any]:
        reply = await self.send("GET", f"/wallets/{address}{query}")
        assert reply.status == 200, reply
        found: dict[str, Any] = reply.json
        return found

    async def listed(self) -> list[str]:
        return [wallet["status"] for wallet in (await self.send("GET", "/wallets")).json["wallets"]]


@asynccontextmanager
async def wallet_harness(database: str, **sections: Any) -> AsyncIterator[WalletHarness]:
    async with connected(database) as connection:
        for number in (1, 2):
            query = "insert into accounts (id, name, email, plan) values ($1, 'A', 'a@b', 'free')"
            await connection.execute(query, f"acc_{number}")
    async with bundler_harness(database, **sections) as harness:
        yield WalletHarness(harness)


DEPLOYED = {"status": "deployed", "nonce": 5, "deployed_at": "2026-01-16T09:25:23Z", "deploy_tx": TX}


def state_of(wallet: dict[str, Any], names: Sequence[str] = tuple(DEPLOYED)) -> dict[str, Any]:
    return {name: wallet[name] for name in names if name in wallet}


@on_uvloop
async def test_wallet_is_counterfactual_until_it_has_code(database: str) -> None:
    async with wallet_harness(database) as harness:
        made = await harness.create()
        assert made["status"] == "counterfactual"
        assert state_of(await harness.read(made["address"])) == {"status": "counterfactual", "nonce": 5}


@on_uvloop
async def test_recent_deployment_is_found_by_its_event_and_recorded(database: str) -> None:
    async with wallet_harness(database) as harness:
        address = await harness.deploy(HEAD - 100)
        assert state_of(await harness.read(address)) == DEPLOYED
        assert await harness.listed() == ["deployed"]
        harness.chain.calls.clear()
        assert state_of(await harness.read(address)) == DEPLOYED
        assert harness.chain.count("eth_getLogs") == 0


@on_uvloop
async def test_old_deployment_is_found_by_bisection(database: str) -> None:
    async with wallet_harness(database) as harness:
        address = await harness.deploy(12_345)
        assert state_of(await harness.read(address)) == DEPLOYED
        assert harness.chain.count("eth_getCode") < 25
        assert harness.chain.count("eth_getLogs") == 2


@on_uvloop
async def test_deployment_is_null_if_no_upstream_has_state_that_old(database: str) -> None:
    async with wallet_harness(database) as harness:
        address = await harness.deploy(12_345)
        harness.oldest_state = HEAD - 127
        wallet = await harness.read(address)
        assert state_of(wallet) == {"status": "deployed", "nonce": 5, "deployed_at": None, "deploy_tx": None}


@on_uvloop
async def test_dropped_deployment_is_removed_by_a_read(database: str) -> None:
    async with wallet_harness(database) as harness:
        address = await harness.deploy(HEAD - 1)
        await harness.read(address)
        harness.reorganise()
        assert state_of(await harness.read(address)) == {"status": "counterfactual", "nonce": 5}
        assert await harness.listed() == ["counterfactual"]


@on_uvloop
async def test_dropped_deployment_is_removed_by_a_list(database: str) -> None:
    async with wallet_harness(database) as harness:
        address = await harness.deploy(HEAD - 1)
        await harness.read(address)
        harness.reorganise()
        assert await harness.listed() == ["counterfactual"]
        async with connected(database) as connection:
            assert await connection.fetchval("select deploy_block from wallets") is None


@on_uvloop
async def test_lagging_upstream_does_not_remove_a_deployment(database: str) -> None:
    async with wallet_harness(database) as harness:
        address = await harness.deploy(HEAD - 1)
        assert state_of(await harness.read(address)) == DEPLOYED
        harness.chain.behind = 10
        assert state_of(await harness.read(address)) == DEPLOYED
        assert await harness.listed() == ["deployed"]
        harness.chain.behind = 0
        harness.chain.calls.clear()
        assert state_of(await harness.read(address)) == DEPLOYED
        assert harness.chain.count("eth_getLogs") == 0


@on_uvloop
async def test_deployed_wallet_is_never_reported_as_counterfactual(database: str) -> None:
    async with wallet_harness(database) as harness:
        made = await harness.create()
        await harness.create(salt="2")
        harness.deployed[made["address"]] = HEAD - 100
        assert await harness.listed() == ["counterfactual", "deployed"]
        assert (await harness.create(200))["status"] == "deployed"
        harness.under.worker.add_key("other")
        body = {"owner": OWNER, "chain": "ethereum"}
        assert (await harness.send("POST", "/wallets/create", body, key="other")).json["status"] == "deployed"


@pytest.mark.parametrize("failure", ["error", "null", "closed"])
@on_uvloop
async def test_list_and_creation_return_the_recorded_state_if_the_chain_fails(database: str, failure: str) -> None:
    def fail(params: list[Any]) -> Any:
        if failure == "error":
            raise Refused(-32000, "no code today")

    async with wallet_harness(database) as harness:
        address = await harness.deploy(HEAD - 100)
        await harness.read(address)
        harness.chain.answers["eth_getCode"] = fail
        if failure == "closed":
            await harness.chain.close()
        assert (await harness.create(salt="2"))["status"] == "counterfactual"
        assert await harness.listed() == ["counterfactual", "deployed"]


@on_uvloop
async def test_list_does_not_check_final_deployments(database: str) -> None:
    async with wallet_harness(database) as harness:
        for salt in ("1", "2", "3"):
            address = await harness.deploy(HEAD - 1000, salt=salt)
            await harness.read(address)
        await harness.create(salt="4")
        await Tracker(harness.under.worker.app.networks.routes[LIVE].state).look()
        harness.chain.calls.clear()
        assert await harness.listed() == ["counterfactual", "deployed", "deployed", "deployed"]
        assert harness.chain.count("eth_getCode") == 1


@on_uvloop
async def test_wallet_of_a_removed_version_is_listed_but_not_readable(database: str) -> None:
    async with wallet_harness(database) as harness:
        made = await harness.create()
        async with connected(database) as connection:
            await connection.execute("update wallets set version = '0.5'")
        (await harness.send("GET", f"/wallets/{made['address']}")).fault(404)
        assert await harness.listed() == ["counterfactual"]


@on_uvloop
async def test_missing_deployment_time_is_added_by_a_read(database: str) -> None:
    async with wallet_harness(database) as harness:
        address = await harness.deploy(12_345)
        async with connected(database) as connection:
            await connection.execute(
                "update wallets set deploy_tx = $1, deploy_block = 12345, deploy_block_hash = $1", b"\xdd" * 32
            )
        assert await harness.listed() == ["deployed"]
        assert state_of(await harness.read(address)) == DEPLOYED
        assert harness.chain.count("eth_getLogs") == 1


@pytest.mark.parametrize("result", ["refused", None, "0xzz"])
@on_uvloop
async def test_unreadable_code_is_an_error(database: str, result: str | None) -> None:
    def odd(params: list[Any]) -> Any:
        if result == "refused":
            raise Refused(-32000, "no code today")
        return result

    async with wallet_harness(database) as harness:
        made = await harness.create()
        harness.chain.answers["eth_getCode"] = odd
        reply = await harness.send("GET", f"/wallets/{made['address']}")
        assert reply.fault(500)["message"] == "the code at an address on ethereum/mainnet cannot be read"


@pytest.mark.parametrize("result", ["refused", None, "0x", "0x05"])
@on_uvloop
async def test_unreadable_nonce_is_an_error(database: str, result: str | None) -> None:
    def odd(params: list[Any]) -> Any:
        if result == "refused":
            raise Refused(3, "execution reverted")
        return result

    async with wallet_harness(database) as harness:
        made = await harness.create()
        harness.chain.answers["eth_call"] = odd
        reply = await harness.send("GET", f"/wallets/{made['address']}")
        assert reply.fault(500)["message"] == "the nonce of a wallet on ethereum/mainnet cannot be read"


@on_uvloop
async def test_plan_limits_the_number_of_wallets(database: str) -> None:
    async with wallet_harness(database) as harness:
        harness.under.worker.app.smart_wallets.wallets._most = {"enterprise": 2}
        for salt in ("1", "2"):
            await harness.create(salt=salt)
        full = await harness.send("POST", "/wallets/create", {"owner": OWNER, "chain": "ethereum", "salt": "3"})
        assert full.fault(403)["message"] == "this account's plan allows 2 wallets, and all of them exist already"
        await harness.create(200, salt="2")


@on_uvloop
async def test_wallet_of_another_key_is_not_found(database: str) -> None:
    async with wallet_harness(database) as harness:
        made = await harness.create()
        harness.under.worker.add_key("other")
        foreign = await harness.send("GET", f"/wallets/{made['address']}", key="other")
        absent = await harness.send("GET", f"/wallets/{OWNER}")
        assert foreign.fault(404) == absent.fault(404)
        assert (await harness.send("GET", "/wallets", key="other")).json == {"wallets": [], "page": 1, "total": 0}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"owner": "0x12", "chain": "ethereum"}, 'owner: must be an EVM address: 0x and 40 hex digits, not "0x12"'),
        (
            {"owner": "0x5AAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "chain": "ethereum"},
            "owner: the checksum of 0x5AAeb6053F3E94C9b9A09f33669435E7Ef1BeAed is wrong; check the address for typing errors",
        ),
        ({"owner": OWNER, "chain": "ethereum", "salt": "9" * 90}, "salt: must be below 2**256"),
        ({"owner": OWNER}, "chain: is required"),
        ({"owner": OWNER, "chain": "ethereum", "Salt": "1"}, None),
    ],
)
@on_uvloop
async def test_error_names_the_invalid_field(database: str, body: dict[str, Any], message: str | None) -> None:
    async with wallet_harness(database) as harness:
        reply = await harness.send("POST", "/wallets/create", body)
        assert message is None or reply.fault(400)["message"] == message
        assert reply.status == 400
