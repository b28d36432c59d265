"""The delivery API for webhook owners: test events, delivery history and redelivery. And `webhooks listen`."""

from __future__ import annotations

import asyncio
import datetime
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.chains.evm.watch_index import KINDS
from proxy.commands.webhooks import fault_of
from proxy.core import signatures
from proxy.dev.triggers import EVENT_TYPES
from tests.delivery.harness import Inbox, inbox
from tests.dev.onchain import rpc
from tests.flows.test_webhook_events import CHECKED
from tests.service import ROOT, Service, command_here, finished, until
from tests.shapes import conforms

ADDRESS = "0x" + "ab" * 20
WATCHED = "0x" + "7e" * 20
# A minimal config for each kind.
CONFIGS: dict[str, dict[str, Any]] = {
    "activity": {"addresses": [ADDRESS]},
    "token": {"addresses": [ADDRESS]},
    "nft": {"contracts": [ADDRESS]},
    "mined": {"tx_hashes": ["0x" + "cd" * 32]},
    "log": {"addresses": [ADDRESS]},
    "internal": {"addresses": [ADDRESS]},
    "block": {},
    "pending": {"addresses": [ADDRESS]},
}


@pytest.fixture
async def box() -> AsyncIterator[Inbox]:
    async with inbox() as found:
        yield found


@asynccontextmanager
async def hooked(service: Service, url: str, event_type: str = "token_transfer") -> AsyncIterator[dict[str, Any]]:
    """A webhook that is deleted at the end."""
    body = {"url": url, "chain": "dev", "event_type": event_type, "config": CONFIGS[KINDS[event_type]]}
    status, made = await service.send("POST", "/webhooks", body)
    assert status == 201, made
    yield made
    assert (await service.send("DELETE", f"/webhooks/{made['id']}"))[0] == 200


async def deliveries(service: Service, made: dict[str, Any], query: str = "") -> dict[str, Any]:
    status, reply = await service.send("GET", f"/webhooks/{made['id']}/deliveries{query}")
    assert status == 200, reply
    return dict(reply)


def ended(service: Service, made: dict[str, Any], count: int = 1) -> Callable[[], Any]:
    """Whether this many deliveries have finished."""

    async def is_finished() -> bool:
        reply = await deliveries(service, made)
        return sum(each["status"] in ("delivered", "failed") for each in reply["deliveries"]) == count

    return is_finished


async def test_test_event_arrives_marked_and_signed_and_is_listed(service: Service, box: Inbox) -> None:
    async with hooked(service, box.url("/a")) as made:
        status, sent = await service.send("POST", f"/webhooks/{made['id']}/test", {})
        assert (status, sent["webhook_id"], sent["event_type"]) == (202, made["id"], "token_transfer")
        await until(ended(service, made))
        (post,) = box.at("/a")
        assert (
            fault_of(made["signing_secret"], post.headers, post.body, now=int(post.headers["webhook-timestamp"]))
            is None
        )
        body = orjson.loads(post.body)
        assert (body["id"], body["test"], body["webhook_id"]) == (sent["event_id"], True, made["id"])
        assert body["event_type"] == "token_transfer"
        (seen,) = (await deliveries(service, made))["deliveries"]
        assert (seen["event_id"], seen["status"], seen["test"]) == (sent["event_id"], "delivered", True)
        (attempt,) = seen["attempts"]
        assert (attempt["number"], attempt["outcome"], attempt["status_code"]) == (1, "answered", 200)
        assert seen["next_attempt_at"] is None
        assert seen["finished_at"] is not None


@pytest.mark.parametrize("own", ["token_transfer", "NEW_BLOCK"])
async def test_every_type_can_be_tested_and_has_its_own_format(service: Service, box: Inbox, own: str) -> None:
    async with hooked(service, box.url("/all"), own) as made:
        for name in KINDS:
            status, reply = await service.send("POST", f"/webhooks/{made['id']}/test", {"event_type": name})
            assert status == 202, reply
        await until(ended(service, made, len(KINDS)))
        now = time.time()
        assert {fault_of(made["signing_secret"], post.headers, post.body, now=now) for post in box.at("/all")} == {None}
    received = {post.event_id: (post.headers, orjson.loads(post.body)) for post in box.at("/all")}
    assert {body.get("event_type") or body["type"] for _, body in received.values()} == {*KINDS}
    for headers, body in received.values():
        assert ("event_type" in body) == ("X-Service-Signature" in headers) != ("X-Platform-Signature" in headers)
        assert headers.get("X-Webhook-Event") == body.get("type")
        assert body["test"] is True
        conforms(body, CHECKED[body.get("event_type") or body["type"]])


async def test_failed_test_includes_an_excerpt_of_the_reply(service: Service, box: Inbox) -> None:
    box.answer("/no", 503)
    async with hooked(service, box.url("/no")) as made:
        await service.send("POST", f"/webhooks/{made['id']}/test", {})
        await until(ended(service, made))
        (seen,) = (await deliveries(service, made))["deliveries"]
        (attempt,) = seen["attempts"]
        assert (seen["status"], attempt["status_code"], attempt["response_excerpt"]) == ("failed", 503, "excerpt")


async def test_attempt_without_a_connection_has_no_headers(service: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
    async with hooked(service, url) as made:
        event = (await service.send("POST", f"/webhooks/{made['id']}/test", {}))[1]["event_id"]
        await until(ended(service, made))
        status, seen = await service.send("GET", f"/webhooks/{made['id']}/deliveries/{event}")
        assert status == 200, seen
        conforms(seen, "DeliveryDetail")
        (attempt,) = seen["attempts"]
        names = ("request_headers", "response_headers", "response_body")
        assert [attempt[name] for name in names] == [None, None, None]


async def test_deliveries_are_redelivered_one_by_one_and_since_a_time(service: Service, box: Inbox) -> None:
    async with hooked(service, box.url("/r"), "NEW_BLOCK") as made:
        path = f"/webhooks/{made['id']}"
        before = datetime.datetime.now(datetime.UTC).isoformat()
        names = [(await service.send("POST", f"{path}/test", {}))[1]["event_id"] for _ in range(3)]
        await until(ended(service, made, 3))
        status, reply = await service.send("POST", f"{path}/deliveries/{names[0]}/redeliver")
        assert (status, reply) == (202, {"webhook_id": made["id"], "event_id": names[0], "status": "pending"})
        await until(lambda: len(box.at("/r")) == 4)
        await until(ended(service, made, 3))
        assert {*[post.body for post in box.at("/r") if post.event_id == names[0]]} == {box.at("/r")[3].body}
        assert await service.send("POST", f"{path}/redeliver", {"since": before}) == (
            202,
            {"webhook_id": made["id"], "redelivering": 3},
        )
        await until(lambda: len(box.at("/r")) == 7)
        await until(ended(service, made, 3))
        for body in ({"since": before, "status": "failed"}, {"since": "2100-01-01T00:00:00+14:00"}):
            assert (await service.send("POST", f"{path}/redeliver", body))[1]["redelivering"] == 0
        seen = {each["event_id"]: each for each in (await deliveries(service, made))["deliveries"]}
        attempts = seen[names[0]]["attempts"]
        assert [(attempt["number"], attempt["status_code"]) for attempt in attempts] == [(1, 200), (2, 200), (3, 200)]


async def test_list_has_filters_and_pages(service: Service, box: Inbox) -> None:
    box.answer("/f", 200, 500, 200)
    async with hooked(service, box.url("/f"), "NEW_BLOCK") as made:
        for count in range(1, 4):
            await service.send("POST", f"/webhooks/{made['id']}/test", {})
            await until(ended(service, made, count))
        whole = await deliveries(service, made)
        assert whole["total"] == 3
        times = [each["created_at"] for each in whole["deliveries"]]
        assert times == sorted(times, reverse=True)
        assert [each["status"] for each in whole["deliveries"]] == ["delivered", "failed", "delivered"]
        failed = await deliveries(service, made, "?status=failed")
        assert (failed["total"], failed["deliveries"]) == (1, [whole["deliveries"][1]])
        second = await deliveries(service, made, "?limit=1&page=2")
        assert (second["total"], second["page"], second["deliveries"]) == (3, 2, [whole["deliveries"][1]])
        # Times are shown in milliseconds and stored more precisely: a delivery is not older than its own time.
        late = await deliveries(service, made, f"?since={whole['deliveries'][0]['created_at']}")
        assert late["deliveries"][0] == whole["deliveries"][0]
        assert (await deliveries(service, made, "?since=2100-01-01T00:00:00Z"))["total"] == 0


@pytest.mark.parametrize(
    ("method", "rest", "body", "named"),
    [
        ("GET", "/deliveries?status=due", None, "status"),
        ("GET", "/deliveries?since=yesterday", None, "since"),
        ("GET", "/deliveries?since=0001-01-01T00:00:00%2B14:00", None, "since"),
        ("GET", "/deliveries?since=2026-01-15T09:30:60Z", None, "since"),
        ("GET", "/deliveries?limit=101", None, "limit"),
        ("POST", "/redeliver", {}, "since"),
        ("POST", "/redeliver", {"since": "2026-01-15"}, "since"),
        ("POST", "/redeliver", {"since": "2026-01-15T09:30:00Z", "status": "x"}, "status"),
        ("POST", "/test", {"event_type": "nothing"}, "event_type"),
        ("POST", "/test", {"eventType": "log"}, "eventType"),
    ],
)  # fmt: skip
async def test_invalid_parameter_is_named(
    service: Service, box: Inbox, method: str, rest: str, body: Any, named: str
) -> None:
    async with hooked(service, box.url()) as made:
        status, reply = await service.send(method, f"/webhooks/{made['id']}{rest}", body)
        assert (status, reply["error"]["code"]) == (400, "invalid_request"), reply
        assert named in reply["error"]["message"]


async def test_webhook_of_another_account_is_not_found(service: Service, box: Inbox) -> None:
    async with hooked(service, box.url()) as made:
        (event,) = [(await service.send("POST", f"/webhooks/{made['id']}/test", {}))[1]["event_id"]]
        absent = await service.send("GET", "/webhooks/wh_nothing/deliveries")
        assert absent[0] == 404
        since = {"since": "2026-01-15T09:30:00Z"}
        for method, rest, body in (
            ("GET", "/deliveries", None),
            ("POST", f"/deliveries/{event}/redeliver", None),
            ("POST", "/redeliver", since),
            ("POST", "/test", {}),
        ):
            assert (await service.send(method, f"/webhooks/{made['id']}{rest}", body, key="growth"))[0] == 404
        assert (await service.send("POST", f"/webhooks/{made['id']}/deliveries/evt_{'0' * 32}/redeliver"))[0] == 404
        await until(ended(service, made))


async def test_paused_webhook_accepts_no_test_and_parks_a_redelivery_until_it_is_resumed(
    service: Service, box: Inbox
) -> None:
    async with hooked(service, box.url("/p")) as made:
        path = f"/webhooks/{made['id']}"
        event = (await service.send("POST", f"{path}/test", {}))[1]["event_id"]
        await until(ended(service, made))
        await service.send("PATCH", path, {"status": "paused"})
        assert (await service.send("POST", f"{path}/test", {}))[0] == 400
        status, reply = await service.send("POST", f"{path}/deliveries/{event}/redeliver")
        assert (status, reply["status"]) == (202, "parked")
        (seen,) = (await deliveries(service, made, "?status=parked"))["deliveries"]
        assert seen["event_id"] == event
        assert (await service.send("POST", f"{path}/resume"))[0] == 200
        await until(lambda: len(box.at("/p")) == 2)
        await until(ended(service, made))


# webhooks listen


@asynccontextmanager
async def listening(
    service: Service, *words: str, ends_with: tuple[signal.Signals, int] = (signal.SIGINT, 130)
) -> AsyncIterator[list[str]]:
    """Run the command and yield the lines it prints. `ends_with`: the signal that ends it, and its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "proxy", "webhooks", "listen", "--data", str(service.data), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    output: list[str] = []
    assert process.stdout is not None
    lines = process.stdout
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(lambda: output.extend(line.decode().rstrip() for line in lines)))
        try:
            await until(lambda: output)
            yield output
        finally:
            process.send_signal(ends_with[0])
    code, _ = await finished(process)
    assert code == ends_with[1], output


async def test_listen_creates_a_webhook_prints_and_forwards_deliveries_and_deletes_it(
    service: Service, box: Inbox
) -> None:
    box.answer("/mine", 202)
    words = ("--api", service.base, "--forward", box.url("/mine"), "--event-type", "NEW_BLOCK")
    async with listening(service, *words) as output:
        name = output[0].split()[0]
        assert "NEW_BLOCK on dev" in output[0]
        sent = (await service.send("POST", f"/webhooks/{name}/test", {}))[1]["event_id"]
        expected = f"verified  NEW_BLOCK  TEST  {sent}  attempt 1  forwarded: 202"
        await until(lambda: expected in output)
        await until(lambda: output[-1] == "}")
        forwarded = next(post for post in box.at("/mine") if post.event_id == sent)
        assert orjson.loads(forwarded.body)["id"] == sent
        assert "X-Platform-Signature" in forwarded.headers
        # A request without a valid signature is refused.
        async with service.session.post(output[0].split(" to ")[1].split(";")[0], data=b"{}") as response:
            assert response.status == 400
        await until(lambda: any(line.startswith("refused: ") for line in output))
    assert (await service.send("GET", f"/webhooks/{name}"))[0] == 404


async def test_triggered_event_reaches_the_listener_whose_webhook_sigterm_deletes(service: Service) -> None:
    words = ("--api", service.base, "--event-type", "TOKEN_TRANSFER")
    async with listening(service, *words, ends_with=(signal.SIGTERM, 0)) as output:
        name = output[0].split()[0]
        await until(lambda: any("webhooks trigger TOKEN_TRANSFER` sends one" in line for line in output))
        done = await service.cli("webhooks", "trigger", "TOKEN_TRANSFER")
        assert done.returncode == 0, done.stderr
        await until(lambda: any(line.startswith("verified  TOKEN_TRANSFER") for line in output))
    assert (await service.send("GET", f"/webhooks/{name}"))[0] == 404


@pytest.mark.parametrize("event_type", EVENT_TYPES)
async def test_every_event_type_can_be_triggered(service: Service, event_type: str) -> None:
    done = await service.cli("webhooks", "trigger", event_type)
    assert (done.returncode, done.stderr) == (0, "")
    sent = done.stdout.split()[1].rstrip(":")
    receipt = await rpc(service.ready["upstream_url"], service, "eth_getTransactionReceipt", sent)
    assert receipt["status"] == "0x1"


async def test_trigger_needs_the_development_chain(tmp_path: Path) -> None:
    done = await asyncio.to_thread(command_here, "webhooks", "trigger", "log", "--data", str(tmp_path))
    assert (done.returncode, done.stderr.startswith("penstock: no development chain: start one")) == (2, True)


async def test_trigger_says_what_an_address_is(service: Service) -> None:
    done = await service.cli("webhooks", "trigger", "log", "--to", "0x12")
    assert (done.returncode, "'0x12' is not an address: use 0x and 40 hex digits" in done.stderr) == (2, True)


async def test_listen_with_a_secret_only_receives(service: Service) -> None:
    secret = signatures.secret_of(b"s" * 32)
    async with listening(service, "--secret", secret) as output:
        url = output[0].removeprefix("listening on ")
        body = b'{"id":"evt_1","event_type":"log","data":{}}'
        stamp = int(datetime.datetime.now().timestamp())
        for signed, status in ((secret, 200), (signatures.secret_of(b"x" * 32), 400)):
            headers = signatures.headers(
                event_type="log", event_id="evt_1", secrets=[signed], timestamp=stamp, body=body
            )
            async with service.session.post(url, data=body, headers=headers) as response:
                assert response.status == status


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--secret", "hunter2"), "--secret: must be whsec_"),
        (("--forward", "ftp://x"), "--forward ftp://x: must be an http"),
        (("--filter", "[]"), "must be a JSON object"),
        (("--api", "http://127.0.0.1:1/v1"), "does not reply"),
        (("--event-type", "nothing"), "the service returned an error: event_type"),
    ],
)  # fmt: skip
async def test_listen_names_the_invalid_argument(service: Service, words: tuple[str, ...], named: str) -> None:
    api = () if "--api" in words else ("--api", service.base)
    done = await service.cli("webhooks", "listen", *api, *words)
    assert done.returncode in (1, 2)
    assert named in done.stderr
