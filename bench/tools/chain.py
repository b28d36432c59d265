"""A stub upstream with blocks of many transfers. Replies are prepared in advance, so that serving one costs almost nothing.

Prints its port when ready. Holders and contracts are distributed as on a busy chain: a few contracts have most of the
transfers, a few holders have many, and most holders appear once or twice.
"""

import asyncio
import hashlib
import random
import re
import sys

TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
SINGLE = "0xc3d58168c5ae7397731d063d5bbf3d657854427343f4c083240f7aacaa2d0f62"
HOLDERS, CONTRACTS, BUSY = 200_000, 2_000, 200
_RANGE = re.compile(rb'"fromBlock":"0x([0-9a-f]+)","toBlock":"0x([0-9a-f]+)"')
_HASH = re.compile(rb'"blockHash":"(0x[0-9a-f]{64})"')
_NUMBER = re.compile(rb'"params":\["(?:0x([0-9a-f]+)|latest)"')
_ID = re.compile(rb'"id":(\d+)')
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


def address(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()[:40]


class Chain:
    """Headers and logs of every block, as JSON."""

    def __init__(self, blocks: int, logs: int) -> None:
        chance = random.Random(1)
        self.hashes = [hashlib.sha256(b"block %d" % number).hexdigest() for number in range(-1, blocks)]
        self.hashes[0] = "0" * 64
        self.headers = [self._header(number) for number in range(blocks)]
        self.logs = [self._logs(number, logs if number else 0, chance) for number in range(blocks)]
        self.by_hash = {b"0x" + self.hashes[number + 1].encode(): number for number in range(blocks)}

    def _header(self, number: int) -> bytes:
        own, parent = self.hashes[number + 1], self.hashes[number]
        bloom = ("f" if number else "0") * 512  # the first block has no logs
        return (
            f'{{"number":"{number:#x}","hash":"0x{own}","parentHash":"0x{parent}","timestamp":"{number + 1:#x}",'
            f'"logsBloom":"0x{bloom}","transactions":[],"miner":"0x{"0" * 40}","gasUsed":"0x1c9c380"}}'
        ).encode()

    def _logs(self, number: int, count: int, chance: random.Random) -> bytes:
        return ",".join(self._log(number, index, chance) for index in range(count)).encode()

    def _log(self, number: int, index: int, chance: random.Random) -> str:
        contract = address(-1 - int(CONTRACTS * chance.random() ** 3))
        sender, recipient = (self._holder(chance) for _ in range(2))
        pads = [f'"0x{"0" * 24}{who}"' for who in (sender, recipient)]
        kind = chance.random()
        if kind < 0.85:
            topics, data = [f'"{TRANSFER}"', *pads], f"{chance.randrange(10**24):064x}"
        elif kind < 0.95:
            topics, data = [f'"{TRANSFER}"', *pads, f'"0x{chance.randrange(10**5):064x}"'], ""
        else:
            topics = [f'"{SINGLE}"', pads[0], *pads]
            data = f"{chance.randrange(1000):064x}{chance.randrange(1, 10):064x}"
        transaction = hashlib.sha256(b"%d %d" % (number, index // 2)).hexdigest()
        return (
            f'{{"address":"0x{contract}","topics":[{",".join(topics)}],"data":"0x{data}","blockNumber":"{number:#x}",'
            f'"blockHash":"0x{self.hashes[number + 1]}","transactionHash":"0x{transaction}",'
            f'"transactionIndex":"{index // 2:#x}","logIndex":"{index:#x}","removed":false}}'
        )

    def _holder(self, chance: random.Random) -> str:
        return address(chance.randrange(BUSY) if chance.random() < 0.3 else chance.randrange(HOLDERS))

    def answer(self, body: bytes) -> bytes:
        if b"eth_chainId" in body:
            return b'"0x1"'
        if b"eth_blockNumber" in body:
            return b'"0x%x"' % (len(self.headers) - 1)
        if b"eth_getLogs" in body:
            if found := _HASH.search(body):
                return b"[%b]" % self.logs[self.by_hash[found[1]]]
            first, last = (int(text, 16) for text in _match(_RANGE, body).groups())
            return b"[%b]" % b",".join(logs for logs in self.logs[first : last + 1] if logs)
        number = _match(_NUMBER, body)[1]
        return self.headers[-1 if number is None else int(number, 16)]


def _match(pattern: re.Pattern[bytes], text: bytes) -> re.Match[bytes]:
    found = pattern.search(text)
    assert found is not None, text
    return found


class Server(asyncio.Protocol):
    chain: Chain

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (head := self.received.find(b"\r\n\r\n")) >= 0:
            length = int(_match(_LENGTH, self.received[:head])[1])
            if len(self.received) < head + 4 + length:
                return
            body = self.received[head + 4 : head + 4 + length]
            self.received = self.received[head + 4 + length :]
            reply = b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (_match(_ID, body)[1], self.chain.answer(body))
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply))
            self.transport.write(reply)


async def main(blocks: int, logs: int) -> None:
    Server.chain = Chain(blocks, logs)
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
