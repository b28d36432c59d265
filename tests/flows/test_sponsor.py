"""Sponsorship on the development chain, with real EntryPoints, VerifyingPaymasters and bundler, by permissionless and viem.

Expected values are read from the chain directly, not through the service: receipts, the price feed and the contracts' hashes.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

import pytest
import sha3
from eth_abi import decode, encode
from eth_account import Account
from eth_account.messages import encode_defunct

from proxy.chains.evm import operations, paymaster, user_operation
from proxy.chains.evm.paymaster import PaymasterTerms
from proxy.chains.evm.signer import Signer
from proxy.chains.evm.user_operation import UserOperation
from tests.client_scripts import run_script
from tests.dev.onchain import Reverted, read, rpc
from tests.service import Service, until

WITHIN_S = 90.0
VERSIONS = ("0.6", "0.7", "0.8")
RECIPIENT = "0x00000000000000000000000000000000000beef6"
CHAIN_ID = 31337
EXACT = Context(prec=100)
PACKED = {
    "0.6": "(address,uint256,bytes,bytes,uint256,uint256,uint256,uint256,uint256,bytes,bytes)",
    "0.7": "(address,uint256,bytes,bytes,bytes32,uint256,bytes32,bytes,bytes)",
}
PACKED["0.8"] = PACKED["0.7"]


@pytest.fixture(scope="module")
async def seen(bundled: Service) -> dict[str, Any]:
    """The output, by version, of the client script written with permissionless and viem."""
    task = {
        "base_url": bundled.base,
        "key": bundled.keys["enterprise"],
        "recipient": RECIPIENT,
        "entry_points": bundled.ready["entry_points"],
        "factories": bundled.ready["factories"],
        "versions": VERSIONS,
        "within_ms": WITHIN_S * 1000,
    }
    return await asyncio.to_thread(run_script, "sponsored.mjs", task, within_s=WITHIN_S * 2)


def dollars(service: Service, wei: int) -> Decimal:
    """The amount at the price of the feed on the chain, rounded up to a pico-dollar."""
    feed = next(each for each in service.ready["price_feeds"] if each["symbol"] == "ETH")
    price = EXACT.scaleb(Decimal(feed["answer"]), -feed["decimals"])
    exact = EXACT.multiply(EXACT.scaleb(Decimal(wei), -18), price)
    return exact.quantize(Decimal("1e-12"), ROUND_CEILING, context=EXACT)


# With wallet libraries


@pytest.mark.parametrize("version", VERSIONS)
async def test_account_without_ether_sends_sponsored_operations(
    bundled: Service, seen: dict[str, Any], version: str
) -> None:
    found = seen[version]["lived"]
    assert found["balance"] == 0
    for receipt in (*found["costs"], seen[version]["by_hand"]["included"]):
        assert (receipt["success"], receipt["paymaster"].lower()) == (
            True,
            bundled.ready["paymasters"][version].lower(),
        )


@pytest.mark.parametrize("version", VERSIONS)
async def test_spend_equals_the_amount_charged_on_chain(bundled: Service, seen: dict[str, Any], version: str) -> None:
    found = seen[version]["lived"]
    spent = sum((dollars(bundled, receipt["cost_wei"]) for receipt in found["costs"]), Decimal(0))

    async def is_settled() -> bool:
        return Decimal((await bundled.send("GET", f"/gas/policies/{found['policy']}/spend"))[1]["spent_usd"]) == spent

    await until(is_settled, within_s=WITHIN_S)
    _, report = await bundled.send("GET", f"/gas/policies/{found['policy']}/spend")
    assert (report["operations"], report["users"][0]["sender"]) == (2, found["address"])


async def test_unused_reservation_is_released_when_the_block_is_final(bundled: Service, seen: dict[str, Any]) -> None:
    policies = [seen[version]["lived"]["policy"] for version in VERSIONS]

    async def is_free() -> bool:
        # The chain mines a block for each transaction, and finality needs some more on top.
        await rpc(bundled.ready["upstream_url"], bundled, "hardhat_mine", "0x1")
        reports = [(await bundled.send("GET", f"/gas/policies/{each}/spend"))[1] for each in policies]
        return all(report["reserved_usd"] == "0" and report["spent_usd"] != "0" for report in reports)

    await until(is_free, within_s=WITHIN_S, every_s=0.3)


@pytest.mark.parametrize("version", VERSIONS)
async def test_repeated_sponsorship_over_http_is_the_same(seen: dict[str, Any], version: str) -> None:
    found = seen[version]["by_hand"]
    assert found["answer"] == found["again"]
    assert ("paymasterAndData" in found["answer"]["body"]) is (version == "0.6")


@pytest.mark.parametrize("version", VERSIONS)
async def test_operation_changed_after_signing_is_refused_by_the_chain(
    bundled: Service, seen: dict[str, Any], version: str
) -> None:
    answers = seen[version]["drained"]["answers"]
    replayed = answers.pop("replayed")
    assert len(answers) == (6 if version == "0.6" else 7)
    # ERC-7769: invalid signature of the account or of the paymaster.
    assert {name: answer["error"]["code"] for name, answer in answers.items()} == dict.fromkeys(answers, -32507)
    assert replayed["error"]["code"] == -32500


@pytest.mark.parametrize("version", VERSIONS)
async def test_expired_operation_is_refused(seen: dict[str, Any], version: str) -> None:
    assert seen[version]["expired"]["error"]["code"] == -32503


@pytest.mark.parametrize("version", VERSIONS)
async def test_client_receives_the_refusal_with_its_rule(seen: dict[str, Any], version: str) -> None:
    assert seen[version]["refused"]["code"] == -32501
    assert "max_gas_usd" in seen[version]["refused"]["message"]


# With the members that the API specifies, and nothing else


async def sent_by_the_specification(service: Service, version: str, *, packed_form: bool) -> tuple[dict[str, Any], Any]:
    """Create a wallet, sponsor its first operation by eight members, and send it. Returns the wallet and the receipt."""
    owner = Account.create()
    made = {"owner": owner.address, "chain": "dev", "salt": f"new {version} {packed_form}", "version": version}
    _, wallet = await service.send("POST", "/wallets/create", made)
    _, policy = await service.send("POST", "/gas/policies", {"name": "New", "chain": "dev", "rules": {}})
    call_data = call("execute(address,uint256,bytes)", ["address", "uint256", "bytes"], [RECIPIENT, 0, b""])
    fields = {
        "sender": wallet["address"], "nonce": "0x0", "callData": call_data, "callGasLimit": "0x30000",
        "verificationGasLimit": "0x80000", "preVerificationGas": "0x20000", "maxFeePerGas": "0x77359400",
        "maxPriorityFeePerGas": "0x3b9aca00",
    }  # fmt: skip
    body = {"chain": "dev", "policy_id": policy["id"], "user_operation": fields}
    status, found = await service.send("POST", "/gas/sponsor", body)
    assert (status, found["entry_point"]) == (200, service.ready["entry_points"][version]), found
    _, shown = await service.send("GET", f"/wallets/{wallet['address']}")
    whole = {**fields, "initCode": shown["init_code"], "signature": "0x"}
    if version == "0.6":
        assert found["initCode"] == shown["init_code"]
        whole["paymasterAndData"] = found["paymasterAndData"]
    else:
        assert found["factory"].lower() + found["factoryData"][2:] == shown["init_code"]
        limits = (
            found[name][2:].rjust(32, "0") for name in ("paymasterVerificationGasLimit", "paymasterPostOpGasLimit")
        )
        whole["paymasterAndData"] = "".join((found["paymaster"], *limits, found["paymasterData"][2:]))
        if not packed_form:
            del whole["initCode"], whole["paymasterAndData"]
            whole |= {name: value for name, value in found.items() if name not in ("entry_point", "sponsored_gas_usd")}
    operation = user_operation.parse(whole, version)
    point = service.ready["entry_points"][version]
    name = user_operation.hash_of(operation, bytes.fromhex(point[2:]), CHAIN_ID)
    # From 0.8 on, accounts sign the hash itself, which is one of EIP-712.
    signature = owner.unsafe_sign_hash(name) if version == "0.8" else owner.sign_message(encode_defunct(name))
    whole["signature"] = "0x" + bytes(signature.signature).hex()
    request = {"jsonrpc": "2.0", "id": 1, "method": "eth_sendUserOperation", "params": [whole, point]}
    _, sent_reply = await service.send("POST", "/bundler/dev/mainnet", request)
    assert sent_reply.get("result") == "0x" + name.hex(), sent_reply

    async def receipt() -> Any:
        asked = {**request, "method": "eth_getUserOperationReceipt", "params": [sent_reply["result"]]}
        return (await service.send("POST", "/bundler/dev/mainnet", asked))[1]["result"]

    return wallet, await until(receipt, within_s=WITHIN_S, every_s=0.3)


@pytest.mark.parametrize(("version", "packed_form"), [("0.6", True), ("0.7", True), ("0.7", False), ("0.8", True)])
async def test_new_wallet_is_deployed_and_sponsored_by_the_specified_members(
    bundled: Service, version: str, packed_form: bool
) -> None:
    wallet, receipt = await sent_by_the_specification(bundled, version, packed_form=packed_form)
    assert (receipt["success"], receipt["paymaster"].lower()) == (True, bundled.ready["paymasters"][version].lower())
    _, shown = await bundled.send("GET", f"/wallets/{wallet['address']}")
    assert (shown["status"], "init_code" in shown) == ("deployed", False)


# With the contracts alone


def packed(operation: UserOperation) -> list[Any]:
    """The operation in the form that the contract's functions take."""
    sender = "0x" + operation.sender.hex()
    if operation.version == "0.6":
        gas = (operation.call_gas, operation.verification_gas, operation.pre_verification_gas)
        fees = (operation.max_fee_wei, operation.max_priority_fee_wei)
        return [
            sender,
            operation.nonce,
            operation.init_code,
            operation.call_data,
            *gas,
            *fees,
            operation.paymaster_and_data,
            b"",
        ]
    return [
        sender, operation.nonce, operation.init_code, operation.call_data, operation.account_gas_limits,
        operation.pre_verification_gas, operation.gas_fees, operation.paymaster_and_data, b"",
    ]  # fmt: skip


async def contract(
    service: Service, to: str, signature: str, gives: list[str], values: list[Any], *, sender: str | None = None
) -> tuple[Any, ...]:
    types = signature[signature.index("(") + 1 : -1]
    parts = [types[: types.rindex(")") + 1], *types[types.rindex(")") + 2 :].split(",")]
    data = sha3.keccak_256(signature.encode()).digest()[:4] + encode(parts, values)
    call = {"to": to, "data": "0x" + data.hex(), **({"from": sender} if sender else {})}
    found = await rpc(service.ready["upstream_url"], service, "eth_call", call, "latest")
    return tuple(decode(gives, bytes.fromhex(found[2:])))


def random_operation(chance: random.Random, version: str, payer: bytes, data: bytes) -> UserOperation:
    def bits() -> int:
        return chance.choice([10, 100])

    plain = UserOperation(
        version, chance.randbytes(20), chance.getrandbits(200),
        chance.randbytes(chance.choice([0, 20, 88])), chance.randbytes(chance.choice([0, 4, 100, 1000])),
        chance.getrandbits(bits()), chance.getrandbits(bits()), chance.getrandbits(bits()), chance.getrandbits(bits()),
        chance.getrandbits(bits()), b"", b"",
    )  # fmt: skip
    return paymaster.funded(plain, payer, gas=(chance.getrandbits(30), chance.getrandbits(10)), data=data)


@pytest.mark.parametrize("version", VERSIONS)
async def test_computed_hash_equals_the_contracts(bundled: Service, version: str) -> None:
    chance = random.Random(version)
    payer = bundled.ready["paymasters"][version]
    for _ in range(12):
        terms = PaymasterTerms(bytes.fromhex(payer[2:]), CHAIN_ID, chance.getrandbits(40), chance.getrandbits(40))
        operation = random_operation(
            chance, version, terms.paymaster, paymaster.data_of(terms, paymaster.STUB_SIGNATURE)
        )
        signature = f"getHash({PACKED[version]},uint48,uint48)"
        values = [packed(operation), terms.valid_until, terms.valid_after]
        [expected] = await contract(bundled, payer, signature, ["bytes32"], values)
        assert paymaster.hash_of(operation, terms) == expected


async def validated(service: Service, operation: UserOperation, payer: str, entry_point: str) -> tuple[bool, int, int]:
    """The paymaster's result: whether the signature is its signer's, and the start and end of its validity."""
    signature = f"validatePaymasterUserOp({PACKED[operation.version]},bytes32,uint256)"
    values = [packed(operation), bytes(32), 1]
    _, found = await contract(service, payer, signature, ["bytes", "uint256"], values, sender=entry_point)
    return found % 2**160 == 0, found >> 208, (found >> 160) % 2**48


@pytest.mark.parametrize("version", VERSIONS)
async def test_signature_is_valid_only_for_its_chain_paymaster_and_period(bundled: Service, version: str) -> None:
    chance = random.Random(version)
    signer = Signer(bytes.fromhex(bundled.ready["paymaster_signer"]["private_key"][2:]))
    payer, entry_point = bundled.ready["paymasters"][version], bundled.ready["entry_points"][version]
    terms = PaymasterTerms(bytes.fromhex(payer[2:]), CHAIN_ID, 1_900_000_000, 1_899_999_700)
    bare = random_operation(chance, version, terms.paymaster, b"")

    async def is_valid(signed: PaymasterTerms, shown: PaymasterTerms = terms, by: Signer = signer) -> bool:
        data = paymaster.data_of(shown, by.sign(paymaster.message(bare, signed)))
        operation = paymaster.funded(bare, shown.paymaster, gas=bare.paymaster_gas, data=data)
        good, after, until_ = await validated(bundled, operation, payer, entry_point)
        assert (after, until_) == (shown.valid_after, shown.valid_until)
        return good

    assert await is_valid(terms)
    assert not await is_valid(replace(terms, chain_id=1))
    assert not await is_valid(replace(terms, paymaster=bytes.fromhex(bundled.ready["paymasters"][_other(version)][2:])))
    assert not await is_valid(terms, replace(terms, valid_until=terms.valid_until + 1))
    assert not await is_valid(terms, replace(terms, valid_after=terms.valid_after - 1))
    assert not await is_valid(terms, by=Signer(b"\x07" * 32))


@pytest.mark.parametrize("version", VERSIONS)
async def test_paymaster_accepts_calls_only_from_its_entry_point(bundled: Service, version: str) -> None:
    payer = bundled.ready["paymasters"][version]
    operation = random_operation(random.Random(1), version, bytes.fromhex(payer[2:]), bytes(paymaster.DATA_BYTES))
    with pytest.raises(Reverted, match="Sender not EntryPoint"):
        await validated(bundled, operation, payer, bundled.ready["entry_points"][_other(version)])


def _other(version: str) -> str:
    return "0.8" if version == "0.7" else "0.7"


@pytest.mark.parametrize("version", VERSIONS)
async def test_paymaster_accepts_the_sponsorship_for_at_most_five_minutes(bundled: Service, version: str) -> None:
    _, policy = await bundled.send("POST", "/gas/policies", {"name": "x", "chain": "dev", "rules": {}})
    chance = random.Random(version)
    given = {
        "sender": "0x" + chance.randbytes(20).hex(),
        "nonce": "0x1",
        "callData": "0x1234",
        **dict.fromkeys(("callGasLimit", "verificationGasLimit", "preVerificationGas"), hex(50_000)),
        **dict.fromkeys(("maxFeePerGas", "maxPriorityFeePerGas"), hex(10**9)),
    }
    entry_point, payer = bundled.ready["entry_points"][version], bundled.ready["paymasters"][version]
    body = {"chain": "dev", "policy_id": policy["id"], "user_operation": given, "entry_point": entry_point}
    status, answer = await bundled.send("POST", "/gas/sponsor", body)
    assert status == 200, answer
    limits = (int(answer["paymasterVerificationGasLimit"], 16), int(answer["paymasterPostOpGasLimit"], 16))
    plain = UserOperation(
        version, bytes.fromhex(given["sender"][2:]), 1, b"", b"\x12\x34", *(50_000,) * 3, *(10**9,) * 2, b"", b""
    )
    operation = paymaster.funded(
        plain, bytes.fromhex(payer[2:]), gas=limits, data=bytes.fromhex(answer["paymasterData"][2:])
    )
    if version == "0.6":
        assert answer["paymasterAndData"] == "0x" + operation.paymaster_and_data.hex()
    good, after, until_ = await validated(bundled, operation, payer, entry_point)
    assert good
    # The chain's clock runs ahead of ours by a second for each block that it mines in the same second.
    assert after < time.time() < until_ <= time.time() + 300


async def test_included_nonce_is_not_sponsored_again(bundled: Service, seen: dict[str, Any]) -> None:
    found = seen["0.7"]["lived"]
    given = {
        "sender": found["address"],
        "nonce": "0x0",
        "callData": "0x1234",
        **dict.fromkeys(("callGasLimit", "verificationGasLimit", "preVerificationGas"), hex(50_000)),
        **dict.fromkeys(("maxFeePerGas", "maxPriorityFeePerGas"), hex(10**9)),
    }
    body = {"chain": "dev", "policy_id": found["policy"], "user_operation": given}

    async def is_known() -> bool:
        return bool((await bundled.send("GET", f"/gas/policies/{found['policy']}/spend"))[1]["spent_usd"] != "0")

    await until(is_known, within_s=WITHIN_S)
    status, answer = await bundled.send("POST", "/gas/sponsor", body)
    assert status == 400
    assert "user_operation.nonce" in answer["error"]["message"]


# Accounts that delegate (EIP-7702)


async def test_operation_that_lands_under_another_hash_is_settled(bundled: Service) -> None:
    """The 0.8 hash covers the sender's delegate, and the owner changes the delegate after the operation was sponsored."""
    url, payee = bundled.ready["upstream_url"], bundled.ready["accounts"][3]["address"]
    entry_point = bytes.fromhex(bundled.ready["entry_points"]["0.8"][2:])
    owner, wallet = Account.create(), Account.create().address
    first = await read(bundled, bundled.ready["factories"]["0.8"], "accountImplementation()", "address")
    second = Account.create().address
    await rpc(url, bundled, "hardhat_setCode", second, await rpc(url, bundled, "eth_getCode", first, "latest"))
    await rpc(url, bundled, "hardhat_setStorageAt", wallet, "0x0", "0x" + owner.address[2:].rjust(64, "0"))
    await rpc(url, bundled, "hardhat_setCode", wallet, "0xef0100" + first[2:])
    operation, policy = await sponsored_fields(
        bundled, wallet, "0.8", factory=user_operation.MARKER_7702, factoryData="0x"
    )
    await rpc(url, bundled, "hardhat_setCode", wallet, "0xef0100" + second[2:])
    name = user_operation.hash_of(operation, entry_point, CHAIN_ID, delegate=bytes.fromhex(second[2:]))
    assert name != user_operation.hash_of(operation, entry_point, CHAIN_ID, delegate=bytes.fromhex(first[2:]))
    signed = [*packed(operation)[:-1], bytes(owner.unsafe_sign_hash(name).signature)]
    handled = call(f"handleOps({PACKED['0.8']}[],address)", [f"{PACKED['0.8']}[]", "address"], [[signed], payee])
    await sent(bundled, payee, bundled.ready["entry_points"]["0.8"], handled)
    topics = [operations.INCLUDED, "0x" + name.hex()]
    [log] = await rpc(url, bundled, "eth_getLogs", {"fromBlock": "0x0", "topics": topics})
    cost = dollars(bundled, int(log["data"][2 + 2 * 64 : 2 + 3 * 64], 16))

    async def is_closed() -> bool:
        await rpc(url, bundled, "hardhat_mine", "0x1")
        found = (await bundled.send("GET", f"/gas/policies/{policy['id']}/spend"))[1]
        return (Decimal(found["spent_usd"]), found["reserved_usd"]) == (cost, "0")

    await until(is_closed, within_s=WITHIN_S, every_s=0.3)


async def test_operation_is_valid_in_the_next_block_although_the_chain_skips_an_hour(bundled: Service) -> None:
    url, entry_point = bundled.ready["upstream_url"], bundled.ready["entry_points"]["0.8"]
    owner, wallet, payee = Account.create(), Account.create().address, bundled.ready["accounts"][3]["address"]
    delegate = await read(bundled, bundled.ready["factories"]["0.8"], "accountImplementation()", "address")
    snapshot = await rpc(url, bundled, "evm_snapshot")
    await rpc(url, bundled, "hardhat_setStorageAt", wallet, "0x0", "0x" + owner.address[2:].rjust(64, "0"))
    await rpc(url, bundled, "hardhat_setCode", wallet, "0xef0100" + delegate[2:])
    await rpc(url, bundled, "evm_increaseTime", 3600)
    marker = {"factory": user_operation.MARKER_7702, "factoryData": "0x"}
    operation, _ = await sponsored_fields(bundled, wallet, "0.8", **marker)
    point = bytes.fromhex(entry_point[2:])
    name = user_operation.hash_of(operation, point, CHAIN_ID, delegate=bytes.fromhex(delegate[2:]))
    signed = [*packed(operation)[:-1], bytes(owner.unsafe_sign_hash(name).signature)]
    handled = call(f"handleOps({PACKED['0.8']}[],address)", [f"{PACKED['0.8']}[]", "address"], [[signed], payee])
    await sent(bundled, payee, entry_point, handled)
    latest = await rpc(url, bundled, "eth_getBlockByNumber", "latest", False)
    assert int(latest["timestamp"], 16) > time.time() + 3000
    assert await rpc(url, bundled, "evm_revert", snapshot)


# Reorganisations: the last test, because afterwards the bundler is out of step with the chain


async def test_reorganisation_reopens_the_reservation(bundled: Service) -> None:
    url, entry_point = bundled.ready["upstream_url"], bundled.ready["entry_points"]["0.7"]
    owner, payee = bundled.ready["accounts"][2], bundled.ready["accounts"][3]["address"]
    wallet = await read(
        bundled, bundled.ready["factories"]["0.7"], "getAddress(address,uint256)", "address", owner["address"], 77
    )
    created = call("createAccount(address,uint256)", ["address", "uint256"], [owner["address"], 77])
    await sent(bundled, payee, bundled.ready["factories"]["0.7"], created)
    operation, policy = await sponsored(bundled, wallet, owner["private_key"])
    snapshot = await rpc(url, bundled, "evm_snapshot")
    handled = call(f"handleOps({PACKED['0.7']}[],address)", [f"{PACKED['0.7']}[]", "address"], [[operation], payee])
    await sent(bundled, payee, entry_point, handled)

    async def amounts() -> tuple[str, bool]:
        found = (await bundled.send("GET", f"/gas/policies/{policy['id']}/spend"))[1]
        return found["spent_usd"], found["reserved_usd"] != "0"

    async def is_spent() -> bool:
        return (await amounts())[0] != "0"

    await until(is_spent, within_s=WITHIN_S)
    before = Decimal((await bundled.send("GET", f"/gas/policies/{policy['id']}/spend"))[1]["left_usd"])
    assert await rpc(url, bundled, "evm_revert", snapshot)

    async def is_open_again() -> bool:
        await rpc(url, bundled, "hardhat_mine", "0x1")
        return await amounts() == ("0", True)

    await until(is_open_again, within_s=WITHIN_S, every_s=0.3)
    # The amount left has not changed, so no other operation could have used the reserved amount in between.
    after = Decimal((await bundled.send("GET", f"/gas/policies/{policy['id']}/spend"))[1]["left_usd"])
    assert after == before


def call(signature: str, types: list[str], values: list[Any]) -> str:
    return "0x" + bytes(sha3.keccak_256(signature.encode()).digest()[:4] + encode(types, values)).hex()


async def sent(service: Service, sender: str, to: str, data: str) -> None:
    """Send a transaction and check that it succeeded."""
    url = service.ready["upstream_url"]
    transaction = {"from": sender, "to": to, "data": data, "gas": hex(3_000_000)}
    hash_ = await rpc(url, service, "eth_sendTransaction", transaction)
    assert (await rpc(url, service, "eth_getTransactionReceipt", hash_))["status"] == "0x1"


async def sponsored(service: Service, wallet: str, owner_key: str) -> tuple[list[Any], dict[str, Any]]:
    """A sponsored and signed operation of the wallet that does nothing, and the policy that pays for it."""
    operation, policy = await sponsored_fields(service, wallet, "0.7")
    entry_point = bytes.fromhex(service.ready["entry_points"]["0.7"][2:])
    name = user_operation.hash_of(operation, entry_point, CHAIN_ID)
    signature = Account.sign_message(encode_defunct(name), owner_key).signature
    return [*packed(operation)[:-1], bytes(signature)], policy


async def sponsored_fields(
    service: Service, wallet: str, version: str, **more: Any
) -> tuple[UserOperation, dict[str, Any]]:
    """A sponsored operation of the wallet that does nothing, not signed yet, and the policy that pays for it."""
    rules = {"max_total_usd": "1000"}
    _, policy = await service.send("POST", "/gas/policies", {"name": "x", "chain": "dev", "rules": rules})
    given = {
        "sender": wallet,
        "nonce": "0x0",
        "callData": call("execute(address,uint256,bytes)", ["address", "uint256", "bytes"], [RECIPIENT, 0, b""]),
        **dict.fromkeys(("callGasLimit", "verificationGasLimit", "preVerificationGas"), hex(100_000)),
        **dict.fromkeys(("maxFeePerGas", "maxPriorityFeePerGas"), hex(10**9)),
        **more,
    }
    point = service.ready["entry_points"][version]
    body = {"chain": "dev", "policy_id": policy["id"], "user_operation": given, "entry_point": point}
    status, answer = await service.send("POST", "/gas/sponsor", body)
    assert status == 200, answer
    own = ("paymaster", "paymasterData", "paymasterVerificationGasLimit", "paymasterPostOpGasLimit")
    return user_operation.parse({**given, **{name: answer[name] for name in own}, "signature": "0x"}, version), policy
