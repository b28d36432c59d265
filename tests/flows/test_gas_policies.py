"""Gas prices, policies and sponsorship over HTTP. test_sponsor covers the chain's side."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import orjson
import pytest

from proxy.chains.evm import abi
from tests.dev.onchain import rpc
from tests.service import Service

CALLED = bytes.fromhex("5a8e771b5d0b3d2e4d218478cb7c9029d00c4e5a")
_chance = random.Random(4337)


async def make(service: Service, rules: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    status, made = await service.send(
        "POST", "/gas/policies", {"name": "Flow", "chain": "dev", "rules": rules or {}}, **more
    )
    assert status == 201, made
    return dict(made)


def operation(**changes: Any) -> dict[str, Any]:
    """An operation of a new sender: 100,000 gas with the paymaster's, at ten gwei."""
    call = abi.selector("execute(address,uint256,bytes)") + abi.word_of(CALLED) + bytes(32)
    call += abi.word_of(96) + abi.word_of(4) + abi.selector("transfer(address,uint256)").ljust(32, b"\0")
    plain = {
        "sender": "0x" + _chance.randbytes(20).hex(),
        "nonce": "0x0",
        "callData": "0x" + call.hex(),
        "callGasLimit": hex(30_000),
        "verificationGasLimit": hex(5_000),
        "preVerificationGas": hex(5_000),
        "maxFeePerGas": hex(10 * 10**9),
        "maxPriorityFeePerGas": "0x1",
    }
    return {**plain, **changes}


# The three limits above and the paymaster's 60,000 gas, at 3000.12345678 USD per coin.
WORST_USD = "3.00012345678"


async def sponsor(
    service: Service,
    policy: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
    *,
    key: str = "enterprise",
    **more: Any,
) -> tuple[int, Any]:
    body = {
        "chain": "dev",
        "policy_id": policy["id"],
        "user_operation": given or operation(),
        "entry_point": service.ready["entry_points"]["0.7"],
        **more,
    }
    given_body = {name: value for name, value in body.items() if value is not None}
    return await service.send("POST", "/gas/sponsor", given_body, key=key)


async def spend(service: Service, policy: Mapping[str, Any]) -> dict[str, Any]:
    status, found = await service.send("GET", f"/gas/policies/{policy['id']}/spend")
    assert status == 200
    return dict(found)


# Prices


async def test_prices_match_the_chain_and_all_workers_agree(service: Service) -> None:
    answers = await asyncio.gather(*(service.send("GET", "/gas/dev/prices") for _ in range(40)))
    assert {status for status, _ in answers} == {200}
    by_block: dict[int, set[bytes]] = {body["block_number"]: set() for _, body in answers}
    for _, body in answers:
        by_block[body["block_number"]].add(orjson.dumps([body["base_fee_gwei"], body["estimates"]]))
    assert all(len(each) == 1 for each in by_block.values())
    body = answers[0][1]
    url = service.ready["upstream_url"]
    history = await rpc(url, service, "eth_feeHistory", "0x1", hex(body["block_number"]), [])
    assert Decimal(body["base_fee_gwei"]) * 10**9 == int(history["baseFeePerGas"][1], 16)
    assert set(body["estimates"]) == {"slow", "standard", "fast"}


async def test_prices_of_a_chain_without_upstream_are_not_found(service: Service) -> None:
    assert (await service.send("GET", "/gas/atlantis/prices"))[0] == 404
    assert (await service.send("GET", "/gas/base/prices"))[0] == 404


# Policies


async def test_policy_is_created_read_listed_changed_and_deleted(service: Service) -> None:
    account = (await service.new_account("growth"))["id"]
    key = (await service.new_key(account))["key"]
    rules = {"max_gas_usd": "0.50", "reset": "weekly", "rate_limit": {"requests": 5, "per_seconds": 60}}
    made = await make(service, rules, key=key)
    assert made["id"].startswith("gp_")
    assert (made["name"], made["chain"], made["rules"], made["status"]) == ("Flow", "dev", rules, "active")
    path = f"/gas/policies/{made['id']}"
    assert await service.send("GET", path, key=key) == (200, made)
    other = await make(service, key=key)
    status, listed = await service.send("GET", "/gas/policies?limit=1", key=key)
    spend = {"reserved_usd": "0", "spent_usd": "0", "operations": 0, "left_usd": None, "reset": "never"}
    assert (status, listed) == (200, {"policies": [{**other, "spend": spend}], "page": 1, "total": 2})

    change = {"status": "paused", "name": "New", "rules": {"max_gas_usd": "0.75", "rate_limit": None}}
    status, changed = await service.send("PATCH", path, change, key=key)
    assert status == 200
    assert (changed["status"], changed["name"]) == ("paused", "New")
    assert changed["rules"] == {"max_gas_usd": "0.75", "reset": "weekly"}
    (paused,) = (await service.send("GET", "/gas/policies?status=paused", key=key))[1]["policies"]
    assert paused == {**changed, "spend": {**spend, "reset": "weekly"}}

    assert await service.send("DELETE", path, key=key) == (200, {"id": made["id"], "deleted": True})
    for method in ("GET", "DELETE"):
        assert (await service.send(method, path, key=key))[0] == 404
    assert (await service.send("GET", "/gas/policies", key=key))[1]["total"] == 1


async def test_policy_of_another_account_is_not_found(service: Service) -> None:
    policy = await make(service)
    for method, path, body in (
        ("GET", f"/gas/policies/{policy['id']}", None),
        ("PATCH", f"/gas/policies/{policy['id']}", {"name": "mine"}),
        ("DELETE", f"/gas/policies/{policy['id']}", None),
        ("GET", f"/gas/policies/{policy['id']}/spend", None),
    ):
        status, answer = await service.send(method, path, body, key="growth")
        assert status == 404
        absent = path.replace(policy["id"], "gp_" + "0" * 24)
        _, nowhere = await service.send(method, absent, body, key="growth")
        assert answer["error"]["message"].replace(policy["id"], "") == nowhere["error"]["message"].replace(
            "gp_" + "0" * 24, ""
        )
    # Also once the owner's requests have put it into the workers' caches.
    for _ in range(8):
        await sponsor(service, policy)
        assert (await sponsor(service, policy, key="growth"))[0] == 404


async def test_test_key_cannot_use_a_policy_on_a_live_network(service: Service) -> None:
    account = (await service.new_account("growth"))["id"]
    live = (await service.new_key(account))["key"]
    test = (await service.new_key(account, "--mode", "test"))["key"]
    policy = await make(service, key=live)
    assert (await service.send("GET", f"/gas/policies/{policy['id']}", key=test))[0] == 403
    assert (await service.send("GET", "/gas/policies", key=test))[1]["total"] == 0
    own = await make(service, key=test)
    assert (own["chain"], own["network"]) == ("dev", "dev/testnet")
    assert (await service.send("GET", "/gas/policies", key=live))[1]["total"] == 2
    assert (await sponsor(service, own, key=test))[0] == 200
    status, answer = await sponsor(service, own, key=live)
    assert (status, answer["error"]["message"][:9]) == (400, "policy_id")


async def test_plan_limits_the_number_of_policies(service: Service) -> None:
    account = (await service.new_account("free"))["id"]
    key = (await service.new_key(account))["key"]
    for _ in range(5):
        await make(service, key=key)
    status, answer = await service.send("POST", "/gas/policies", {"name": "x", "chain": "dev", "rules": {}}, key=key)
    assert status == 403
    assert "5 gas policies" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"max_gas": "1"}, "max_gas"),
        ({"max_gas_usd": 1}, "rules.max_gas_usd"),
        ({"max_gas_usd": "-1"}, "rules.max_gas_usd"),
        ({"max_per_user_per_day": "3"}, "rules.max_per_user_per_day"),
        ({"allowed_contracts": ["0x12"]}, "rules.allowed_contracts.0"),
        ({"allowed_contracts": ["0x5A8E771b5D0B3d2e4d218478CB7C9029d00c4e5a"]}, "rules.allowed_contracts.0"),
        ({"allowed_methods": ["transfer"]}, "rules.allowed_methods.0"),
        ({"rate_limit": {"requests": 1}}, "rules.rate_limit"),
        ({"rate_limit": {"requests": 1, "per_seconds": 1, "scope": "world"}}, "rules.rate_limit.scope"),
        ({"reset": "yearly"}, "rules.reset"),
        ({"starts_at": "tomorrow"}, "rules.starts_at"),
        ({"expiry_seconds": 301}, "rules.expiry_seconds"),
        ({"min_gas_efficiency": "1.5"}, "rules.min_gas_efficiency"),
    ],
)
async def test_error_names_the_invalid_rule(service: Service, rules: dict[str, Any], named: str) -> None:
    status, answer = await service.send("POST", "/gas/policies", {"name": "x", "chain": "dev", "rules": rules})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert named in answer["error"]["message"]


# Sponsorship


async def test_sponsorship_returns_and_reserves_its_maximum_cost(service: Service) -> None:
    policy = await make(service, {"max_total_usd": "10"})
    status, answer = await sponsor(service, policy)
    assert status == 200, answer
    assert answer["paymaster"] == service.ready["paymasters"]["0.7"]
    assert answer["sponsored_gas_usd"] == WORST_USD
    found = await spend(service, policy)
    assert (found["reserved_usd"], found["spent_usd"], found["left_usd"]) == (WORST_USD, "0", "6.99987654322")
    assert found["operations"] == found["days"][0]["operations"] == found["users"][0]["operations"] == 1


async def test_repeated_operation_gets_the_same_reply_from_every_worker_at_no_cost(service: Service) -> None:
    policy = await make(service)
    given = operation()
    answers = await asyncio.gather(*(sponsor(service, policy, given) for _ in range(40)))
    assert {orjson.dumps(answer) for answer in answers} == {orjson.dumps(answers[0])}
    assert answers[0][0] == 200
    assert (await spend(service, policy))["reserved_usd"] == WORST_USD


async def test_changed_operation_with_the_same_nonce_replaces_its_reservation(service: Service) -> None:
    policy = await make(service)
    given = operation()
    await sponsor(service, policy, given)
    status, dearer = await sponsor(service, policy, {**given, "maxFeePerGas": hex(20 * 10**9)})
    assert (status, dearer["sponsored_gas_usd"]) == (200, "6.00024691356")
    found = await spend(service, policy)
    assert (found["reserved_usd"], found["operations"]) == ("6.00024691356", 1)


async def test_two_hundred_concurrent_requests_with_budget_for_ten_sponsor_ten(service: Service) -> None:
    policy = await make(service, {"max_total_usd": "32"})
    answers = await asyncio.gather(*(sponsor(service, policy) for _ in range(200)))
    assert Counter(status for status, _ in answers) == {200: 10, 403: 190}
    refused = next(answer for status, answer in answers if status == 403)
    assert refused["error"]["details"]["rule"] == "max_total_usd"
    assert refused["error"]["details"]["left"] == "1.9987654322"
    assert (await spend(service, policy))["operations"] == 10


@pytest.mark.parametrize(
    ("rules", "given", "rule", "left"),
    [
        ({"max_gas_usd": "3"}, {}, "max_gas_usd", "3"),
        ({"max_gas_price_gwei": "9.5"}, {}, "max_gas_price_gwei", "9.5"),
        ({"allowed_contracts": ["0x" + "11" * 20]}, {}, "allowed_contracts", None),
        ({"allowed_methods": ["approve(address,uint256)"]}, {}, "allowed_methods", None),
        ({"allowed_methods": ["0xa9059cbb"]}, {"callData": "0x1234"}, "allowed_methods", None),
        ({"sender_allowlist": []}, {}, "sender_allowlist", None),
        ({"sender_denylist": ["0x" + "77" * 20]}, {"sender": "0x" + "77" * 20}, "sender_denylist", None),
        ({"starts_at": "2999-01-01T00:00:00Z"}, {}, "starts_at", None),
        ({"ends_at": "2020-01-01T00:00:00Z"}, {}, "ends_at", None),
        ({"max_total_usd": "2.5"}, {}, "max_total_usd", "2.5"),
        ({"max_per_user_usd": "1"}, {}, "max_per_user_usd", "1"),
        ({"max_per_user_per_day": 0}, {}, "max_per_user_per_day", 0),
        # There is no code at the sender's address, so the call uses hardly any of its gas limit.
        ({"min_gas_efficiency": "0.5"}, {"callGasLimit": hex(3_000_000)}, "min_gas_efficiency", None),
    ],
)
async def test_refusal_names_the_rule_and_the_remaining_amount(
    service: Service, rules: dict[str, Any], given: dict[str, Any], rule: str, left: Any
) -> None:
    policy = await make(service, rules)
    status, answer = await sponsor(service, policy, operation(**given))
    assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert answer["error"]["details"] == {"rule": rule, **({} if left is None else {"left": left})}
    assert rule in answer["error"]["message"]


async def test_operation_that_meets_every_rule_is_sponsored(service: Service) -> None:
    given = operation()
    policy = await make(
        service,
        {
            "max_gas_usd": "4",
            "max_per_user_per_day": 1,
            "allowed_contracts": ["0x" + CALLED.hex()],
            "allowed_methods": ["transfer(address,uint256)"],
            "rate_limit": {"requests": 1, "per_seconds": 3600, "scope": "user"},
            "max_total_usd": "100",
            "max_per_user_usd": "4",
            "reset": "monthly",
            "sender_allowlist": [given["sender"]],
            "starts_at": "2020-01-01T00:00:00Z",
            "ends_at": "2999-01-01T00:00:00Z",
            "expiry_seconds": 60,
            "max_gas_price_gwei": "10",
            "min_gas_efficiency": "0.0001",
        },
    )
    status, answer = await sponsor(service, policy, given)
    assert status == 200, answer
    until, after = (int(answer["paymasterData"][start : start + 64], 16) for start in (2, 66))
    assert after < time.time() - 29
    assert time.time() < until <= time.time() + 60
    status, refused = await sponsor(service, policy, {**given, "callGasLimit": hex(29_999)})
    assert (status, refused["error"]["details"]["rule"], refused["error"]["details"]["left"]) == (403, "rate_limit", 0)
    assert 0 < refused["error"]["details"]["retry_after_s"] <= 3600


async def test_pause_and_new_limits_apply_in_every_worker_at_once(service: Service) -> None:
    policy = await make(service)
    path = f"/gas/policies/{policy['id']}"
    await asyncio.gather(*(sponsor(service, policy) for _ in range(16)))
    for change, rule in (
        ({"status": "paused"}, "status"),
        ({"status": "active", "rules": {"max_gas_usd": "1"}}, "max_gas_usd"),
    ):
        assert (await service.send("PATCH", path, change))[0] == 200
        answers = await asyncio.gather(*(sponsor(service, policy) for _ in range(16)))
        assert {answer["error"]["details"]["rule"] for _, answer in answers} == {rule}
    assert (await service.send("PATCH", path, {"rules": {"max_gas_usd": None}}))[0] == 200
    answers = await asyncio.gather(*(sponsor(service, policy) for _ in range(16)))
    assert {status for status, _ in answers} == {200}
    assert (await service.send("DELETE", path))[0] == 200
    answers = await asyncio.gather(*(sponsor(service, policy) for _ in range(16)))
    assert {status for status, _ in answers} == {404}


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"user_operation": {"sender": "0x12"}}, 400, "user_operation"),
        ({"user_operation": operation(nonce="3")}, 400, "user_operation"),
        ({"user_operation": operation(factory="0x" + "11" * 20)}, 400, "factoryData"),
        ({"user_operation": operation(initCode="0x1234")}, 400, "user_operation.initCode"),
        ({"user_operation": operation(callGasLimit=hex(2**130))}, 400, "user_operation.callGasLimit"),
        ({"entry_point": "0x" + "11" * 20}, 400, "entry_point: "),
        ({"policy_id": "gp_nothing"}, 404, "gas policy"),
        ({"chain": "atlantis"}, 404, "atlantis"),
        ({"more": 1}, 400, "more"),
    ],
)
async def test_error_names_the_invalid_field(service: Service, body: dict[str, Any], status: int, named: str) -> None:
    policy = await make(service)
    point = service.ready["entry_points"]["0.7"]
    whole = {"chain": "dev", "policy_id": policy["id"], "user_operation": operation(), "entry_point": point, **body}
    found, answer = await service.send("POST", "/gas/sponsor", whole)
    assert (found, named in answer["error"]["message"]) == (status, True), answer


async def test_unknown_account_gets_the_default_entry_point_and_the_reply_names_it(service: Service) -> None:
    policy = await make(service)
    body = {"chain": "dev", "policy_id": policy["id"], "user_operation": operation()}
    status, answer = await service.send("POST", "/gas/sponsor", body)
    assert (status, answer["entry_point"]) == (200, service.ready["entry_points"]["0.7"])
    assert answer["paymaster"] == service.ready["paymasters"]["0.7"]


@pytest.mark.parametrize("version", ["0.6", "0.7", "0.8"])
async def test_paymaster_is_that_of_the_wallets_entry_point(service: Service, version: str) -> None:
    policy = await make(service)
    owner = "0x" + _chance.randbytes(20).hex()
    body = {"owner": owner, "chain": "dev", "version": version}
    status, wallet = await service.send("POST", "/wallets/create", body)
    assert status == 201, wallet
    given = operation(sender=wallet["address"])
    status, answer = await sponsor(service, policy, given, entry_point=None)
    assert (status, answer.get("paymaster")) == (200, service.ready["paymasters"][version]), answer


async def test_chain_without_a_paymaster_is_404_with_the_reason(service: Service) -> None:
    body = {"name": "x", "chain": "ethereum-sepolia", "rules": {}}
    _, policy = await service.send("POST", "/gas/policies", body)
    status, answer = await sponsor(service, policy, chain="ethereum-sepolia")
    assert status == 404
    assert "no paymaster is configured" in answer["error"]["message"]


async def test_scope_is_needed(service: Service) -> None:
    account = (await service.new_account("growth"))["id"]
    key = (await service.new_key(account, "--scope", "rpc:read"))["key"]
    assert (await service.send("GET", "/gas/policies", key=key))[0] == 403
    assert (await service.send("GET", "/gas/dev/prices", key=key))[0] == 200
    call = {"jsonrpc": "2.0", "id": 1, "method": "pm_getPaymasterData", "params": []}
    assert (await service.send("POST", "/paymaster/dev/mainnet", call, key=key))[0] == 403


# ERC-7677


async def paymaster(service: Service, method: str, *params: Any) -> Any:
    call = {"jsonrpc": "2.0", "id": "mine", "method": method, "params": list(params)}
    status, answer = await service.send("POST", "/paymaster/dev/mainnet", call)
    assert status == 200, answer
    assert answer["id"] == "mine"
    return answer.get("result") or answer["error"]


@pytest.mark.parametrize("version", ["0.6", "0.7", "0.8"])
async def test_paymaster_implements_erc_7677(service: Service, version: str) -> None:
    policy = await make(service)
    point, context = service.ready["entry_points"][version], {"policyId": policy["id"]}
    given = operation(**({"initCode": "0x"} if version == "0.6" else {}))
    draft = {name: given[name] for name in ("sender", "nonce", "callData")}
    stub = await paymaster(service, "pm_getPaymasterStubData", draft, point, "0x7a69", context)
    assert stub.pop("isFinal") is False
    assert (await spend(service, policy))["operations"] == 0
    real = await paymaster(service, "pm_getPaymasterData", given, point, "0x7a69", context)
    names = (
        {"paymasterAndData"}
        if version == "0.6"
        else {"paymaster", "paymasterData", "paymasterVerificationGasLimit", "paymasterPostOpGasLimit"}
    )
    assert set(real) == set(stub) == names
    assert [len(stub[name]) for name in sorted(names)] == [len(real[name]) for name in sorted(names)]
    assert (await spend(service, policy))["operations"] == 1
    status, same = await sponsor(service, policy, given, entry_point=point)
    assert status == 200
    assert {name: same[name] for name in names} == real


async def test_paymaster_refuses_with_json_rpc_errors(service: Service) -> None:
    policy = await make(service, {"max_gas_usd": "0.1"})
    point, context = service.ready["entry_points"]["0.7"], {"policyId": policy["id"]}
    refused = await paymaster(service, "pm_getPaymasterData", operation(), point, "0x7a69", context)
    assert (refused["code"], refused["data"]) == (-32501, {"rule": "max_gas_usd", "left": "0.1"})
    for params, named in (
        ([], "params"),
        ([operation(), point, "0x1", context], "params.2"),
        ([operation(), point, "0x7a69", {}], "params.3"),
        ([operation(), point, "0x7a69"], "params.3"),
        ([operation(), "0x12", "0x7a69", context], "entryPoint"),
        ([{**operation(), "callGasLimit": None}, point, "0x7a69", context], "callGasLimit"),
        ([operation(), point, "0x7a69", {"policyId": "gp_nothing"}], "gas policy"),
    ):
        error = await paymaster(service, "pm_getPaymasterData", *params)
        assert (error["code"], named in error["message"]) == (-32602, True), error
    assert (await paymaster(service, "eth_sendUserOperation"))["code"] == -32601


@pytest.mark.parametrize(
    "body",
    [
        {"jsonrpc": "2.0", "id": 1, "method": "pm_getFortune", "params": []},
        {"jsonrpc": "2.0", "id": 1, "method": "pm_getPaymasterData", "params": []},
        {"jsonrpc": "2.0", "id": 1, "method": 5},
        [{"jsonrpc": "2.0", "id": 1}] * 2,
        {"jsonrpc": "2.0", "id": 1, "method": "pm_getPaymasterData", "params": ["0x" + "a" * 400_000]},
    ],
    ids=["unknown method", "bad params", "malformed", "malformed in a batch", "large"],
)
async def test_mistakes_at_the_paymaster_are_not_free(service: Service, body: Any) -> None:
    account = (await service.new_account("free"))["id"]
    key = (await service.new_key(account))["key"]
    replies = await asyncio.gather(*(service.send("POST", "/paymaster/dev/mainnet", body, key=key) for _ in range(40)))
    refused = [reply for reply in replies if reply[0] == 429 or b"rate limit" in orjson.dumps(reply[1])]
    assert len(refused) >= 5


async def test_paymaster_answers_batches_and_notifications(service: Service) -> None:
    policy = await make(service)
    params = [operation(), service.ready["entry_points"]["0.7"], "0x7a69", {"policyId": policy["id"]}]
    one = {"jsonrpc": "2.0", "id": 1, "method": "pm_getPaymasterData", "params": params}
    batch = [one, {**one, "id": 2, "method": "eth_call"}, {"jsonrpc": "2.0", "id": 3}, {**one, "id": 4}]
    status, answers = await service.send("POST", "/paymaster/dev/mainnet", batch)
    assert status == 200
    assert [answer["id"] for answer in answers] == [1, 2, 3, 4]
    assert answers[0]["result"] == answers[3]["result"]
    assert [answers[index]["error"]["code"] for index in (1, 2)] == [-32601, -32600]
    silent = {name: value for name, value in one.items() if name != "id"}
    response = await service.post("/paymaster/dev/mainnet", silent)
    assert response.status == 204
    status, answer = await service.send("POST", "/paymaster/dev/mainnet", [])
    assert (status, answer["error"]["details"]["rpc_code"]) == (400, -32600)


# The signer's key


async def test_signers_key_is_in_no_log_no_table_and_no_reply(service: Service) -> None:
    key = service.ready["paymaster_signer"]["private_key"].removeprefix("0x")
    await sponsor(service, await make(service))
    logs = [path for path in (service.data / "logs").rglob("*") if path.is_file() and path.name != "chain.log"]
    assert logs
    for path in logs:
        assert key not in path.read_text("utf-8", "replace").lower()
    _, answer = await service.send("GET", "/openapi.json")
    assert key not in orjson.dumps(answer).decode()
    running = (service.data / "running.json").read_text()
    assert key not in running
    shown = await service.cli("check")
    assert key not in shown.stdout + shown.stderr
