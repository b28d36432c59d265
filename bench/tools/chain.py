"""A stub upstream with blocks of many transfers, as long as wanted: `chain.py BLOCKS LOGS [CHAIN_ID EVERY_S LIVE_LOGS]`.

Prints its port when ready, and the time by the monotonic clock. A few hundred blocks are prepared; all others repeat them with
numbers and hashes of their own, so that serving one costs little. From then on a block with LIVE_LOGS logs is added every
EVERY_S seconds. Holders and contracts are distributed as on a busy chain: a few contracts have most of the transfers, a few
holders have many, and most holders appear a few times. Logs have the times of their blocks, as those of geth, reth and erigon.
"""

import asyncio
import hashlib
import random
import re
import sys
import time

TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
SINGLE = "0xc3d58168c5ae7397731d063d5bbf3d657854427343f4c083240f7aacaa2d0f62"
HOLDERS, CONTRACTS, BUSY = 200_000, 2_000, 200
# Prepared blocks, and how often they repeat before most of their holders become others.
PREPARED, REPEATS = 250, 4
FINAL_DEPTH = 64
# In prepared JSON: the members that name the block and the transaction, and the digits of a holder that change.
_BLOCK, _HOLDER = b"@", b"~~~~"
_FROM = re.compile(rb'"fromBlock":"0x([0-9a-f]+)"')
_TO = re.compile(rb'"toBlock":"0x([0-9a-f]+)"')
_HASH = re.compile(rb'"blockHash":"0x[0-9a-f]{48}([0-9a-f]{16})"')
_NUMBER = re.compile(rb'"params":\["(?:0x([0-9a-f]+)|(latest|safe|finalized))"')
_ID = re.compile(rb'"id":(\d+)')
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")
_ZERO = "0" * 64
# The rest of a header and of a transaction, which strict clients read.
_HEADER = (
    f'"miner":"0x{"0" * 40}","gasUsed":"0x1c9c380","gasLimit":"0x1c9c380","baseFeePerGas":"0x7","difficulty":"0x0",'
    f'"totalDifficulty":"0x0","extraData":"0x","mixHash":"0x{_ZERO}","nonce":"0x{"0" * 16}","receiptsRoot":"0x{_ZERO}",'
    f'"sha3Uncles":"0x{_ZERO}","size":"0x220","stateRoot":"0x{_ZERO}","transactionsRoot":"0x{_ZERO}","uncles":[]'
)
_TRANSACTION = (
    f'"from":"0x{"1" * 40}","to":"0x{"2" * 40}","gas":"0x5208","gasPrice":"0x7","input":"0xa9059cbb{"0" * 128}",'
    f'"nonce":"0x1","r":"0x1","s":"0x1","v":"0x1b","type":"0x0","value":"0x0"'
)


def address(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()[:40]


def block_hash(number: int) -> str:
    """Ends with the number, so that the block of a hash is known."""
    return hashlib.sha256(b"block %d" % number).hexdigest()[:48] + f"{number:016x}" if number >= 0 else _ZERO


class PreparedLogs:
    """The logs of a few blocks as JSON, by the first topics that a filter has."""

    def __init__(self, blocks: int, logs: int) -> None:
        chance = random.Random(1)
        made = [[self._log(index, chance) for index in range(logs)] for _ in range(blocks)]
        self._all = [",".join(block).encode() for block in made]
        self._transfers = [",".join(log for log in block if SINGLE not in log).encode() for block in made]
        self._singles = [",".join(log for log in block if SINGLE in log).encode() for block in made]

    def _log(self, index: int, chance: random.Random) -> str:
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
        return (
            f'{{"address":"0x{contract}","topics":[{",".join(topics)}],"data":"0x{data}",'
            f'@{_tail(index // 2)}","transactionIndex":"{index // 2:#x}","logIndex":"{index:#x}","removed":false}}'
        )

    def _holder(self, chance: random.Random) -> str:
        if chance.random() < 0.3:
            return address(chance.randrange(BUSY))
        return address(chance.randrange(HOLDERS))[:36] + _HOLDER.decode()

    def of(self, number: int, body: bytes) -> bytes:
        wants = [topic.encode() in body for topic in (TRANSFER, SINGLE)]
        kept = self._all if wants[0] == wants[1] else self._transfers if wants[0] else self._singles
        cycle, place = divmod(number, len(kept))
        holders = b"%04x" % (cycle // REPEATS % (1 << 16))
        return kept[place].replace(_BLOCK, _names(number)).replace(_HOLDER, holders)


def _tail(transaction: int) -> str:
    return hashlib.sha256(b"%d" % transaction).hexdigest()[:48]


def _names(number: int) -> bytes:
    """The members of a log up to the middle of its transaction's hash, which begins with the number."""
    return (
        f'"blockNumber":"{number:#x}","blockHash":"0x{block_hash(number)}","blockTimestamp":"{number + 1:#x}",'
        f'"transactionHash":"0x{number:016x}'
    ).encode()


class Chain:
    """Headers and logs of every block, as JSON. The first block has no logs."""

    def __init__(self, blocks: int, logs: int, chain_id: int = 1, every_s: float = 0.0, live_logs: int = 0) -> None:
        self._blocks = blocks
        self._logs = PreparedLogs(min(blocks, PREPARED), logs)
        self._live_logs = PreparedLogs(8, live_logs)
        self._transactions = [
            f'{{"hash":"0x@{_tail(index)}","transactionIndex":"{index:#x}",{_TRANSACTION},'
            for index in range((logs + 1) // 2)
        ]
        self._chain_id = chain_id
        self._every_s = every_s
        self.began = time.monotonic()

    @property
    def head(self) -> int:
        added = int((time.monotonic() - self.began) / self._every_s) if self._every_s else 0
        return self._blocks - 1 + added

    def _time(self, number: int) -> int:
        """Prepared blocks are a second apart, and live ones as far as they are added."""
        live = max(0, number - self._blocks + 1)
        return number + 1 - live + int(live * self._every_s)

    def _header(self, number: int, *, full: bool) -> bytes:
        bloom = ("f" if number else "0") * 512
        transactions = ",".join(self._whole_transactions(number)) if full and number else ""
        return (
            f'{{"number":"{number:#x}","hash":"0x{block_hash(number)}","parentHash":"0x{block_hash(number - 1)}",'
            f'"timestamp":"{self._time(number):#x}","logsBloom":"0x{bloom}","transactions":[{transactions}],{_HEADER}}}'
        ).encode()

    def _whole_transactions(self, number: int) -> list[str]:
        start, end = f"{number:016x}", f'"blockNumber":"{number:#x}","blockHash":"0x{block_hash(number)}"}}'
        return [each.replace("@", start) + end for each in self._transactions]

    def _logs_of(self, number: int, body: bytes) -> bytes:
        if not number:
            return b""
        return (self._logs if number < self._blocks else self._live_logs).of(number, body)

    def answer(self, body: bytes) -> bytes:
        if b"eth_chainId" in body:
            return b'"0x%x"' % self._chain_id
        if b"eth_blockNumber" in body:
            return b'"0x%x"' % self.head
        if b"eth_getLogs" in body:
            if found := _HASH.search(body):
                return b"[%b]" % self._logs_of(int(found[1], 16), body)
            first, last = (int(_match(pattern, body)[1], 16) for pattern in (_FROM, _TO))
            pieces = (self._logs_of(number, body) for number in range(first, min(last, self.head) + 1))
            return b"[%b]" % b",".join(logs for logs in pieces if logs)
        if b"eth_getBlockByNumber" not in body:
            return b"null"
        number, tag = _match(_NUMBER, body).groups()
        depth = FINAL_DEPTH if tag in (b"safe", b"finalized") else 0
        wanted = max(0, self.head - depth) if number is None else int(number, 16)
        return b"null" if wanted > self.head else self._header(wanted, full=b"true" in body)


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
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(reply)
            )
            self.transport.write(reply)


async def main(chain: Chain) -> None:
    Server.chain = chain
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], chain.began, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    blocks, logs, *more = sys.argv[1:]
    chain_id, every_s, live_logs = more or ("1", "0", "0")
    asyncio.run(main(Chain(int(blocks), int(logs), int(chain_id), float(every_s), int(live_logs))))
