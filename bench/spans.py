"""Traces: the CPU time that they add to a call, off and on, in this process.

Off, the code for traces runs only where headers are parsed. That is measured as plain Python, next to the same module without
its lines for traces, with headers that are never repeated. Whole calls are measured with a client, the same in every row.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import uvloop

from bench.cases import NO_TRACES
from proxy import compiled
from proxy.core.access import Key
from proxy.web.request_targets import TargetReader
from tests.http_client import fresh_call, rpc
from tests.web.worker import LIVE, NO_CACHE, Worker, running_worker

HEADS_SOURCE = compiled.ROOT / "web" / "front" / "request_headers.py"
# Its lines for traces.
TRACE_LINES = (
    " or (self._is_tracing and _is_sampled(name, line))",
    "\n        if self._is_tracing and name.lower() == _TRACEPARENT:\n            return None",
)
HEADS, TURNS, CALLS = 20_000, 8, 400
NOT_SAMPLED, SAMPLED = "00-{:032x}-{:016x}-00", "00-{:032x}-{:016x}-01"
_serial = itertools.count(1)

# CPU microseconds by figure and row.
Costs = dict[str, dict[str, float]]


def costs(rounds: int, *, upstream: str, collector: str) -> list[Costs]:
    # The worker has no database and would print a warning whenever it cannot store usage.
    logging.getLogger("proxy").addHandler(logging.NullHandler())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_rounds(rounds, upstream, collector))


async def _rounds(rounds: int, upstream: str, collector: str) -> list[Costs]:
    on = {"tracing": {"endpoint": collector, "ratio": 0.0, "max_per_second": 1_000_000, "flush_s": 0.2}}
    async with (
        running_worker({LIVE: [upstream]}, **NO_CACHE) as without,
        running_worker({LIVE: [upstream]}, **NO_CACHE, **on) as traced,
    ):
        return [await _round(without, traced) for _ in range(rounds)]


async def _round(off: Worker, on: Worker) -> Costs:
    heads = _heads_us(off)
    return {
        "a head, off": {NO_TRACES: heads[NO_TRACES], "penstock": heads["off"]},
        "a head, on": {NO_TRACES: heads[NO_TRACES], "penstock": heads["on"]},
        "a sampled call": {NO_TRACES: await _call_us(off, NOT_SAMPLED), "penstock": await _call_us(on, SAMPLED)},
    }


# Headers


def _heads_us(worker: Worker) -> dict[str, float]:
    """The least of several measurements that take turns: other work can only add."""
    whole, cut = _module(()), _module(TRACE_LINES)
    kinds = {NO_TRACES: (cut, False), "off": (whole, False), "on": (whole, True)}
    turns = [{name: _read_us(_reader(*kind, worker), worker) for name, kind in kinds.items()} for _ in range(TURNS)]
    return {name: min(turn[name] for turn in turns) for name in kinds}


def _module(without: tuple[str, ...]) -> ModuleType:
    """The module of request headers, run from its source, without some of its lines."""
    source = HEADS_SOURCE.read_text("utf-8")
    for lines in without:
        assert lines in source, lines
        source = source.replace(lines, "")
    module = ModuleType("request_headers")
    exec(compile(source, "request_headers.py", "exec"), module.__dict__)
    return module


def _reader(module: ModuleType, is_tracing: bool, worker: Worker) -> Any:
    def find(text: str) -> Key | None:
        return worker.app.keyring.find(text, 0.0)

    routes = {f"/v1/rpc/{LIVE}": worker.app.networks.routes[LIVE]}
    return module.RequestHeaderReader(
        routes, find, TargetReader(), max_header_bytes=8192, max_body=100_000, is_tracing=is_tracing
    )


def _read_us(reader: Any, worker: Worker) -> float:
    body = rpc("eth_blockNumber")
    heads = [worker.post(body, **_traceparent(NOT_SAMPLED))[: -len(body)] for _ in range(HEADS)]
    began = time.process_time()
    for head in heads:
        assert reader.read(head) is not None
    return (time.process_time() - began) / HEADS * 1e6


# Calls


async def _call_us(worker: Worker, form: str) -> float:
    async with await worker.connect() as client:
        for _ in range(20):
            await client.send(worker.post(fresh_call(), **_traceparent(form)))
        began = time.process_time()
        for _ in range(CALLS):
            reply = await client.send(worker.post(fresh_call(), **_traceparent(form)))
            assert reply.status == 200, reply
        return (time.process_time() - began) / CALLS * 1e6


def _traceparent(form: str) -> Mapping[str, str]:
    number = next(_serial)
    return {"traceparent": form.format(number, number)}
