"""Memory per idle connection, and memory of cached replies relative to their size."""

import json
import multiprocessing
import os
import random
import socket
import time
from pathlib import Path

from bench import machine
from bench.cases import Case
from bench.loaders import MARKER, Load, Target, measure
from proxy.core.caching import ReplyCache, key_of
from proxy.core.encodings import GZIP, EncodedResults

SETTLE_S = 1.0  # let allocators and timers settle before memory is read
SPARE_FILES = 500  # descriptors reserved for everything except idle connections
LOGS_REPLIES, LOGS_PER_REPLY = 20_000, 10
CACHE_BYTES = 1 << 30
# The part of the cache's memory that compressed forms may take, as in the service.
ENCODED_BYTES = CACHE_BYTES // 8


def connections_possible(wanted: int) -> int:
    return min(wanted, machine.raise_file_limit() - SPARE_FILES)


def bytes_per_idle_connection(target: Target, case: Case, count: int) -> float:
    """Every connection makes one call first: a real idle client has done so, and the server keeps state for it."""
    request = case.template(target).replace(MARKER.encode(), b"1" * len(MARKER))
    pids = machine.listeners(target.port)
    held = [_converse(target, request) for _ in range(50)]  # warm-up: one-time allocations of the process
    before = settled(pids)
    try:
        held += [_converse(target, request) for _ in range(count)]
        return (settled(pids) - before) / count
    finally:
        for connection in held:
            connection.close()


def _converse(target: Target, request: bytes) -> socket.socket:
    connection = socket.create_connection((target.host, target.port), timeout=10)
    connection.sendall(request)
    seen = b""
    while b"\r\n\r\n" not in seen or not seen.rstrip().endswith((b"}", b"\r\n0")):
        received = connection.recv(65536)
        if not received:
            raise ConnectionError("connection closed before a reply")
        seen += received
    return connection


def settled(pids: list[int]) -> int:
    time.sleep(SETTLE_S)
    return machine.resident_bytes(pids)


def growth_per_cached_byte(target: Target, case: Case, layout: machine.Layout, *, count: int, workdir: Path) -> float:
    """Request `count` different immutable blocks; return memory growth divided by the bytes of their results."""
    pids = machine.listeners(target.port)
    load = Load(case.template(target), case.expect, case.connections, seconds=120, count=count)
    before = settled(pids)
    sample = measure(load, target, layout, workdir=workdir)
    if sample.requests < count:
        raise ConnectionError(f"only {sample.requests:,} of {count:,} calls got a reply")
    return (settled(pids) - before) / (count * _result_bytes(target, case))


def growth_per_byte_of_logs() -> dict[str, float]:
    """Memory growth divided by the bytes of the results: after they were cached, and after a new head and a client with gzip
    asked for one in ten of them. In a new process, so that no memory was used before."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_cache_logs)


def _cache_logs() -> dict[str, float]:
    replies, encoded = ReplyCache(CACHE_BYTES), EncodedResults(ENCODED_BYTES)
    draw = random.Random(1)
    total, before = 0, settled([os.getpid()])
    for number in range(LOGS_REPLIES):
        result = _logs(draw)
        total += len(result)
        replies.put(_logs_key(number), result, "forever")
    kept = settled([os.getpid()]) - before
    replies.head_moved()
    for number in range(0, LOGS_REPLIES, 10):
        encoded.get(replies.get(_logs_key(number)) or b"", GZIP)
    return {"kept": kept / total, "served": (settled([os.getpid()]) - before) / total}


def _logs_key(number: int) -> bytes:
    return key_of(b"eth_getLogs", b"[%d]" % number)


def _logs(draw: random.Random) -> bytes:
    """Transfers in one block, as eth_getLogs returns them."""
    block, token = f"0x{draw.randbytes(32).hex()}", f"0x{draw.randbytes(20).hex()}"
    transfer = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
    logs = [
        {
            "address": token,
            "topics": [transfer, *(f"0x{draw.randbytes(20).hex():0>64}" for _ in range(2))],
            "data": f"0x{draw.randrange(10**21):064x}",
            "blockNumber": "0x13a4f5c",
            "transactionHash": f"0x{draw.randbytes(32).hex()}",
            "transactionIndex": hex(at // 2),
            "blockHash": block,
            "logIndex": hex(at),
            "removed": False,
        }
        for at in range(LOGS_PER_REPLY)
    ]
    return json.dumps(logs, separators=(",", ":")).encode()


def _result_bytes(target: Target, case: Case) -> int:
    connection = socket.create_connection((target.host, target.port), timeout=10)
    with connection, connection.makefile("rb") as stream:
        connection.sendall(case.template(target).replace(MARKER.encode(), b"1" * len(MARKER)))
        length = 0
        while (line := stream.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        reply = json.loads(stream.read(length))
    return len(json.dumps(reply["result"], separators=(",", ":")))
