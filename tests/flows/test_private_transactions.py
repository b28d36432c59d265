"""Private transactions: they reach relays that verify who sends them, and never the mempool of a real node."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from eth_account import Account
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import TextContent

from proxy.dev.funded_accounts import FUNDED
from tests.database import Server
from tests.flows import production
from tests.flows.production import Production, settings_text
from tests.real_nodes import CHAIN_ID, RealNode, hardhat_nodes
from tests.relays import Relay, relays
from tests.service import ROOT, command_here, until

NETWORK = "dev/mainnet"
SEND, BY_HASH = "eth_sendRawTransaction", "eth_getTransactionByHash"
SIGNER = Account.from_key("0x" + "42" * 32)
_serial = itertools.count(1)


@dataclass
class Setting:
    serving: Production
    node: RealNode
    relays: list[Relay]
    session: aiohttp.ClientSession
    keys: dict[str, str]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.serving.port}/v1"

    async def post(self, body: Any, *, key: str = "plain", path: str = "", **headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            sent["X-API-Key"] = self.keys[key]
        async with self.session.post(f"{self.base}/rpc/{NETWORK}{path}", json=body, headers=sent) as response:
            return response.status, await response.json()

    async def call(self, method: str, *params: Any, key: str = "plain", **headers: str) -> Any:
        status, found = await self.post(call_of(method, *params), key=key, **headers)
        assert status == 200, found
        return found

    async def is_public(self, name: str) -> bool:
        """Whether the node knows the transaction, in a block or not."""
        return await self.node.ask(BY_HASH, name) is not None

    async def pool(self) -> list[Any]:
        found: list[Any] = await self.node.ask("eth_pendingTransactions")
        return found

    async def mine(self, blocks: int) -> None:
        """The service sees the last of them."""
        for _ in range(blocks):
            await self.node.ask("evm_mine")
        head = await self.node.ask("eth_blockNumber")

        async def is_seen() -> bool:
            return bool((await self.call("eth_blockNumber", Cache_Control="no-cache"))["result"] == head)

        await until(is_seen)


def call_of(method: str, *params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}


async def signed(setting: Setting) -> tuple[str, str]:
    """A new transaction that the node would accept: its raw form and its hash."""
    nonce = int(await setting.node.ask("eth_getTransactionCount", FUNDED.address, "pending"), 16)
    fields = {"type": 2, "chainId": CHAIN_ID, "nonce": nonce, "to": FUNDED.address, "value": next(_serial)}
    fields |= {"gas": 21_000, "maxFeePerGas": 10**12, "maxPriorityFeePerGas": 10**9}
    found = Account.sign_transaction(fields, FUNDED.private_key)
    return found.raw_transaction.to_0x_hex(), found.hash.to_0x_hex()


def settings(database: str, node: RealNode, found: list[Relay]) -> str:
    text = settings_text(database, node.url, workers=2).replace("ethereum/sepolia", NETWORK)
    signing, plain = found
    return f"""{text}
[[upstreams]]
network = "dev/testnet"
url = "{node.url}"
[[relays]]
network = "{NETWORK}"
url = "{signing.url}"
style = "flashbots"
signer_env = "RELAY_SIGNER"
name = "builder"
[[relays]]
network = "{NETWORK}"
url = "{plain.url}"
"""


def keys_of(config: Path) -> dict[str, str]:
    def run(*words: str) -> dict[str, Any]:
        done = command_here(*words, "--config", str(config), "--json")
        assert done.returncode == 0, done.stderr
        return dict(orjson.loads(done.stdout))

    def account(name: str) -> str:
        made = run("accounts", "create", "--name", name, "--email", f"{name}@example.com", "--plan", "enterprise")
        return str(made["id"])

    ours, theirs = account("ours"), account("theirs")
    return {
        "plain": run("keys", "create", "--account", ours)["key"],
        "url": run("keys", "create", "--account", ours, "--allow-in-url")["key"],
        "private": run("keys", "create", "--account", ours, "--private-transactions")["key"],
        "test": run("keys", "create", "--account", ours, "--mode", "test", "--private-transactions")["key"],
        "other": run("keys", "create", "--account", theirs)["key"],
    }


@pytest.fixture(scope="module")
async def setting(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setting]:
    name, room = await server.create("migrated"), tmp_path_factory.mktemp("private")
    os.environ["RELAY_SIGNER"] = SIGNER.key.to_0x_hex()
    try:
        with hardhat_nodes(1) as (node,):
            async with relays(SIGNER.address, "") as found, aiohttp.ClientSession() as session:
                node.session = session
                await node.ask("evm_mine")
                (config := room / "penstock.toml").write_text(settings(server.url(name), node, found))
                keys = await asyncio.to_thread(keys_of, config)
                serving = await production.start(config, room / "log", keys["plain"])
                yield Setting(serving, node, found, session, keys)
                assert await production.stop(serving) == 0
    finally:
        del os.environ["RELAY_SIGNER"]
    await server.drop(name)


@pytest.fixture(autouse=True)
async def rested(setting: Setting) -> None:
    for each in setting.relays:
        each.refuses, each.pause_s = "", 0.0
        if each._runner is None:
            await each.open()


async def test_operators_see_the_relays_of_a_network(setting: Setting) -> None:
    def listed() -> dict[str, Any]:
        done = command_here("upstreams", "list", "--json", "--config", str(setting.serving.config))
        assert done.returncode == 0, done.stderr
        return {each["label"]: (each["kind"], each["state"]) for each in orjson.loads(done.stdout)}

    async def are_listed() -> bool:
        found = await asyncio.to_thread(listed)
        relays_found = {label: each for label, each in found.items() if each[0] == "relay"}
        return set(relays_found.values()) == {("relay", "up")} and len(relays_found) == len(setting.relays)

    await until(are_listed)


# Ways to send one


async def by_header(setting: Setting, raw: str) -> Any:
    return (await setting.call(SEND, raw, X_Private="1"))["result"]


async def by_setting(setting: Setting, raw: str) -> Any:
    return (await setting.call(SEND, raw, key="private"))["result"]


async def by_method(setting: Setting, raw: str) -> Any:
    members = {"tx": raw, "maxBlockNumber": "0x100000", "preferences": {"fast": True}}
    return (await setting.call("eth_sendPrivateTransaction", members))["result"]


async def by_raw_method(setting: Setting, raw: str) -> Any:
    return (await setting.call("eth_sendPrivateRawTransaction", raw, {"fast": True}))["result"]


async def by_url(setting: Setting, raw: str) -> Any:
    status, found = await setting.post(call_of(SEND, raw), key="", path=f"/{setting.keys['url']}?private=1")
    assert status == 200, found
    return found["result"]


async def by_batch(setting: Setting, raw: str) -> Any:
    batch = [{**call_of("eth_chainId"), "id": 1}, {**call_of(SEND, raw), "id": 2}]
    status, found = await setting.post(batch, X_Private="1")
    assert status == 200, found
    assert found[0]["result"] == hex(CHAIN_ID)
    return found[1]["result"]


async def by_socket(setting: Setting, raw: str) -> Any:
    url = f"{setting.base}/ws/{NETWORK}?apiKey={setting.keys['plain']}&private=1"
    async with setting.session.ws_connect(url) as ws:
        await ws.send_json(call_of(SEND, raw))
        return (await ws.receive_json())["result"]


async def by_socket_of_key(setting: Setting, raw: str) -> Any:
    async with setting.session.ws_connect(f"{setting.base}/ws/{NETWORK}?apiKey={setting.keys['private']}") as ws:
        await ws.send_json(call_of(SEND, raw))
        return (await ws.receive_json())["result"]


async def by_agent(setting: Setting, raw: str) -> Any:
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "proxy", "mcp", "--url", setting.base, "--allow-writes"],
        env={"PATH": os.environ["PATH"], "API_KEY": setting.keys["plain"]},
        cwd=ROOT,
    )
    async with Client(stdio_client(parameters, errlog=sys.stderr)) as client:
        arguments = {"network": NETWORK, "method": SEND, "params": [raw], "private": True}
        (content,) = (await client.call_tool("rpc_call", arguments)).content
        assert isinstance(content, TextContent)
        return orjson.loads(content.text)["result"]


WAYS = (
    by_header,
    by_setting,
    by_method,
    by_raw_method,
    by_url,
    by_batch,
    by_socket,
    by_socket_of_key,
    by_agent,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_private_transaction_reaches_the_relays_and_not_the_mempool(
    setting: Setting, way: Callable[[Setting, str], Awaitable[Any]]
) -> None:
    raw, name = await signed(setting)
    assert await way(setting, raw) == name
    signing, plain = setting.relays
    await until(lambda: name in signing.held and name in plain.held)
    assert signing.held[name] == plain.held[name] == raw
    assert signing.unsigned == 0
    assert not await setting.is_public(name)
    assert await setting.pool() == []
    if way is by_method:
        (params,) = next(
            each["params"] for each in signing.calls[::-1] if each["method"] == "eth_sendPrivateTransaction"
        )
        assert params == {"tx": raw, "maxBlockNumber": "0x100000", "preferences": {"fast": True}}


async def test_only_its_sender_sees_a_private_transaction_until_it_is_mined(setting: Setting) -> None:
    raw, name = await signed(setting)
    await by_header(setting, raw)
    # Every worker shows it, and so does every key of the account.
    for _ in range(8):
        for key in ("plain", "private", "url"):
            found = (await setting.call(BY_HASH, name, key=key))["result"]
            assert (found["hash"], found["blockNumber"]) == (name, None)
        assert (await setting.call(BY_HASH, name, key="other"))["result"] is None
    assert (await setting.call("eth_getTransactionReceipt", name))["result"] is None
    seen = await asyncio.gather(*(setting.call(BY_HASH, name, key=key) for key in ("plain", "other") * 20))
    assert [each["result"] is None for each in seen] == [False, True] * 20
    # A builder includes it.
    await setting.node.ask(SEND, raw)
    await setting.mine(1)
    for key in ("plain", "other"):
        assert int((await setting.call("eth_getTransactionReceipt", name, key=key))["result"]["blockNumber"], 16) > 0


async def test_transaction_is_sent_nowhere_if_no_relay_can_be_reached(setting: Setting) -> None:
    raw, name = await signed(setting)
    for each in setting.relays:
        await each.close()
    for headers in ({"X_Private": "1"}, {"X_Private": "1", "X_Private_Fallback": "1"}):
        status, found = await setting.post(call_of(SEND, raw), **headers)
        assert status == 503, found
        assert (
            "no relay of dev/mainnet can be reached, so the transaction was not sent anywhere"
            in found["error"]["message"]
        )
        assert "connection refused" in found["error"]["message"]
    await setting.mine(3)
    assert not await setting.is_public(name)
    assert (await setting.call(BY_HASH, name))["result"] is None


async def test_one_relay_suffices(setting: Setting) -> None:
    raw, name = await signed(setting)
    await setting.relays[0].close()
    assert await by_header(setting, raw) == name
    assert name in setting.relays[1].held
    assert not await setting.is_public(name)


async def test_refusal_of_all_relays_is_passed_on(setting: Setting) -> None:
    raw, name = await signed(setting)
    for each in setting.relays:
        each.refuses = "nonce too low"
    found = await setting.call(SEND, raw, X_Private="1", X_Private_Fallback="1")
    assert found["error"]["message"] == "nonce too low"
    await setting.mine(3)
    assert not await setting.is_public(name)


async def test_deadline_of_a_private_send_names_the_transaction(setting: Setting) -> None:
    """Relays have it by then."""
    for each in setting.relays:
        each.pause_s = 5.0
    raw, name = await signed(setting)
    status, found = await setting.post(call_of(SEND, raw), X_Private="1", X_Timeout_Ms="300")
    assert (status, found["error"]["details"]) == (504, {"transaction_hash": name})
    assert "look it up by its hash" in found["error"]["message"]
    status, (item,) = await setting.post([call_of(SEND, raw)], X_Private="1", X_Timeout_Ms="300")
    assert (status, item["error"]["data"]) == (200, {"transaction_hash": name})
    await until(lambda: name in setting.relays[1].held)


async def test_transaction_becomes_public_only_if_asked_and_after_its_blocks(setting: Setting) -> None:
    raw, name = await signed(setting)
    assert (await setting.call(SEND, raw, X_Private="1", X_Private_Fallback="4"))["result"] == name
    await setting.mine(2)
    assert not await setting.is_public(name)
    await setting.mine(2)
    await until(lambda: setting.is_public(name))
    await setting.mine(1)
    assert (await setting.call("eth_getTransactionReceipt", name))["result"]["status"] == "0x1"


async def test_cancelled_transaction_never_becomes_public(setting: Setting) -> None:
    raw, name = await signed(setting)
    await setting.call(SEND, raw, X_Private="1", X_Private_Fallback="2")
    assert "error" in await setting.call("eth_cancelPrivateTransaction", {"txHash": name}, key="other")
    assert (await setting.call("eth_cancelPrivateTransaction", {"txHash": name}))["result"] is True
    assert name not in setting.relays[0].held
    other, marker = await signed(setting)
    await setting.call(SEND, other, X_Private="1", X_Private_Fallback="2")
    await setting.mine(4)
    await until(lambda: setting.is_public(marker))  # The loop has run.
    assert not await setting.is_public(name)
    await setting.mine(1)


async def test_public_transaction_still_goes_to_the_mempool(setting: Setting) -> None:
    raw, name = await signed(setting)
    assert (await setting.call(SEND, raw))["result"] == name
    assert await setting.is_public(name)
    assert all(name not in each.held for each in setting.relays)
    await setting.mine(1)


# Refusals


@pytest.mark.parametrize("method", ["eth_sendRawTransactionSync", "eth_sendRawTransactionConditional"])
@pytest.mark.parametrize("key", ["plain", "private"])
async def test_write_that_relays_do_not_take_is_not_sent(setting: Setting, method: str, key: str) -> None:
    raw, name = await signed(setting)
    headers = {"X_Private": "1"} if key == "plain" else {}
    status, found = await setting.post(call_of(method, raw), key=key, **headers)
    assert status == 400
    assert (
        "cannot be sent to private relays, so it was not sent: use eth_sendRawTransaction" in found["error"]["message"]
    )
    assert not await setting.is_public(name)


async def test_network_without_relays_refuses_private_transactions(setting: Setting) -> None:
    raw, name = await signed(setting)
    url = f"{setting.base}/rpc/dev/testnet"
    for key, query in (("test", ""), ("plain", "?private=1")):
        async with setting.session.post(
            url + query, json=call_of(SEND, raw), headers={"X-API-Key": setting.keys[key]}
        ) as response:
            assert response.status == 400
            message = (await response.json())["error"]["message"]
            assert message.startswith("dev/testnet has no private relay, so the transaction was not sent: ")
    assert not await setting.is_public(name)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], "params: must be an array with the transaction"),
        ([{}], "params.0.tx: is required"),
        ([{"tx": "0x1"}], "even number of hex digits"),
        ([{"tx": "0x"}], "even number of hex digits"),
        ([{"tx": 5}], "must be hex text"),
        ([{"tx": "0x02"}], "is not a signed transaction"),
        ([{"tx": "0x02ff", "maxBlockNumber": 5}], "params.0.maxBlockNumber"),
        ([{"tx": "0x02ff", "maxBlockNumber": "soon"}], "params.0.maxBlockNumber"),
        ([{"tx": "0x02ff", "preferences": []}], "preferences: must be an object"),
        ([{"tx": "0x02ff", "preferences": {"hints": "x" * 5000}}], "preferences: must be an object of at most"),
        ([{"tx": "0x02ff", "TX": "0x03"}], "params.0.TX: there is no such member"),
        (["0x02ff"], "must be an object with the member tx"),
    ],
)
async def test_malformed_params_are_an_error_that_names_them(setting: Setting, params: list[Any], words: str) -> None:
    found = await setting.call("eth_sendPrivateTransaction", *params)
    assert found["error"]["code"] == -32602
    assert words in found["error"]["message"]


@pytest.mark.parametrize(
    ("relay", "words"),
    [
        ('network = "dev/nowhere"', "relays.0.network: there is no network dev/nowhere"),
        (
            'network = "ethereum/mainnet"',
            "relays.0.network: ethereum/mainnet has no upstream: add one under [[upstreams]]",
        ),
        (
            'network = "dev/mainnet"\nstyle = "flashbots"',
            "relays.0: style flashbots signs its requests: set signer_env",
        ),
        ('network = "dev/mainnet"\nsigner_env = "NO_SUCH"', "relays.0: there is no signing key in NO_SUCH"),
        ('network = "dev/mainnet"\nstyle = "loud"', "relays.0.style"),
        ('network = "dev/mainnet"\nweight = 2', "relays.0.weight: there is no such key"),
        ('network = "dev/mainnet"\ncert = "a"', "relays.0.cert: cert and key belong together"),
    ],
)
def test_check_reports_faults_of_relays(tmp_path: Path, relay: str, words: str) -> None:
    text = settings_text("postgresql://nobody@127.0.0.1:1/nothing", "http://127.0.0.1:1").replace(
        "ethereum/sepolia", NETWORK
    )
    (config := tmp_path / "penstock.toml").write_text(
        f'{text}\n[[relays]]\nurl = "http://secret.example/key"\n{relay}\n'
    )
    done = command_here("check", "--config", str(config))
    assert done.returncode != 0
    assert words in done.stdout + done.stderr
    assert "secret.example" not in done.stdout + done.stderr
