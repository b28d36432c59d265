"""viem, ethers and web3.py over their WebSocket providers, against the whole service and its development chain.

Each script in tests/clients listens to heads and logs, reads, sends transactions and prints what it saw. The expected values
come from the chain itself, not through the service.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, fields
from typing import Any

import aiohttp
import pytest

from proxy.core import access
from proxy.dev.banner import ReadyFile, listener, miner
from tests.client_scripts import ENVIRONMENT, run_script
from tests.flows.test_clients import CLIENTS, LOGGER, RUN_S, TOPIC, Chain, has_head
from tests.service import SOON_S, Service, until
from tests.sockets import SocketClient

ROUNDS = 3
FILES = {"viem": "viem_socket.mjs", "ethers": "ethers_socket.mjs", "web3.py": "web3_py_socket.py"}


@dataclass(frozen=True)
class Run:
    client: str
    task: dict[str, Any]
    balance: int
    results: list[Any]
    seen: dict[str, Any]


@pytest.fixture(scope="module")
async def chain(service: Service) -> Chain:
    return Chain(service.ready["upstream_url"], service.nodes)


@pytest.fixture(scope="module")
async def logger(chain: Chain) -> str:
    return await chain.deploy(LOGGER)


def url(service: Service, key: str, network: str = "dev/mainnet") -> str:
    return f"{service.ready['ws_url']}/v1/ws/{network}?apiKey={key}"


@pytest.fixture(scope="module", params=CLIENTS)
async def run(request: pytest.FixtureRequest, service: Service, chain: Chain, logger: str) -> Run:
    funded = service.ready["funded_account"]
    head = await chain.number("eth_blockNumber")
    await until(lambda: has_head(service, head))
    task = {
        "socket_url": url(service, service.keys["enterprise"]),
        "bad_url": url(service, access.mint("live", bytes(32))),
        "chain_id": 31337,
        "private_key": funded["private_key"],
        "logger": logger,
        "recipient": "0x" + "5e" * 20,
        "topic": TOPIC,
        "block": head,
        "rounds": ROUNDS,
        "calls": [
            {"method": "eth_getBlockByNumber", "params": [hex(head), False]},
            {"method": "eth_getCode", "params": [logger, "latest"]},
            {"method": "eth_chainId", "params": []},
        ],
    }
    balance = await chain.number("eth_getBalance", funded["address"], "latest")
    results = [await chain.call(call["method"], *call["params"]) for call in task["calls"]]
    seen = await asyncio.to_thread(run_script, FILES[request.param], task, within_s=RUN_S)
    return Run(request.param, task, balance, results, seen)


async def test_reads_match_the_chain(run: Run, chain: Chain) -> None:
    assert run.seen["chain_id"] == 31337
    assert run.seen["block"] == (await chain.call("eth_getBlockByNumber", hex(run.task["block"]), False))["hash"]
    assert run.seen["balance"] == run.balance
    assert run.seen["replies"] == run.results
    assert run.seen["unknown"]["rpc_code"] == -32601


async def test_transactions_are_sent_and_their_logs_seen_once_and_in_order(run: Run, chain: Chain) -> None:
    receipts = [await chain.call("eth_getTransactionReceipt", sent) for sent in run.seen["sent"]]
    assert len(receipts) == ROUNDS
    wanted = [[receipt["transactionHash"], receipt["blockHash"], [TOPIC], False] for receipt in receipts]
    assert run.seen["logs"] == wanted


async def test_heads_match_the_chain_without_a_gap(run: Run, chain: Chain) -> None:
    heads = run.seen["heads"]
    numbers = [int(number, 16) for number, _, _ in heads]
    assert numbers == [*range(numbers[0], numbers[0] + len(heads))]
    sent = [int((await chain.call("eth_getTransactionReceipt", each))["blockNumber"], 16) for each in run.seen["sent"]]
    assert set(sent) <= set(numbers)
    for number, block_hash, parent in heads:
        block = await chain.call("eth_getBlockByNumber", number, False)
        assert (block_hash, parent) == (block["hash"], block["parentHash"])


def test_bad_key_is_refused(run: Run) -> None:
    words = json.dumps(run.seen["refused"]).lower()
    assert "accepted" not in words
    assert "svc_live_" not in words.replace(run.task["bad_url"].lower(), "")
    if run.client != "viem":  # viem does not report the reason
        assert "401" in words


# Tests that need the whole service


async def opened(service: Service, key: str) -> SocketClient:
    return SocketClient(await service.session.ws_connect(url(service, key)))


async def test_heads_have_the_seven_documented_fields(service: Service, chain: Chain) -> None:
    client = await opened(service, service.keys["enterprise"])
    await client.result("eth_subscribe", "newHeads")
    await chain.send(to="0x" + "5e" * 20, value="0x1")
    head = (await client.event())["result"]
    block = await chain.call("eth_getBlockByNumber", head["number"], False)
    for name in ("number", "hash", "parentHash", "timestamp", "gasUsed", "gasLimit", "baseFeePerGas"):
        assert head[name] == block[name]
    await client.ws.close()


async def test_cursor_replays_every_block_and_goes_live(service: Service, chain: Chain) -> None:
    first = await chain.number("eth_blockNumber")
    for _ in range(5):
        await chain.send(to="0x" + "5e" * 20, value="0x1")
    await until(lambda: has_head(service, first + 5))
    client = await opened(service, service.keys["enterprise"])
    await client.result("eth_subscribe", "newHeads", {"fromBlock": hex(first + 1)})
    await chain.send(to="0x" + "5e" * 20, value="0x1")
    numbers = [int((await client.event())["result"]["number"], 16) for _ in range(6)]
    assert numbers == [*range(first + 1, first + 7)]
    await client.ws.close()


async def test_command_in_the_banner_prints_heads(service: Service, chain: Chain) -> None:
    ready: dict[str, Any] = {field.name: service.ready.get(field.name) for field in fields(ReadyFile)}
    line, block = listener(ReadyFile(**ready), "enterprise"), miner(ReadyFile(**ready))
    process = await asyncio.create_subprocess_shell(f"exec {line}", stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(RUN_S):
            assert b'"result":"0x' in await process.stdout.readline()
            sent = await chain.send(to="0x" + "5e" * 20, value="0x1")
            assert sent["blockHash"].encode() in await process.stdout.readline()
            mining = await asyncio.create_subprocess_shell(block, stdout=asyncio.subprocess.DEVNULL)
            assert await mining.wait() == 0
            assert sent["blockHash"].encode() in await process.stdout.readline()  # the parent of the next one
    finally:
        process.kill()
        await process.wait()


async def test_revoked_keys_sockets_close_within_a_second(service: Service) -> None:
    account = (await service.new_account("growth"))["id"]
    made = await service.new_key(account)
    clients = [await opened(service, made["key"]) for _ in range(8)]
    other = await opened(service, service.keys["enterprise"])
    for client in clients:
        await client.result("eth_subscribe", "newHeads")
    await service.cli_json("keys", "revoke", made["id"])
    async with asyncio.timeout(SOON_S):
        assert [await client.closed() for client in clients] == [(1008, "the API key was revoked")] * 8
    assert await other.result("eth_chainId")
    await other.ws.close()
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await opened(service, made["key"])
    assert refused.value.status == 401


async def test_test_key_is_forbidden_on_a_live_network(service: Service) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await opened(service, service.keys["test"])
    assert refused.value.status == 403
    client = SocketClient(await service.session.ws_connect(url(service, service.keys["test"], "dev/testnet")))
    assert await client.result("eth_chainId") == "0x7a69"
    await client.ws.close()


async def test_metrics_count_sockets_subscriptions_and_events(service: Service, chain: Chain) -> None:
    client = await opened(service, service.keys["enterprise"])
    await client.result("eth_subscribe", "newHeads")
    await chain.send(to="0x" + "5e" * 20, value="0x1")
    await client.event()

    async def counted() -> bool:
        text = await (await service.get(service.ready["metrics_url"])).text()
        return (
            "penstock_sockets_open 1.0" in text
            and 'penstock_subscriptions_open{kind="newHeads"} 1.0' in text
            and 'penstock_socket_events_total{kind="newHeads",outcome="sent"}' in text
            and 'penstock_requests_total{operation="open_socket",status="101"}' in text
        )

    await until(counted)
    await client.ws.close()
