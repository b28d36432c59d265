"""Simulated clients over HTTP: each kind uses the service in its own way, and reports every call and reply to the oracle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tests.http_client import post
from tests.simulation.block_tree import CONTRACTS, FIRST_HEAD, BlockTree
from tests.simulation.memory_network import Address
from tests.simulation.oracle import CALL_TIMEOUT_S, HARDLY, Account, Call, Oracle

# A client gives up on a reply after this time. The service must have replied by then, whatever its upstreams do.
PATIENCE_S = CALL_TIMEOUT_S + 20.0
DIGITS = "0123456789abcdef"
# Bytes that arrive before the client takes them. With more, the service would not notice slow clients.
READS_AHEAD = 1 << 15
# A slow client takes this many at a time.
READS_AT_ONCE = 1 << 14
# Calls that are repeated at the end, of each account and network.
MOST_AUDITED = 40


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms on which every client runs."""

    gateway: Address
    oracle: Oracle
    until_s: float
    # Whether clients may leave in the middle.
    may_leave: bool
    # Subscribers stay until then: the faults have ended before.
    listens_until_s: float = 0.0
    # The network with enough operators for a quorum.
    quorum_on: str = ""
    # How many calls a crowd makes at a time.
    crowd: int = 0

    def verifies(self, tree: BlockTree) -> bool:
        return tree.name == self.quorum_on


def address_of(client: str) -> str:
    return f"10.1.0.{int(client.rpartition(' ')[2])}"


class Connection(asyncio.Protocol):
    """One connection of a client. It stops reading while the client does not take what has arrived: `READS_AHEAD`."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._more: asyncio.Future[None] | None = None
        self._has_ended = self._is_paused = False
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        return f"<Connection with {len(self._buffer)} bytes that were not taken>"

    # For the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._wake()
        if len(self._buffer) > READS_AHEAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._has_ended = True
        self._wake()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended, self._failure = True, exc
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    # For the client

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    async def reply(self, pause_s: Callable[[], float] | None = None) -> tuple[int, dict[str, str], bytes]:
        """The next reply. `pause_s`: how long to wait between the parts of a large body."""
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        headers: dict[str, str] = dict([line.split(": ", 1) for line in lines[1:-2]])
        status = int(lines[0].split(" ")[1])
        if headers.get("transfer-encoding") != "chunked":
            size = 0 if status == 101 else int(headers.get("content-length", "0"))
            return status, headers, await self._body(size, pause_s)
        parts = []
        while size := int(await self._until(b"\r\n"), 16):
            parts.append(await self._body(size, pause_s))
            await self._exactly(2)
        await self._exactly(2)
        return status, headers, b"".join(parts)

    async def frame(self) -> tuple[int, bytes]:
        """The next frame of a WebSocket: its opcode and its payload."""
        first, size = await self._exactly(2)
        if size >= 126:
            size = int.from_bytes(await self._exactly(2 if size == 126 else 8), "big")
        return first & 0x0F, await self._exactly(size)

    async def _body(self, size: int, pause_s: Callable[[], float] | None) -> bytes:
        if pause_s is None or size <= 4096:
            return await self._exactly(size)
        parts = []
        while size:
            parts.append(await self._exactly(min(size, READS_AT_ONCE)))
            size -= len(parts[-1])
            await asyncio.sleep(pause_s())
        return b"".join(parts)

    async def _until(self, end: bytes) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            await self._wait()
        return self._taken(at + len(end))

    async def _exactly(self, size: int) -> bytes:
        # A large body is collected in parts, as a client that takes them would.
        parts = []
        while len(self._buffer) < size:
            if self._buffer:
                size -= len(self._buffer)
                parts.append(self._taken(len(self._buffer)))
            await self._wait()
        last = self._taken(size)
        return b"".join([*parts, last]) if parts else last

    def _taken(self, size: int) -> bytes:
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._is_paused and len(self._buffer) <= READS_AHEAD:
            self._is_paused = False
            self._transport.resume_reading()
        return found

    async def _wait(self) -> None:
        """Wait for more data."""
        if self._has_ended:
            raise self._failure or ConnectionResetError("the service has closed the connection")
        self._more = asyncio.get_running_loop().create_future()
        try:
            await self._more
        finally:
            self._more = None


class SimClient:
    """Makes calls on one connection at a time until the end of the simulation."""

    def __init__(self, name: str, account: Account, tree: BlockTree, terms: Terms, rng: random.Random) -> None:
        self.name, self._account, self._tree, self._terms, self._rng = name, account, tree, terms, rng
        self._oracle, self._serial = terms.oracle, 0
        self._open: list[Call] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def _ends_s(self) -> float:
        return self._terms.until_s

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < self._ends_s:
            self._open = []
            try:
                _, connection = await loop.create_connection(
                    Connection, *self._terms.gateway, local_addr=(address_of(self.name), 0)
                )
            except ConnectionError:
                await asyncio.sleep(0.1)
                continue
            await self._use(connection)

    async def _use(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        try:
            while loop.time() < self._ends_s:
                await self._talk(connection)
        except ConnectionError:
            for call in self._open:
                self._oracle.lost(call)
            await asyncio.sleep(0.05)
        except _Left:
            for call in self._open:
                self._oracle.left(call)
        except TimeoutError:
            for call in self._open:
                self._oracle.no_reply(call)
        finally:
            connection.close()

    async def _talk(self, connection: Connection) -> None:
        """One exchange, and the pause after it."""
        raise NotImplementedError

    # Parts of exchanges

    def _ask(self, method: str, params: list[Any], **directives: str) -> Call:
        self._serial += 1
        named = {name.replace("_", "-"): value for name, value in directives.items()}
        name: Any = self._serial if self._serial % 2 else f"{self._account.mark}-{self.name}-{self._serial}"
        call = self._oracle.asked(self._account, self._tree, name, method, params, named, via=self._terms.gateway[0])
        self._open.append(call)
        return call

    def _request(self, call: Call, **headers: str) -> bytes:
        sent = {name: value for name, value in call.directives.items() if name.startswith("X-")}
        return post(_envelope(call), key=self._account.key, network=self._tree.name, **sent, **headers)

    async def _single(self, connection: Connection, *calls: Call, pause_s: Callable[[], float] | None = None) -> None:
        """Send these calls, one request each, and read the replies in order."""
        data = b"".join(self._request(call) for call in calls)
        await self._send(connection, data)
        async with asyncio.timeout(PATIENCE_S + 30.0 * (pause_s is not None)):
            for call in calls:
                found = await connection.reply(pause_s)
                self._open.remove(call)
                self._oracle.replied(call, *found)

    async def _send(self, connection: Connection, data: bytes) -> None:
        """Mostly at once; now and then in two parts, or only a part before the client leaves."""
        draw = self._rng.random()
        if draw < 0.01 and self._terms.may_leave:
            connection.write(data[: self._rng.randint(0, len(data))])
            await asyncio.sleep(self._rng.uniform(0.0, 0.2))
            connection.abort()
            raise _Left
        if draw < 0.05:
            at = self._rng.randint(0, len(data))
            connection.write(data[:at])
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            data = data[at:]
        connection.write(data)
        for call in self._open:
            call.written_s = self._oracle.now_s
        if draw > 0.99 and self._terms.may_leave:
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))
            connection.abort()
            raise _Left

    def _pause(self, mean_s: float) -> asyncio.Future[None] | Any:
        return asyncio.sleep(self._rng.expovariate(1 / mean_s))

    def _address(self) -> str:
        """Few addresses, so that calls meet in the cache."""
        return f"0x{self._account.mark}{self._rng.randint(0, 7):032x}"

    def _read(self) -> Call:
        draw, rng = self._rng.random(), self._rng
        if draw < 0.3:
            return self._ask("eth_blockNumber", [])
        if draw < 0.6:
            return self._ask("eth_getBalance", [self._address(), "latest"])
        if draw < 0.7:
            return self._ask("eth_getBlockByNumber", ["latest", False])
        if draw < 0.8:
            near = max(FIRST_HEAD, self._tree.tip.number - rng.randint(0, 6))
            return self._ask("eth_getBlockByNumber", [hex(near), False])
        if draw < 0.85:
            return self._ask("eth_getBalance", [self._address(), hex(rng.randint(1, self._tree.tip.number - 5))])
        if draw < 0.9:
            first = self._tree.tip.number - rng.randint(0, 8)
            return self._ask("eth_getLogs", [{"fromBlock": hex(first), "toBlock": "latest"}])
        if draw < 0.95:
            return self._ask("eth_chainId", [])
        return self._ask("eth_call", [{"to": CONTRACTS[0], "data": self._data(2)}, "latest"])

    def _data(self, size: int) -> str:
        """Call data with the account's mark. The answer has 64 bytes times two to the power of `size`."""
        return f"0x{self._account.mark}{self._rng.getrandbits(64):016x}{DIGITS[size]}"


class Reader(SimClient):
    """Reads, alone or a few sent ahead."""

    async def _talk(self, connection: Connection) -> None:
        count = 1 if self._rng.random() < 0.8 else self._rng.randint(2, 5)
        await self._single(connection, *[self._read() for _ in range(count)])
        await self._pause(0.02)


class Batcher(SimClient):
    async def _talk(self, connection: Connection) -> None:
        calls = [self._read() for _ in range(self._rng.randint(1, 12))]
        if self._rng.random() < 0.3:
            calls[self._rng.randrange(len(calls))].id = None  # A notification.
        body = b"[" + b",".join(map(_envelope, calls)) + b"]"
        await self._send(connection, post(body, key=self._account.key, network=self._tree.name))
        async with asyncio.timeout(PATIENCE_S):
            status, _, reply = await connection.reply()
        for call in calls:
            self._open.remove(call)
        if all(call.id is None for call in calls):
            for call in calls:
                self._oracle.left(call)
        else:
            self._oracle.replied_together(calls, status, reply)
        await self._pause(0.1)


class Director(SimClient):
    """Uses directives."""

    async def _talk(self, connection: Connection) -> None:
        rng, tip, draw = self._rng, self._tree.tip.number, self._rng.random()
        params = [self._address(), "latest"]
        if draw < 0.3:
            # Read, wait for a block, and read again: the second reply is not the first one from the cache.
            await self._single(connection, self._ask("eth_getBalance", params))
            least = max(1, self._tree.tip.number + rng.randint(-3, 2))
            await self._single(connection, self._ask("eth_getBalance", params, X_Min_Block=str(least)))
            call = self._ask("eth_getBalance", params)
        elif draw < 0.45:
            call = self._ask("eth_getBalance", params, X_Timeout_Ms=str(rng.choice((1, 20, 300, 3000))))
        elif draw < 0.6 and self._terms.verifies(self._tree):
            call = self._ask("eth_getBalance", [params[0], hex(tip - 5)], X_Verify="quorum 2/3")
        elif draw < 0.9:
            # As `NewBlockReader`.
            near = max(FIRST_HEAD, tip - rng.randint(0, 2))
            call = self._ask("eth_getBalance", [params[0], hex(near)], X_Retry="0")
        else:
            call = self._ask("eth_blockNumber", [], X_Retry="0")
        await self._single(connection, call)
        await self._pause(0.1)


class NewBlockReader(SimClient):
    """Reads state at the newest blocks. Only the upstream that is asked first can answer, however long it takes."""

    async def _talk(self, connection: Connection) -> None:
        near = hex(self._tree.tip.number - self._rng.randint(0, 1))
        await self._single(connection, self._ask("eth_getBalance", [self._address(), near], X_Retry="0"))
        await self._pause(0.05)


class HeadReader(SimClient):
    """Asks for the newest block. Both attempts could go to the same upstream, if only that one has it."""

    async def _talk(self, connection: Connection) -> None:
        await self._single(connection, self._ask("eth_blockNumber", [], X_Retry="1"))
        await self._pause(0.05)


class Writer(SimClient):
    """Sends transactions, each once."""

    async def _talk(self, connection: Connection) -> None:
        raw = f"0x02{self._account.mark}{self._rng.getrandbits(256):064x}"
        if self._rng.random() < 0.7:
            call = self._ask("eth_sendRawTransaction", [raw])
        else:
            call = self._ask("eth_sendPrivateTransaction", [{"tx": raw}])
        await self._single(connection, call)
        await self._pause(0.2)


class LargeReader(SimClient):
    """Makes calls with large results, and reads some of them slowly."""

    async def _talk(self, connection: Connection) -> None:
        rng = self._rng
        call = self._ask("eth_call", [{"to": CONTRACTS[0], "data": self._data(rng.randint(4, 13))}, "latest"])
        slow_s = rng.choice((0.0, 0.0, 0.02, 0.3))
        call.directives["reads slowly"] = "yes"
        await self._single(connection, call, pause_s=lambda: rng.random() * slow_s)
        await self._pause(0.1)


class Auditor(SimClient):
    """Repeats calls whose results are out of date by now: no cache has kept them."""

    _again: list[tuple[str, list[Any]]]

    async def run(self) -> None:
        self._again = self._oracle.replaced_results(self._account, self._tree)[:MOST_AUDITED]
        if self._again:
            await super().run()

    async def _talk(self, connection: Connection) -> None:
        if not self._again:
            raise _Left
        await self._single(connection, self._ask(*self._again.pop()))

    @property
    def _ends_s(self) -> float:
        return self._terms.until_s if self._again else 0.0


class Hoarder(SimClient):
    """One of many connections with large results that are hardly read. They may be closed."""

    async def _talk(self, connection: Connection) -> None:
        call = self._ask("eth_call", [{"to": CONTRACTS[0], "data": self._data(13)}, "latest"])
        call.directives["reads slowly"] = HARDLY
        await self._single(connection, call, pause_s=self._dawdles_s)

    def _dawdles_s(self) -> float:
        is_over = asyncio.get_running_loop().time() >= self._terms.until_s
        return 0.0 if is_over else self._rng.uniform(0.3, 1.5)


class Flooder(SimClient):
    """Sends more than its account may."""

    async def _talk(self, connection: Connection) -> None:
        await self._single(connection, *[self._read() for _ in range(self._rng.randint(1, 20))])
        await self._pause(0.2)


class CrowdMember(SimClient):
    """One connection of a crowd: calls that no cache answers, one after the other."""

    async def _talk(self, connection: Connection) -> None:
        await self._single(connection, self._ask("eth_call", [{"to": CONTRACTS[0], "data": self._data(1)}, "latest"]))
        await self._pause(0.02)


class Crowd(SimClient):
    """Makes more calls at a time than the upstreams take."""

    member: type[SimClient] = CrowdMember

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for place in range(self._terms.crowd):
                rng = random.Random(f"{self._rng.random()} {place}")
                group.create_task(self.member(self.name, self._account, self._tree, self._terms, rng).run())


class Hoarders(Crowd):
    """Hold all connections of the upstreams, by hardly reading their results."""

    member = Hoarder


class Modest(CrowdMember):
    """Makes one call at a time. Its account has no other client."""

    async def _talk(self, connection: Connection) -> None:
        await super()._talk(connection)
        await self._pause(0.1)


class Vandal(SimClient):
    """Sends malformed and cut-off requests. Their replies are errors, if any."""

    async def _talk(self, connection: Connection) -> None:
        rng = self._rng
        good = post(b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId","params":[]}', key=self._account.key)
        kind = rng.choice(("bytes", "cut", "json", "length", "key", "flip"))
        self._oracle.malformed(self._account, kind)
        if kind == "bytes":
            connection.write(rng.randbytes(rng.randint(1, 300)))
        elif kind == "cut":
            connection.write(good[: rng.randint(1, len(good) - 1)])
        elif kind == "json":
            body = rng.choice((b"{", b"[]", b"null", b'{"id":1}', b"[" * 200, b'{"jsonrpc":"2.0","id":[],"method":1}'))
            connection.write(post(body, key=self._account.key, network=self._tree.name))
        elif kind == "length":
            connection.write(good.replace(b"Content-Length: ", b"Content-Length: 1"))
        elif kind == "key":
            connection.write(post(b"{}", key="svc_live_" + "0" * 36, network=self._tree.name))
        else:
            place = rng.randrange(len(good))
            connection.write(good[:place] + bytes([good[place] ^ 1 << rng.randrange(8)]) + good[place + 1 :])
        try:
            async with asyncio.timeout(rng.uniform(0.05, 1.0)):
                status, _, body = await connection.reply()
                self._oracle.vandal_replied(status, body)
        except TimeoutError:
            pass
        except ValueError:
            self._oracle.violate("one-reply", "a malformed request got a malformed reply")
        await self._pause(0.2)
        raise _Left


class FilterUser(SimClient):
    """Creates a filter of blocks, polls it, and removes it."""

    async def _talk(self, connection: Connection) -> None:
        made = await self._result(connection, "eth_newBlockFilter", [])
        for _ in range(self._rng.randint(1, 5)):
            if made is None:
                break
            await self._pause(0.5)
            await self._result(connection, "eth_getFilterChanges", [made])
        if made is not None:
            await self._result(connection, "eth_uninstallFilter", [made])
        await self._pause(0.3)

    async def _result(self, connection: Connection, method: str, params: list[Any]) -> Any:
        call = self._ask(method, params)
        await self._send(connection, self._request(call))
        async with asyncio.timeout(PATIENCE_S):
            status, headers, body = await connection.reply()
        self._open.remove(call)
        self._oracle.replied(call, status, headers, body)
        return orjson.loads(body).get("result") if status == 200 else None


class _Left(Exception):
    """The client has left its connection."""


def _envelope(call: Call) -> bytes:
    name = {} if call.id is None else {"id": call.id}
    return orjson.dumps({"jsonrpc": "2.0", **name, "method": call.method, "params": call.params})


HTTP_KINDS: Sequence[type[SimClient]] = (Reader, Batcher, Director, Writer, LargeReader, Flooder, Vandal, FilterUser)
# Those of crowded scenarios.
CROWD_KINDS: Sequence[type[SimClient]] = (Crowd, Modest)
