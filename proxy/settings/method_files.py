"""Loads the methods of each chain family from `config/methods/*.toml`.

A file names a family, perhaps the chains that have its methods, and the methods. A chain that is not configured is ignored.
Several files may add methods to a family, but no method is defined twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from proxy.chains.evm.bundler_methods import BUNDLER
from proxy.chains.family import Family, Method, MethodTable
from proxy.core.rest_routes import RouteTable, rival_of, template_fault
from proxy.settings.toml_files import checked, with_line


def load_methods(paths: Iterable[Path], families: Mapping[str, Family], faults: list[str]) -> dict[str, MethodTable]:
    """The methods by family. Adds the faults of every file to `faults`."""
    tables: dict[str, dict[str, Method]] = {name: {} for name in (*families, BUNDLER.name)}
    for path in paths:
        data = checked("methods", path, faults)
        if data:
            faults += [with_line(path, fault) for fault in _file_faults(data, tables, families)]
            tables.setdefault(data["family"], {}).update((method.name, method) for method in _methods_in(data))
    faults += [f"config/methods: there are no methods of the family {name}" for name in tables if not tables[name]]
    return dict(tables)


def _route_faults(family: Family, names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Methods of a REST family are routes, and those of other families are not. `known`: the routes of other files."""
    names_before = [*known]
    table = RouteTable(names_before if family.rest is not None else ())
    for name in names:
        place = f"methods.{name}"
        if family.rest is None:
            if " " in name:
                yield f"{place}: is a route, and the family has no REST transport"
        elif fault := template_fault(name):
            yield f"{place}: {fault}"
        elif rival := rival_of(name, names_before):
            yield f"{place}: some paths match {rival} as well: leave one of both out"
        else:
            names_before.append(name)
            try:
                table.add(name)
            except ValueError as exc:
                yield f"{place}: {exc}"


def _methods_in(data: Mapping[str, Any]) -> Iterator[Method]:
    chains, samples = data.get("chains", []), data.get("samples", {})
    for name, row in data["methods"].items():
        yield msgspec.convert({"name": name, "chains": chains, "sample": samples.get(name, ""), **row}, Method)


def _file_faults(
    data: Mapping[str, Any], tables: Mapping[str, MethodTable], families: Mapping[str, Family]
) -> Iterator[str]:
    family = data["family"]
    if family not in tables:
        yield f"family: there is no family {family!r}; use one of {', '.join(tables)}"
    if family in families:
        yield from _route_faults(families[family], data["methods"], tables[family])
    for method in _methods_in(data):
        if method.name in tables.get(family, ()):
            yield f"methods.{method.name}: already defined in another file"
        if family in families and method.name in families[family].refused:
            yield f"methods.{method.name}: the family's file has it under `refused`: remove it here or there"
        yield from (f"methods.{method.name}: {fault}" for fault in _method_faults(method))
    for name, text in data.get("samples", {}).items():
        if name not in data["methods"] or not isinstance(_parsed(text), list | dict):
            yield f"samples.{name}: must be a method of this file with its params as a JSON array or object"


def _method_faults(method: Method) -> Iterator[str]:
    is_read, has_block = method.kind == "read", method.block_at is not None
    if not is_read and (method.cache != "never" or method.answer):
        yield f"a {method.kind} has neither cache nor answer"
    is_at_block = method.cache == "block" or method.span or method.after_object
    if not has_block and (is_at_block or (method.head == "block" and method.cache != "head")):
        yield "block_at is missing: say which param names the block"
    if method.splits and not method.span:
        yield "splits needs span"
    if method.creates_filter and method.kind != "filter":
        yield 'creates_filter needs kind = "filter"'
    if method.page_token is not None and method.kind != "filter":
        yield 'page_token needs kind = "filter"'
    if method.same_as and method.kind != "filter":
        yield 'same_as needs kind = "filter"'
    if method.identified and method.kind != "write":
        yield 'identified needs kind = "write"'
    if method.about != "none" and not is_read:
        yield 'about needs kind = "read"'
    if method.block_name and not has_block:
        yield "block_name needs block_at"
    if method.final_if is not None and not {"hash", "block"} & {method.cache, *[case.cache for case in method.cases]}:
        yield 'final_if needs cache = "hash" or "block"'
    if method.answer and _parsed(method.answer) is msgspec.UNSET:
        yield "answer must be JSON"


def _parsed(text: str) -> Any:
    """The value of a JSON text; UNSET if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return msgspec.UNSET
