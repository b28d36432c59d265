"""The cases, as data: what is asked, of whom, and what Penstock aims at. Ratios are to nginx in the same round.

A template is one HTTP request. Every MARKER in it becomes a number that no other request has, so where calls must not
be the same (nothing may be cached or joined) the parameters carry one, and where heads must differ so does a header.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from bench.loaders import MARKER, Generator, Target

Kind = Literal["rate", "bytes", "latency", "workers", "idle", "cached", "admission"]

ALL = ("nginx", "nginx+lua", "haproxy", "relay", "plain", "penstock")
FEW = ("nginx", "relay", "penstock")
BATCH = 20
# nginx's row of the small case, shown beside the batches: to a proxy that does not look inside, a batch is one request.
ONE_BY_ONE = "nginx, one by one"
BIG = 100 * 1024


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on Penstock's figure: as a ratio to `over`, or absolute when `over` is empty."""

    bound: float
    at_most: bool = False
    over: str = "nginx"
    without_pgo: float | None = None  # what holds instead on an interpreter built without PGO
    figure: str = ""  # which of the case's figures, where it has several

    def bound_here(self, *, pgo: bool) -> float:
        return self.bound if pgo or self.without_pgo is None else self.without_pgo


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    title: str
    kind: Kind
    unit: str
    body: Callable[[], str]
    expect: str
    aims: tuple[Aim, ...]
    candidates: tuple[str, ...] = ALL
    stub: str = "small"
    profile: str = "forward"
    connections: int = 64
    calls_per_request: int = 1
    generators: tuple[Generator, ...] = ("load",)
    headers: Mapping[str, str] | None = None
    cache: str = ""  # what Penstock's X-Cache must say, where the case depends on it

    def template(self, target: Target) -> bytes:
        """The request's bytes for one candidate: its host, path and key."""
        body = self.body()
        headers = {
            "Host": f"{target.host}:{target.port}",
            "Content-Type": "application/json",
            "X-API-Key": target.key,
            **(self.headers or {}),
            "Content-Length": str(len(body)),
        }
        lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def _call(method: str, params: str, *, id_: str = MARKER) -> str:
    return f'{{"jsonrpc":"2.0","id":{id_},"method":"{method}","params":[{params}]}}'


def _address(last: str) -> str:
    return '"0x' + last.rjust(40, "0") + '"'


def small() -> str:
    return _call("eth_getBalance", _address(MARKER) + ',"latest"')


def same() -> str:
    """The same read from everyone, each with an id of its own."""
    return _call("eth_getBalance", _address("beef") + ',"latest"')


def old_block() -> str:
    """An answer that can never change: a block by its hash, far below the head."""
    return _call("eth_getBlockByHash", f'"0xb10c{1:060x}",false')


def many_old_blocks() -> str:
    """The stub reads the last 16 digits as the number: always an old block, under a hash that never repeats."""
    return _call("eth_getBlockByHash", f'"0xb10c{MARKER.rjust(44, "0")}{1:016x}",false')


def big_body() -> str:
    return _call("eth_sendRawTransaction", '"0x' + MARKER + "ab" * (BIG // 2) + '"')


def big_reply() -> str:
    return _call("eth_call", f'{{"to":{_address(MARKER)},"data":"0x70a08231"}},"latest"')


def batch() -> str:
    calls = [
        _call("eth_getBalance", _address(f"{MARKER}{i:02d}") + ',"latest"', id_=f"{MARKER}{i:02d}")
        for i in range(BATCH)
    ]
    return "[" + ",".join(calls) + "]"


OWN_ID = f'"id":{MARKER}'  # every reply must carry its own request's id

CASES = (
    Case(
        "small",
        "small call forwarded, everything on, cache off, one call per upstream connection",
        kind="rate",
        unit="calls/s",
        body=small,
        expect=OWN_ID,
        generators=("load", "wrk"),
        aims=(Aim(1.0, without_pgo=0.95), Aim(1.7, over="nginx+lua")),
    ),
    Case(
        "heads",
        "the same where every request's head differs (a trace id)",
        kind="rate",
        unit="calls/s",
        body=small,
        expect=OWN_ID,
        headers={"X-Trace-Id": MARKER},
        aims=(Aim(0.75),),
    ),
    Case(
        "in-flight",
        "small call with several in flight per upstream connection",
        kind="rate",
        unit="calls/s",
        body=small,
        expect=OWN_ID,
        candidates=FEW,
        profile="in-flight",
        generators=("load", "wrk"),
        aims=(Aim(1.5),),
    ),
    Case(
        "body",
        "100 KB request body",
        kind="rate",
        unit="calls/s",
        body=big_body,
        expect=OWN_ID,
        aims=(Aim(0.6),),
    ),
    Case(
        "batch",
        f"batch of {BATCH}: calls/s, against nginx forwarding the same calls one by one",
        kind="rate",
        unit="calls/s",
        body=batch,
        expect=f'"id":{MARKER}{BATCH - 1:02d}',
        calls_per_request=BATCH,
        aims=(Aim(2.0, over=ONE_BY_ONE),),
    ),
    Case(
        "reply",
        "100 KB reply streamed",
        kind="bytes",
        unit="MB/s",
        body=big_reply,
        expect=OWN_ID,
        stub="large",
        aims=(Aim(0.95),),
    ),
    Case(
        "hit",
        "cache hit (the others forward the same call)",
        kind="rate",
        unit="calls/s",
        body=old_block,
        expect=OWN_ID,
        candidates=FEW,
        profile="cached",
        generators=("load", "wrk"),
        cache="hit",
        aims=(Aim(1.5),),
    ),
    Case(
        "join",
        "joined call: everyone asks the same, the upstream takes 1 ms",
        kind="rate",
        unit="calls/s",
        body=same,
        expect=OWN_ID,
        candidates=FEW,
        stub="slow",
        profile="joined",
        connections=256,  # at 1 ms each, 64 callers would measure the delay and not the gateway
        generators=("load", "wrk"),
        aims=(Aim(1.5),),
    ),
    Case(
        "latency",
        "latency added to a direct call, at half of nginx's rate",
        kind="latency",
        unit="µs",
        body=small,
        expect=OWN_ID,
        candidates=("direct", "nginx", "nginx+lua", "haproxy", "relay", "penstock"),
        connections=16,
        aims=(Aim(1.6, at_most=True, figure="p50"), Aim(1.5, at_most=True, figure="p99")),
    ),
    Case(
        "workers",
        "two workers against one",
        kind="workers",
        unit="×",
        body=small,
        expect=OWN_ID,
        candidates=("nginx", "penstock"),
        connections=256,  # the kernel spreads connections by hash: few of them spread badly
        aims=(Aim(1.8, over=""),),
    ),
    Case(
        "idle",
        "memory of 10,000 idle keep-alive connections",
        kind="idle",
        unit="KB/connection",
        body=small,
        expect=OWN_ID,
        candidates=("nginx", "plain", "penstock"),
        profile="idle",
        connections=10_000,
        aims=(Aim(10.0, at_most=True, over=""),),
    ),
    Case(
        "cached",
        "memory of 1,000,000 cached replies, against their own bytes",
        kind="cached",
        unit="×",
        body=many_old_blocks,
        expect=OWN_ID,
        candidates=("penstock",),
        profile="cached-million",
        aims=(Aim(1.3, at_most=True, over=""),),
    ),
    Case(
        "admission",
        "admission (key, scope, both buckets, headers) with 100,000 keys loaded",
        kind="admission",
        unit="µs of CPU a request",
        body=small,
        expect="",
        candidates=("penstock",),
        aims=(Aim(15.0, at_most=True, over="", figure="alone"), Aim(15.0, at_most=True, over="", figure="shared")),
    ),
    Case(
        "start",
        "loading 100,000 keys at start-up",
        kind="admission",
        unit="s",
        body=small,
        expect="",
        candidates=("penstock",),
        aims=(Aim(3.0, at_most=True, over="", figure="loaded_s"),),
    ),
)
