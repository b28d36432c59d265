"""The import table: web -> services -> {store, wire, chains} -> core -> errors, and chains -> core."""

from __future__ import annotations

import ast
from functools import cache

from tests.conventions.source import imports_of, modules, ring_of

# Modules that every ring but the pure ones may import beside its inner rings.
SUPPORT = {
    *(
        "connection_queue",
        "data_files",
        "memory_budget",
        "request_threads",
        "settings",
        "telemetry",
        "tasks",
        "tracing",
        "turn_queue",
    ),
}

# The whole table. A ring may know itself, but for services.
MAY_KNOW: dict[str, set[str]] = {
    "compiled": set(),
    "connection_queue": {"core"},
    "data_files": set(),
    "errors": set(),
    "core": {"errors"},
    "chains": {"core", "errors"},
    "memory_budget": {"telemetry"},
    "request_threads": {"connection_queue", "tasks"},
    "tasks": {"errors", "telemetry"},
    "telemetry": {"core"},
    "turn_queue": {"core", "tasks"},
    "tracing": {"core", "settings"},
    "settings": {"chains", "core", "data_files", "errors"},
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
    ("request_recorder", "rpc"): "the record of a call lists the attempts of its flight",
    ("request_log", "request_recorder"): "the log writes what was recorded",
    ("readiness", "accounts"): "a worker is ready when its keys are loaded",
    ("bundler", "accounts"): "a search for an operation is charged call by call",
    ("webhooks", "accounts"): "a back-test is charged for what it reads",
    ("bundler", "rpc"): "bundler calls run on the data plane, behind a guard that checks their params",
    ("wallets", "rpc"): "only the chain can say whether a wallet is deployed",
    ("follower", "rpc"): "blocks are read like any call: healthy upstreams that are far enough, and retries",
    ("multicall", "rpc"): "reading contracts is a call, and only its error separates a refusal from an outage",
    ("tokens", "multicall"): "token data comes from contracts, many in one call",
    ("tokens", "rpc"): "where a family finds accounts by owner, the network itself is queried",
    ("tokens", "accounts"): "long lists of holders and transfers are paid for as they are read",
    ("tokens", "prices"): "balances are sorted by their value",
    ("gas", "rpc"): "gas prices come from the network",
    ("sponsor", "rpc"): "a paymaster's past payments and a call's gas come from the network",
    ("events", "follower"): "a sink that needs more than was read raises StaleRead, and the follower reads again",
    ("events", "rpc"): "missing parts of an event are read from the network",
    ("webhooks", "rpc"): "a backtest reads past blocks from the network",
    ("relays", "accounts"): "each relay that gets a transaction is a call, which is paid for",
    ("relays", "rpc"): "private transactions run on the data plane, past its upstreams",
    ("fleet", "rpc"): "upstream health and cordons belong to the network's route",
    ("rpc", "accounts"): "a call is admitted in the middle of its own flow, item by item in a batch",
    ("feed", "rpc"): "subscriptions use the same upstreams and the same flights",
}
# Modules of web that import from beyond services.
PAST_SERVICES: dict[tuple[str, str], str] = {
    ("front.front_connection", "wire"): "on the short path it chooses the network's only upstream",
    ("front.short_call", "wire"): "a call goes from the client's connection to the upstream's, and its reply back",
    ("front.reply_writer", "wire"): "it waits for large replies, and the replies of one loop turn leave together",
    ("front.reply_stream", "wire"): "a large reply streams from the upstream's connection to the client's",
    ("front.request_reader", "wire"): "bytes that no message begins with mark a head that is not known",
    ("front.front_context", "wire"): "replies and calls of one turn of the loop leave together",
    ("front.handler_connection", "wire"): "both sides of a connection read large messages in slices",
    ("front.lingering", "wire"): "both sides of a connection read large messages in slices",
    ("front.tls_listener", "wire"): "both sides of a connection use the same TLS",
}

# Foreign modules that core and chains may import: no clock, no randomness, no I/O, no logging. Check a module for these
# before adding it.
PURE = {
    *(
        "__future__",
        "abc",
        "base64",
        "bisect",
        "collections",
        "dataclasses",
        "datetime",
        "decimal",
        "difflib",
        "email",
        "enum",
    ),
    *("fractions", "functools", "hashlib", "heapq", "hmac", "ipaddress", "itertools", "json", "math", "operator", "re"),
    *("string", "struct", "types", "typing", "zlib", "msgspec", "orjson", "sha3", "ens_normalize", "isal", "zstandard"),
    *("brotli", "coincurve", "rlp", "trie"),
}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}
# Methods of `datetime` that read the clock.
CLOCK_METHODS = {"now", "today", "utcnow"}
PURE_RINGS = ("core", "chains")


@cache
def every_module() -> list[str]:
    return sorted(modules())


def ours(module: str) -> list[str]:
    return [name for name in imports_of(module) if name.split(".")[0] == "proxy"]


def test_every_ring_is_in_the_table() -> None:
    assert {ring_of(module) for module in every_module()} <= set(MAY_KNOW) | SEE_EVERYTHING


def outside(module: str) -> list[str]:
    """The imports of a module that its ring does not allow."""
    ring = ring_of(module)
    if ring in SEE_EVERYTHING:
        return []
    allowed = {*MAY_KNOW[ring], ring, ""} | {past for name, past in PAST_SERVICES if f"proxy.web.{name}" == module}
    return [name for name in ours(module) if ring_of(name) not in allowed]


def test_modules_import_only_from_rings_that_the_table_allows() -> None:
    assert not [f"{module} imports {name}" for module in every_module() for name in outside(module)]


def test_store_and_wire_never_meet() -> None:
    for one, other in (("store", "wire"), ("wire", "store")):
        assert other not in MAY_KNOW[one]
        assert not [m for m in every_module() if ring_of(m) == one and other in map(ring_of, ours(m))]


def service_of(module: str) -> str:
    """A service is a module of services/, or a package there: its rooms are one service."""
    return module.split(".")[2] if module.startswith("proxy.services.") else ""


def service_pairs() -> set[tuple[str, str]]:
    pairs = {(service_of(module), service_of(name)) for module in every_module() for name in ours(module)}
    return {(one, other) for one, other in pairs if one and other and one != other}


def test_services_import_each_other_only_where_the_table_gives_the_reason() -> None:
    assert not service_pairs() - set(TOGETHER)


def test_no_exemption_outlives_its_import() -> None:
    assert not set(TOGETHER) - service_pairs()
    web = {(module.removeprefix("proxy.web."), ring_of(name)) for module in every_module() for name in ours(module)}
    assert not set(PAST_SERVICES) - web


def impurities(module: str) -> set[str]:
    """The imports and calls by which a module could reach a clock, randomness, I/O or a log."""
    foreign = {name.split(".")[0] for name in imports_of(module)} - {"proxy"}
    called = {
        node.func.id
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    methods = {
        node.func.attr
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    return (foreign - PURE) | (called & IMPURE_CALLS) | (methods & CLOCK_METHODS)


def test_pure_modules_use_no_clock_randomness_io_or_log() -> None:
    pure = [module for module in every_module() if ring_of(module) in PURE_RINGS]
    assert not [f"{module} uses {name}" for module in pure for name in sorted(impurities(module))]


def test_only_settings_reads_the_environment() -> None:
    """And what starts a process, is the root of one, or comes before everything else."""
    allowed = {"settings", "processes", "compose", "dev", "compiled"}
    reads = [
        module
        for module in every_module()
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ring_of(module) not in allowed
    ]
    assert not reads


# Cycles

# Modules that still import each other, for type checkers at least. Remove a knot once it is untied; add none.
KNOTS: tuple[frozenset[str], ...] = ()


def needed_by(module: str) -> set[str]:
    """The modules of ours that a module imports, and their packages: Python runs these first. Not its own packages."""
    found = {name for name in ours(module) if name in modules()}
    packages = {package for name in found for package in packages_of(name)}
    return found | packages - {module, *packages_of(module)}


def packages_of(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def reachable(module: str) -> set[str]:
    """All modules of ours that a module imports, directly or through others, for type checkers too."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        found = needed_by(todo.pop()) - seen
        seen |= found
        todo += found
    return seen


def cycles() -> set[frozenset[str]]:
    """The groups of modules that import each other."""
    below = {module: reachable(module) for module in every_module()}
    groups = {frozenset(name for name in below[module] if module in below[name]) for module in every_module()}
    return groups - {frozenset()}


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports under TYPE_CHECKING count: a cycle of types is one object cut into files."""
    assert not [sorted(group) for group in cycles() if not any(group <= knot for knot in KNOTS)]
