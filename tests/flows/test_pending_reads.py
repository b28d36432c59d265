"""Reads right after a write: upstreams that are not peers know only the transactions that they have received themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from eth_account import Account

from tests.flows.test_upstream_writes import DYNAMIC, LEGACY, SEND
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import ScriptedUpstream, tx_hash
from tests.web.worker import on_uvloop

# The address of the private key 0x11…11.
SENDER = "0x19e7e376e7c213b7e7e7e46cc70a5dd086daff2a"
UPSTREAMS, ROUNDS = 4, 10


class UnpeeredUpstream(ScriptedUpstream):
    """An upstream that tells no other of its transactions."""

    def __init__(self, chain: Any) -> None:
        super().__init__(chain)
        self.received: list[str] = []

    def _eth_sendRawTransaction(self, params: list[Any]) -> str:
        self.received.append(tx_hash(params[0]))
        return self.received[-1]

    def _eth_getTransactionByHash(self, params: list[Any]) -> dict[str, Any] | None:
        if (mined := super()._eth_getTransactionReceipt(params)) is not None:
            return mined
        return {"hash": params[0], "blockNumber": None} if params[0] in self.received else None

    def _eth_getTransactionCount(self, params: list[Any]) -> str:
        return hex(len(self.received) if params[1] == "pending" else 0)

    _eth_getBalance = _eth_getTransactionCount


def unpeered(count: int = UPSTREAMS, **sections: Any) -> Any:
    return rpc_harness(count, kind=UnpeeredUpstream, **sections)


async def pending_nonce(harness: RpcHarness, **options: Any) -> int:
    return int(await harness.result("eth_getTransactionCount", [SENDER, "pending"], **options), 16)


@pytest.mark.parametrize(("raw", "hash_"), [LEGACY, DYNAMIC])
@on_uvloop
async def test_transaction_and_pending_nonce_are_read_from_the_upstream_that_took_it(raw: str, hash_: str) -> None:
    async with unpeered() as harness:
        await harness.result(SEND, [raw])
        for _ in range(ROUNDS):
            assert (await harness.result("eth_getTransactionByHash", [hash_]))["hash"] == hash_
            assert await pending_nonce(harness) == 1
            # Addresses are the same in capital letters.
            count = await harness.result("eth_getTransactionCount", ["0x" + SENDER[2:].upper(), "pending"])
            assert count == "0x1"


@on_uvloop
async def test_transactions_of_a_sender_go_to_the_upstream_that_took_the_first() -> None:
    async with unpeered() as harness:
        for number in range(1, ROUNDS + 1):
            sender = Account.from_key(number.to_bytes(32, "big"))
            signed = [
                sender.sign_transaction(
                    {"nonce": nonce, "to": "0x" + "22" * 20, "value": 1, "gas": 21000, "gasPrice": 1, "chainId": 1}
                )
                for nonce in range(4)
            ]
            for each in signed:
                await harness.result(SEND, [each.raw_transaction.to_0x_hex()])
            hashes = {each.hash.to_0x_hex() for each in signed}
            assert [len(hashes & {*each.received}) for each in harness.upstreams if hashes & {*each.received}] == [4]
        assert len([each for each in harness.upstreams if each.received]) > 1


@on_uvloop
async def test_next_transaction_goes_elsewhere_when_the_upstream_that_took_the_first_is_gone() -> None:
    async with unpeered(faults=True) as harness:
        await harness.result(SEND, [LEGACY[0]])
        (index,) = [index for index, each in enumerate(harness.upstreams) if each.count(SEND)]
        await harness.proxies[index].switch("dead")
        found = await harness.call(SEND, [DYNAMIC[0]])
        assert found.status == 200


@on_uvloop
async def test_pending_reads_in_a_batch_go_to_the_upstream_that_took_the_write() -> None:
    async with unpeered() as harness:
        await harness.result(SEND, [LEGACY[0]])
        for _ in range(ROUNDS):
            calls = [("eth_getTransactionByHash", [LEGACY[1]]), ("eth_getTransactionCount", [SENDER, "pending"])]
            found = await harness.batch(*calls, ("eth_call", [{"to": SENDER}, "latest"]))
            assert [each["result"] for each in found.json][:2] == [{"hash": LEGACY[1], "blockNumber": None}, "0x1"]


@on_uvloop
async def test_pending_balance_is_not_one_that_another_account_has_read_elsewhere() -> None:
    async with unpeered() as harness:
        harness.worker.add_key("other")
        await harness.result(SEND, [LEGACY[0]])
        for _ in range(ROUNDS):
            await harness.result("eth_getBalance", [SENDER, "pending"], key="other")
            assert await harness.result("eth_getBalance", [SENDER, "pending"]) == "0x1"


@on_uvloop
async def test_write_of_another_account_steers_no_reads() -> None:
    async with unpeered() as harness:
        harness.worker.add_key("other")
        await harness.result(SEND, [LEGACY[0]])
        found = [await pending_nonce(harness, key="other") for _ in range(40)]
        assert set(found) == {0, 1}


@on_uvloop
async def test_other_reads_of_the_sender_go_to_any_upstream() -> None:
    async with unpeered() as harness:
        await harness.result(SEND, [LEGACY[0]])
        for number in range(40):
            await harness.result("eth_call", [{"from": SENDER, "data": hex(number)}, "latest"])
            await harness.result("eth_getTransactionCount", [SENDER, "latest"])
        asked = Counter({at: each.count("eth_getTransactionCount") for at, each in enumerate(harness.upstreams)})
        assert sum(count > 0 for count in asked.values()) > 1, asked


@on_uvloop
async def test_other_upstreams_are_asked_when_the_one_that_took_the_write_is_gone() -> None:
    async with unpeered(faults=True) as harness:
        await harness.result(SEND, [LEGACY[0]])
        (at,) = [at for at, each in enumerate(harness.upstreams) if each.count(SEND)]
        await harness.proxies[at].switch("dead")
        harness.chain.mined[LEGACY[1]] = harness.chain.head
        for _ in range(ROUNDS):
            found = await harness.result("eth_getTransactionByHash", [LEGACY[1]])
            assert found["blockNumber"] == hex(harness.chain.head)


@on_uvloop
async def test_named_upstream_is_asked_whichever_took_the_write() -> None:
    async with unpeered() as harness:
        harness.worker.add_key("steering", directives=frozenset({"upstream"}))
        await harness.result(SEND, [LEGACY[0]], key="steering")
        found = []
        for upstream in harness.route.upstreams:
            headers = {"X_Upstream": upstream.label}
            found.append(await harness.result("eth_getTransactionByHash", [LEGACY[1]], key="steering", **headers))
        assert sorted(each is None for each in found) == [False, True, True, True]
