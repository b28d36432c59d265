"""Smart wallets and the bundler on the development chain, with real EntryPoints and factories, by permissionless and viem.

Expected values are read from the chain directly, not through the service.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import orjson
import pytest
from eth_abi import encode

from proxy.chains.evm import abi, address, factories, user_operation
from tests.bundler_harness import ScriptedBundler
from tests.client_scripts import run_script
from tests.database import connected
from tests.dev.onchain import read, rpc
from tests.http_client import request
from tests.rpc_upstreams import Chain, scripted
from tests.service import Service, until
from tests.shipped_tables import TABLES
from tests.web.worker import running_worker

# An operation waits for the bundler's next bundle, and the machine may be busy.
WITHIN_S = 60.0
RECIPIENT = "0x00000000000000000000000000000000000beef6"
VERSIONS = ("0.6", "0.7", "0.8")
FACTORIES = factories.of_chain(TABLES.chains.chains["dev"], TABLES.proxies)


async def chain(service: Service, method: str, *params: Any) -> Any:
    return await rpc(service.ready["upstream_url"], service, method, *params)


async def send(service: Service, path: str, body: Any = None, *, key: str = "enterprise") -> tuple[int, Any]:
    return await service.send("GET" if body is None else "POST", path, body, key=key)


async def records(service: Service) -> dict[str, asyncpg.Record]:
    """The recorded operations, by hash."""
    url = orjson.loads((service.data / "running.json").read_bytes())["database"]["url"]
    async with connected(url) as connection:
        return {"0x" + row["hash"].hex(): row for row in await connection.fetch("select * from operations")}


# Addresses


@pytest.mark.parametrize("version", VERSIONS)
async def test_computed_address_equals_the_factorys(bundled: Service, version: str) -> None:
    chance = random.Random(version)
    factory = FACTORIES[version]
    assert bundled.ready["factories"][version] == address.checksum(factory.address)
    implementation = await read(bundled, address.checksum(factory.address), "accountImplementation()", "address")
    assert bytes.fromhex(implementation[2:]) == factory.implementation
    drawn = [(chance.randbytes(20), chance.getrandbits(chance.choice([1, 8, 64, 256]))) for _ in range(60)]
    drawn += [(bytes(20), 0), (b"\xff" * 20, 2**256 - 1)]
    selector = abi.selector("getAddress(address,uint256)")
    calls = [
        {
            "to": address.checksum(factory.address),
            "data": "0x" + (selector + encode(["address", "uint256"], pair)).hex(),
        }
        for pair in drawn
    ]
    batch = [
        {"jsonrpc": "2.0", "id": index, "method": "eth_call", "params": [call, "latest"]}
        for index, call in enumerate(calls)
    ]
    async with bundled.nodes.post(bundled.ready["upstream_url"], json=batch) as response:
        results = {item["id"]: item["result"][-40:] for item in await response.json()}
    assert [results[index] for index in range(len(drawn))] == [factory.wallet(*pair).hex() for pair in drawn]


async def test_wallet_is_created_once_and_found_by_its_key_only(bundled: Service) -> None:
    account = (await bundled.new_account("growth"))["id"]
    mine, other = [await bundled.new_key(account) for _ in range(2)]
    owner = bundled.ready["accounts"][4]["address"]
    body = {"owner": owner.lower(), "chain": "dev", "salt": "savings"}
    status, made = await send(bundled, "/wallets/create", body, key=mine["key"])
    assert status == 201
    salt = factories.salt_of("savings")
    expected = await read(bundled, made["factory"], "getAddress(address,uint256)", "address", owner, salt)
    assert made["address"].lower() == expected.lower()
    assert (made["owner"], made["chain"], made["status"]) == (owner, "dev", "counterfactual")
    assert (made["version"], made["factory"]) == ("0.7", bundled.ready["factories"]["0.7"])
    assert await send(bundled, "/wallets/create", body, key=mine["key"]) == (200, made)
    path = f"/wallets/{made['address']}"
    data = "0x" + (abi.selector("createAccount(address,uint256)") + encode(["address", "uint256"], [owner, salt])).hex()
    more = {"chains": ["dev"], "nonce": 0, "factory_data": data, "init_code": made["factory"].lower() + data[2:]}
    assert await send(bundled, path, key=mine["key"]) == (200, {**made, **more})
    assert (await send(bundled, path.lower(), key=mine["key"]))[0] == 200
    status, foreign = await send(bundled, path, key=other["key"])
    assert status == 404
    assert foreign == (await send(bundled, f"/wallets/{RECIPIENT}", key=mine["key"]))[1]
    rotated = await bundled.cli_json("keys", "rotate", mine["id"], "--overlap", "0")

    async def has_the_wallet() -> bool:
        status, found = await send(bundled, path, key=rotated["key"])
        return status == 200 and found["address"] == made["address"]

    await until(has_the_wallet)
    assert (await send(bundled, "/wallets", key=rotated["key"]))[1]["total"] == 1


async def test_list_is_paged_and_filtered(bundled: Service) -> None:
    account = (await bundled.new_account("growth"))["id"]
    key = (await bundled.new_key(account))["key"]
    owner = bundled.ready["accounts"][5]["address"]
    made = []
    for number in range(5):
        word = "dev" if number % 2 == 0 else "dev-testnet"
        _, found = await send(bundled, "/wallets/create", {"owner": owner, "chain": word, "salt": str(number)}, key=key)
        made.append(found)
    status, whole = await send(bundled, "/wallets", key=key)
    assert (status, whole["page"], whole["total"]) == (200, 1, 5)
    shown = ("address", "owner", "chain", "status", "created_at")
    assert whole["wallets"] == [{name: wallet[name] for name in shown} for wallet in reversed(made)]
    _, second = await send(bundled, "/wallets?page=2&limit=2", key=key)
    assert (second["wallets"], second["page"], second["total"]) == (whole["wallets"][2:4], 2, 5)
    _, some = await send(bundled, "/wallets?chain=dev-testnet", key=key)
    assert (some["total"], {wallet["chain"] for wallet in some["wallets"]}) == (2, {"dev-testnet"})
    assert (await send(bundled, "/wallets?limit=101", key=key))[0] == 400
    assert (await send(bundled, "/wallets?chain=nowhere", key=key))[0] == 404
    # A network without an upstream is one without wallets.
    assert await send(bundled, "/wallets?chain=ethereum", key=key) == (200, {"wallets": [], "page": 1, "total": 0})


async def test_address_on_several_chains_is_the_first_one_unless_the_query_selects_another(bundled: Service) -> None:
    account = (await bundled.new_account("growth"))["id"]
    key = (await bundled.new_key(account))["key"]
    owner = bundled.ready["accounts"][6]["address"]
    both = [
        (await send(bundled, "/wallets/create", {"owner": owner, "chain": word}, key=key))[1]
        for word in ("dev", "dev-testnet")
    ]
    assert both[0]["address"] == both[1]["address"]
    path = f"/wallets/{both[0]['address']}"
    for query, word in (("", "dev"), ("?chain=dev", "dev"), ("?chain=dev-testnet", "dev-testnet")):
        status, found = await send(bundled, path + query, key=key)
        assert (status, found["chain"], found["chains"]) == (200, word, ["dev", "dev-testnet"])


# permissionless and viem


@pytest.fixture(scope="module")
async def seen(bundled: Service) -> dict[str, Any]:
    """The output of the client script, by version."""
    task = {
        "base_url": bundled.base,
        "key": bundled.keys["enterprise"],
        "private_key": bundled.ready["funded_account"]["private_key"],
        "factories": bundled.ready["factories"],
        "recipient": RECIPIENT,
        "within_ms": int(WITHIN_S * 1000),
    }
    return await asyncio.to_thread(run_script, "wallets.mjs", task, within_s=3 * WITHIN_S)


@pytest.mark.parametrize("version", VERSIONS)
async def test_wallet_is_deployed_by_its_first_operation(bundled: Service, seen: dict[str, Any], version: str) -> None:
    found = seen[version]
    made, before, after, then = (found[name]["body"] for name in ("created", "before", "after", "then"))
    assert found["created"]["status"] == 201
    assert made["address"] == found["computed"]
    assert before["init_code"] == made["factory"].lower() + before["factory_data"][2:]
    assert {**made, "chains": ["dev"], "nonce": 0}.items() <= before.items()
    first = await chain(bundled, "eth_getTransactionReceipt", found["first"]["tx"])
    block = await chain(bundled, "eth_getBlockByNumber", first["blockNumber"], False)
    assert (after["status"], after["nonce"], after["deploy_tx"]) == ("deployed", 1, first["transactionHash"])
    assert service_time(after["deployed_at"]) == int(block["timestamp"], 16)
    assert then == {**after, "nonce": 2}
    entry_point = bundled.ready["entry_points"][version]
    nonce = await read(bundled, entry_point, "getNonce(address,uint192)", "uint256", made["address"], 0)
    assert then["nonce"] == nonce
    assert found["first"]["success"] is found["second"]["success"] is True
    assert found["first"]["entry_point"].lower() == entry_point.lower()
    assert found["balance"] == int(await chain(bundled, "eth_getBalance", made["address"], "latest"), 16)
    assert 10**18 - 10**16 < found["balance"] < 10**18 - 11


def service_time(text: str) -> int:
    return int(datetime.datetime.fromisoformat(text).timestamp())


@pytest.mark.parametrize("version", VERSIONS)
async def test_computed_hash_equals_the_entry_points(bundled: Service, seen: dict[str, Any], version: str) -> None:
    """The hash recorded before the operation was sent is the one returned by the contract's getUserOpHash."""
    kept = await records(bundled)
    entry_point = bundled.ready["entry_points"][version]
    by_hash = seen[version]["by_hash"]["result"]
    operation = user_operation.parse(by_hash["userOperation"], version)
    if version == "0.6":
        form = "(address,uint256,bytes,bytes,uint256,uint256,uint256,uint256,uint256,bytes,bytes)"
        gas: tuple[Any, ...] = (operation.call_gas, operation.verification_gas, operation.pre_verification_gas)
        gas += (operation.max_fee_wei, operation.max_priority_fee_wei)
    else:
        form = "(address,uint256,bytes,bytes,bytes32,uint256,bytes32,bytes,bytes)"
        gas = (operation.account_gas_limits, operation.pre_verification_gas, operation.gas_fees)
    packed = (address.checksum(operation.sender), operation.nonce, operation.init_code, operation.call_data, *gas)
    packed += (operation.paymaster_and_data, operation.signature)
    expected = await read(bundled, entry_point, f"getUserOpHash({form})", "bytes32", packed)
    assert "0x" + expected.hex() == seen[version]["second"]["hash"]
    assert kept[seen[version]["second"]["hash"]]["sender"] == operation.sender


@pytest.mark.parametrize("version", VERSIONS)
async def test_included_operation_is_recorded_with_its_block(
    bundled: Service, seen: dict[str, Any], version: str
) -> None:
    for which in ("first", "second"):
        sent = seen[version][which]

        async def is_included(sent: dict[str, Any] = sent) -> asyncpg.Record | None:
            row = (await records(bundled))[sent["hash"]]
            return row if row["status"] == "included" else None

        row = await until(is_included)
        assert (row["block"], "0x" + row["transaction"].hex()) == (sent["block"], sent["tx"])
        assert row["lineage_id"] == row["key_id"]
        assert row["cost_wei"] > 0


@pytest.mark.parametrize("version", VERSIONS)
async def test_wrong_signature_and_used_nonce_are_refused_by_the_bundler(
    bundled: Service, seen: dict[str, Any], version: str
) -> None:
    refused = seen[version]["refused"]
    assert refused["forged"]["error"]["code"] == -32507
    assert "signature" in refused["forged"]["error"]["message"]
    assert refused["replayed"]["error"]["code"] == -32500
    assert "AA25 invalid account nonce" in refused["replayed"]["error"]["message"]
    kept = await records(bundled)
    for which in ("forged", "replayed"):
        row = kept[refused[which]["hash"]]
        assert (row["status"], row["block"]) == ("failed", None)
        assert json.loads(row["error"]) == refused[which]["error"]


async def test_receipt_missing_at_the_bundler_is_read_from_the_chain(bundled: Service, seen: dict[str, Any]) -> None:
    """A worker with an empty bundler on the same chain returns the same receipt as the bundler that sent the operation."""
    async with AsyncExitStack() as stack:
        (empty,) = await stack.enter_async_context(scripted(1, Chain(), ScriptedBundler))
        running = await stack.enter_async_context(
            running_worker(
                {"dev/mainnet": [bundled.ready["upstream_url"]]},
                bundlers=[{"network": "dev/mainnet", "url": empty.url}],
            )
        )
        for version in VERSIONS:
            body = receipt_of(seen[version]["second"]["hash"])
            _, reply = await send(bundled, "/bundler/dev/mainnet", body)
            async with await running.connect() as client:
                data = request("POST", "/v1/bundler/dev/mainnet", orjson.dumps(body), key=running.keys["main"])
                found = (await client.send(data)).json["result"]
            expected = reply["result"]
            for name in ("userOpHash", "success", "actualGasCost", "actualGasUsed", "nonce"):
                assert found[name] == expected[name], name
            for name in ("sender", "entryPoint"):
                assert found[name].lower() == expected[name].lower()
            assert found["receipt"]["transactionHash"] == expected["receipt"]["transactionHash"]
            assert [log["logIndex"] for log in found["logs"]] == [log["logIndex"] for log in expected["logs"]]


def receipt_of(name: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "eth_getUserOperationReceipt", "params": [name]}


async def test_operations_are_listed_on_the_command_line(bundled: Service, seen: dict[str, Any]) -> None:
    whole = {row["hash"]: row for row in await bundled.cli_json("operations")}
    for version in VERSIONS:
        row = whole[seen[version]["second"]["hash"]]
        assert (row["network"], row["nonce"]) == ("dev/mainnet", "0x1")
        assert row["operation"]["nonce"] == "0x1"
    key = next(iter(whole.values()))["key_id"]
    assert len(await bundled.cli_json("operations", "--key", key, "--limit", "2")) == 2
    other = (await bundled.new_key((await bundled.new_account("free"))["id"]))["id"]
    assert await bundled.cli_json("operations", "--key", other) == []
    table = await bundled.cli("operations", "--key", key)
    assert (table.returncode, table.stdout.splitlines()[0].split()[:3]) == (0, ["hash", "network", "key_id"])
    unknown = await bundled.cli("operations", "--key", "key_unknown")
    assert (unknown.returncode, unknown.stderr) == (1, "penstock: there is no key key_unknown\n")


# Deployments without an operation, and reorganisations


async def deploy(service: Service, owner: str, salt: int) -> str:
    """Call the factory from an account of the node; return the transaction hash."""
    data = abi.selector("createAccount(address,uint256)") + encode(["address", "uint256"], [owner, salt])
    sender = (await chain(service, "eth_accounts"))[7]
    call = {"from": sender, "to": service.ready["factories"]["0.7"], "data": "0x" + data.hex()}
    sent: str = await chain(service, "eth_sendTransaction", call)
    return sent


async def listed(service: Service, key: str) -> list[str]:
    _, found = await send(service, "/wallets", key=key)
    return [wallet["status"] for wallet in found["wallets"]]


async def test_deployment_without_an_operation_is_found_and_reverted_by_a_reorganisation(bundled: Service) -> None:
    account = (await bundled.new_account("growth"))["id"]
    key = (await bundled.new_key(account))["key"]
    owner = bundled.ready["accounts"][8]["address"]
    _, made = await send(bundled, "/wallets/create", {"owner": owner, "chain": "dev", "salt": "77"}, key=key)
    path = f"/wallets/{made['address']}"
    before = await chain(bundled, "evm_snapshot")
    transaction = await deploy(bundled, owner, 77)
    status, found = await send(bundled, path, key=key)
    assert (status, found["status"], found["deploy_tx"]) == (200, "deployed", transaction)

    async def is_listed_as(wanted: str) -> bool:
        return await listed(bundled, key) == [wanted]

    await until(lambda: is_listed_as("deployed"))
    assert await chain(bundled, "evm_revert", before)
    await chain(bundled, "hardhat_mine", "0x3")
    status, found = await send(bundled, path, key=key)
    assert (status, found["status"], found["nonce"]) == (200, "counterfactual", 0)
    assert "deploy_tx" not in found
    await until(lambda: is_listed_as("counterfactual"))
    again = await deploy(bundled, owner, 77)
    # Found by the follower alone: no single read has checked it.
    await until(lambda: is_listed_as("deployed"))
    assert (await send(bundled, path, key=key))[1]["deploy_tx"] == again
