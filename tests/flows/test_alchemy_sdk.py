"""Alchemy's SDK, unmodified, on the development service: transfers, balances, metadata and receipts as the chain has them."""

from __future__ import annotations

import asyncio

from tests.client_scripts import run_script
from tests.flows.test_follower import BALANCE, SLOW_S, chain, is_at_the_head, read, word
from tests.service import Service, until

# Transfer(address,address,uint256)
TRANSFERRED = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"


async def test_sdk_reads_the_history_and_the_tokens_of_an_account(followed: Service) -> None:
    await until(lambda: is_at_the_head(followed), within_s=SLOW_S)
    holder = followed.ready["funded_account"]["address"]
    token = next(each["address"] for each in followed.ready["tokens"] if each["kind"] == "erc20")
    logs = await chain(followed, "eth_getLogs", {"fromBlock": "0x0", "address": token, "topics": [TRANSFERRED]})
    received = [log for log in logs if log["topics"][2][-40:] == holder[2:].lower()]
    assert received
    task = {
        "url": f"{followed.base}/rpc/dev/mainnet",
        "key": followed.keys["enterprise"],
        "holder": holder,
        "token": token,
        "block": received[0]["blockNumber"],
    }
    seen = await asyncio.to_thread(run_script, "alchemy_sdk.mjs", task, within_s=60.0)
    of_token = [each for each in seen["transfers"] if each["rawContract"]["address"] == token.lower()]
    assert [(each["hash"], each["uniqueId"]) for each in of_token] == [
        (log["transactionHash"], f"{log['transactionHash']}:log:{int(log['logIndex'], 16)}") for log in received
    ]
    assert [int(each["rawContract"]["value"], 16) for each in of_token] == [int(log["data"], 16) for log in received]
    assert all(each["metadata"]["blockTimestamp"].endswith("Z") for each in seen["transfers"])
    assert [each["uniqueId"] for each in seen["pages"]] == [each["uniqueId"] for each in seen["transfers"]]
    amount = await read(followed, token, BALANCE + word(bytes.fromhex(holder[2:])))
    (balance,) = seen["balance"]
    assert (balance["contractAddress"], int(balance["tokenBalance"], 16)) == (token.lower(), amount)
    assert token.lower() in {each["contractAddress"] for each in seen["balances"]}
    assert seen["metadata"]["decimals"] is not None
    assert {each["transactionHash"] for each in seen["receipts"]} >= {received[0]["transactionHash"]}
    assert any(each["contractAddress"] == token.lower() and each["symbol"] for each in seen["owned"])
    assert "external" in seen["external"]["message"]
