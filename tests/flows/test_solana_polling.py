"""Solana's subscriptions on upstreams without a WebSocket, on a real virtual machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.services.feed import svm_poller
from proxy.services.feed.topics import Topic
from proxy.services.rpc.calls import RpcError
from tests.client_scripts import SCRIPTS, run_script
from tests.feed_upstreams import FeedHarness, RecordingListener, feed_harness
from tests.http_client import rpc
from tests.rpc_upstreams import Refused
from tests.service import holds, until
from tests.spl import TOKEN, Bank
from tests.svm_upstreams import PAYEE, PAYER, SvmChain, SvmFeedUpstream, signed_transfer
from tests.web.worker import on_uvloop

SOLANA = "solana/mainnet"
CONFIRMED = {"commitment": "confirmed"}
BASE64 = {"encoding": "base64", "commitment": "confirmed"}


class SlotUpstream(SvmFeedUpstream):
    """The newest slot still receives transactions: it is confirmed when the next one is there."""

    def _slot(self, commitment: str) -> int:
        return super()._slot(commitment) - (commitment == "confirmed")


class Polled:
    """A network whose upstreams are polled, and its chain."""

    def __init__(self, harness: FeedHarness, chain: SvmChain) -> None:
        self.harness = harness
        self.chain = chain

    async def listen(self, kind: str, *params: Any) -> RecordingListener:
        return await self.harness.listen(topic(kind, *params))

    async def send(self, lamports: int) -> str:
        raw = signed_transfer(str(self.chain.machine.latest_blockhash()), lamports)
        body = rpc("sendTransaction", [raw, {"encoding": "base64"}])
        return str((await self.harness.worker.send(body, network=SOLANA)).json["result"])

    def values(self, listener: RecordingListener) -> list[Any]:
        return [each["value"] for each in listener.results]

    async def keep_going(self) -> None:
        """Make slots."""
        while True:
            self.chain.head += 1
            await asyncio.sleep(0.05)


def topic(kind: str, *params: Any) -> Topic:
    return Topic(f"{kind}Subscribe", orjson.dumps(params))


@asynccontextmanager
async def polled(*kinds: str) -> AsyncIterator[Polled]:
    chain = SvmChain(lands_ahead=True, lead=4)
    async with feed_harness(kinds or ["http"], kind=SlotUpstream, chain=chain, network=SOLANA) as harness:
        yield Polled(harness, chain)


@asynccontextmanager
async def running(*kinds: str) -> AsyncIterator[Polled]:
    async with polled(*kinds) as polling, asyncio.TaskGroup() as group:
        task = group.create_task(polling.keep_going())
        try:
            yield polling
        finally:
            task.cancel()


@on_uvloop
async def test_every_slot_and_every_root_is_sent_once() -> None:
    async with polled() as polling:
        slots, roots = await polling.listen("slot"), await polling.listen("root")
        start = polling.chain.head
        for step in (1, 1, 3, 1):
            before = len(slots.events)
            polling.chain.head += step
            await until(lambda before=before, step=step: len(slots.events) == before + step)
        await until(lambda: len(roots.events) == 6)
        assert roots.results == list(range(start + 1, start + 7))
        assert [each["slot"] for each in slots.results] == [each + polling.chain.lead for each in roots.results]
        assert all(each["parent"] == each["slot"] - 1 for each in slots.results)


@on_uvloop
async def test_slots_updates_follow_a_slot_to_its_root() -> None:
    async with polled() as polling:
        updates = await polling.listen("slotsUpdates")
        start = polling.chain.head
        polling.chain.head += 1
        await until(lambda: len(updates.events) == 3)
        assert {(each["type"], each["slot"]) for each in updates.results} == {
            ("completed", start + 5),
            ("optimisticConfirmation", start + 4),
            ("root", start + 1),
        }
        assert all(each["timestamp"] > 1_600_000_000_000 for each in updates.results)


@on_uvloop
async def test_account_is_sent_when_it_changes_and_not_before() -> None:
    async with running() as polling:
        payee = await polling.listen("account", str(PAYEE), BASE64)
        payer = await polling.listen("account", str(PAYER.pubkey()), BASE64)
        await polling.send(2_000_000)
        await until(lambda: payee.events and payer.events)
        assert [each["lamports"] for each in polling.values(payee)] == [2_000_000]
        assert payee.results[0]["context"]["slot"] > 0
        await polling.send(1_000_000)
        await until(lambda: len(payee.events) == 2)
        assert polling.values(payee)[1]["lamports"] == 3_000_000
        # Both accounts are read by one call.
        assert polling.harness.count("getAccountInfo") == 0


@on_uvloop
async def test_accounts_of_a_program_are_sent_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm_poller, "PROGRAM_POLL_S", 0.05)
    async with running() as polling:
        bank = Bank(polling.chain.machine)
        bank.new_mint(6)
        program = await polling.listen("program", str(TOKEN), BASE64)
        mint = bank.new_mint(9)
        await until(lambda: program.events)
        assert [each["pubkey"] for each in polling.values(program)] == [str(mint)]
        assert polling.values(program)[0]["account"]["owner"] == str(TOKEN)


@pytest.mark.parametrize("commitment", ["processed", "confirmed", "finalized"])
@on_uvloop
async def test_signature_is_sent_once_it_is_as_certain_as_wanted(commitment: str) -> None:
    async with polled() as polling:
        signature = await polling.send(1_000_000)
        landed = polling.chain.landed[signature]
        listener = await polling.listen("signature", signature, {"commitment": commitment})
        for _ in range(100):
            await asyncio.sleep(0.3)
            if listener.events:
                break
            polling.chain.head += 1
        (event,) = listener.events
        assert (listener.results[0]["value"], event.last) == ({"err": None}, True)
        assert event.block >= landed + {"processed": 0, "confirmed": 1, "finalized": 4}[commitment]


@on_uvloop
async def test_signature_that_lands_after_the_subscription_is_sent() -> None:
    async with running() as polling:
        raw = signed_transfer(str(polling.chain.machine.latest_blockhash()), 1_000_000)
        signature = polling.chain.send(raw)
        slot = polling.chain.landed.pop(signature)
        listener = await polling.listen("signature", signature, CONFIRMED)
        await holds(lambda: listener.events == [], for_s=0.3)
        polling.chain.landed[signature] = slot
        await until(lambda: len(listener.events) == 1)


@pytest.mark.parametrize("given", ["all", "allWithVotes", {"mentions": [str(PAYEE)]}])
@on_uvloop
async def test_logs_of_each_transaction_are_sent_once_and_in_order(given: Any) -> None:
    async with running() as polling:
        await polling.send(1_000_000)
        for _ in range(10):
            await asyncio.sleep(0.05)
        listener = await polling.listen("logs", given, CONFIRMED)
        sent = [await polling.send(2_000_000 + n) for n in range(3)]
        await until(lambda: len(listener.events) >= 3)
        await holds(lambda: [each["signature"] for each in polling.values(listener)] == sent, for_s=0.3)
        assert all(any("success" in line for line in each["logs"]) for each in polling.values(listener))


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("account", ["x"]),
        ("account", []),
        ("account", [str(PAYEE), {"commitment": "soon"}]),
        ("program", [7]),
        ("signature", ["1" * 80]),
        ("signature", [str(PAYEE)]),
        ("logs", ["some"]),
        ("logs", [{"mentions": []}]),
        ("logs", [{"mentions": [str(PAYEE), str(PAYER.pubkey())]}]),
    ],
)
@on_uvloop
async def test_invalid_params_are_refused(kind: str, params: list[Any]) -> None:
    async with polled() as polling:
        with pytest.raises(RpcError, match=f"-32602.*{kind}Subscribe"):
            await polling.listen(kind, *params)


@on_uvloop
async def test_error_of_the_upstream_is_passed_on() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32602, "Invalid param: unknown encoding")

    async with polled() as polling:
        for each in polling.harness.upstreams:
            each.answers["getMultipleAccounts"] = refuse
        with pytest.raises(RpcError, match="unknown encoding"):
            await polling.listen("account", str(PAYEE), {"encoding": "base1"})


@on_uvloop
async def test_topic_that_a_stream_does_not_have_is_polled() -> None:
    def lacking(_: list[Any]) -> Any:
        raise Refused(-32601, "Method not found")

    async with polled("ws", "http") as polling:
        stream, _ = polling.harness.upstreams
        stream.answers["slotsUpdatesSubscribe"] = lacking
        updates, slots = await polling.listen("slotsUpdates"), await polling.listen("slot")
        assert stream.subscribed == 1
        polling.chain.head += 1
        await until(lambda: len(updates.events) == 3)
        assert slots.events == []


@on_uvloop
async def test_polling_takes_over_when_the_only_stream_dies() -> None:
    async with running("ws", "http") as polling:
        stream, _ = polling.harness.upstreams
        listener = await polling.listen("account", str(PAYEE), BASE64)
        assert stream.subscribed == 1
        await stream.kill()
        await until(lambda: polling.harness.upstreams[1].count("getMultipleAccounts") > 1)
        await polling.send(2_000_000)
        await until(lambda: listener.events)
        assert polling.values(listener)[0]["lamports"] == 2_000_000


@pytest.mark.parametrize("client", ["web3", "kit"])
@on_uvloop
async def test_client_library_sends_confirms_and_listens_without_a_stream(client: str) -> None:
    if not (SCRIPTS / "node_modules" / "@solana" / "kit").exists():
        pytest.skip("the client libraries are not installed")

    async with running() as polling:
        worker = polling.harness.worker
        task = {
            "url": f"http://127.0.0.1:{worker.port}/v1/rpc/{SOLANA}",
            "socket_url": f"ws://127.0.0.1:{worker.port}/v1/ws/{SOLANA}?apiKey={worker.keys['main']}",
            "key": worker.keys["main"],
            "seed": [1] * 32,
            "payee": str(PAYEE),
            "rounds": 3,
        }
        seen = await asyncio.to_thread(run_script, f"solana_{client}.mjs", task, within_s=120)
        assert seen["sent"] == list(polling.chain.landed)
        assert seen["logs"] == seen["sent"]
        assert seen["accounts"][-1] == polling.chain.machine.get_balance(PAYEE)
        assert seen["slots"] > 1
        assert seen["roots"] > 1
        if client == "web3":
            assert set(seen["updates"]) == {"completed", "optimisticConfirmation", "root"}
