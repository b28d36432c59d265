"""A program written with web3.py's WebSocketProvider: it subscribes, reads, batches, sends transactions and gets their events.

It reads its task as JSON from standard input and writes its results as JSON to standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from eth_account import Account
from hexbytes import HexBytes
from web3 import AsyncWeb3, Web3, WebSocketProvider
from web3.exceptions import Web3Exception, Web3RPCError
from web3.method import Method
from web3.types import RPCEndpoint

TASK = json.load(sys.stdin)
LOGGER, RECIPIENT = (Web3.to_checksum_address(TASK[name]) for name in ("logger", "recipient"))
ACCOUNT = Account.from_key(TASK["private_key"])
WAIT_S = 30.0


async def main() -> None:
    seen: dict[str, Any] = {"heads": [], "logs": []}
    async with AsyncWeb3(WebSocketProvider(TASK["socket_url"])) as w3:
        heads = await w3.eth.subscribe("newHeads")
        logs = await w3.eth.subscribe("logs", {"address": LOGGER})
        nothing = await w3.eth.subscribe("logs", {"address": RECIPIENT})
        seen |= await reads(w3)
        seen["sent"] = [await send(w3) for _ in range(TASK["rounds"])]
        last = (await w3.eth.wait_for_transaction_receipt(HexBytes(seen["sent"][-1])))["blockNumber"]
        async with asyncio.timeout(WAIT_S):
            async for event in w3.socket.process_subscriptions():
                result = event["result"]
                if event["subscription"] == heads:
                    seen["heads"].append([hex(result["number"]), result["hash"], result["parentHash"]])
                elif event["subscription"] == logs:
                    seen["logs"].append(
                        [result["transactionHash"], result["blockHash"], result["topics"], result["removed"]]
                    )
                else:
                    seen["logs"].append("unexpected event")
                if len(seen["logs"]) >= TASK["rounds"] and int(seen["heads"][-1][0], 16) >= last:
                    break
        for id_ in (heads, logs, nothing):
            assert await w3.eth.unsubscribe(id_)
    seen["refused"] = await refused()
    json.dump(seen, sys.stdout, default=shown)


async def reads(w3: AsyncWeb3[WebSocketProvider]) -> dict[str, Any]:
    async with w3.batch_requests() as batch:
        batch.add(w3.eth.get_balance(ACCOUNT.address))
        batch.add(w3.eth.get_block(TASK["block"]))
        replies: list[Any] = await batch.async_execute()
        balance, block = replies
    return {
        "chain_id": await w3.eth.chain_id,
        "block": block["hash"],
        "balance": balance,
        "replies": [await w3.manager.coro_request(call["method"], call["params"]) for call in TASK["calls"]],
        "unknown": await unknown(w3),
    }


async def unknown(w3: AsyncWeb3[WebSocketProvider]) -> dict[str, Any]:
    eth: Any = w3.eth
    eth.attach_methods({"nope": Method(RPCEndpoint("eth_nope"))})
    try:
        await eth.nope()
    except Web3RPCError as exc:
        return {"rpc_code": exc.rpc_response["error"]["code"] if exc.rpc_response else None}
    return {}


async def send(w3: AsyncWeb3[WebSocketProvider]) -> HexBytes:
    made = {
        "to": LOGGER,
        "data": TASK["topic"],
        "gas": 200_000,
        "nonce": await w3.eth.get_transaction_count(ACCOUNT.address, "pending"),
        "chainId": TASK["chain_id"],
        "maxFeePerGas": 10**11,
        "maxPriorityFeePerGas": 1,
    }
    return await w3.eth.send_raw_transaction(ACCOUNT.sign_transaction(made).raw_transaction)


async def refused() -> dict[str, Any]:
    try:
        async with AsyncWeb3(WebSocketProvider(TASK["bad_url"], max_connection_retries=1)):
            return {"message": "the connection was accepted"}
    except (Web3Exception, OSError) as exc:
        return {"name": type(exc).__name__, "message": f"{exc} {exc.__cause__}"}


def shown(value: Any) -> Any:
    """The JSON form of web3.py's bytes and mappings."""
    return value.to_0x_hex() if isinstance(value, HexBytes) else dict(value)


if __name__ == "__main__":
    asyncio.run(main())
