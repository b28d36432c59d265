"""The benchmark cases as data: the request, the candidates and the aims for Penstock. Ratios are to nginx in the same round.

A template is one HTTP request. Every MARKER in it becomes a number that no other request has. Put one in the parameters
if calls must differ (so that none is cached or joined), and in a header if request heads must differ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from bench import bodies
from bench.bodies import BATCH, OWN_ID
from bench.loaders import MARKER, Generator, Target

Kind = Literal[
    "rate", "bytes", "latency", "workers", "idle", "cached", "admission", "fanout", "turn", "sockets", "filters", "index",
    "pages", "balances", "sponsor", "matching", "delivery", "usage", "faults", "overload",
    "attacks", "cpu", "mixed", "hedge", "records", "verify", "packed", "spans", "paired", "costs", "transfers",
    "upstreams",
]  # fmt: skip

ALL = ("nginx", "nginx+lua", "haproxy", "relay", "plain", "penstock")
FEW = ("nginx", "relay", "penstock")
ALONE = ("penstock",)
# nginx's row from the small case, shown with the batches: a proxy that does not parse bodies forwards a batch as one request.
ONE_BY_ONE = "nginx, one by one"
# Penstock rows that serve as baselines for other Penstock rows: one write per message, and calls with no sockets open.
ONE_IN_A_TURN = "one by one"
NO_SOCKETS = "without sockets"
# Penstock's own p99 without an attack.
NO_ATTACK = "without the attack"
# The most that a worker may grow under any attack: 128 MiB of held replies (`server.max_held_bytes`), and as much again for the
# buffers of connections and the allocator.
MAX_GROWTH_MIB = 256
# The most that it may grow by what one Free account sends at the rate of its plan.
MAX_FREE_GROWTH_MIB = 64
# Penstock's own p99 of small calls without the large ones.
SMALL_ONLY = "small calls only"
# The same block matched against few watched addresses.
FEW_ADDRESSES = "a thousand addresses"
# Penstock's own figure while every upstream is healthy.
ALL_HEALTHY = "all healthy"
# Penstock whose limits hold on one host only.
NO_VALKEY = "without Valkey"
# The same code without the lines for traces, or the same call with tracing off.
NO_TRACES = "without traces"
# No upstream is on trial.
NO_TRIAL = "without a trial"
# Upstreams that are chosen by latency alone.
LATENCY_ONLY = "by latency alone"
# The same call without verification.
NOT_VERIFIED = "not verified"
# Penstock's own p99 without a back-fill, and the page of an address with ten transfers.
NO_BACKFILL = "without the back-fill"
FEW_TRANSFERS = "ten transfers"
# aiohttp's client posting the same bodies: no database, no signatures.
BARE_CLIENT = "bare client"
HUGE = 2 * 1024 * 1024
# The round trip to a remote upstream.
FAR_MS = 40
# One in this many replies of that upstream is ten times as late. With exactly one in a hundred, chance would decide on which
# side of them the p99 is.
LATE_EVERY = 80
GZIP = {"Accept-Encoding": "gzip"}
# The stub of limited capacity: the time that each call takes, and how many it works on at a time.
LIMITED_MS = 100
LIMITED_AT_ONCE = 64
OVERLOAD = 4
RPC = "rpc"
# Penstock's RPC path, as a baseline for a case about another path.
OWN_RPC = "penstock /rpc"
# Another checkout of Penstock in the same run, and how much more CPU time a call may take than there.
OTHER_CHECKOUT = "other checkout"
NOISE = 1.01


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on Penstock's figure: as a ratio to `over`, or absolute when `over` is empty."""

    bound: float
    at_most: bool = False
    over: str = "nginx"
    without_pgo: float | None = None  # the bound on an interpreter built without PGO
    figure: str = ""  # the figure it applies to, if the case has several

    def bound_here(self, *, pgo: bool) -> float:
        return self.bound if pgo or self.without_pgo is None else self.without_pgo


def at_most(bound: float, figure: str = "") -> Aim:
    return Aim(bound, at_most=True, over="", figure=figure)


def at_most_times(over: str, bounds: Mapping[str, float]) -> tuple[Aim, ...]:
    """Bounds on the ratio of figures to those of `over`."""
    return tuple(Aim(bound, at_most=True, over=over, figure=figure) for figure, bound in bounds.items())


def at_least(bound: float, figure: str = "") -> Aim:
    return Aim(bound, over="", figure=figure)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    title: str
    aims: tuple[Aim, ...]
    kind: Kind = "rate"
    unit: str = "calls/s"
    body: Callable[[], str] = bodies.small
    expect: str = OWN_ID
    candidates: tuple[str, ...] = ALL
    stub: str = "small"
    profile: str = "forward"
    connections: int = 64
    calls_per_request: int = 1
    generators: tuple[Generator, ...] = ("load",)
    headers: Mapping[str, str] | None = None
    cache: str = ""  # required value of Penstock's X-Cache header, if the case depends on it
    has_peers: bool = False  # other gateways take part, with --peers
    # The Penstock path that is measured; the RPC path can then be a candidate too. With {key} it is a whole path with the key
    # in it, and {path} is the RPC path.
    stem: str = RPC
    network: str = "ethereum/mainnet"
    route: str = ""  # the request is a GET of this route of a chain with a REST API

    @property
    def is_comparable(self) -> bool:
        """Whether it measures calls, so that their CPU time can be compared with that of another checkout."""
        return self.kind in ("rate", "bytes", "cpu", "paired")

    def template(self, target: Target) -> bytes:
        """Return the request bytes for one candidate, with its host, path and key."""
        body = self.body() if self.stem == RPC or f"/{self.stem}/" in target.path else bodies.small()
        path = target.path.replace("ethereum/mainnet", self.network)
        if self.route:
            return _get(target, path.replace(f"/{RPC}/", "/rest/") + self.route)
        headers = {
            "Host": f"{target.host}:{target.port}",
            "Content-Type": "application/json",
            **({"X-API-Key": target.key} if target.key else {}),
            **(self.headers or {}),
            "Content-Length": str(len(body)),
        }
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def at_path(target: Target, stem: str) -> Target:
    """The target at the path of a case instead of the RPC path: see `Case.stem`."""
    if "{key}" in stem:
        return replace(target, path=stem.format(path=target.path, key=target.key), key="")
    return replace(target, path=target.path.replace(f"/{RPC}/", f"/{stem}/"))


def _get(target: Target, path: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: {target.host}:{target.port}", f"X-API-Key: {target.key}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def against(case: Case) -> Case:
    """The same calls as a comparison of CPU time with another checkout."""
    aims = (Aim(NOISE, at_most=True, over=OTHER_CHECKOUT),)
    return replace(case, kind="cpu", unit="µs CPU/request", candidates=(OTHER_CHECKOUT, "penstock"), aims=aims)


CASES = (
    Case(
        "small",
        "small call, all features on, cache off, one call per upstream connection",
        generators=("load", "wrk"),
        has_peers=True,
        aims=(Aim(1.15, without_pgo=1.0), Aim(1.7, over="nginx+lua")),
    ),
    Case(
        "path-key",
        "small call with the key in the path, as wallets send it, compared with the key in a header",
        candidates=(*FEW, OWN_RPC),
        stem="{path}/{key}",
        aims=(Aim(1.15, without_pgo=1.0), Aim(0.98, over=OWN_RPC)),
    ),
    Case(
        "path-alias",
        "small call at the path of another service, compared with the key in a header",
        candidates=(*FEW, OWN_RPC),
        stem="/alchemy/dev/v2/{key}",
        aims=(Aim(1.15, without_pgo=1.0), Aim(0.98, over=OWN_RPC)),
    ),
    Case(
        "heads",
        "small call with a different request head each time (a trace id)",
        headers={"X-Trace-Id": MARKER},
        aims=(Aim(0.75),),
    ),
    Case(
        "bitcoin",
        "small call to a node of Bitcoin, cache off",
        body=bodies.bitcoin,
        candidates=("nginx", "penstock"),
        profile="bitcoin",
        network="bitcoin/regtest",
        aims=(Aim(0.95),),
    ),
    Case(
        "rest-hit",
        "GET of a cached block of the beacon chain (baselines forward the request)",
        expect='"slot":"5"',
        candidates=("nginx", "penstock"),
        profile="beacon",
        network="ethereum-beacon/mainnet",
        route="/eth/v1/beacon/headers/5",
        cache="hit",
        aims=(Aim(1.8),),
    ),
    Case(
        "in-flight",
        "small call, several in flight per upstream connection",
        candidates=FEW,
        profile="in-flight",
        generators=("load", "wrk"),
        aims=(Aim(1.6),),
    ),
    Case(
        "body",
        "100 KB request body",
        body=bodies.big_body,
        aims=(Aim(0.6),),
    ),
    Case(
        "batch",
        f"batch of {BATCH}, compared with nginx forwarding the same calls one by one",
        body=bodies.batch,
        expect=f'"id":{MARKER}{BATCH - 1:02d}',
        calls_per_request=BATCH,
        has_peers=True,
        aims=(Aim(3.0, over=ONE_BY_ONE),),
    ),
    Case(
        "reply",
        "100 KB reply, streamed",
        kind="bytes",
        unit="MB/s",
        body=bodies.big_reply,
        stub="large",
        has_peers=True,
        aims=(Aim(0.95),),
    ),
    Case(
        "tls-upstream",
        "small call to an https upstream, CPU of the gateway",
        kind="cpu",
        unit="µs CPU/call",
        candidates=("nginx+upstream-tls", "penstock"),
        stub="tls",
        has_peers=True,
        aims=(Aim(1.05, at_most=True, over="nginx+upstream-tls"),),
    ),
    Case(
        "tls-upstream-reply",
        "100 KB reply of an https upstream, CPU of the gateway",
        kind="cpu",
        unit="µs CPU/call",
        body=bodies.big_reply,
        candidates=("nginx+upstream-tls", "penstock"),
        stub="tls-large",
        aims=(Aim(1.1, at_most=True, over="nginx+upstream-tls"),),
    ),
    Case(
        "tls",
        "small call over https, connections kept open",
        candidates=("nginx+tls", "penstock"),
        profile="tls",
        generators=("wrk",),
        aims=(Aim(0.8, over="nginx+tls"),),
    ),
    Case(
        "handshakes",
        "small call over https, a full handshake for each",
        candidates=("nginx+tls", "penstock"),
        profile="tls",
        generators=("wrk",),
        headers={"Connection": "close"},
        aims=(Aim(0.7, over="nginx+tls"),),
    ),
    Case(
        "gzip",
        "100 KB reply in gzip",
        body=bodies.big_reply,
        expect="",
        headers=GZIP,
        candidates=("nginx+gzip", "penstock"),
        stub="large",
        aims=(Aim(1.0, over="nginx+gzip"),),
    ),
    Case(
        "gzip-huge",
        "2 MB reply in gzip",
        body=bodies.big_reply,
        expect="",
        headers=GZIP,
        candidates=("nginx+gzip", "penstock"),
        stub="huge",
        connections=16,
        aims=(Aim(1.0, over="nginx+gzip"),),
    ),
    Case(
        "far",
        f"small call to an upstream {FAR_MS} ms away, 512 clients",
        candidates=("nginx", "penstock"),
        stub="far",
        connections=512,
        aims=(Aim(0.95),),
    ),
    Case(
        "one-dead",
        "small call, one upstream of three refuses connections",
        candidates=("penstock", ALL_HEALTHY),
        profile="one-dead",
        has_peers=True,
        aims=(Aim(0.95, over=ALL_HEALTHY),),
    ),
    Case(
        "shared-limits",
        "small call, limits shared with other hosts over Valkey, CPU of the gateway",
        kind="paired",
        unit="µs CPU/call",
        candidates=("penstock", NO_VALKEY),
        profile="shared-limits",
        aims=(Aim(1 / 0.97, at_most=True, over=NO_VALKEY),),
    ),
    Case(
        "mixed",
        "p99 of small calls beside a tenth as many replies of 100 KB, some of 5 MB, and batches of 100",
        kind="mixed",
        unit="µs (p99)",
        candidates=("nginx", "penstock"),
        connections=16,
        aims=(Aim(2.0, at_most=True, over=SMALL_ONLY),),
    ),
    Case(
        "hedge",
        f"hedging: two upstreams {FAR_MS} ms away, 1 reply in {LATE_EVERY} ten times as late",
        kind="hedge",
        unit="",
        candidates=("nginx", "penstock"),
        stub="late",
        profile="hedged",
        connections=128,
        aims=(Aim(0.5, at_most=True, figure="p99"), at_most(5.0, figure="extra")),
    ),
    Case(
        "bundler",
        "bundler read, compared with a small call on the RPC path of the same service",
        body=bodies.receipt,
        candidates=("penstock", OWN_RPC),
        stem="bundler",
        aims=(Aim(0.8, over=OWN_RPC),),
    ),
    Case(
        "hit",
        "cache hit (baselines forward the call)",
        body=bodies.old_block,
        candidates=FEW,
        profile="cached",
        generators=("load", "wrk"),
        cache="hit",
        has_peers=True,
        aims=(Aim(2.2),),
    ),
    Case(
        "hit-number",
        "cache hit of a block by its number (baselines forward the call)",
        body=bodies.old_block_by_number,
        candidates=("nginx", "penstock"),
        profile="cached",
        cache="hit",
        aims=(Aim(2.2),),
    ),
    Case(
        "join",
        "identical calls in flight are joined; the upstream takes 1 ms",
        body=bodies.same,
        candidates=FEW,
        stub="slow",
        profile="joined",
        connections=1024,  # clients run in step: with fewer, the 1 ms they all wait would distort the figure
        generators=("load", "wrk"),
        aims=(Aim(1.5),),
    ),
    Case(
        "latency",
        "latency added to a direct call at half of nginx's rate",
        kind="latency",
        unit="µs",
        candidates=("direct", "nginx", "nginx+lua", "haproxy", "relay", "penstock"),
        connections=16,
        has_peers=True,
        aims=(Aim(1.2, at_most=True, figure="p50"), Aim(1.3, at_most=True, figure="p99")),
    ),
    Case(
        "workers",
        "two workers compared with one",
        kind="workers",
        unit="×",
        candidates=("nginx", "penstock"),
        connections=256,  # the kernel distributes connections by hash, unevenly if there are few
        aims=(at_least(1.8),),
    ),
    Case(
        "idle",
        "memory of 10,000 idle keep-alive connections",
        kind="idle",
        unit="KB/connection",
        candidates=("nginx", "plain", "penstock"),
        profile="idle",
        connections=10_000,
        has_peers=True,
        aims=(at_most(10.0),),
    ),
    Case(
        "cached",
        "memory of 1,000,000 cached replies relative to their size",
        kind="cached",
        unit="×",
        body=bodies.many_old_blocks,
        candidates=ALONE,
        profile="cached-million",
        aims=(at_most(1.3),),
    ),
    Case(
        "cached-logs",
        "memory of 20,000 cached replies with ten logs each, relative to their size",
        kind="packed",
        unit="×",
        candidates=ALONE,
        aims=(at_most(0.4, "kept"), at_most(0.6, "served")),
    ),
    Case(
        "admission",
        "admission (key, scope, both buckets, headers) with 100,000 keys loaded",
        kind="admission",
        unit="µs CPU/request",
        candidates=ALONE,
        aims=(at_most(15.0, "alone"), at_most(15.0, "shared")),
    ),
    Case(
        "leased-admission",
        "admission with limits leased from Valkey and no lease to wait for, 100,000 keys loaded",
        kind="admission",
        unit="µs CPU/request",
        candidates=("penstock", NO_VALKEY),
        aims=at_most_times(NO_VALKEY, {"request": 1.3, "charge": 1.3}),
    ),
    Case(
        "start",
        "loading 100,000 keys at start-up",
        kind="admission",
        unit="s",
        candidates=ALONE,
        aims=(at_most(3.0, "loaded_s"),),
    ),
    Case(
        "fanout",
        "600-byte head sent to every socket",
        kind="fanout",
        unit="messages/CPU second",
        candidates=("ws", "aiohttp", "write", "penstock"),
        connections=10_000,
        aims=(Aim(1.9, over="ws"), Aim(1.3, over="aiohttp")),
    ),
    Case(
        "turn",
        "eight messages per socket in one event-loop iteration, compared with one at a time",
        kind="turn",
        unit="messages/CPU second",
        candidates=ALONE,
        connections=1_000,
        aims=(Aim(4.0, over=ONE_IN_A_TURN),),
    ),
    Case(
        "sockets",
        "10,000 subscribed sockets on one worker",
        kind="sockets",
        unit="",
        candidates=ALONE,
        profile="sockets",
        connections=10_000,
        aims=(
            at_most(30.0, "memory"),
            at_most(500.0, "last"),
            Aim(2.0, at_most=True, over=NO_SOCKETS, figure="calls"),
        ),
    ),
    Case(
        "faults",
        "p99 of calls while one of three upstreams fails, the worst of eight kinds of failure",
        kind="faults",
        unit="ms",
        candidates=ALONE,
        aims=(at_most(250.0),),
    ),
    Case(
        "records",
        "what deciding about a record, and the record itself, add to a call",
        kind="records",
        unit="µs CPU/call",
        candidates=ALONE,
        aims=(at_most(0.15, "not recorded"), at_most(0.15, "not recorded, inline"), at_most(5.0, "recorded")),
    ),
    Case(
        "spans",
        "what traces add, compared with the code without them or a call with tracing off",
        kind="spans",
        unit="µs CPU",
        candidates=ALONE,
        aims=at_most_times(NO_TRACES, {"a head, off": 1.05, "a head, on": 1.3, "a sampled call": 12.0}),
    ),
    Case(
        "verify",
        "verified replies of a real chain, compared with the same call unverified",
        kind="verify",
        unit="µs CPU/call",
        candidates=ALONE,
        aims=at_most_times(NOT_VERIFIED, {"quorum": 3.0, "proof": 60.0}),
    ),
    Case(
        "overload",
        f"{OVERLOAD} times as many calls as the upstream can answer ({LIMITED_MS} ms each, {LIMITED_AT_ONCE} at a time)",
        kind="overload",
        profile="usual-limit",
        unit="",
        candidates=("nginx", "haproxy+queue", "penstock"),
        stub="limited",
        connections=1024,
        aims=(
            at_least(90.0, "goodput"),
            at_most(3.0 * LIMITED_MS, "p99"),
        ),
    ),
    Case(
        "attacks",
        "p99 of one account's calls while another account attacks",
        kind="attacks",
        profile="attacked",
        unit="µs (p99)",
        candidates=ALONE,
        connections=16,
        aims=(
            Aim(2.0, at_most=True, over=NO_ATTACK),
            Aim(3.0, at_most=True, over=NO_ATTACK, figure="crowd"),
            at_most(MAX_GROWTH_MIB, "memory"),
            at_most(MAX_FREE_GROWTH_MIB, "memory of one"),
        ),
    ),
    Case(
        "costs",
        "the dearest of all hostile inputs to all operations",
        kind="costs",
        unit="",
        candidates=ALONE,
        aims=(
            at_most(5.0, "step"),
            at_most(64.0, "growth"),
            at_most(64.0, "written"),
            at_most(1.0, "price"),
            at_most(0.0, "failed"),
        ),
    ),
    Case(
        "filters",
        "block of 1,000 logs matched against 10,000 different filters",
        kind="filters",
        unit="ms",
        candidates=ALONE,
        aims=(at_most(20.0),),
    ),
    Case(
        "matching",
        "block of 5,000 facts matched against 1,000,000 addresses watched by 10,000 webhooks",
        kind="matching",
        unit="ms",
        candidates=ALONE,
        aims=(at_most(50.0), Aim(1.5, at_most=True, over=FEW_ADDRESSES)),
    ),
    Case(
        "upstreams",
        "trying, knowing and billing upstreams",
        kind="upstreams",
        unit="",
        candidates=ALONE,
        aims=(
            *at_most_times(NO_TRIAL, {"p99": 1.05, "cpu": 1.12}),
            at_most(0.0, "missed"),
            at_most(0.0, "false"),
            at_most(0.0, "bounds"),
            at_most(25.0, "bound-calls"),
            at_most(1.0, "refresh"),
            at_most(0.0, "credits"),
            at_most(0.0, "above"),
            at_most(1.0, "unused"),
            *at_most_times(LATENCY_ONLY, {"cost": 0.8, "cost-p99": 1.05}),
            *at_most_times(OTHER_CHECKOUT, dict.fromkeys(("small", "hit", "batch"), NOISE)),
        ),
    ),
    Case(
        "usage",
        "usage: cost per call, and charts of a large account among 10,000,000 rows",
        kind="usage",
        unit="ms",
        candidates=ALONE,
        aims=(
            at_most(0.5, "count"),
            at_most(0.5, "flush"),
            at_most(100.0, "first"),
            at_most(100.0, "all"),
            at_most(100.0, "methods"),
            at_most(100.0, "minutes"),
            at_most(100.0, "filtered"),
            at_most(100.0, "month"),
        ),
    ),
    Case(
        "index",
        "token transfers written to the index, blocks of 300 logs, Postgres on the same core",
        kind="index",
        unit="events/s",
        candidates=("penstock", "copy"),
        aims=(
            at_least(20_000, "ranges"),
            Aim(1 / 3, over="copy", figure="ranges"),
            at_least(20_000, "blocks"),
            Aim(1 / 3, over="copy", figure="blocks"),
        ),
    ),
    Case(
        "pages",
        "page of balances or owned NFTs among 10,000,000 holdings",
        kind="pages",
        unit="ms in Postgres",
        candidates=ALONE,
        aims=(at_most(5.0, "balances"), at_most(5.0, "owned")),
    ),
    Case(
        "transfers",
        "history of transfers",
        kind="transfers",
        unit="transfers/s",
        candidates=ALONE,
        aims=(
            Aim(0.4, over="copy", figure="ranges"),
            Aim(0.4, over="copy", figure="blocks"),
            Aim(5.0, over="ponder", figure="backfill"),
            Aim(0.5, over="cryo", figure="backfill"),
            at_most(220.0, "bytes"),
            at_most(5.0, "page"),
            Aim(2.0, at_most=True, over=FEW_TRANSFERS, figure="page"),
            at_most(1.0, "late"),
            Aim(1.5, at_most=True, over=NO_BACKFILL, figure="calls"),
        ),
    ),
    Case(
        "balances",
        "balances of a holder of 500 tokens, with nothing cached, names cached, or all cached",
        kind="balances",
        unit="ms CPU",
        candidates=ALONE,
        aims=(
            at_most(25.0, "cold"),
            at_most(25.0, "block"),
            at_most(1.0, "kept"),
            at_most(2.0, "calls"),
        ),
    ),
    Case(
        "sponsor",
        "sponsorship (decide, sign, reserve), Postgres on the same core",
        kind="sponsor",
        unit="ms",
        candidates=ALONE,
        aims=(at_most(3.0, "p50"),),
    ),
    Case(
        "delivery",
        "webhook delivery (claim, sign, post, record), Postgres on the same core",
        kind="delivery",
        unit="deliveries/s",
        candidates=("penstock", BARE_CLIENT),
        aims=(
            at_least(1_000, "rate"),
            Aim(0.5, over=BARE_CLIENT, figure="rate"),
            at_most(50.0, "lag"),
            at_most(32.0, "memory"),
        ),
    ),
)
