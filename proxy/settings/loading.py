"""Merges the defaults, the operator's file and the environment into settings, or reports all faults together."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from proxy.chains.registry import Network
from proxy.data_files import CONFIG
from proxy.errors import StartError
from proxy.settings.alias_files import load_aliases
from proxy.settings.certificates import link_faults, tls_faults
from proxy.settings.crosschecks import (
    database_faults,
    named_networks,
    network_faults,
    paymaster_faults,
    relay_faults,
    tracing_faults,
)
from proxy.settings.given_files import read_text
from proxy.settings.masking import masked_value
from proxy.settings.providers import with_providers
from proxy.settings.proxies import with_proxies
from proxy.settings.schemas import is_secret, schema_faults
from proxy.settings.sections import Settings
from proxy.settings.tables import Tables, load_tables, shipped_tables
from proxy.settings.toml_files import line_of, read

PREFIX = "PENSTOCK_"
# Variables with the prefix that are not settings: the directory of `dev`, the settings file and the tracebacks of commands,
# options of the development chain (config/devnet), the tests' browser (tests/browser), and whether to make (setup.py) or ignore
# (proxy/compiled.py) compiled modules.
_NOT_SETTINGS = frozenset(
    {
        "PENSTOCK_DATA",
        "PENSTOCK_CONFIG",
        "PENSTOCK_TRACEBACK",
        "PENSTOCK_BLOCK_TIME_MS",
        "PENSTOCK_DEVNET_LOG",
        "PENSTOCK_CHROMIUM",
        "PENSTOCK_COMPILE",
        "PENSTOCK_SOURCE",
    }
)


# The name of a setting at the beginning of a fault, and URLs that stand for one upstream.
_SETTING = re.compile(r"[a-z][a-z0-9_]*(\.[\w*/-]+)*")
_OWN_URL = re.compile(r"(https?|wss?):")


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the effective settings, or raise StartError with every fault.

    `defaults` replace those of `config/default.toml`; `overrides` replace everything.
    """
    tree, faults = _tree(path, environ, defaults or {})
    return from_tree(_merged(tree, overrides or {}), faults=faults)


def load_with_tables(path: Path | None, *, environ: Mapping[str, str]) -> tuple[Settings, Tables]:
    """Return the effective settings and the data files, or raise StartError with the faults of both, and their lines."""
    try:
        return _load_with_tables(path, environ)
    except StartError as exc:
        if path is None:
            raise
        raise StartError(_with_lines(path, exc.faults)) from None


def _with_lines(path: Path, faults: Sequence[str]) -> list[str]:
    """The faults, those about keys of the operator's file with its line."""
    try:
        text, given = read_text(path), read(path)
    except (OSError, UnicodeDecodeError, StartError):
        return [*faults]
    upstreams = [each for each in given.get("upstreams", ()) if isinstance(each, Mapping)]
    # Other URLs stand for several upstreams, so the positions of those after them are others.
    is_expanded = any(not _OWN_URL.match(str(each.get("url", "http:"))) for each in upstreams)
    located = []
    for fault in faults:
        name = fault.partition(": ")[0]
        is_moved = is_expanded and name.startswith("upstreams.")
        line = line_of(text, name) if _SETTING.fullmatch(name) and not is_moved else None
        located.append(fault if line is None else f"{path}:{line}: {fault}")
    return located


def _load_with_tables(path: Path | None, environ: Mapping[str, str]) -> tuple[Settings, Tables]:
    tree, faults = _tree(path, environ, {})
    tables = None
    try:
        tables = load_tables(own=_own_directory(tree)).with_networks(named_networks(tree))
        faults += (
            *network_faults(tree, tables),
            *database_faults(tree, tables),
            *paymaster_faults(tree, tables, environ),
            *relay_faults(tree, tables, environ),
        )
        switches = tree.get("aliases")
        if isinstance(switches, Mapping):
            load_aliases(switches, tables, own=_own_directory(tree), settings_file=path)
    except StartError as exc:
        faults += exc.faults
    faults += (*tls_faults(tree), *link_faults(tree), *tracing_faults(tree))
    settings = from_tree(tree, faults=faults)
    if tables is None:
        raise StartError(faults)
    return settings, tables


def _tree(
    path: Path | None, environ: Mapping[str, str], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    known = tree = _merged(read(CONFIG / "default.toml"), defaults)
    if path is not None:
        tree = _merged(tree, read(path))
    tree, faults = _with_environment(tree, environ, known)
    tree, unusable = expanded(tree, path)
    return with_proxies(tree, environ), [*faults, *unusable]


def expanded(tree: Mapping[str, Any], path: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """The settings with the upstreams of their providers, and the faults. `path`: the operator's file."""
    own = _own_directory(tree)

    def place(list_name: str, index: int, setting: str) -> str:
        line = None if path is None else line_of(read_text(path), f"{list_name}.{index}.{setting}")
        name = f"{list_name}.{index}.{setting}"
        return name if line is None else f"{path}:{line}: {name}"

    def find(name: str) -> Network | None:
        return (load_tables(own=own) if own else shipped_tables()).find_network(name)

    return with_providers(tree, own=own, find=find, place=place)


def tables_for(settings: Settings) -> Tables:
    """The data files of a service with these settings: all chain files, and the listed chains that the settings name."""
    own = settings.data_files.directory
    tables = load_tables(own=own) if own else shipped_tables()
    return tables.with_networks(named_networks(settings.tree))


def own_directory(path: Path | None, *, environ: Mapping[str, str]) -> str:
    """The operator's directory of data files, even if other settings are still missing. Empty if there is none."""
    tree = _tree(path, environ, {})[0]
    if faults := [fault for fault in schema_faults("settings", tree) if fault.startswith("data_files")]:
        raise StartError(faults)
    return _own_directory(tree)


def _own_directory(tree: Mapping[str, Any]) -> str:
    """The schema reports values of the wrong type."""
    section = tree.get("data_files")
    directory = section.get("directory") if isinstance(section, Mapping) else None
    return directory if isinstance(directory, str) else ""


def from_tree(tree: Mapping[str, Any], *, faults: list[str] | None = None) -> Settings:
    all_faults = list(faults or ())
    all_faults += schema_faults("settings", tree)
    all_faults += _network_faults(tree)
    if all_faults:
        raise StartError(all_faults)
    # Not strict, because the schema accepts 8545.0 as an integer.
    lists: dict[str, Any] = {
        name: []
        for name in (
            *("databases", "upstreams", "bundlers", "relays", "paymasters"),
            *("verify", "routing", "cost_routing", "replies"),
        )
    }
    return msgspec.convert({**lists, **tree, "tree": tree}, Settings, strict=False)


def preload() -> None:
    """Read the files that ship with the code before processes are forked, so that they share the memory."""
    shipped_tables()
    load(environ={}, overrides={"database": {"url": "postgresql://localhost"}, "keys": {"pepper": "-" * 32}})


def masked(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each setting with its value as JSON, secrets masked."""
    for name, value in _leaves(settings.tree):
        secret = is_secret(name.split(".")) and value
        yield name, masked_value(value) if secret else str(orjson.dumps(value), "utf-8")


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(tree, list | tuple) and tree and isinstance(tree[0], Mapping):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{name}.{index}")
    else:
        yield name, tree


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merged(below if isinstance(below, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return out


def _with_environment(
    tree: Mapping[str, Any], environ: Mapping[str, str], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Apply PENSTOCK_SECTION__KEY=value, parsed as the type of the key's default, and DATABASE_URL.

    A table inside a section adds its name: PENSTOCK_SERVER__TLS__CERT.
    """
    faults: list[str] = []
    tree = _merged({}, tree)
    own = {name: text for name, text in environ.items() if name.startswith(PREFIX) and name not in _NOT_SETTINGS}
    if url := environ.get("DATABASE_URL"):
        own = {f"{PREFIX}DATABASE__URL": url, **own}
    for name, text in own.items():
        *tables, key = name.removeprefix(PREFIX).lower().split("__")
        like = _value_at(defaults, (*tables, key))
        if not tables:
            faults.append(f"{name}: settings are named {PREFIX}SECTION__KEY")
        elif like is None:
            faults.append(f"{name}: there is no setting {'.'.join((*tables, key))}")
        elif isinstance(section := _value_at(tree, tables), dict):  # otherwise the schema reports the file's fault
            section[key] = _typed(text, like)
    return tree, faults


def _value_at(tree: Any, names: Sequence[str]) -> Any:
    for name in names:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _typed(text: str, like: Any) -> Any:
    """Parse the text as a TOML value of the default's type. Invalid text is returned as it is; the schema reports it."""
    if isinstance(like, str):
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return float(value) if isinstance(like, float) and type(value) is int else value


def _network_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """Report invalid address blocks. The schema reports values that are not lists or not text."""
    for name, key in (("server", "trusted_proxies"), ("egress", "allow"), ("egress", "deny")):
        section = tree.get(name)
        blocks = section.get(key) if isinstance(section, Mapping) else None
        for index, text in enumerate(blocks if isinstance(blocks, list | tuple) else ()):
            try:
                if isinstance(text, str):
                    ipaddress.ip_network(text)
            except ValueError as exc:
                yield f"{name}.{key}.{index}: {exc}"


def environment() -> Mapping[str, str]:
    return os.environ


def data_directory() -> Path:
    """Return the default data directory of a development service."""
    return Path(environment().get("PENSTOCK_DATA", ".penstock"))
