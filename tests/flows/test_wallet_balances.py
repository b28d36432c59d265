"""Balances of a wallet in the shapes of QuickNode and Ankr are those of the API, also for their official SDKs."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from tests.client_scripts import run_script
from tests.flows.test_follower import SLOW_S, is_at_the_head
from tests.service import Service, until

QUICKNODE = "qn_getWalletTokenBalance"
ANKR = "ankr_getAccountBalance"
OWNER = "0x" + "11" * 20


async def call(service: Service, method: str, params: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    status, found = await service.send("POST", "/rpc/dev/mainnet", body)
    assert status == 200, found
    return found


async def listed(service: Service) -> tuple[str, list[dict[str, Any]]]:
    """A holder, and its tokens as the API lists them."""
    await until(lambda: is_at_the_head(service), within_s=SLOW_S)
    holder = str(service.ready["funded_account"]["address"])
    _, ours = await service.send("GET", f"/tokens/dev/balances/{holder}?limit=100")
    assert ours["total"] == len(ours["tokens"]) > 1
    return holder, ours["tokens"]


async def test_balances_are_those_of_the_api(followed: Service) -> None:
    holder, tokens = await listed(followed)
    expected = [(each["contract"].lower(), each["balance"]) for each in tokens]
    theirs = (await call(followed, QUICKNODE, [{"wallet": holder}]))["result"]
    assert [(each["address"], each["totalBalance"]) for each in theirs["result"]] == expected[:40]
    assert (theirs["totalItems"], theirs["pageNumber"]) == (len(tokens), 1)
    assert int(theirs["nativeTokenBalance"]) > 0
    second = (await call(followed, QUICKNODE, [{"wallet": holder, "page": 2, "perPage": 1}]))["result"]
    assert [each["address"] for each in second["result"]] == [expected[1][0]]
    assert second["totalPages"] == len(tokens)
    one = (await call(followed, QUICKNODE, [{"wallet": holder, "contracts": [expected[1][0]]}]))["result"]
    assert ([each["address"] for each in one["result"]], one["totalItems"]) == ([expected[1][0]], 1)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], "one object"),
        (["x"], "one object"),
        ([{}], "wallet"),
        ([{"wallet": "0x12"}], "wallet"),
        ([{"wallet": OWNER, "perPage": 101}], "perPage"),
        ([{"wallet": OWNER, "page": 0}], "page"),
        ([{"wallet": OWNER, "page": True}], "page"),
        ([{"wallet": OWNER, "contracts": [1]}], "contracts"),
        ([{"wallet": OWNER, "contracts": [OWNER] * 101}], "contracts"),
        ([{"wallet": OWNER, "chain": "x"}], "chain: is not a member"),
    ],
)
async def test_wrong_params_are_named(followed: Service, params: Any, words: str) -> None:
    error = (await call(followed, QUICKNODE, params))["error"]
    assert error["code"] == -32602
    assert words in error["message"]


async def test_official_sdks_read_the_balances_with_only_a_url(followed: Service) -> None:
    holder, tokens = await listed(followed)
    url = f"{followed.base}/rpc/dev/mainnet/{followed.keys['growth']}"
    task = {"url": url, "holder": holder, "network": "dev/mainnet"}
    seen = await asyncio.to_thread(run_script, "wallet_balances.mjs", task, within_s=60.0)
    expected = [(each["contract"].lower(), each["balance"], each["symbol"] or "") for each in tokens]
    ankr = seen["ankr"]
    coins, others = [[each for each in ankr["assets"] if each["tokenType"] == kind] for kind in ("NATIVE", "ERC20")]
    assert [(each["contractAddress"], each["balanceRawInteger"], each["tokenSymbol"]) for each in others] == expected
    (coin,) = coins
    assert (coin["tokenSymbol"], coin["tokenDecimals"], int(coin["balanceRawInteger"]) > 0) == ("ETH", 18, True)
    assert (ankr["totalCount"], ankr["nextPageToken"]) == (len(tokens) + 1, "")
    assert {each["blockchain"] for each in ankr["assets"]} == {"dev/mainnet"}
    assert seen["ankr_pages"] == ankr["assets"]
    assert "blockchain" in seen["ankr_unknown"]["message"]
    quicknode = seen["quicknode"]["result"]
    assert [(each["address"], each["totalBalance"], each["symbol"] or "") for each in quicknode] == expected[:40]
    assert [each["address"] for each in seen["quicknode_page"]["result"]] == [expected[1][0]]
    assert seen["quicknode_block"] > 0


async def test_assets_have_the_values_of_the_api(followed: Service) -> None:
    holder, tokens = await listed(followed)
    found = (await call(followed, ANKR, {"walletAddress": holder, "nativeFirst": True}))["result"]
    coin, *others = found["assets"]
    assert coin["tokenType"] == "NATIVE"
    for each, token in zip(others, tokens, strict=True):
        assert each["balance"] == (token["formatted_balance"] or token["balance"])
        assert each["balanceUsd"] == (token["usd_value"] or "0")
        assert (each["tokenPrice"] == "0") == (token["usd_value"] is None)
        assert each["thumbnail"] == (token["logo_url"] or "")
    values = [Decimal(each["balanceUsd"]) for each in found["assets"]]
    assert Decimal(found["totalBalanceUsd"]) == pytest.approx(sum(values), abs=Decimal("0.0000001"))
    sorted_ = (await call(followed, ANKR, [{"walletAddress": holder}]))["result"]["assets"]
    values = [Decimal(each["balanceUsd"]) for each in sorted_]
    assert values == sorted(values, reverse=True)
    known = (await call(followed, ANKR, {"walletAddress": holder, "onlyWhitelisted": True}))["result"]
    expected = [each["contract"].lower() for each in tokens if each["usd_value"] or each["logo_url"]]
    assert [each["contractAddress"] for each in known["assets"] if each["tokenType"] == "ERC20"] == expected
    assert known["totalCount"] == len(known["assets"])


async def test_networks_are_named_once_each_and_paid_for(followed: Service) -> None:
    """The name of Ankr, the id and the chain id of a network mean it. All networks means those of the same class."""
    holder, _ = await listed(followed)
    one = (await call(followed, ANKR, {"walletAddress": holder, "blockchain": "dev/mainnet"}))["result"]
    names = ["dev/mainnet", "dev-mainnet", "dev"]
    assert (await call(followed, ANKR, {"walletAddress": holder, "blockchain": names}))["result"] == one
    every: dict[str, Any]
    for every in ({}, {"blockchain": []}, {"blockchain": None}):
        assert (await call(followed, ANKR, {"walletAddress": holder, **every}))["result"] == one
    both = {"walletAddress": holder, "blockchain": ["dev/mainnet", "dev/testnet"]}
    found = (await call(followed, ANKR, both))["result"]
    assert {each["blockchain"] for each in found["assets"]} == {"dev/mainnet", "dev/testnet"}
    assert found["totalCount"] > one["totalCount"]
    for asked, least in (({"walletAddress": holder}, 5), (both, 10)):
        reply = await followed.rpc(ANKR, [asked])
        assert int(reply.headers["X-Compute-Units"]) == least


async def test_key_reads_only_networks_that_it_may_use(followed: Service) -> None:
    holder, _ = await listed(followed)
    account = await followed.new_account("growth")
    scopes = ("--scope", "rpc:read", "--scope", "data:read")
    key = (await followed.new_key(account["id"], *scopes, "--allow-network", "dev/mainnet"))["key"]
    body = {"jsonrpc": "2.0", "id": 1, "method": ANKR, "params": {"walletAddress": holder, "blockchain": "dev/testnet"}}
    status, found = await followed.send("POST", "/rpc/dev/mainnet", body, key=key)
    assert (status, "dev/testnet" in found["error"]["message"]) == (403, True), found


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], "one object"),
        ({}, "walletAddress"),
        ([7], "one object"),
        ({"walletAddress": "vitalik.eth"}, "walletAddress"),
        ({"walletAddress": OWNER, "blockchain": "atlantis"}, "atlantis"),
        ({"walletAddress": OWNER, "blockchain": [1]}, "blockchain"),
        ({"walletAddress": OWNER, "blockchain": ["dev"] * 101}, "blockchain"),
        ({"walletAddress": OWNER, "pageSize": 0}, "pageSize"),
        ({"walletAddress": OWNER, "pageSize": 1001}, "pageSize"),
        ({"walletAddress": OWNER, "pageToken": "-1"}, "pageToken"),
        ({"walletAddress": OWNER, "pageToken": "9" * 10}, "pageToken"),
        ({"walletAddress": OWNER, "pageToken": "٣"}, "pageToken"),
        ({"walletAddress": OWNER, "onlyWhitelisted": "yes"}, "onlyWhitelisted"),
        ({"walletAddress": OWNER, "onlyWhitelisted": 1}, "onlyWhitelisted"),
        ({"walletAddress": OWNER, "wallet": OWNER}, "wallet: is not a member"),
    ],
)
async def test_wrong_params_of_ankr_are_named(followed: Service, params: Any, words: str) -> None:
    error = (await call(followed, ANKR, params))["error"]
    assert error["code"] == -32602
    assert words in error["message"]
