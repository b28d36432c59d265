"""TOML and the environment -> frozen settings.

Order: `config/default.toml`, then the operator's file, then the environment. What the values may be is written in
`schemas/config/*.json`; everything wrong is collected and reported at once, each fault with the name of its key.
Only this room reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jsonschema_rs
import msgspec
import orjson

from proxy.chains.registry import Chain, Registry
from proxy.core.access import Limits
from proxy.core.pricing import Prices
from proxy.errors import StartError

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "config"
SCHEMAS = ROOT / "schemas"
PREFIX = "PENSTOCK_"
# Names with our prefix that are no settings: where `dev` keeps its state, and what its chain reads (config/devnet).
_NOT_SETTINGS = frozenset({"PENSTOCK_DATA", "PENSTOCK_BLOCK_TIME_MS", "PENSTOCK_DEVNET_LOG"})
# Settings whose value is never printed.
SECRETS = frozenset({"cache.redis_url", "database.url", "keys.pepper", "upstreams.url", "upstreams.headers"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    port: int
    workers: int
    dev: bool
    head_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float
    keepalive_s: float
    keepalive_requests: int
    max_head_bytes: int
    max_body_bytes: int
    max_connections: int
    connections_per_address: int
    drain_s: float
    trusted_proxies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Database:
    url: str
    pool_size: int
    acquire_timeout_s: float


@dataclass(frozen=True, slots=True)
class Keys:
    pepper: str
    reload_s: float
    auth_failures_per_minute: int


@dataclass(frozen=True, slots=True)
class Quotas:
    chunk: int
    flush_s: float


@dataclass(frozen=True, slots=True)
class Log:
    level: str
    access: bool


@dataclass(frozen=True, slots=True)
class Rpc:
    call_timeout_s: float
    lag_s: float
    max_logs_blocks: int
    logs_chunk_blocks: int
    depth: int
    broadcast: int
    show_upstream: bool


@dataclass(frozen=True, slots=True)
class Cache:
    enabled: bool
    bytes: int
    coalesce: bool
    redis_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    network: str
    url: str
    weight: float = 1.0
    tier: int = 0
    archive: bool = True
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    requests_per_second: float = 0.0
    batch: int = 20
    connections: int = 64
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    requests_per_second: int
    requests_per_day: int
    units_per_second: int
    webhook_deliveries_per_day: int
    sockets: int
    subscriptions: int
    webhooks: int
    policies: int
    wallets: int

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_second, self.units_per_second, self.requests_per_day)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that an operator can decide. `tree` is the same as plain data, to print or to hand to a worker."""

    server: Server
    metrics: Metrics
    database: Database
    keys: Keys
    quotas: Quotas
    rpc: Rpc
    cache: Cache
    log: Log
    upstreams: tuple[Upstream, ...]
    tree: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tables:
    """The data files: chains, plans and prices."""

    chains: Registry
    plans: Mapping[str, Plan]
    prices: Prices


def load(
    path: Path | None = None, *, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None
) -> Settings:
    """The effective settings, or a StartError with every fault."""
    defaults = tree = _read(CONFIG / "default.toml")
    if path is not None:
        tree = _merged(tree, _read(path))
    tree, faults = _with_environment(tree, environ, defaults)
    tree = _merged(tree, overrides or {})
    return from_tree(tree, faults=faults)


def from_tree(tree: Mapping[str, Any], *, faults: list[str] | None = None) -> Settings:
    found = list(faults or ())
    found += _schema_faults("settings", tree)
    found += _network_faults(tree)
    if found:
        raise StartError(found)
    # Not strict, because to the schema 8545.0 is an integer.
    return msgspec.convert({"upstreams": [], **tree, "tree": tree}, Settings, strict=False)


def load_tables(config: Path = CONFIG) -> Tables:
    """Chains, plans and prices, or a StartError with every fault of every file."""
    faults: list[str] = []
    files = sorted((config / "chains").glob("*.toml"))
    chains = [msgspec.convert(data, Chain) for path in files if (data := _checked("chain", path, faults))]
    plans = _checked("plans", config / "plans.toml", faults)
    prices = _checked("pricing", config / "pricing.toml", faults)
    registry = Registry(chains)
    faults += registry.faults()
    if faults:
        raise StartError(faults)
    return Tables(registry, msgspec.convert(plans, dict[str, Plan]), msgspec.convert(prices, Prices))


def masked(settings: Settings) -> Iterator[tuple[str, str]]:
    """Each setting with its value as it may be shown."""
    for name, value in _leaves(settings.tree):
        secret = _is_secret(name.split(".")) and value
        yield name, "********" if secret else str(orjson.dumps(value), "utf-8")


def _is_secret(path: Sequence[str]) -> bool:
    """Whether a setting, or one that it is a part of, is secret: `upstreams.0.url` is as `upstreams.url`."""
    return any(f"{path[0]}.{step}" in SECRETS for step in path[1:])


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(tree, list | tuple) and tree and isinstance(tree[0], Mapping):
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{name}.{place}")
    else:
        yield name, tree


def _read(path: Path) -> dict[str, Any]:
    try:
        # TOML has dates, the schemas know none: as text they are checked like any other value.
        return dict(msgspec.to_builtins(tomllib.loads(path.read_text("utf-8"))))
    except OSError as exc:
        raise StartError([f"{path}: cannot be read: {exc.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise StartError([f"{path}: not valid TOML: {exc}"]) from None


def _checked(schema: str, path: Path, faults: list[str]) -> dict[str, Any]:
    """The file's data; empty, and its faults added to the others, where it has any."""
    try:
        data = _read(path)
    except StartError as exc:
        faults += exc.faults
        return {}
    found = [f"{path.name}: {fault}" for fault in _schema_faults(schema, data)]
    if schema == "chain" and data.get("name", path.stem) != path.stem:
        found.append(f"{path.name}: name: must be {path.stem}, as the file's name is")
    faults += found
    return {} if found else data


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return out


def _with_environment(
    tree: Mapping[str, Any], environ: Mapping[str, str], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """PENSTOCK_SECTION__KEY=value, read as the type that the key's default has. DATABASE_URL is understood as well."""
    faults: list[str] = []
    tree = {section: dict(values) if isinstance(values, Mapping) else values for section, values in tree.items()}
    own = {name: text for name, text in environ.items() if name.startswith(PREFIX) and name not in _NOT_SETTINGS}
    if url := environ.get("DATABASE_URL"):
        own = {f"{PREFIX}DATABASE__URL": url, **own}
    for name, text in own.items():
        section, _, key = name.removeprefix(PREFIX).lower().partition("__")
        if key not in defaults.get(section, {}):
            faults.append(
                f"{name}: there is no setting {section}.{key}" if key else f"{name}: write {PREFIX}SECTION__KEY"
            )
        elif isinstance(tree[section], dict):  # else the file is at fault, and the schema says so
            tree[section][key] = _typed(text, defaults[section][key])
    return tree, faults


def _typed(text: str, like: Any) -> Any:
    """The text as a TOML value of the default's type; what does not read stays text, and the schema names it."""
    if isinstance(like, str):
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return float(value) if isinstance(like, float) and type(value) is int else value


def _schema_faults(name: str, data: Mapping[str, Any]) -> list[str]:
    schema = orjson.loads((SCHEMAS / "config" / f"{name}.json").read_bytes())
    validator = jsonschema_rs.Draft202012Validator(schema)
    return sorted({_fault_text(error) for error in validator.iter_errors(dict(data))})


# A secret's value must not reach the terminal through a message about it.
_FAULT_WORDS: dict[tuple[str, ...], str] = {
    ("cache", "redis_url"): "must be a redis:// or rediss:// address, or empty",
    ("database", "url"): "must be a postgresql:// address (set it in the file or in DATABASE_URL)",
    ("keys", "pepper"): "must be 32 or more random characters (set it in the file or in PENSTOCK_KEYS__PEPPER)",
}


# What stands in the place of one of these sections is most likely the secret that belongs inside it.
_SECRET_ROOMS = frozenset(name.split(".")[0] for name in SECRETS)


def _fault_text(error: jsonschema_rs.ValidationError) -> str:
    path = tuple(str(step) for step in error.instance_path)
    words = _FAULT_WORDS.get(path[:2])
    if words is None and _is_secret(path):
        words = (
            "must be an http, https, ws or wss address"
            if path[-1] == "url"
            else "is not valid; it is not repeated here"
        )
    is_section = len(path) == 1 or (len(path) == 2 and path[1].isdecimal())
    if words is None and is_section and path[0] in _SECRET_ROOMS and error.kind.name == "type":
        words = "must be a table of settings"
    return f"{'.'.join(path) or 'settings'}: {words or error.message}"


def _network_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """What is no list or no text the schema has already named."""
    server = tree.get("server")
    blocks = server.get("trusted_proxies") if isinstance(server, Mapping) else None
    for place, text in enumerate(blocks if isinstance(blocks, list | tuple) else ()):
        try:
            if isinstance(text, str):
                ipaddress.ip_network(text)
        except ValueError as exc:
            yield f"server.trusted_proxies.{place}: {exc}"


def upstream_faults(settings: Settings, tables: Tables) -> list[str]:
    """Upstreams of networks that no chain file knows."""
    return [
        f"upstreams.{place}.network: there is no network {upstream.network} in config/chains"
        for place, upstream in enumerate(settings.upstreams)
        if tables.chains.find(*upstream.network.split("/")) is None
    ]


def environment() -> Mapping[str, str]:
    return os.environ


def data_directory() -> Path:
    """Where a development service keeps its state, unless it is told otherwise."""
    return Path(environment().get("PENSTOCK_DATA", ".penstock"))
