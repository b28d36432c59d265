"""Calls of clients are captured to a file, and sent again elsewhere at the pace at which they arrived."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import orjson
import pytest
from aiohttp import web

from proxy.__main__ import main
from proxy.commands import capture
from proxy.commands.capture_file import VERSION, CapturedCall, read_capture, write_capture
from proxy.errors import StartError
from proxy.store.postgres.captures import CapturedRow
from tests.service import Service, command_here
from tests.shipped_tables import TABLES

HOLDER = "0x" + 40 * "4"


async def recording_key(service: Service) -> tuple[str, str]:
    """The id of a new account that records params, and its key."""
    account = (await service.new_account("enterprise"))["id"]
    scopes = [word for each in ("rpc:read", "rpc:write", "account:manage") for word in ("--scope", each)]
    key = (await service.new_key(account, "--mode", "live", *scopes))["key"]
    status, _ = await service.send("PATCH", "/account", {"record_params": True}, key=key)
    assert status == 200
    return account, key


async def test_capture_has_reads_with_params_and_times_and_nothing_of_the_client(
    service: Service, tmp_path: Path
) -> None:
    account, key = await recording_key(service)
    silent = await service.new_key((await service.new_account("enterprise"))["id"], "--mode", "live")
    file = tmp_path / "calls.jsonl"
    async with asyncio.TaskGroup() as tasks:
        words = ("capture", str(file), "--account", account, "--seconds", "4")
        capturing = tasks.create_task(service.cli(*words))
        await _call_for_a_while(service, key, silent["key"])
    done = capturing.result()
    assert done.returncode == 0, done.stderr
    calls = read_capture(file)
    counts = {name: sum(call.method == name for call in calls) for name in ("eth_chainId", "eth_getBalance")}
    # The capture may begin or end between the two calls of a pair.
    assert abs(counts["eth_chainId"] - counts["eth_getBalance"]) <= 1
    assert counts["eth_chainId"] > 10
    assert {call.method for call in calls} == {"eth_chainId", "eth_getBalance", "eth_gasPrice"}
    assert {call.network for call in calls} == {"dev/mainnet"}
    assert all(0 <= call.at_ms < 4000 for call in calls)
    assert [call.at_ms for call in calls] == sorted(call.at_ms for call in calls)
    text = file.read_text()
    assert HOLDER in text
    assert not [word for word in (key, account, "127.0.0.1", 40 * "5", "svc_") if word in text]
    assert "left out: writes, filters and subscriptions" in done.stdout
    assert "left out: params above 2,048 bytes" in done.stdout
    # The records that only the capture made end with it.
    await service.rpc("eth_chainId", key=key, **{"X-Request-Id": "after-the-capture"})
    await asyncio.sleep(2.0)
    assert (await service.cli("explain", "after-the-capture")).returncode == 1


async def _call_for_a_while(service: Service, key: str, silent: str) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "eth_getBalance", "params": [HOLDER, "latest"]}
    for _ in range(60):
        await service.rpc("eth_chainId", key=key)
        await service.rpc("eth_getBalance", ["0x" + 40 * "5", "latest"], key=silent)
        await service.post("/rpc/dev/mainnet", [call, {**call, "method": "eth_gasPrice", "params": []}], key=key)
        await service.rpc("eth_sendRawTransaction", ["0x01"], key=key)
        await service.rpc("eth_getCode", [HOLDER, "latest", "x" * 3000], key=key)
        await asyncio.sleep(0.1)


async def test_account_that_does_not_record_params_is_not_captured(service: Service, tmp_path: Path) -> None:
    account = (await service.new_account("enterprise"))["id"]
    done = await service.cli("capture", str(tmp_path / "calls"), "--account", account, "--seconds", "1")
    assert done.returncode == 1
    assert f"{account}: does not exist, is disabled or does not record params" in done.stderr
    assert not (tmp_path / "calls").exists()
    assert (await service.cli("capture", str(tmp_path / "calls"), "--seconds", "0")).returncode == 1


class Receiver:
    """A gateway that notes when each call arrives."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str, str]] = []
        self.keys: set[str | None] = set()

    async def answer(self, request: web.Request) -> web.Response:
        at = time.monotonic()
        call = orjson.loads(await request.read())
        self.calls.append((at, request.path, call["method"]))
        self.keys.add(request.headers.get("X-API-Key"))
        if call["method"] == "eth_call":
            return web.json_response({"jsonrpc": "2.0", "id": call["id"], "error": {"code": 3, "message": "reverted"}})
        return web.json_response({"jsonrpc": "2.0", "id": call["id"], "result": "0x1"})


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[Receiver, str]]:
    receiver, app = Receiver(), web.Application()
    app.router.add_post("/{path:.*}", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield receiver, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def captured(path: Path, times_ms: Sequence[float], *methods: str) -> Path:
    """A file of calls at these times."""
    names = methods or ("eth_chainId",)
    calls = [
        CapturedCall(at, "dev/mainnet", names[index % len(names)], msgspec.Raw(b"[]"))
        for index, at in enumerate(times_ms)
    ]
    write_capture(path, "2026-11-18T12:00:00.000+00:00", calls)
    return path


@pytest.mark.parametrize("speed", [1.0, 4.0])
async def test_replay_keeps_the_pace(tmp_path: Path, speed: float) -> None:
    times = [0.0, 3.5, 40.0, 41.0, 200.25, 201.0, *(210.0 + 7 * number for number in range(60))]
    file = captured(tmp_path / "calls", times)
    async with receiving() as (receiver, url):
        words = ("replay", str(file), "--to", url, "--speed", str(speed), "--key", "svc_a", "--json")
        began = time.monotonic()
        done = await asyncio.to_thread(command_here, *words)
    assert done.returncode == 0, done.stderr
    report = orjson.loads(done.stdout)
    assert report["calls"] == report["answered"] == len(times) == len(receiver.calls)
    assert receiver.keys == {"svc_a"}
    assert {path for _, path, _ in receiver.calls} == {"/v1/rpc/dev/mainnet"}
    # None was sent before it was due. How late they were, on a machine that may be busy, is in the report.
    assert receiver.calls[-1][0] - began >= times[-1] / 1000 / speed
    assert report["p99_delay_ms"] >= 0.0
    assert report["sent_late"] <= len(times)


async def test_replay_reports_errors_and_failures_apart(tmp_path: Path) -> None:
    file = captured(tmp_path / "calls", [0.0, 1.0, 2.0], "eth_call", "eth_chainId")
    async with receiving() as (receiver, url):
        done = await asyncio.to_thread(
            command_here, "replay", str(file), "--to", url, "--network", "dev/mainnet", "--json"
        )
        assert {path for _, path, _ in receiver.calls} == {"/"}
    report = orjson.loads(done.stdout)
    assert (done.returncode, report["answered"], report["answered_with_an_error"]) == (0, 1, 2)
    away = await asyncio.to_thread(command_here, "replay", str(file), "--to", url)
    assert away.returncode == 1
    assert "no_connection" in away.stdout


REPLIES: dict[str, tuple[bytes, str]] = {
    "chunked": (
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{"result\r\n5\r\n":"1"\r\n1\r\n}\r\n0\r\n\r\n',
        "answered",
    ),
    "until_the_end": (b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"result":null}', "answered"),
    "error": (b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"error":{}}', "answered_with_an_error"),
    "not_http": (b"hello\r\n\r\n", "not_HTTP"),
    "list": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "not_a_reply"),
    "cut": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{", "no_connection"),
    "empty": (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "status_503"),
    "nothing": (b"", "no_connection"),
}


@pytest.mark.parametrize("kind", REPLIES)
async def test_replay_reads_every_kind_of_reply(tmp_path: Path, kind: str) -> None:
    reply, outcome = REPLIES[kind]
    requests: list[bytes] = []
    connected: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(time.monotonic())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                requests.append(head + await reader.readexactly(size))
                writer.write(reply)
                if kind in ("until_the_end", "nothing", "cut"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    file = captured(tmp_path / "calls", [0.0, 5.0, 10.0])
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://us%20er:word@127.0.0.1:{server.sockets[0].getsockname()[1]}"
        done = await asyncio.to_thread(command_here, "replay", str(file), "--to", url, "--key", "svc_a", "--json")
    report = orjson.loads(done.stdout)
    assert (report["calls"], report[outcome]) == (3, 3), report
    assert requests[0].startswith(b"POST /v1/rpc/dev/mainnet HTTP/1.1\r\n")
    assert b"\r\nX-API-Key: svc_a\r\nAuthorization: Basic dXMgZXI6d29yZA==\r\n" in requests[0]
    assert len(connected) > 3, "connections are opened before they are needed"


def test_key_that_is_no_header_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = captured(tmp_path / "calls", [0.0])
    for words in (("--key", "a\r\nX-Other: 1"), ("--key", "é"), ("--to", "http://127.0.0.1:x")):
        assert main(["replay", str(file), "--to", "http://127.0.0.1:1", *words]) == 2
        assert "must be an http or https URL of ASCII characters" in capsys.readouterr().err


def test_file_of_another_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = captured(tmp_path / "calls", [0.0])
    header, *calls = file.read_text().splitlines()
    file.write_text("\n".join([header.replace(f'"penstock_capture":{VERSION}', '"penstock_capture":9'), *calls]))
    assert main(["replay", str(file), "--to", "http://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert f"{file}, line 1: is of version 9, and this Penstock reads version {VERSION}" in said
    file.write_text("\n".join([header, "[1, 2]"]))
    with pytest.raises(StartError, match="line 2: "):
        read_capture(file)
    file.write_text("{}")
    with pytest.raises(StartError, match="line 1: is not a file of captured calls"):
        read_capture(file)
    with pytest.raises(StartError, match="cannot be read"):
        read_capture(tmp_path / "missing")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "line 3: "),
        ('[1.0,"dev/mainnet","eth_call",' + "[" * 100_000 + "]" * 100_000 + "]", "line 3: is nested too deeply"),
        ('[-1,"dev/mainnet","eth_call",[]]', "line 3: its time must not be before"),
        ('[1e300,"dev/mainnet","eth_call",[]]', "line 3: its time must not be before that of the last line, nor after"),
        ('[1e999,"dev/mainnet","eth_call",[]]', "line 3: "),
        ('["1","dev/mainnet","eth_call",[]]', "line 3: "),
        ('[1,"dev/mainnet"]', "line 3: "),
        ("\x00", "line 3: "),
    ],
)
def test_hostile_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = captured(tmp_path / "calls", [0.5])
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(StartError, match=message):
        read_capture(file)


def test_capture_ends_before_the_file_is_too_large_to_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capture, "MOST_BYTES", 100_000)
    began = datetime.datetime(2026, 11, 18, tzinfo=datetime.UTC)
    draft = capture.CaptureDraft(TABLES, 1_000_000, began_at=began, ends_at=began + datetime.timedelta(seconds=60))
    params = orjson.dumps(["0x" + "a" * 2000, "latest"]).decode()
    number = 0
    while not draft.is_full:
        number += 1
        row = CapturedRow(began, str(number), 0.0, "dev/mainnet", "single", "eth_getCode", params)
        draft.add(row)
        assert number < 1000
    write_capture(tmp_path / "calls", "2026-11-18T12:00:00.000+00:00", draft.calls)
    assert 90_000 < (tmp_path / "calls").stat().st_size <= 100_000


def test_call_at_an_odd_speed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = captured(tmp_path / "calls", [0.0])
    assert main(["replay", str(file), "--to", "http://127.0.0.1:1", "--speed", "0"]) == 1
    assert "--speed must be above 0" in capsys.readouterr().err
    assert main(["replay", str(file), "--to", "ftp://x"]) == 2
    assert main(["replay", str(file), "--to", "http://127.0.0.1:1", "--network", "base/mainnet"]) == 2
    assert "has no calls of base/mainnet" in capsys.readouterr().err
