"""The import table: web -> services -> {store, wire, chains} -> core -> errors, and chains -> core."""

from __future__ import annotations

import ast

from tests.house.source import imports_of, modules, ring_of

# What every ring but the pure ones may know beside its inner rings.
SUPPORT = {"settings", "telemetry", "tasks"}

# The whole table. A ring may know itself, but for services.
MAY_KNOW: dict[str, set[str]] = {
    "compiled": set(),
    "errors": set(),
    "core": {"errors"},
    "chains": {"core", "errors"},
    "tasks": set(),
    "telemetry": {"core"},
    "settings": {"chains", "core", "errors"},
    "store": {"chains", "core", "errors", *SUPPORT},
    "wire": {"chains", "core", "errors", *SUPPORT},
    "services": {"store", "wire", "chains", "core", "errors", *SUPPORT},
    "web": {"services", "chains", "core", "errors", *SUPPORT},
}
# The composition root, the processes around it, and what a person starts.
SEE_EVERYTHING = {"compose", "processes", "commands", "dev", "__main__", ""}

# Services do not import each other: what one needs is passed in. These are passed in as well, and known by type because
# the two are one decision; a protocol between them would have one implementation and be read twice.
TOGETHER: dict[tuple[str, str], str] = {
    ("admission", "keyring"): "who asks is the first of admission's three questions",
    ("admission", "quotas"): "and how much of the day is left is part of the last",
    ("readiness", "keyring"): "a worker is ready when its keys are loaded",
    ("bundler", "rpc"): "its calls are the data plane's, with a desk before them",
    ("wallets", "rpc"): "whether a wallet is deployed only the chain knows",
    (
        "follower",
        "rpc",
    ): "it asks of blocks by the ways of all calls: upstreams that are healthy and far enough, and retries",
    ("multicall", "rpc"): "reading contracts is asking the network, and only its errors tell a refusal from an outage",
    ("tokens", "multicall"): "what a token is, its contract says: many are read at once",
    ("tokens", "rpc"): "where accounts are found by their owner, the network itself is asked",
    ("tokens", "prices"): "a balance is listed by what it is worth",
    ("gas", "rpc"): "what gas costs only the network knows",
    ("sponsor", "rpc"): "what a paymaster has paid, and what a call will use, only the network knows",
    ("events", "follower"): "a sink that wants more than was read says so, and the follower reads again",
    ("events", "rpc"): "what an event lacks only the network can tell",
    ("backtest", "rpc"): "blocks of the past are the network's to tell",
    ("backtest", "webhooks"): "a config means the same, tried or subscribed to",
    ("fleet", "rpc"): "the health of upstreams is the network's, and so is a cordon",
    ("rpc", "admission"): "a call is admitted in the middle of its own flow, item by item in a batch",
    ("feed", "rpc"): "it asks the same upstreams, by the same flights",
}
# Where web reaches past services.
PAST_SERVICES: dict[tuple[str, str], str] = {
    ("front.client", "wire"): "a call goes from the client's connection to the upstream's, and its reply back",
    (
        "front.writing",
        "wire",
    ): "a large reply is passed on as it arrives, from the upstream's connection to the client's",
    ("front.reading", "wire"): "a client that does not read stops the reading of its reply from the upstream",
    ("front.shared", "wire"): "replies and calls of one turn of the loop leave together",
}

# What core and chains may import from outside. No clock, no randomness, no I/O, no logging: whoever adds a module here
# has made sure that it has none of these.
PURE = {
    *("__future__", "abc", "base64", "bisect", "collections", "dataclasses", "decimal", "enum"),
    *("fractions", "functools", "hashlib", "heapq", "hmac", "ipaddress", "itertools", "json", "math", "operator", "re"),
    *("string", "struct", "types", "typing", "zlib", "msgspec", "orjson", "sha3"),
}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}
PURE_RINGS = ("core", "chains")

OURS = sorted(modules())


def ours(module: str) -> list[str]:
    return [name for name in imports_of(module) if name.split(".")[0] == "proxy"]


def test_every_ring_is_in_the_table() -> None:
    assert {ring_of(module) for module in OURS} <= set(MAY_KNOW) | SEE_EVERYTHING


def outside(module: str) -> list[str]:
    """The imports of a module that its ring does not allow."""
    ring = ring_of(module)
    if ring in SEE_EVERYTHING:
        return []
    allowed = {*MAY_KNOW[ring], ring, ""} | {past for name, past in PAST_SERVICES if f"proxy.web.{name}" == module}
    return [name for name in ours(module) if ring_of(name) not in allowed]


def test_modules_import_only_from_rings_that_the_table_allows() -> None:
    assert not [f"{module} imports {name}" for module in OURS for name in outside(module)]


def test_store_and_wire_never_meet() -> None:
    for one, other in (("store", "wire"), ("wire", "store")):
        assert other not in MAY_KNOW[one]
        assert not [m for m in OURS if ring_of(m) == one and other in map(ring_of, ours(m))]


def service_of(module: str) -> str:
    """A service is a module of services/, or a package there: its rooms are one service."""
    return module.split(".")[2] if module.startswith("proxy.services.") else ""


def service_pairs() -> set[tuple[str, str]]:
    pairs = {(service_of(module), service_of(name)) for module in OURS for name in ours(module)}
    return {(one, other) for one, other in pairs if one and other and one != other}


def test_services_import_each_other_only_where_the_table_gives_the_reason() -> None:
    assert not service_pairs() - set(TOGETHER)


def test_no_exemption_outlives_its_import() -> None:
    assert not set(TOGETHER) - service_pairs()
    web = {(module.removeprefix("proxy.web."), ring_of(name)) for module in OURS for name in ours(module)}
    assert not set(PAST_SERVICES) - web


def impurities(module: str) -> set[str]:
    """The imports and calls by which a module could reach a clock, randomness, I/O or a log."""
    foreign = {name.split(".")[0] for name in imports_of(module)} - {"proxy"}
    called = {
        node.func.id
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return (foreign - PURE) | (called & IMPURE_CALLS)


def test_pure_modules_use_no_clock_randomness_io_or_log() -> None:
    pure = [module for module in OURS if ring_of(module) in PURE_RINGS]
    assert not [f"{module} uses {name}" for module in pure for name in sorted(impurities(module))]


def test_only_settings_reads_the_environment() -> None:
    """And what starts a process, is the root of one, or comes before everything else."""
    allowed = {"settings", "processes", "compose", "dev", "compiled"}
    reads = [
        module
        for module in OURS
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ring_of(module) not in allowed
    ]
    assert not reads
