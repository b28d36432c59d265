"""Memory per idle connection, and memory of cached replies relative to their size."""

import json
import socket
import time
from pathlib import Path

from bench import machine
from bench.cases import Case
from bench.loaders import MARKER, Load, Target, measure

SETTLE_S = 1.0  # let allocators and timers settle before memory is read
SPARE_FILES = 500  # descriptors reserved for everything except idle connections


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
    sample = measure("load", load, target, layout, workdir=workdir)
    if sample.requests < count:
        raise ConnectionError(f"only {sample.requests:,} of {count:,} calls got a reply")
    return (settled(pids) - before) / (count * _result_bytes(target, case))


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
