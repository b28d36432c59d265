"""A program written with web3.py: reads, batches, a transaction, and every kind of error.

It reads its task as JSON from standard input and writes its results as JSON to standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import requests
from eth_account import Account
from hexbytes import HexBytes
from web3 import AsyncHTTPProvider, AsyncWeb3, HTTPProvider, Web3
from web3.middleware import SignAndSendRawMiddlewareBuilder
from web3.types import RPCEndpoint, TxParams

TASK = json.load(sys.stdin)
LOGGER, REVERTER, RECIPIENT = (Web3.to_checksum_address(TASK[name]) for name in ("logger", "reverter", "recipient"))
ACCOUNT = Account.from_key(TASK["private_key"])
ABI = [
    {"type": "function", "name": name, "stateMutability": "view", "inputs": [{"type": kind, "name": ""}], "outputs": []}
    for name, kind in (("Error", "string"), ("Panic", "uint256"), ("Custom", "uint256"))
]


def with_key(key: str) -> dict[str, Any]:
    return {"headers": {"X-API-Key": key}}


def connect(key: str = TASK["key"], url: str = TASK["url"], **options: Any) -> Web3:
    return Web3(Web3.HTTPProvider(url, request_kwargs=with_key(key), **options))


def provider_of(w3: Web3) -> HTTPProvider:
    assert isinstance(w3.provider, HTTPProvider)
    return w3.provider


def describe(error: Exception) -> dict[str, Any]:
    found: dict[str, Any] = {"types": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
    found["data"] = getattr(error, "data", None)
    if response := getattr(error, "rpc_response", None):
        found["rpc_code"] = response["error"]["code"]
    if isinstance(error, requests.HTTPError) and error.response is not None:
        found["status"] = error.response.status_code
        found["message"] += error.response.text
    return found


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return describe(error)


def shown_logs(logs: Sequence[Any]) -> list[Any]:
    return [[log["transactionHash"], log["topics"], log["data"]] for log in logs]


def reads(w3: Web3) -> dict[str, Any]:
    block: Any = w3.eth.get_block(TASK["block"], full_transactions=True)
    fees = w3.eth.fee_history(4, "latest", [25, 75])
    logs = w3.eth.get_logs({"address": LOGGER, "fromBlock": 0, "toBlock": "latest"})
    return {
        "chain_id": w3.eth.chain_id,
        "block_number": w3.eth.block_number,
        "block": {"hash": block["hash"], "transactions": [[tx["hash"], tx["gas"]] for tx in block["transactions"]]},
        "balance": w3.eth.get_balance(ACCOUNT.address),
        "nonce": w3.eth.get_transaction_count(ACCOUNT.address),
        "gas": w3.eth.estimate_gas({"from": ACCOUNT.address, "to": LOGGER, "data": TASK["topic"]}),
        "gas_price": w3.eth.gas_price,
        "code": w3.eth.get_code(LOGGER),
        "fees": {"oldest": fees["oldestBlock"], "base": fees["baseFeePerGas"], "reward": fees["reward"]},
        "logs": [[log["blockNumber"], log["transactionHash"], log["topics"], log["data"]] for log in logs],
    }


async def asynchronous_reads() -> dict[str, Any]:
    provider = AsyncHTTPProvider(TASK["url"], request_kwargs=with_key(TASK["key"]))
    w3 = AsyncWeb3(provider)
    async with w3.batch_requests() as batch:
        batch.add(w3.eth.get_balance(ACCOUNT.address))
        batch.add(w3.eth.get_block(TASK["block"]))
        replies: list[Any] = await batch.async_execute()
        balance, block = replies
    seen = {"chain_id": await w3.eth.chain_id, "balance": balance, "hash": block["hash"]}
    await provider.disconnect()
    return seen


def batches(w3: Web3) -> dict[str, Any]:
    """A batch as users write it, which raises the first error; then the task's batches, with their errors."""
    with w3.batch_requests() as batch:
        for _ in range(20):
            batch.add(w3.eth.get_block(TASK["block"], full_transactions=True))
            batch.add(w3.eth.get_balance(ACCOUNT.address))
            batch.add(w3.eth.get_logs({"address": LOGGER, "fromBlock": 0}))
        typed = batch.execute()
    triples = zip(*[iter(typed)] * 3, strict=True)
    results = []
    for size in TASK["batches"]:
        calls = [TASK["calls"][at % len(TASK["calls"])] for at in range(size)]
        replies = provider_of(w3).make_batch_request([(call["method"], call["params"]) for call in calls])
        results.append([result_of(reply) for reply in replies])
    return {"replies": results, "typed": [[block["hash"], balance, len(logs)] for block, balance, logs in triples]}


def result_of(reply: Any) -> Any:
    if "result" in reply:
        return reply["result"]
    return {"rpc_code": reply["error"]["code"], "data": reply["error"].get("data")}


def transaction(w3: Web3) -> dict[str, Any]:
    w3.middleware_onion.inject(SignAndSendRawMiddlewareBuilder.build(ACCOUNT), layer=0)
    before = w3.eth.block_number
    paid = w3.eth.send_transaction({"from": ACCOUNT.address, "to": RECIPIENT, "value": TASK["value"]})
    receipt = w3.eth.wait_for_transaction_receipt(paid)
    found = w3.eth.get_transaction(paid)
    seen: dict[str, Any] = {
        "hash": paid,
        "succeeded": receipt["status"] == 1,
        "block": receipt["blockNumber"],
        "cost": receipt["gasUsed"] * receipt["effectiveGasPrice"],
        "value": found["value"],
        "found_in": found["blockNumber"],
        "received": w3.eth.get_balance(RECIPIENT),
        "left": w3.eth.get_balance(ACCOUNT.address),
        "nonce": w3.eth.get_transaction_count(ACCOUNT.address),
        "heads": [before, receipt["blockNumber"]],
    }
    logged = w3.eth.send_transaction({"from": ACCOUNT.address, "to": LOGGER, "data": TASK["topic"]})
    receipt = w3.eth.wait_for_transaction_receipt(logged)
    logs = w3.eth.get_logs({"address": LOGGER, "fromBlock": receipt["blockNumber"]})
    seen["logs"] = [shown_logs(receipt["logs"]), shown_logs(logs)]
    seen["heads"] += [w3.eth.block_number for _ in range(20)]
    return seen


def signed(account: Any, nonce: int, chain_id: int) -> Any:
    made = {"to": RECIPIENT, "value": 1, "gas": 21000, "nonce": nonce, "chainId": chain_id}
    return account.sign_transaction({**made, "maxFeePerGas": 10**11, "maxPriorityFeePerGas": 1})


def errors(w3: Web3) -> dict[str, Any]:
    contract = w3.eth.contract(REVERTER, abi=ABI)
    call: TxParams = {"to": REVERTER, "data": TASK["revert"]}

    def send(account: Any) -> Any:
        return w3.eth.send_raw_transaction(signed(account, 0, TASK["chain_id"]).raw_transaction)

    actions: dict[str, Callable[[], Any]] = {
        "revert": lambda: w3.eth.call(call),
        "revert_bare": lambda: w3.eth.call({"to": REVERTER}),
        "revert_estimate": lambda: w3.eth.estimate_gas({"from": ACCOUNT.address, **call}),
        "contract_revert": contract.functions.Error("not today").call,
        "contract_panic": contract.functions.Panic(17).call,
        "contract_custom": contract.functions.Custom(42).call,
        "unknown_method": lambda: w3.manager.request_blocking(RPCEndpoint("eth_nope"), []),
        "bad_params": lambda: w3.manager.request_blocking(RPCEndpoint("eth_getBalance"), ["0x1", "latest"]),
        "no_transaction": lambda: w3.eth.get_transaction(TASK["no_hash"]),
        "no_block": lambda: w3.eth.get_block(10**9),
        "bad_key": lambda: connect(TASK["bad_key"]).eth.block_number,
        "no_funds": lambda: send(Account.create()),
        "nonce_too_low": lambda: send(ACCOUNT),
    }
    return {name: outcome(action) for name, action in actions.items()}


def refusals() -> dict[str, Any]:
    """An upstream that refuses every transaction, each time with another message."""
    w3 = connect(url=TASK["far_url"])
    seen = {}
    for nonce, name in enumerate(TASK["refusals"]):
        made = signed(ACCOUNT, nonce, TASK["far_chain_id"])
        found = outcome(partial(w3.eth.send_raw_transaction, made.raw_transaction))
        seen[name] = found == made.hash if isinstance(found, HexBytes) else found
    return seen


def prices_in_a_batch(w3: Web3, count: int) -> Any:
    found = outcome(lambda: provider_of(w3).make_batch_request([(RPCEndpoint("eth_gasPrice"), [])] * count))
    return [int(item["result"], 16) for item in found] if isinstance(found, list) else found


def limits() -> dict[str, Any]:
    impatient = connect(TASK["tight_key"], exception_retry_configuration=None)
    patient = connect(TASK["free_key"])
    return {
        "refused": outcome(lambda: [impatient.eth.gas_price for _ in range(100)]),
        "got": [outcome(lambda: patient.eth.gas_price) for _ in range(15)],
        "large": prices_in_a_batch(patient, 80),
        "many": prices_in_a_batch(connect(), 1000),
    }


def shown(value: Any) -> Any:
    """The JSON form of web3.py's bytes and mappings."""
    return value.to_0x_hex() if isinstance(value, HexBytes) else dict(value)


def main() -> None:
    w3 = connect()
    seen = {"reads": reads(w3), "asynchronous_reads": asyncio.run(asynchronous_reads()), "batches": batches(w3)}
    seen |= {"transaction": transaction(w3), "errors": errors(w3), "refusals": refusals(), "limits": limits()}
    json.dump(seen, sys.stdout, default=shown)


if __name__ == "__main__":
    main()
