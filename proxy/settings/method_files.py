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
from proxy.core.rest_routes import RouteTable, template_fault
from proxy.settings.toml_files import checked, with_line


def load_methods(paths: Iterable[Path], families: Mapping[str, Family], faults: list[str]) -> dict[str, MethodTable]:
    """The methods by family. Adds the faults of every file to `faults`."""
    tables: dict[str, dict[str, Method]] = {name: {} for name in (*families, BUNDLER.name)}
    for path in paths:
        data = checked("methods", path, faults)
        if data:
            faults += [with_line(path, fault) for fault in _file_faults(data, tables)]
            tables.setdefault(data["family"], {}).update((method.name, method) for method in _methods_in(data))
    for name, family in families.items():
        faults += [f"config/methods: {name}: {fault}" for fault in _route_faults(family, tables[name])]
        both = sorted({*tables[name]} & {*family.refused})
        faults += [f"{name}.toml: refused.{method}: a file of methods has it too" for method in both]
    faults += [f"config/methods: there are no methods of the family {name}" for name in tables if not tables[name]]
    return dict(tables)


def _route_faults(family: Family, methods: MethodTable) -> Iterator[str]:
    """Methods of a REST family are routes, and those of other families are not."""
    if family.rest is None:
        yield from (f"{name!r} is a route, and the family has no REST transport" for name in methods if " " in name)
        return
    wrong = [f"{name!r} {fault}" for name in methods if (fault := template_fault(name))]
    yield from wrong
    if not wrong:
        try:
            RouteTable(methods)
        except ValueError as exc:
            yield str(exc)


def _methods_in(data: Mapping[str, Any]) -> Iterator[Method]:
    chains, samples = data.get("chains", []), data.get("samples", {})
    for name, row in data["methods"].items():
        yield msgspec.convert({"name": name, "chains": chains, "sample": samples.get(name, ""), **row}, Method)


def _file_faults(data: Mapping[str, Any], tables: Mapping[str, MethodTable]) -> Iterator[str]:
    family = data["family"]
    if family not in tables:
        yield f"family: there is no family {family!r}; use one of {', '.join(tables)}"
    for method in _methods_in(data):
        if method.name in tables.get(family, ()):
            yield f"methods.{method.name}: already defined in another file"
        yield from (f"methods.{method.name}: {fault}" for fault in _method_faults(method))
    for name, text in data.get("samples", {}).items():
        if name not in data["methods"] or not isinstance(_parsed(text), list | dict):
            yield f"samples.{name}: must be a method of this file with its params as a JSON array or object"


def _method_faults(method: Method) -> Iterator[str]:
    is_read, has_block = method.kind == "read", method.block_at is not None
    if not is_read and (method.cache != "never" or method.answer):
        yield f"a {method.kind} has neither cache nor answer"
    if not has_block and (method.cache == "block" or method.span or method.after_object or method.head == "block"):
        yield "block_at is missing: say which param names the block"
    if method.splits and not method.span:
        yield "splits needs span"
    if method.creates_filter and method.kind != "filter":
        yield 'creates_filter needs kind = "filter"'
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
