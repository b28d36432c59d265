"""Balances of a wallet in the shape of QuickNode are those of the API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.flows.test_follower import SLOW_S, is_at_the_head
from tests.service import Service, until

QUICKNODE = "qn_getWalletTokenBalance"
OWNER = "0x" + "11" * 20


async def call(service: Service, method: str, params: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    status, found = await service.send("POST", "/rpc/dev/mainnet", body)
    assert status == 200, found
    return found


async def test_balances_are_those_of_the_api(followed: Service) -> None:
    await until(lambda: is_at_the_head(followed), within_s=SLOW_S)
    holder = followed.ready["funded_account"]["address"]
    _, ours = await followed.send("GET", f"/tokens/dev/balances/{holder}?limit=100")
    expected = [(each["contract"].lower(), each["balance"]) for each in ours["tokens"]]
    assert len(expected) > 1
    theirs = (await call(followed, QUICKNODE, [{"wallet": holder}]))["result"]
    assert [(each["address"], each["totalBalance"]) for each in theirs["result"]] == expected[:40]
    assert (theirs["totalItems"], theirs["pageNumber"]) == (ours["total"], 1)
    assert int(theirs["nativeTokenBalance"]) > 0
    second = (await call(followed, QUICKNODE, [{"wallet": holder, "page": 2, "perPage": 1}]))["result"]
    assert [each["address"] for each in second["result"]] == [expected[1][0]]
    assert second["totalPages"] == ours["total"]
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
