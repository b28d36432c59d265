"""Validates settings against `schemas/config/*.json`. A fault names the key and never contains a secret's value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import orjson

from proxy.data_files import SCHEMAS

# Settings whose value is never printed whole.
SECRETS = frozenset(
    {
        *(
            "valkey.limits_url",
            "valkey.cache_url",
            "database.direct_url",
            "database.replica_url",
            "database.url",
            "keys.pepper",
            "keys.previous_pepper",
            "nfts.floor_url",
            "prices.key",
            "prices.url",
            "mail.password",
        ),
        "webhooks.secret_key",
        *("upstreams.url", "upstreams.headers", "upstreams.bearer", "upstreams.proxy"),
        *("databases.url", "databases.direct_url"),
        *("bundlers.url", "bundlers.headers", "bundlers.bearer", "bundlers.proxy"),
        *("relays.url", "relays.headers", "relays.bearer", "relays.proxy"),
    }
)


def is_secret(path: Sequence[str]) -> bool:
    """Return whether a setting, or one that contains it, is secret. `upstreams.0.url` counts as `upstreams.url`."""
    return any(f"{path[0]}.{step}" in SECRETS for step in path[1:])


def schema_faults(name: str, data: Mapping[str, Any]) -> list[str]:
    path = SCHEMAS / "config" / f"{name}.json"
    validator = _validator(path, path.stat().st_mtime_ns)
    return sorted({_fault_text(error) for error in validator.iter_errors(dict(data))})


@cache
def _validator(path: Path, _changed_ns: int) -> jsonschema_rs.Draft202012Validator:
    """Compiled once for all files of a kind. An upgrade under a running supervisor changes the schema."""
    return jsonschema_rs.Draft202012Validator(orjson.loads(path.read_bytes()))


# Messages for secrets, instead of the validator's, which contain the value.
_FAULT_WORDS: dict[tuple[str, ...], str] = {
    ("valkey", "limits_url"): "must be a valkey://, valkeys://, redis:// or rediss:// address, or empty",
    ("valkey", "cache_url"): "must be a valkey://, valkeys://, redis:// or rediss:// address, or empty",
    ("database", "url"): "must be a postgresql:// address (set it in a file of `penstock init` or in DATABASE_URL)",
    ("database", "direct_url"): "must be a postgresql:// address, or empty",
    ("database", "replica_url"): "must be a postgresql:// address, or empty",
    ("databases", "url"): "must be a postgresql:// address",
    ("databases", "direct_url"): "must be a postgresql:// address, or empty",
    ("nfts", "floor_url"): "must be an http or https address with {contract} in it, or empty",
    ("prices", "url"): "must be an http or https address, or empty",
    ("webhooks", "secret_key"): "must be 32 or more random characters, or empty",
    ("keys", "previous_pepper"): "must be 32 or more characters, or empty",
    ("keys", "pepper"): "must be 32 or more random characters (set it in the file or in PENSTOCK_KEYS__PEPPER)",
}


# The same for secrets of upstreams, bundlers and relays.
_SECRET_WORDS = {
    "url": "must be an http, https, ws or wss address",
    "proxy": "must be the http:// address of a proxy, or env",
}


# Sections with a secret. A value written instead of the section's table is probably that secret.
_SECRET_SECTIONS = frozenset(name.split(".")[0] for name in SECRETS)


def _fault_text(error: jsonschema_rs.ValidationError) -> str:
    path = tuple(str(step) for step in error.instance_path)
    words = _FAULT_WORDS.get(path[:2]) or _FAULT_WORDS.get(path[::2])
    if words is None and is_secret(path):
        words = _SECRET_WORDS.get(path[-1]) or "is not valid (the value is hidden because it is secret)"
    is_section = len(path) == 1 or (len(path) == 2 and path[1].isdecimal())
    if words is None and is_section and path[0] in _SECRET_SECTIONS and error.kind.name == "type":
        words = "must be a table of settings"
    if words is None and error.kind.name == "additionalProperties":
        return _unknown_names(error, path)
    return f"{'.'.join(path) or 'settings'}: {words or error.message}"


def _unknown_names(error: jsonschema_rs.ValidationError, path: tuple[str, ...]) -> str:
    return "; ".join(f"{'.'.join((*path, name))}: there is no such key" for name in error.kind.as_dict()["unexpected"])
