"""Alchemy's SDK, unmodified, on the development service: transfers, balances, metadata and receipts as the chain has them."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

import pytest

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
    status, owned = await followed.send("GET", f"/nfts/dev/owned/{holder}?limit=100")
    assert (status, owned["total"] > 1) == (200, True)
    task = {
        "url": f"{followed.base}/rpc/dev/mainnet",
        "key": followed.keys["enterprise"],
        "holder": holder,
        "token": token,
        "block": received[0]["blockNumber"],
        "alias_url": f"{followed.base.removesuffix('/v1')}/alchemy/dev/v2/{followed.keys['enterprise']}",
        "nft": owned["nfts"][0]["contract"],
        "nft_id": owned["nfts"][0]["token_id"],
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
    _same_nfts(seen, owned)


def _same_nfts(seen: dict[str, Any], owned: dict[str, Any]) -> None:
    """The SDK reads at Alchemy's paths what the API has."""
    ours = [(each["contract"], each["token_id"], each["balance"]) for each in owned["nfts"]]
    for name in ("nfts", "every_nft"):
        listed = seen[name]["ownedNfts"] if name == "nfts" else seen[name]
        assert [(each["contract"]["address"], each["tokenId"], each["balance"]) for each in listed] == ours
    assert (seen["nfts"]["totalCount"], seen["nfts"].get("pageKey")) == (owned["total"], None)
    assert seen["nfts"]["validAt"]["blockNumber"] >= owned["as_of_block"]
    assert [each.get("name") for each in seen["every_nft"]] == [each["name"] or None for each in owned["nfts"]]
    contract, token_id, _ = ours[0]
    of_contract = [each for each in ours if each[0] == contract]
    assert seen["nfts_of_contract"]["totalCount"] == len(of_contract)
    assert len(seen["nfts_of_contract"]["ownedNfts"]) == 1
    (second,) = seen["second_page"]["ownedNfts"]
    assert (second["contractAddress"], second["tokenId"], second["balance"]) == ours[1]
    assert (seen["nft"]["contract"]["address"], seen["nft"]["tokenId"]) == (contract, token_id)
    assert seen["nft"]["tokenType"] == owned["nfts"][0]["standard"]
    assert seen["contract"]["address"] == contract
    assert seen["contract"]["name"] == owned["nfts"][0]["collection_name"]
    assert "404" in seen["no_nft"]["message"]
    assert "excludeFilters" in seen["spam"]["message"]


OWNER, BAD = "0x" + "11" * 20, "owner=0x12"
WRONG = [
    ("getNFTsForOwner", "", 400, "owner"),
    ("getNFTsForOwner", BAD, 400, "owner"),
    ("getNFTsForOwner", f"owner={OWNER}&contractAddresses[]=0x1&contractAddresses[]={OWNER}", 400, "contractAddresses"),
    ("getNFTsForOwner", f"owner={OWNER}" + f"&contractAddresses[]={OWNER}" * 46, 400, "contractAddresses"),
    ("getNFTsForOwner", f"owner={OWNER}&pageSize=101", 400, "pageSize"),
    ("getNFTsForOwner", f"owner={OWNER}&pageSize=0", 400, "pageSize"),
    ("getNFTsForOwner", f"owner={OWNER}&pageKey=x", 400, "pageKey"),
    ("getNFTsForOwner", f"owner={OWNER}&pageKey=2-50", 400, "same pageSize"),
    ("getNFTsForOwner", f"owner={OWNER}&pageKey=9999999-100", 400, "pageKey"),
    ("getNFTsForOwner", f"owner={OWNER}&withMetadata=1", 400, "withMetadata"),
    ("getNFTsForOwner", f"owner={OWNER}&owner={OWNER}", 400, "owner"),
    ("getNFTMetadata", f"contractAddress={OWNER}", 400, "tokenId"),
    ("getNFTMetadata", f"contractAddress={OWNER}&tokenId=-1", 400, "tokenId"),
    ("getNFTMetadata", f"contractAddress={OWNER}&tokenId={2**256}", 400, "256 bits"),
    ("getNFTMetadata", f"contractAddress={OWNER}&tokenId=1&tokenType=ERC20", 400, "tokenType"),
    ("getNFTMetadata", f"contractAddress={OWNER}&tokenId=1", 404, "no NFT contract"),
    ("getContractMetadata", "", 400, "contractAddress"),
    ("getContractMetadata", f"contractAddress={OWNER}", 404, "no NFT collection"),
    ("getNFTsForContract", "", 404, ""),
]


@pytest.mark.parametrize(("read", "query", "status", "words"), WRONG)
async def test_wrong_read_names_its_parameter(
    followed: Service, read: str, query: str, status: int, words: str
) -> None:
    root = followed.base.removesuffix("/v1")
    reply = await followed.get(f"{root}/alchemy/dev/nft/v3/{followed.keys['enterprise']}/{read}?{query}")
    assert reply.status == status
    assert words in (await reply.json())["error"]["message"]


async def test_infura_s_fees_are_those_of_the_api(followed: Service) -> None:
    root, key = followed.base.removesuffix("/v1"), followed.keys["enterprise"]
    reply = await followed.get(f"{root}/v3/{key}/networks/31337/suggestedGasFees")
    assert reply.status == 200
    found = await reply.json()
    _, ours = await followed.send("GET", "/gas/dev/prices")
    assert found["estimatedBaseFee"] == ours["base_fee_gwei"]
    for theirs, tier in (("low", "slow"), ("medium", "standard"), ("high", "fast")):
        assert found[theirs]["suggestedMaxFeePerGas"] == ours["estimates"][tier]["max_fee_gwei"]
        assert found[theirs]["suggestedMaxPriorityFeePerGas"] == ours["estimates"][tier]["max_priority_fee_gwei"]
    # Infura takes the key as a user name or password too.
    login = b64encode(f"me:{key}".encode()).decode()
    again = await followed.get(f"{root}/networks/31337/suggestedGasFees", Authorization=f"Basic {login}")
    assert again.status == 200
