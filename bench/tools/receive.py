"""A fast webhook receiver on a raw protocol: replies 200 to every length-framed POST. Prints its port."""

import asyncio

import uvloop

REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Receiver(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._read = bytearray()

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._read[:end]).lower()
            start = head.index(b"content-length:") + 15
            length = int(head[start : head.find(b"\r\n", start) if b"\r\n" in head[start:] else None])
            if len(self._read) < end + 4 + length:
                return
            del self._read[: end + 4 + length]
            self._transport.write(REPLY)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
