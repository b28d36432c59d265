"""Loads the chain families from `config/families/*.toml`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from proxy.chains.families import READERS
from proxy.chains.family import Detection, Family
from proxy.chains.lookups import Lookup, LookupCall, Lookups
from proxy.chains.query_subscriptions import QUERIES
from proxy.chains.tabled import BlockNames, family_of_tables
from proxy.chains.write_ids import WRITE_IDS
from proxy.core.jsonrpc import Dialect
from proxy.core.rest_routes import EventRoute, RestTransport, template_fault
from proxy.core.upstream_errors import ErrorRule, matching
from proxy.settings.toml_files import checked, with_line

# How statuses of REST upstreams are read, unless the family has rules for them. Something that is not found may be
# missing because the upstream is behind.
_OF_STATUSES: tuple[ErrorRule, ...] = (
    matching("invalid", codes=(400, 406, 411, 413, 414, 415, 422)),
    matching("unauthorized", codes=(401, 402, 403, 407)),
    matching("behind", codes=(404,)),
    matching("unsupported", codes=(405, 501)),
    matching("missing_data", codes=(410,)),
    matching("timeout", codes=(408, 504)),
)
_PLACEHOLDER = re.compile(r"\{([a-z]+)\}")
# The values that a lookup must read, one of each group.
_NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    "number": (("number",),),
    "head": (("number",), ("hash",)),
    "final": (("number",),),
    "block": (("hash",),),
    "chain": (("chain", "number"),),
    "first": (("chain",),),
    "version": (("version",),),
    "slots": (("number",),),
    "bounds": (("found",),),
}

# The values that are given: the number of the block, and that of the block whose hash names the chain.
_GIVEN = {"block": ("number",), "bounds": ("number", "before"), "chain": ("at",), "first": ("at",)}


def load_families(paths: Iterable[Path], faults: list[str]) -> dict[str, Family]:
    """The families by name. Adds the faults of every file to `faults`."""
    families = {}
    for path in paths:
        data = checked("family", path, faults)
        wrong = [with_line(path, fault) for fault in _file_faults(data)] if data else []
        faults += wrong
        if data and not wrong:
            families[data["name"]] = family_in(data)
    return families


def family_in(data: Mapping[str, Any]) -> Family:
    """The family that a file describes: its reader's code with the file's data."""
    numbers, blocks = data.get("numbers", "number"), data.get("blocks", {})
    bounds = {kind: _lookup(given, numbers) for kind, given in data.get("bounds", {}).items()}
    lookups = Lookups(bounds=bounds, **{name: _lookup(given, numbers) for name, given in data["lookups"].items()})
    transport, errors, writes, timing = (data.get(name, {}) for name in ("transport", "errors", "writes", "timing"))
    reader = READERS.get(data.get("reader", "data"))
    if reader is None:
        names = {kind: blocks[f"{kind}_member"] for kind in ("number", "hash") if f"{kind}_member" in blocks}
        latest, tags, pending = data.get("latest", "latest"), blocks.get("tags", ()), blocks.get("pending", ())
        more = {name: blocks[name] for name in ("tag_member", "by_hash", "only_numbers") if name in blocks}
        words = BlockNames(numbers, latest, frozenset(tags), frozenset(pending), names, **more)
        reader = family_of_tables(data["name"], words, lookups, is_rest="rest" in transport)
    changes: dict[str, Any] = {"sent_id": WRITE_IDS[writes["id"]]} if "id" in writes else {}
    if transport.get("subscriptions") == "queries":
        changes["subscriptions"] = QUERIES
    return replace(
        reader,
        title=data["title"],
        latest=data.get("latest", reader.latest),
        kept_blocks=data.get("kept_blocks", 0),
        lag_blocks=timing.get("lag_blocks", 0),
        facts={name: value for name, value in timing.items() if name != "lag_blocks"},
        head=replace(reader.head, lookups=lookups),
        rest=_rest(transport["rest"]) if "rest" in transport else None,
        uri_params=transport.get("uri", {}),
        dialect=_dialect(transport),
        batches=transport.get("batches", True),
        socket_calls=transport.get("sockets") == "calls",
        standard_errors=errors.get("standard", False),
        error_rules=(*_error_rules(errors), *(_OF_STATUSES if "rest" in transport else ())),
        error_members=tuple(errors.get("members", ())),
        volatile=frozenset(data.get("volatile", ())) | _volatile_headers(transport),
        sends_to_all=writes.get("to_all", False),
        refused=data.get("refused", {}),
        detection=msgspec.convert(data["detection"], Detection) if "detection" in data else None,
        **changes,
    )


def _error_rules(errors: Mapping[str, Any]) -> Iterator[ErrorRule]:
    for rule in errors.get("rules", ()):
        phrases, codes = rule.get("phrases", ()), rule.get("codes", ())
        yield matching(rule["kind"], *phrases, codes=codes, in_data=errors.get("phrases_in") == "data")


def _volatile_headers(transport: Mapping[str, Any]) -> frozenset[str]:
    """Headers of REST upstreams, which differ between servers."""
    return (
        frozenset(("content-type", *transport["rest"].get("reply_headers", ()))) if "rest" in transport else frozenset()
    )


def _dialect(transport: Mapping[str, Any]) -> Dialect:
    params = transport.get("params", "array")
    return Dialect(
        named_params=params != "array",
        only_named=params == "object",
        old_versions=len(transport.get("envelopes", ())) > 1,
        says_ok=transport.get("replies") == "ok",
        lone_object=transport.get("lone_object", ""),
    )


def _rest(given: Mapping[str, Any]) -> RestTransport:
    usual = RestTransport()
    return RestTransport(
        tuple(given.get("types", usual.types)),
        tuple(given.get("body_types", usual.body_types)),
        frozenset(given.get("request_headers", ())),
        frozenset(given.get("reply_headers", ())),
        given.get("error_member", ""),
        msgspec.convert(given["events"], EventRoute) if "events" in given else None,
    )


def _lookup(given: Mapping[str, Any], numbers: Any) -> Lookup:
    calls = tuple(msgspec.convert(call, LookupCall) for call in given["calls"])
    return Lookup(calls, numbers, given.get("unknown_parent", ""))


def _rest_faults(data: Mapping[str, Any]) -> Iterator[str]:
    """The calls of a REST family are routes, and its params are objects."""
    if "rest" not in data.get("transport", {}):
        return
    for name, given in data["lookups"].items():
        for index, call in enumerate(given["calls"]):
            if fault := template_fault(call["method"]):
                yield f"lookups.{name}.calls.{index}.method: {fault}"
            if not isinstance(call.get("params"), Mapping):
                yield f'lookups.{name}.calls.{index}.params: must be a table such as {{ path = {{ id = "head" }} }}'


def _file_faults(data: Mapping[str, Any]) -> Iterator[str]:
    """Faults that the schema cannot detect."""
    yield from _rest_faults(data)
    named = {f"lookups.{name}": given for name, given in data["lookups"].items()}
    named |= {f"bounds.{kind}": given for kind, given in data.get("bounds", {}).items()}
    for place, given in named.items():
        name = "bounds" if place.startswith("bounds.") else place.removeprefix("lookups.")
        known = {*_GIVEN.get(name, ())}
        for index, call in enumerate(given["calls"]):
            used = set(_PLACEHOLDER.findall(str(call.get("params", ""))))
            if missing := sorted(used - known):
                yield f"{place}.calls.{index}.params: {{{missing[0]}}} was not read by a call before"
            known |= {*call.get("read", {})}
        read = {value for call in given["calls"] for value in call.get("read", {})}
        for group in _NEEDED.get(name, ()):
            if not read & {*group}:
                yield f"{place}: reads no {' or '.join(group)}"
    refused = data.get("refused", {})
    offered = {
        method for given in data["lookups"].values() for call in given["calls"] for method in call.get("offers", {})
    }
    for method in sorted(offered & {*refused}):
        yield f"refused.{method}: the status lookup offers this method"
