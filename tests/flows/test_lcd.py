"""The REST API of Cosmos SDK chains (LCD) on real nodes: a validator and a full node of simd.

Every reply about a height is compared with that of the node itself, byte for byte.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import orjson
import pytest

from proxy.settings import load_tables
from tests.client_scripts import run_script
from tests.http_client import HttpClient, Reply
from tests.new_network import new_network
from tests.random_reads import reads_or
from tests.rpc_harness import NetworkHarness
from tests.service import until
from tests.simd_nodes import CHAIN, DENOM, SimdNode, simd_nodes
from tests.web import worker as worker_module
from tests.web.worker import on_uvloop, running_worker

NETWORK = "sim-lcd/mainnet"
READS = reads_or(1500)
HEIGHT = "x-cosmos-block-height"
OF_REPLY = "grpc-metadata-x-cosmos-block-height"
CHAIN_FILE = f"""name = "sim-lcd"
family = "lcd"
native = {{ symbol = "STAKE", decimals = 6 }}

[networks.mainnet]
genesis = "{CHAIN}"
block_time_s = 0.5
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SimdNode]]:
    """The last one keeps the state of few heights."""
    whole, pruning = ("--pruning", "nothing"), ("--pruning", "custom", "--pruning-keep-recent", "5")
    options = [whole, whole, (*pruning, "--pruning-interval", "10")]
    with simd_nodes(tmp_path_factory.mktemp("simd"), options) as found:
        yield found


@pytest.fixture
def own_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "chains").mkdir(parents=True)
    (tmp_path / "own" / "chains" / "sim-lcd.toml").write_text(CHAIN_FILE)
    rpc_chain = CHAIN_FILE.replace('"sim-lcd"', '"sim"').replace('"lcd"', '"cosmos"')
    (tmp_path / "own" / "chains" / "sim.toml").write_text(rpc_chain)
    monkeypatch.setattr(worker_module, "TABLES", load_tables(own=str(tmp_path / "own")))


class LcdHarness(NetworkHarness):
    nodes: list[SimdNode]
    session: aiohttp.ClientSession

    async def of_node(self, path: str, height: str = "", *, node: int = 0) -> tuple[int, bytes, str]:
        """The status, the body and the height of the node's reply."""
        headers = {HEIGHT: height} if height else {}
        async with self.session.get(self.nodes[node].url + path, headers=headers) as response:
            return response.status, await response.read(), response.headers.get(OF_REPLY, "")

    async def of_service(self, client: HttpClient, path: str, height: str = "", body: bytes = b"") -> Reply:
        lines = [f"{'POST' if body else 'GET'} /v1/rest/{NETWORK}{path} HTTP/1.1", "Host: x"]
        lines += [f"X-API-Key: {self.worker.keys['main']}", *([f"{HEIGHT}: {height}"] if height else [])]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
        return await client.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def height(self, node: int = 0) -> int:
        with suppress(aiohttp.ClientError):
            status, _, height = await self.of_node("/cosmos/base/tendermint/v1beta1/syncing", node=node)
            return int(height or 0) if status == 200 else 0
        return 0


@asynccontextmanager
async def lcd_harness(nodes: list[SimdNode], height: int = 12) -> AsyncIterator[LcdHarness]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        running = await stack.enter_async_context(running_worker({NETWORK: [each.url for each in nodes]}))
        harness = LcdHarness(running, NETWORK)
        harness.nodes, harness.session = nodes, session

        async def are_there() -> bool:
            return min([await harness.height(index) for index in range(len(nodes))]) >= height

        await until(are_there, within_s=90)
        await harness.look()
        harness.watch()
        yield harness


@on_uvloop
async def test_every_reply_is_that_of_the_node_while_blocks_are_made(nodes: list[SimdNode], own_chain: None) -> None:
    rng, compared, owner = random.Random(5), 0, nodes[0].owner
    async with lcd_harness(nodes[:2]) as harness, await harness.worker.connect() as client:
        _, found, _ = await harness.of_node("/cosmos/staking/v1beta1/validators")
        validator = orjson.loads(found)["validators"][0]["operator_address"]
        state = [
            *(
                "/cosmos/mint/v1beta1/inflation",
                "/cosmos/mint/v1beta1/annual_provisions",
                "/cosmos/bank/v1beta1/supply",
            ),
            *(f"/cosmos/bank/v1beta1/balances/{owner}", f"/cosmos/auth/v1beta1/accounts/{owner}"),
            f"/cosmos/bank/v1beta1/balances/{owner}/by_denom?denom={DENOM}",
            f"/cosmos/distribution/v1beta1/validators/{validator}/outstanding_rewards",
            *("/cosmos/staking/v1beta1/validators?pagination.limit=3", "/cosmos/gov/v1/params/voting"),
            *("/cosmos/auth/v1beta1/accounts/nonsense", "/ibc/core/client/v1/params"),
        ]
        blocks = [f"/cosmos/base/tendermint/v1beta1/{kind}/{{}}" for kind in ("blocks", "validatorsets")]
        height = 0
        for number in range(READS):
            if number % 50 == 0:
                height = await harness.height()
            at = str(rng.randint(1, height - 2))
            if rng.random() < 0.3:
                path, at = rng.choice(blocks).format(rng.choice([at, at, str(height + 500)])), ""
            else:
                path, at = rng.choice(state), rng.choice([at, at, at, str(height + 500)])
            status, body, of_node = await harness.of_node(path, at)
            reply = await harness.of_service(client, path, at)
            assert (reply.status, reply.body) == (status, body), (path, at, reply.body)
            if status == 200 and at:
                assert reply.headers[OF_REPLY] == of_node == at, (path, at)
            compared += status == 200
        assert compared > READS // 2
        assert harness.states == ["up", "up"]


@on_uvloop
async def test_state_without_a_height_is_never_older_than_the_head(nodes: list[SimdNode], own_chain: None) -> None:
    async with lcd_harness(nodes[:2]) as harness, await harness.worker.connect() as client:
        seen: list[int] = []
        for _ in range(60):
            reply = await harness.of_service(client, "/cosmos/mint/v1beta1/annual_provisions")
            seen.append(int(reply.headers[OF_REPLY]))
            at = await harness.of_service(client, "/cosmos/mint/v1beta1/annual_provisions", str(seen[-1]))
            assert (at.status, at.body) == (200, reply.body)
            zero = await harness.of_service(client, "/cosmos/mint/v1beta1/annual_provisions", "0")
            assert int(zero.headers[OF_REPLY]) >= seen[-1] - 1
            await asyncio.sleep(0.05)
        assert seen[-1] > seen[0]
        assert seen[-1] >= await harness.height() - 3


@on_uvloop
async def test_state_that_an_upstream_has_pruned_comes_from_another(nodes: list[SimdNode], own_chain: None) -> None:
    async with lcd_harness([nodes[0], nodes[2]], 40) as harness, await harness.worker.connect() as client:
        path = "/cosmos/mint/v1beta1/annual_provisions"
        assert (await harness.of_node(path, "3", node=1))[0] != 200
        for height in range(1, 25):
            status, body, _ = await harness.of_node(path, str(height))
            reply = await harness.of_service(client, path, str(height))
            assert (reply.status, reply.body) == (status, body) == (200, body), height
        assert harness.states == ["up", "up"]


@on_uvloop
async def test_transaction_is_sent_and_found(nodes: list[SimdNode], own_chain: None) -> None:
    receiver = "cosmos1qypqxpq9qcrsszg2pvxq6rs0zqg3yyc5lzv7xu"
    async with lcd_harness(nodes[:2]) as harness, await harness.worker.connect() as client:
        raw = await asyncio.to_thread(nodes[0].signed_payment, receiver, 7)
        body = orjson.dumps({"tx_bytes": raw, "mode": "BROADCAST_MODE_SYNC"})
        sent = (await harness.of_service(client, "/cosmos/tx/v1beta1/txs", body=body)).json["tx_response"]
        assert sent["code"] == 0, sent

        async def found() -> Reply:
            return await harness.of_service(client, f"/cosmos/tx/v1beta1/txs/{sent['txhash']}")

        async def is_found() -> bool:
            return (await found()).status == 200

        await until(is_found, within_s=20)
        at = (await found()).json["tx_response"]["height"]
        balance = f"/cosmos/bank/v1beta1/balances/{receiver}/by_denom?denom={DENOM}"
        for height, amount in ((str(int(at) - 1), "0"), (at, "7")):
            reply = await harness.of_service(client, balance, height)
            assert (reply.status, reply.json.get("balance")) == (200, {"denom": DENOM, "amount": amount}), reply
        again = await harness.of_service(client, "/cosmos/tx/v1beta1/txs", body=body)
        assert again.json["tx_response"]["txhash"] == sent["txhash"]


@on_uvloop
async def test_new_network_works_within_a_minute(
    nodes: list[SimdNode], own_chain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lcd_harness(nodes[:1], 3):
        (tmp_path / "new").mkdir()  # The node is there.
    async with new_network("lcd", nodes[0].url, tmp_path / "new", monkeypatch) as harness:
        assert harness.route.heads.tip > 0


@on_uvloop
async def test_other_routes_and_headers_are_not_passed_on(nodes: list[SimdNode], own_chain: None) -> None:
    async with lcd_harness(nodes[:2]) as harness, await harness.worker.connect() as client:
        for path, status in (("/cosmos/base/node/v1beta1/status", 404), ("/swagger/", 400), ("/cosmos/none", 404)):
            assert (await harness.of_service(client, path)).status == status, path
        bad = await harness.of_service(client, "/cosmos/bank/v1beta1/params", "x" * 300)
        assert bad.status == 400


# The test vector of BIP-39, and its first account.
MNEMONIC = "abandon " * 11 + "about"
OF_MNEMONIC = "cosmos19rl4cm2hmr8afy4kldpxz3fka4jguq0auqdal4"
RPC_NETWORK = "sim/mainnet"
RECEIVER = "cosmos1qypqxpq9qcrsszg2pvxq6rs0zqg3yyc5lzv7xu"
# A private key, and its account.
PRIVATE, OF_PRIVATE = "01" * 32, "cosmos10xcqpzrky6eff2g52qdye53xkk9jxkvrpq6uqr"


async def pay(harness: LcdHarness, to: str) -> None:
    """Send coins of the node's owner to an account."""
    raw = await asyncio.to_thread(harness.nodes[0].signed_payment, to, 1000)
    body = orjson.dumps({"tx_bytes": raw, "mode": "BROADCAST_MODE_SYNC"})
    balance = f"/cosmos/bank/v1beta1/balances/{to}/by_denom?denom={DENOM}"
    async with await harness.worker.connect() as client:
        paid = (await harness.of_service(client, "/cosmos/tx/v1beta1/txs", body=body)).json["tx_response"]
        assert paid["code"] == 0, paid

        async def has_coins() -> bool:
            return bool((await harness.of_service(client, balance)).json["balance"]["amount"] != "0")

        await until(has_coins, within_s=20)


@on_uvloop
async def test_stargate_works_with_only_a_url(nodes: list[SimdNode], own_chain: None) -> None:
    """It sends to the JSON-RPC of CometBFT, and reads state with `abci_query`."""
    async with lcd_harness(nodes[:2]) as harness:
        await pay(harness, OF_MNEMONIC)
        async with running_worker({RPC_NETWORK: [each.rpc_url for each in nodes[:2]]}) as running:
            rpc = NetworkHarness(running, RPC_NETWORK)
            await rpc.look()
            rpc.watch()
            running.add_key("open", allow_in_url=True)
            url = f"http://127.0.0.1:{running.port}/v1/rpc/{RPC_NETWORK}/{running.keys['open']}"
            task = {"mnemonic": MNEMONIC, "to": RECEIVER, "url": url}
            seen = await asyncio.to_thread(run_script, "cosmjs_stargate.mjs", task, within_s=90)
    assert seen["address"] == OF_MNEMONIC
    assert (seen["chain"], seen["code"], seen["received"], seen["sequence"]) == (CHAIN, 0, 5, 1), seen
    assert seen["found"] == seen["block"] == seen["height"], seen
    assert (seen["searched"], seen["txs"]) == ([True], 1), seen
    assert "height" in seen["missing"], seen


@on_uvloop
async def test_cosmpy_works_with_a_key_in_its_url(nodes: list[SimdNode], own_chain: None) -> None:
    async with lcd_harness(nodes[:2]) as harness:
        await pay(harness, OF_PRIVATE)
        worker = harness.worker
        url = f"http://key:{worker.keys['main']}@127.0.0.1:{worker.port}/v1/rest/{NETWORK}"
        task = {"url": url, "chain": CHAIN, "private_key": PRIVATE, "to": RECEIVER}
        seen = await asyncio.to_thread(run_script, "cosmpy_rest.py", task, within_s=90, package="cosmpy")
    assert seen["address"] == OF_PRIVATE
    assert (seen["code"], seen["received"], seen["sequence"], seen["validators"]) == (0, 5, 1, 1), seen
    assert seen["height"] >= seen["block"] == seen["sent_at"], seen
