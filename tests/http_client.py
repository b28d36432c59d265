"""A raw HTTP client: one connection, the exact bytes sent on it, and the replies."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import orjson

from proxy.errors import ERRORS_PAGE, REASONS
from tests.service import Service, owner_of, until

REPLY_S = 30.0
CODE_OF = {400: "invalid_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 429: "rate_limited"}


class Closed(Exception):
    """The server closed the connection before a complete reply."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    at: float = field(default_factory=time.time)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"

    def fault(self, status: int) -> dict[str, Any]:
        """Check every part of the error body, and return its `error` member."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"].split(";")[0] == "application/json"
        body = self.json
        assert list(body) == ["error"]
        error: dict[str, Any] = body["error"]
        assert set(error) <= {"code", "message", "status", "param", "reason", "docs", "details", "errors"}
        assert error["reason"] in REASONS
        assert error["docs"].endswith(f"{ERRORS_PAGE}#{error['reason']}")
        assert error["status"] == status
        usual = CODE_OF.get(status, "internal_error" if status >= 500 else "invalid_request")
        assert error["code"] == ("not_found" if error["reason"] == "block" else usual)
        assert error["message"]
        assert "Traceback" not in error["message"]
        assert "<html" not in error["message"].lower()
        return error


class HttpClient:
    """A connection to the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.port: int = writer.get_extra_info("sockname")[1]

    @classmethod
    async def open(cls, port: int) -> HttpClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass

    async def write(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError as exc:
            raise Closed(repr(exc)) from exc

    async def reply(self, within_s: float = REPLY_S) -> Reply:
        """Return the next complete reply, skipping interim ones."""
        try:
            async with asyncio.timeout(within_s):
                while (reply := await self._read()).status == 100:
                    pass
                return reply
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            raise Closed(repr(exc)) from exc

    async def _read(self) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, _ = f"{head[0]} ".split(" ", 2)
        assert version in ("HTTP/1.1", "HTTP/1.0"), head[0]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        if int(status) in (100, 101, 204, 304):
            return Reply(int(status), headers, b"")
        if "content-length" in headers:
            return Reply(int(status), headers, await self.reader.readexactly(int(headers["content-length"])))
        assert headers.get("transfer-encoding") is None, "the service sends replies of known length"
        return Reply(int(status), headers, await self.reader.read())

    async def send(self, data: bytes, within_s: float = REPLY_S) -> Reply:
        """Send and read the reply. A server may reply and close before it has read everything, so ignore a broken pipe."""
        try:
            await self.write(data)
        except Closed:
            pass
        return await self.reply(within_s)

    async def call(self, method: str = "eth_chainId", *, key: str, network: str = "dev/mainnet") -> Reply:
        return await self.send(post(rpc(method), key=key, network=network))

    async def is_closed(self, within_s: float = REPLY_S) -> bool:
        """Wait until the server closes the connection; return False if it does not."""
        try:
            async with asyncio.timeout(within_s):
                while await self.reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


class RawReply(msgspec.Struct):
    """A reply to a JSON-RPC call, whose result is compared byte for byte."""

    result: msgspec.Raw = msgspec.Raw()
    error: Any = None


def rpc(method: str, params: Any = (), *, id: Any = 1) -> bytes:  # noqa: A002
    return orjson.dumps(
        {"jsonrpc": "2.0", "id": id, "method": method, "params": params if isinstance(params, dict) else list(params)}
    )


_serial = itertools.count(1)


def fresh_call() -> bytes:
    """Return a unique read that is not cached and that no other call joins."""
    return rpc("eth_call", [{"data": f"0x{next(_serial):064x}"}, "latest"])


def post(body: bytes, *, key: str | None, network: str = "dev/mainnet", **headers: str) -> bytes:
    """Return a complete request to the JSON-RPC path."""
    return request("POST", f"/v1/rpc/{network}", body, key=key, **headers)


def request(method: str, target: str, body: bytes = b"", *, key: str | None = None, **headers: str) -> bytes:
    lines = {"Host": "penstock", "Content-Type": "application/json", "Content-Length": str(len(body))}
    if key is not None:
        lines["X-API-Key"] = key
    lines.update({name.replace("_", "-"): value for name, value in headers.items()})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body


async def send_once(service: Service, data: bytes) -> Reply:
    async with await HttpClient.open(service.port) as client:
        return await client.send(data)


class HasWorkers(Protocol):
    """A running service, for development or in production."""

    def worker_pids(self) -> list[int]: ...

    @property
    def port(self) -> int: ...


async def to_every_worker(service: HasWorkers, at_least: int = 1) -> dict[int, list[HttpClient]]:
    """Open keep-alive connections until every worker has some."""
    pids = service.worker_pids()
    held: dict[int, list[HttpClient]] = {pid: [] for pid in pids}
    end = time.monotonic() + 20.0
    while any(len(clients) < at_least for clients in held.values()):
        assert time.monotonic() < end, f"connections do not reach every worker: {held}"
        client = await HttpClient.open(service.port)
        pid = await until(lambda client=client: owner_of(service.port, client.port, pids))
        held[pid].append(client)
    return held


async def queued_at(worker: int, port: int, workers: list[int]) -> HttpClient:
    """Stop the worker, and return a connection in the kernel's queue for it."""
    while True:
        os.kill(worker, signal.SIGSTOP)
        client = await HttpClient.open(port)
        await asyncio.sleep(0.05)
        if owner_of(port, client.port, workers) is None:
            return client
        await client.close()
        # If it were silent for long, the other workers would accept its connections.
        os.kill(worker, signal.SIGCONT)
        await asyncio.sleep(1.0)


async def is_known_everywhere(service: Service, key: str) -> None:
    """Wait until every worker has loaded the key. The requests name an unknown network, so they cost nothing."""
    data = post(rpc("eth_chainId"), key=key, network="dev/nowhere")
    async with service.clients_lock:
        for client in await _one_for_each_worker(service):

            async def knows(client: HttpClient = client) -> bool:
                return (await client.send(data)).status != 401

            await until(knows)


async def _one_for_each_worker(service: Service) -> list[HttpClient]:
    """Return one connection per worker, reusing open ones."""
    pids = await until(service.worker_pids)
    for pid, client in tuple(service.clients.items()):
        if pid not in pids or client.reader.at_eof():
            await service.clients.pop(pid).close()
    while missing := [pid for pid in pids if pid not in service.clients]:
        client = await HttpClient.open(service.port)
        pid = await until(lambda client=client: owner_of(service.port, client.port, pids))
        if pid in missing:
            service.clients[pid] = client
        else:
            await client.close()
    return [*service.clients.values()]


async def close_all(held: dict[int, list[HttpClient]]) -> None:
    for clients in held.values():
        for client in clients:
            await client.close()
