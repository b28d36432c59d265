"""Explaining requests by their id: what is recorded, over every surface, and who may read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import orjson
import pytest
from prometheus_client import REGISTRY

from proxy.core.access import AllowedUses, Key
from proxy.core.directives import USUAL
from proxy.core.request_records import MOST_PARAMS, RecordReader, kind_of, shown_text
from proxy.errors import InvalidRequest
from proxy.services.request_recorder import (
    BYTES_AT_ONCE,
    BYTES_PER_DAY,
    MORE_PER_S,
    MOST_OF_ACCOUNT,
    RequestRecorder,
)
from proxy.services.rpc.finished_call import FinishedCall
from tests.database import connected
from tests.http_client import Reply, request, rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.shapes import conforms
from tests.sockets import bare
from tests.web.worker import LIVE, on_uvloop

ADDRESS = "0x" + "ab" * 20
BALANCE = ("eth_getBalance", [ADDRESS, "latest"])
# aiohttp serves requests of web pages, the front all others.
SERVED_BY = [{}, {"Origin": "https://app.example.com"}]


class Records:
    def __init__(self, harness: RpcHarness, database: asyncpg.Connection[asyncpg.Record]) -> None:
        self.harness = harness
        self.database = database

    async def get(self, path: str, *, key: str = "main") -> Reply:
        await self.harness.worker.app.requests.flush()
        async with await self.harness.worker.connect() as client:
            return await client.send(request("GET", f"/v1{path}", key=self.harness.worker.keys[key]))

    async def of(self, reply: Reply, suffix: str = "") -> Any:
        found = await self.get(f"/requests/{reply.headers['x-request-id']}{suffix}")
        assert found.status == 200, found
        return conforms(found.json, "RequestRecord")


@asynccontextmanager
async def recording(url: str, count: int = 1, **sections: Any) -> AsyncIterator[Records]:
    async with connected(url) as connection, rpc_harness(count, database={"url": url}, **sections) as harness:
        await harness.worker.app.pool.open()
        yield Records(harness, connection)


def with_records(count: int = 1, **sections: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Any]:
    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        def run(database: str, more: dict[str, str]) -> None:
            @on_uvloop
            async def main() -> None:
                async with recording(database, count, **sections) as records:
                    await test(records, more)

            main()

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return pytest.mark.parametrize("more", SERVED_BY)(run)

    return decorate


@with_records()
async def test_request_is_recorded_on_request(records: Records, more: dict[str, str]) -> None:
    reply = await records.harness.call(*BALANCE, X_Explain="1", **more)
    record = await records.of(reply)
    expected = {
        "method": "eth_getBalance", "network": LIVE, "status": 200, "recorded": "asked", "cache": "miss", "surface": "http",
        "units": int(reply.headers["x-compute-units"]), "block": records.harness.chain.head, "error": None, "params": None,
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    (attempt,) = record["attempts"]
    assert (attempt["upstream"], attempt["kind"], attempt["outcome"]) == ("upstream 1", "first", "answered")
    assert (await records.of(await records.harness.call(*BALANCE, X_Explain="1", **more)))["cache"] == "hit"


@with_records()
async def test_good_request_is_recorded_by_the_sample(records: Records, more: dict[str, str]) -> None:
    every = 100
    replies = [await records.harness.call("eth_gasPrice", [], **more) for _ in range(every)]
    found = (await records.get("/requests?method=eth_gasPrice")).json
    assert (found["total"], found["requests"][0]["recorded"]) == (1, "sampled")
    assert found["requests"][0]["id"] in {reply.headers["x-request-id"] for reply in replies}


@with_records(options=[{"cost": "alchemy", "credit_price": "0.40"}])
async def test_cost_at_providers_is_recorded(records: Records, more: dict[str, str]) -> None:
    worker = records.harness.worker
    main = worker.app.keyring.find(worker.keys["main"], 0.0)
    worker.add_key("dear", directives=USUAL | {"cost"}, beside=main)
    reply = await records.harness.call(*BALANCE, X_Explain="1", **more)
    batch = await records.harness.batch(("eth_gasPrice", []), ("eth_chainId", []), X_Explain="1", **more)
    for found in (reply, batch):
        assert (await records.of(found))["cost_usd"] is None, "the key may not see prices"
        path = f"/requests/{found.headers['x-request-id']}"
        assert (await records.get(path, key="dear")).json["cost_usd"] == "0.000008000"


@with_records(3, cache={"enabled": False, "coalesce": False})
async def test_retries_and_their_reasons_are_recorded(records: Records, more: dict[str, str]) -> None:
    for each in records.harness.upstreams:
        each.limited, each.limited_by, each.retry_after = 1, 500, None
    reply = await records.harness.call(*BALANCE, X_Retry="1", **more)
    assert reply.status == 500
    record = await records.of(reply)
    assert (record["recorded"], record["blame"], record["units"]) == ("failed", "upstream", 0)
    assert record["price"] == int((await records.harness.call(*BALANCE, **more)).headers["x-compute-units"])
    assert [(each["kind"], each["outcome"]) for each in record["attempts"]] == [
        ("first", "invalid reply, HTTP status 500"),
        ("retry", "invalid reply, HTTP status 500"),
    ]
    assert len({each["upstream"] for each in record["attempts"]}) == 2


@with_records(2, cache={"enabled": False, "coalesce": False})
async def test_hedge_is_recorded_beside_the_slow_attempt(records: Records, more: dict[str, str]) -> None:
    upstreams = records.harness.upstreams
    for each in upstreams:
        each.held.add("eth_getBalance")
    async with asyncio.TaskGroup() as group:
        call = group.create_task(records.harness.call(*BALANCE, X_Explain="1", **more))
        await until(lambda: all(each.count("eth_getBalance") == 1 for each in upstreams))
        upstreams[1].gate.set()
    attempts = (await records.of(call.result()))["attempts"]
    assert [each["kind"] for each in attempts] == ["first", "hedge"]
    assert {each["outcome"] for each in attempts} == {"answered", "given up: another upstream was faster"}
    upstreams[0].gate.set()


@with_records(3)
async def test_upstreams_that_verified_a_reply_are_recorded(records: Records, more: dict[str, str]) -> None:
    reply = await records.harness.call(*BALANCE, X_Verify="quorum 2/3", X_Explain="1", **more)
    record = await records.of(reply)
    assert (record["cache"], record["block"]) == ("quorum 2/3", records.harness.chain.head)
    assert {each["kind"] for each in record["attempts"]} == {"check"}
    assert len({each["upstream"] for each in record["attempts"]}) == 3
    operators = [f"eth_getBalance by operator-{index}, answered" for index in (1, 2, 3)]
    assert sorted(each["outcome"].removeprefix("for verification: ") for each in record["attempts"]) == operators


@with_records(3)
async def test_late_member_of_a_quorum_does_not_delay_the_reply(records: Records, more: dict[str, str]) -> None:
    late = records.harness.upstreams[2]
    late.held.add("eth_getBalance")
    reply = await records.harness.call(*BALANCE, X_Verify="quorum 2/3", X_Explain="1", **more)
    assert (reply.status, reply.headers["x-verified"]) == (200, "quorum 2/3")
    outcomes = [each["outcome"].rpartition(", ")[2] for each in (await records.of(reply))["attempts"]]
    assert sorted(outcomes) == ["answered", "answered", "not waited for"]
    late.gate.set()


@with_records()
async def test_every_failure_says_whose_fault_it_was(records: Records, more: dict[str, str]) -> None:
    harness = records.harness

    def revert(params: list[Any]) -> Any:
        raise Refused(3, "execution reverted", data="0x08c379a0")

    harness.upstreams[0].answers["eth_call"] = revert
    chain = await records.of(await harness.call("eth_call", [{"to": ADDRESS}, "latest"], **more))
    assert (chain["blame"], chain["status"], chain["attempts"][0]["outcome"][:6]) == ("chain", 200, "error:")
    assert "execution reverted" in chain["error"]
    client = await records.of(await harness.call(*BALANCE, X_Min_Block="99999999999", X_Min_Block_Wait="0", **more))
    assert (client["blame"], client["status"]) == ("upstream", 503)  # none has the block
    assert (client["block"], client["bytes"] > 0) == (None, True)
    unknown = await records.of(await harness.worker.send(b"{", **more))
    assert (unknown["blame"], unknown["status"]) == ("client", 400)
    failed = (await records.get("/requests?reason=failed&status=503")).json
    assert [each["id"] for each in failed["requests"]] == [client["id"]]


@with_records()
async def test_method_that_does_not_exist_has_the_price_that_was_charged(
    records: Records, more: dict[str, str]
) -> None:
    record = await records.of(await records.harness.call("eth_noSuchThing", [], **more))
    assert (record["called"], record["price"], record["units"]) == ("eth_noSuchThing", 1, 1)


@with_records(1, requests={"slow_ms": 30.0})
async def test_slow_request_is_recorded(records: Records, more: dict[str, str]) -> None:
    upstream = records.harness.upstreams[0]
    upstream.held.add("eth_getBalance")
    async with asyncio.TaskGroup() as group:
        call = group.create_task(records.harness.call(*BALANCE, **more))
        await until(lambda: upstream.count("eth_getBalance") == 1)
        await asyncio.sleep(0.1)
        upstream.gate.set()
    record = await records.of(call.result())
    assert record["recorded"] == "slow"
    assert record["ms"] > 30


@with_records()
async def test_items_of_a_batch_have_their_own_records(records: Records, more: dict[str, str]) -> None:
    def refuse(params: list[Any]) -> Any:
        raise Refused(-32000, "no")

    records.harness.upstreams[0].answers["eth_call"] = refuse
    calls: tuple[Any, ...] = (BALANCE, ("eth_call", [{"to": ADDRESS}, "latest"]), ("eth_chainId", []))
    reply = await records.harness.batch(*calls, **more)
    assert (await records.of(reply))["surface"] == "batch"
    item = await records.of(reply, ".1")
    assert (item["surface"], item["method"], item["recorded"]) == ("item", "eth_call", "failed")
    assert (await records.get(f"/requests/{reply.headers['x-request-id']}.0")).status == 404
    asked = await records.harness.batch(BALANCE, ("eth_gasPrice", []), X_Explain="1", **more)
    assert [(await records.of(asked, f".{index}"))["method"] for index in (0, 1)] == ["eth_getBalance", "eth_gasPrice"]


@with_records()
async def test_items_of_a_large_batch_have_their_own_records(records: Records, more: dict[str, str]) -> None:
    """Its reply is sent in parts, before all items are answered."""

    def answer(params: list[Any]) -> Any:
        if params[0]["to"] == "0x0":
            raise Refused(-32000, "no")
        return "0x" + "ab" * 400_000

    records.harness.upstreams[0].answers["eth_call"] = answer
    targets = ("0x1", "0x2", "0x0")
    reply = await records.harness.batch(*[("eth_call", [{"to": each}, "latest"]) for each in targets], **more)
    assert "error" in reply.json[2]
    batch = await records.of(reply)
    assert (batch["surface"], batch["method"], batch["recorded"]) == ("batch", "batch", "failed")
    item = await records.of(reply, ".2")
    assert (item["surface"], item["recorded"], item["blame"]) == ("item", "failed", "chain")


@with_records()
async def test_record_belongs_to_the_account(records: Records, more: dict[str, str]) -> None:
    records.harness.worker.add_key("other")
    reply = await records.harness.call(*BALANCE, X_Explain="1", X_Request_Id="mine-1", **more)
    assert reply.headers["x-request-id"] == "mine-1"
    path = "/requests/mine-1"
    assert (await records.get(path)).status == 200
    foreign, absent = (await records.get(path, key="other")), (await records.get("/requests/absent", key="other"))
    assert foreign.fault(404)["message"].replace("mine-1", "") == absent.fault(404)["message"].replace("absent", "")
    assert (await records.get("/requests?method=eth_getBalance", key="other")).json["total"] == 0


@with_records()
async def test_unknown_method_is_named_as_it_was_called(records: Records, more: dict[str, str]) -> None:
    harness = records.harness
    record = await records.of(await harness.call("eth_noSuchThing", [], **more))
    assert (record["method"], record["called"], record["code"]) == ("other", "eth_noSuchThing", "-32601")
    key = harness.worker.keys["main"]
    for name, called in (("x" * 128, "x" * 64), ('a"\\\n', "a???"), (key, "svc_…"), ("other", None)):
        record = await records.of(await harness.call(name, [], **more))
        assert (record["method"], record["called"]) == ("other", called)
    reply = await harness.batch(("eth_chainId", []), ("eth_nope", []), **more)
    assert (await records.of(reply, ".1"))["called"] == "eth_nope"
    assert (await records.of(reply))["called"] is None
    assert (await records.of(await harness.call(*BALANCE, X_Explain="1", **more)))["called"] is None


@with_records()
async def test_each_record_of_a_reused_id_is_found(records: Records, more: dict[str, str]) -> None:
    harness = records.harness
    for method, params in (BALANCE, ("eth_gasPrice", []), ("eth_chainId", [])):
        reply = await harness.call(method, params, X_Explain="1", X_Request_Id="mine", **more)
        assert reply.headers["x-request-id"] == "mine"
    newest = conforms((await records.get("/requests/mine")).json, "RequestRecord")
    assert (newest["method"], newest["client_id"], newest["others"]) == ("eth_chainId", "mine", 2)
    listed = (await records.get("/requests?client_id=mine")).json
    assert listed["total"] == 3
    assert [each["method"] for each in listed["requests"]] == ["eth_chainId", "eth_gasPrice", "eth_getBalance"]
    # Each has an id of ours, which leads to no other.
    for each in listed["requests"]:
        assert each["id"].startswith("req_")
        found = (await records.get(f"/requests/{each['id']}")).json
        assert (found["method"], found["others"]) == (each["method"], 2)
    plain = await records.of(await harness.call(*BALANCE, X_Explain="1", **more))
    assert (plain["client_id"], plain["others"]) == (None, 0)


@with_records()
async def test_client_cannot_choose_an_id_of_ours_or_of_an_event(records: Records, more: dict[str, str]) -> None:
    harness = records.harness
    harness.worker.add_key("other")
    given = (await harness.call(*BALANCE, X_Explain="1", **more)).headers["x-request-id"]
    for chosen in (given, "req_", "evt_0123456789abcdef"):
        reply = await harness.call("eth_gasPrice", [], key="other", X_Explain="1", X_Request_Id=chosen, **more)
        assert reply.headers["x-request-id"] != chosen
        assert (await records.get(f"/requests/{reply.headers['x-request-id']}", key="other")).status == 200
    assert (await records.get(f"/requests/{given}")).json["method"] == "eth_getBalance"
    (await records.get(f"/requests/{given}", key="other")).fault(404)


@with_records()
async def test_operator_names_the_account_of_an_id_that_several_clients_chose(
    records: Records, more: dict[str, str]
) -> None:
    harness, log = records.harness, records.harness.worker.app.requests
    other = harness.worker.add_key("other")
    for key, method in (("main", "eth_chainId"), ("other", "eth_gasPrice")):
        await harness.call(method, [], key=key, X_Explain="1", X_Request_Id="both", **more)
    await log.flush()
    with pytest.raises(InvalidRequest, match="account"):
        await log.read("both", RecordReader())
    assert (await log.read("both", RecordReader(account=other.account.id))).method == "eth_gasPrice"


@with_records()
async def test_items_of_a_batch_are_found_by_both_ids(records: Records, more: dict[str, str]) -> None:
    await records.harness.batch(BALANCE, ("eth_gasPrice", []), X_Explain="1", X_Request_Id="batched", **more)
    whole = (await records.get("/requests/batched")).json
    item = (await records.get("/requests/batched.0")).json
    assert (whole["surface"], item["surface"], item["client_id"]) == ("batch", "item", "batched.0")
    assert item["id"] == f"{whole['id']}.0"
    assert (await records.get(f"/requests/{item['id']}")).json["client_id"] == "batched.0"


@with_records()
async def test_key_without_the_scope_sees_only_its_own_requests(records: Records, more: dict[str, str]) -> None:
    worker = records.harness.worker
    whole = worker.add_key("whole")
    worker.add_key("narrow", scopes=["rpc:read"], beside=whole)
    foreign, own = [
        (await records.harness.call(*BALANCE, key=name, X_Explain="1", **more)).headers["x-request-id"]
        for name in ("whole", "narrow")
    ]
    assert (await records.get(f"/requests/{own}", key="narrow")).status == 200
    hidden, absent = [await records.get(f"/requests/{each}", key="narrow") for each in (foreign, "absent")]
    assert hidden.fault(404)["message"].replace(foreign, "") == absent.fault(404)["message"].replace("absent", "")
    for path in ("/requests", "/errors"):
        refused = (await records.get(path, key="narrow")).fault(403)
        assert refused["message"].startswith("this API key lacks the scope requests:read: ")
        assert (await records.get(path, key="whole")).status == 200
    for each in (foreign, own):
        assert (await records.get(f"/requests/{each}", key="whole")).status == 200


@with_records()
async def test_key_limited_to_networks_sees_no_records_of_others(records: Records, more: dict[str, str]) -> None:
    worker = records.harness.worker
    whole = worker.add_key("whole")
    worker.add_key("here", uses=AllowedUses(networks=frozenset({LIVE})), beside=whole)
    worker.add_key("elsewhere", uses=AllowedUses(networks=frozenset({"base/mainnet"})), beside=whole)
    await records.harness.call(*BALANCE, key="whole", X_Explain="1", X_Request_Id="chosen", **more)
    failed = (await records.harness.call("eth_nope", [], key="whole", **more)).headers["x-request-id"]
    for key, count in (("whole", 2), ("here", 2), ("elsewhere", 0)):
        listed = (await records.get("/requests?choices=true", key=key)).json
        assert (listed["total"], len(listed["requests"])) == (count, count)
        assert bool(listed["choices"]["network"]) is bool(count)
        assert len((await records.get("/errors", key=key)).json["errors"]) == bool(count)
        for each in (failed, "chosen"):
            assert (await records.get(f"/requests/{each}", key=key)).status == (200 if count else 404)
    # A key sees its own requests, also those that its limit refused.
    own = await records.harness.call(*BALANCE, key="elsewhere", **more)
    assert own.status == 403
    assert (await records.get(f"/requests/{own.headers['x-request-id']}", key="elsewhere")).status == 200
    assert (await records.get("/requests?status=403", key="elsewhere")).json["total"] == 1


@with_records()
async def test_params_are_recorded_only_if_the_account_wants_that(records: Records, more: dict[str, str]) -> None:
    harness = records.harness
    secret = harness.worker.keys["main"]
    params = [{"to": ADDRESS, "data": f"0x{secret}"}, "latest"]
    assert (await records.of(await harness.call("eth_call", params, X_Explain="1", **more)))["params"] is None
    harness.worker.add_key("open", records_params=True)
    for cache in ("miss", "hit"):
        reply = await harness.call("eth_call", [*params[:1], "latest"], key="open", X_Explain="1", **more)
        found = await records.get(f"/requests/{reply.headers['x-request-id']}", key="open")
        assert found.json["cache"] in (cache, "hit")
        assert ADDRESS in found.json["params"]
        assert secret not in found.body.decode()


@with_records()
async def test_records_beyond_the_bound_are_dropped(records: Records, more: dict[str, str]) -> None:
    recorder = records.harness.worker.app.recorder
    records.harness.worker.add_key("other")
    # More than the account is allowed again while the test runs.
    recorder._of_account["acc_1"] = MOST_OF_ACCOUNT + 1000 * MORE_PER_S
    await records.harness.worker.app.requests.flush()
    counted = _dropped()
    dropped = await records.harness.call(*BALANCE, X_Explain="1", **more)
    kept = await records.harness.call(*BALANCE, key="other", X_Explain="1", **more)
    assert len(recorder.waiting) == 1
    assert (await records.get(f"/requests/{dropped.headers['x-request-id']}")).status == 404
    assert (await records.get(f"/requests/{kept.headers['x-request-id']}", key="other")).status == 200
    assert _dropped() > counted
    used = recorder._of_account["acc_1"]
    recorder.allow_more(recorder._since + 2.01)
    assert used - recorder._of_account["acc_1"] == 2 * MORE_PER_S
    recorder.allow_more(recorder._since + 10_000.0)
    again = await records.harness.call(*BALANCE, X_Explain="1", **more)
    assert (await records.get(f"/requests/{again.headers['x-request-id']}")).status == 200


@with_records()
async def test_bad_characters_of_one_account_leave_the_records_of_others_alone(
    records: Records, more: dict[str, str]
) -> None:
    harness = records.harness
    harness.worker.add_key("other")
    async with await harness.worker.connect() as client:
        body = orjson.dumps({"chain": "ethereum", "owner": ADDRESS, "bad\0name": 1})
        bad = await client.send(request("POST", "/v1/wallets/create", body, key=harness.worker.keys["main"]))
    assert bad.status == 400
    failed = await harness.call(f"eth_{chr(0)}", [], **more)
    harness.worker.app.recorder.waiting[-1].error += "\0\ud800"
    good = await harness.call(*BALANCE, key="other", X_Explain="1", **more)
    assert (await records.get(f"/requests/{good.headers['x-request-id']}", key="other")).status == 200
    assert (await records.of(bad))["blame"] == "client"
    assert (await records.of(failed))["error"].endswith("\N{REPLACEMENT CHARACTER}" * 2)


@with_records()
async def test_record_that_cannot_be_stored_is_set_aside(records: Records, more: dict[str, str]) -> None:
    recorder = records.harness.worker.app.recorder
    replies = [await records.harness.call(*BALANCE, X_Explain="1", **more) for _ in range(5)]
    counted = _set_aside("request_record")
    # No column has room for these.
    recorder.waiting[1].block, recorder.waiting[3].units = 2**63, 2**31
    statuses = [(await records.get(f"/requests/{each.headers['x-request-id']}")).status for each in replies]
    assert statuses == [200, 404, 200, 404, 200]
    assert not recorder.waiting
    assert _set_aside("request_record") - counted == 2


@with_records()
async def test_bytes_of_an_account_are_bounded(records: Records, more: dict[str, str]) -> None:
    harness, recorder = records.harness, records.harness.worker.app.recorder
    key = harness.worker.add_key("open", records_params=True)
    params = [{"to": ADDRESS, "data": "0x" + "ab" * 4000}, "latest"]
    calls = 2 * BYTES_AT_ONCE // MOST_PARAMS
    for number in range(calls):
        note(recorder, key, f"req_{number}", params)
    # Params are left out first, then whole records.
    kept = [each for each in recorder.waiting if each.account == key.account.id]
    with_params = [each for each in kept if each.params]
    assert 0 < len(with_params) < len(kept) <= MOST_OF_ACCOUNT
    assert sum(len(each.params or "") for each in kept) <= BYTES_AT_ONCE
    # Another account has its own.
    await harness.call(*BALANCE, X_Explain="1", **more)
    assert recorder.waiting[-1].account != key.account.id
    # They come back with time, but not beyond those of a day.
    recorder.forget(len(recorder.waiting))
    written = 0
    for second in range(1, 100_000, 100):
        recorder.allow_more(recorder._since + 100.0, day=0)
        for _ in range(100):
            note(recorder, key, f"req_{second}", params)
        written += sum(len(each.params or "") for each in recorder.waiting)
        recorder.forget(len(recorder.waiting))
    assert BYTES_PER_DAY / 2 < written <= BYTES_PER_DAY
    recorder.allow_more(recorder._since + 100.0, day=1)
    note(recorder, key, "req_next_day", params)
    assert recorder.waiting[-1].params


def note(recorder: RequestRecorder, key: Key, request_id: str, params: Any) -> None:
    recorder.record(
        FinishedCall(
            request_id=request_id,
            key=key,
            network=LIVE,
            took_s=0.1,
            method="eth_call",
            error="reverted",
            params=orjson.dumps(params),
        )
    )


def _set_aside(kind: str) -> float:
    return REGISTRY.get_sample_value("penstock_rows_set_aside_total", {"kind": kind}) or 0.0


def _dropped() -> float:
    return REGISTRY.get_sample_value("penstock_request_records_dropped_total") or 0.0


def test_messages_of_a_socket_have_their_own_records(database: str) -> None:
    @on_uvloop
    async def main() -> None:
        async with recording(database) as records:
            async with bare(records.harness.worker, X_Explain="1", X_Request_Id="socket-1") as socket:
                for call in (BALANCE, ("eth_nothing", [])):
                    socket.write(rpc(*call))
                    await socket.json()
                batch = [
                    {"jsonrpc": "2.0", "id": n, "method": m, "params": p} for n, (m, p) in enumerate([BALANCE] * 2)
                ]
                for message in (b"{", orjson.dumps(batch), b"[]"):
                    socket.write(message)
                    await socket.json()
            first, second, third, _, item, last = [
                (await records.get(f"/requests/socket-1.{number}")).json for number in (1, 2, 3, 4, "4.1", 5)
            ]
            assert (first["surface"], first["method"], first["recorded"]) == ("socket", "eth_getBalance", "asked")
            assert (second["recorded"], second["blame"]) == ("failed", "chain")
            assert (item["surface"], item["method"], item["recorded"]) == ("item", "eth_getBalance", "asked")
            for malformed in (third, last):
                assert (malformed["surface"], malformed["status"], malformed["blame"]) == ("socket", 400, "client")

    main()


def test_replies_on_a_socket_have_their_details_on_request(database: str) -> None:
    @on_uvloop
    async def main() -> None:
        async with recording(database, 3) as records:
            head = records.harness.chain.head
            async with bare(records.harness.worker, X_Meta="1", X_Explain="1", X_Request_Id="socket-2") as socket:
                metas = []
                for message in (rpc(*BALANCE), rpc(*BALANCE), rpc("eth_nothing", []), b"{"):
                    socket.write(message)
                    metas.append((await socket.json())["meta"])
                batch = [
                    {"jsonrpc": "2.0", "id": n, "method": m, "params": p} for n, (m, p) in enumerate([BALANCE] * 2)
                ]
                socket.write(orjson.dumps(batch))
                items = await socket.json()
            assert [each["request_id"] for each in metas] == [f"socket-2.{number}" for number in (1, 2, 3, 4)]
            assert [(each["block"], each["cache"], each["units"] > 0) for each in metas[:2]] == [
                (head, "miss", True),
                (head, "hit", True),
            ]
            assert [(each["id"], each["meta"]["request_id"], each["meta"]["block"]) for each in items] == [
                (0, "socket-2.5.0", head),
                (1, "socket-2.5.1", head),
            ]
            found = (await records.get("/requests/socket-2.5.1")).json
            assert (found["client_id"], found["block"]) == ("socket-2.5.1", head)
            single = (await records.get("/requests/socket-2.2")).json
            assert (single["block"], single["cache"], single["bytes"] > 0) == (head, "hit", True)
            async with bare(records.harness.worker, X_Meta="1", X_Verify="quorum 2/3") as socket:
                socket.write(rpc(*BALANCE))
                assert (await socket.json())["meta"]["verified"] == "quorum 2/3"
            async with bare(records.harness.worker, X_Meta="0") as socket:
                socket.write(rpc(*BALANCE))
                assert set(await socket.json()) == {"jsonrpc", "id", "result"}

    main()


def test_old_days_are_dropped(database: str) -> None:
    @on_uvloop
    async def main() -> None:
        async with recording(database) as records:
            await records.database.execute("select open_request_day('2020-01-01'), open_request_day('2020-01-01')")
            reply = await records.harness.call(*BALANCE, X_Explain="1")
            requests = records.harness.worker.app.requests
            await requests.flush()
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(requests.keep())

                async def is_dropped() -> bool:
                    return await records.database.fetchval("select to_regclass('requests_20200101') is null") is True

                await until(is_dropped)
                keeping.cancel()
            assert (await records.of(reply))["recorded"] == "asked"

    main()


def test_kind_of_an_attempt_follows_from_its_times() -> None:
    attempts = [("a", 0.0, 1.0, ""), ("b", 0.4, 0.1, ""), ("c", 1.5, 0.1, "")]
    assert [kind_of(index, attempts) for index in range(3)] == ["first", "hedge", "retry"]


def test_text_that_looks_like_a_key_is_not_shown() -> None:
    assert shown_text("a svc_live_" + "x" * 36 + " b", 100) == "a svc_… b"


def test_webhook_delivery_is_explained_by_its_event(database: str) -> None:
    @on_uvloop
    async def main() -> None:
        async with recording(database) as records:
            await records.database.execute("""
                insert into accounts (id, name, email, plan) values ('acc_1', 'a', 'a@example.com', 'free');
                insert into webhooks (
                    number, id, account_id, network, live, url, event_type, config, secret, version, addresses_version
                ) values (1, 'wh_1', 'acc_1', 'ethereum/mainnet', true, 'https://a.example.com', 'NEW_BLOCK', '{}', '', 1, 1);
                insert into deliveries (event_id, webhook_id, state) values ('evt_1', 'wh_1', 'failed');
                insert into attempts (event_id, number, began_at, took_ms, outcome, status)
                values ('evt_1', 1, now(), 20, 'status', 500), ('evt_1', 2, now() + interval '1 s', 30, 'timeout', null);
            """)
            found = (await records.get("/requests/evt_1")).json
            assert (found["surface"], found["method"], found["recorded"]) == ("webhook", "NEW_BLOCK", "failed")
            assert [each["outcome"] for each in found["attempts"]] == ["status, HTTP status 500", "timeout"]
            records.harness.worker.add_key("other")
            assert (await records.get("/requests/evt_1", key="other")).status == 404
            main = records.harness.worker.app.keyring.find(records.harness.worker.keys["main"], 0.0)
            for network, status in (("ethereum/mainnet", 200), ("base/mainnet", 404)):
                uses = AllowedUses(networks=frozenset({network}))
                records.harness.worker.add_key(network, uses=uses, beside=main)
                assert (await records.get("/requests/evt_1", key=network)).status == status

    main()


@with_records()
async def test_errors_are_counted_by_status_code_method_and_key(records: Records, more: dict[str, str]) -> None:
    harness = records.harness

    def revert(params: list[Any]) -> Any:
        raise Refused(3, "execution reverted", data="0x08c379a0")

    harness.upstreams[0].answers["eth_call"] = revert
    for _ in range(2):
        await harness.call("eth_call", [{"to": ADDRESS}, "latest"], **more)
    await harness.call(*BALANCE, X_Min_Block="99999999999", X_Min_Block_Wait="0", **more)
    found = conforms((await records.get("/errors")).json, "ErrorGroupList")["errors"]
    shown = [(each["status"], each["code"], each["method"], each["count"]) for each in found]
    assert shown == [(200, "3", "eth_call", 2), (503, "internal_error", "eth_getBalance", 1)]
    assert "execution reverted" in found[0]["example"]
    listed = (await records.get(f"/requests?code=3&status=200&method=eth_call&key={found[0]['key_id']}")).json
    assert listed["total"] == 2
    assert (await records.get("/requests?code=3&until=2020-01-01T00:00:00Z")).json["total"] == 0
    assert (await records.get("/errors?since=2100-01-01T00:00:00Z")).json["errors"] == []
    assert (await records.get("/errors?since=yesterday")).status == 400
