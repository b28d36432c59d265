"""Many WebSocket clients in one process: they connect, subscribe, read everything and record when it arrived.

Usage: audience.py HOST PORT PATH COUNT. Prints one line of JSON when all are subscribed, and another for each line on
standard input: the bytes received so far, and each *wave* since the last report. A wave is one message to all clients: the
times when the first and the last client got it, and how many got it.
"""

import json
import os
import selectors
import socket
import sys
import time

QUIET_S = 0.3  # a silence this long separates two waves
PING, PONG = b"\x89\x00", b"\x8a\x80\x00\x00\x00\x00"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="


def subscribe() -> bytes:
    call = b'{"jsonrpc":"2.0","id":1,"method":"eth_subscribe","params":["newHeads"]}'
    return bytes((0x81, 0x80 | len(call))) + bytes(4) + call  # masked with zeros


def connect(host: str, port: int, path: str) -> socket.socket:
    made = socket.create_connection((host, port), timeout=30)
    made.sendall(
        f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n\r\n".encode()
    )
    seen = b""
    while b"\r\n\r\n" not in seen:
        seen += received(made)
    if not seen.startswith(b"HTTP/1.1 101"):
        raise SystemExit(f"handshake failed: {seen[:300]!r}")
    made.sendall(subscribe())
    while b'"result"' not in seen:
        seen += received(made)
    made.setblocking(False)
    return made


def received(made: socket.socket) -> bytes:
    data = made.recv(4096)
    if not data:
        raise SystemExit("connection closed before the subscription was confirmed")
    return data


class Audience:
    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._bytes = 0
        self._waves: list[tuple[float, float, int]] = []
        self._first = self._last = 0.0
        self._count = 0
        self._lost = 0

    def run(self) -> None:
        ready = selectors.EpollSelector()
        for each in self._sockets:
            ready.register(each, selectors.EVENT_READ)
        ready.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fd == sys.stdin.fileno():
                    if not os.read(key.fd, 4096):
                        return
                    self._report()
                elif not self._read(key.fileobj):  # type: ignore[arg-type]
                    ready.unregister(key.fileobj)
                    self._lost += 1

    def _read(self, made: socket.socket) -> bool:
        try:
            data = made.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data.startswith(PING) or data.endswith(PING):
            made.send(PONG)
            data = data.removeprefix(PING).removesuffix(PING)
            if not data:
                return True
        now = time.monotonic()
        if now - self._last > QUIET_S:
            self._end_wave()
            self._first = now
        self._last = now
        self._count += 1
        self._bytes += len(data)
        return bool(data)

    def _end_wave(self) -> None:
        if self._count:
            self._waves.append((self._first, self._last, self._count))
        self._count = 0

    def _report(self) -> None:
        """Print the finished waves; the current one follows in the next report."""
        waves, self._waves = self._waves, []
        print(json.dumps({"bytes": self._bytes, "lost": self._lost, "waves": waves}), flush=True)


def main() -> None:
    host, port, path, count = sys.argv[1:]
    sockets = [connect(host, int(port), path) for _ in range(int(count))]
    print(json.dumps({"connected": len(sockets)}), flush=True)
    Audience(sockets).run()


if __name__ == "__main__":
    main()
