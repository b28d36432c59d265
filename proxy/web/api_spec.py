"""The API spec: the OpenAPI document that is published and that requests are validated against.

It is assembled at start-up from the files under `schemas/` (see `schemas/README.md`) and served as one document. Each
operation's path, query and body are checked by validators compiled from it once; a refusal names the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import orjson

from proxy.core.access import has_key
from proxy.core.bounded_json import MAX_ECHO, JsonReader, LongList, RefusedJson
from proxy.core.roles import PERMISSIONS, Permission
from proxy.core.sessions import SessionKind
from proxy.errors import InvalidRequest
from proxy.web.body_sizes import BodySizes
from proxy.web.timestamps import is_moment
from proxy.web.validation_messages import ISO_8601, ValidationMessages, member_of, unknown_name

METHODS = ("get", "post", "patch", "delete", "put")
# Paths that also exist under /account, for signed-in account holders.
MIRRORED = ("/webhooks", "/gas/policies", "/requests", "/errors", "/alerts", "/chains")
# The security of an operation under /account that a key with its scope can use too.
_WITH_KEY: tuple[dict[str, list[str]], ...] = ({"ApiKeyHeader": []}, {"BearerKey": []})
SCHEMAS_AT = "#/components/schemas/"
# An integer in a query. The limit on digits bounds the time that int() takes.
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
# A body with at most this many values gets all its errors in one reply, for people who fill in forms. Each error takes up to
# 0.1 ms to describe. And the most errors in one reply.
FEW_VALUES, MOST_ERRORS = 40, 20
# Items of a long list that are validated in one step, which takes 0.2 ms.
ITEMS_PER_STEP = 500
# Formats of our own. An empty text in a query is an absent value.
_FORMATS = {ISO_8601: lambda text: not text or is_moment(text)}
# Invalid parameters with their messages.
ParameterErrors = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    required: bool
    kind: str
    default: Any
    schema: Mapping[str, Any]
    validator: jsonschema_rs.Draft202012Validator
    words: ValidationMessages
    # Whether it is a path of its own, whose slashes are not encoded (`x-slashes`).
    has_slashes: bool

    def read(self, text: str, errors: ParameterErrors) -> Any:
        """The typed value. If it is invalid, an error is added."""
        value = _cast(text, self.kind)
        try:
            self.validator.validate(value)  # `iter_errors` finds the errors of all items first
        except jsonschema_rs.ValidationError as error:
            errors.append((self.name, f"parameter {self.name!r}: {self.words.of(error, self.schema)}"))
        return value


@dataclass(frozen=True, slots=True)
class ApiOperation:
    id: str
    method: str
    path: str
    # The scope that the key needs. Empty if every key may use it, or none, in the case of operations for signed-in people.
    scope: str
    session: SessionKind | None
    # The permission that the role of a person in the account needs.
    permission: Permission | None
    # Whether it is a GET whose reply is JSON.
    is_read: bool
    large_body: bool
    path_parameters: Mapping[str, Parameter]
    query: Mapping[str, Parameter]
    # The schema of the body with those that it refers to.
    schema: Mapping[str, Any] | None
    body: jsonschema_rs.Draft202012Validator | None
    # The same without values in its messages, for bodies with long strings: a message would be as long as the string.
    masked_body: jsonschema_rs.Draft202012Validator | None
    # The largest body that its schema allows, in bytes; None if the schema has no bound, as for JSON-RPC.
    body_bytes: int | None
    # The most items of the body's lists that are longer than a step, by their path.
    longest_lists: Mapping[tuple[str, ...], int]
    words: ValidationMessages

    def check_parameters(
        self, path: Mapping[str, str], query: Mapping[str, str]
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Validate the parameters in the path and the query; return typed values, with defaults. The error lists all that are
        invalid."""
        errors: ParameterErrors = []
        in_path = {name: parameter.read(path[name], errors) for name, parameter in self.path_parameters.items()}
        given = self._read_query(query, errors)
        if errors:
            raise InvalidRequest.listing([*dict.fromkeys(errors)])
        return in_path, given

    def default_query(self) -> dict[str, Any]:
        """The values of a query without parameters, of an operation that requires none."""
        return {name: parameter.default for name, parameter in self.query.items()}

    def _read_query(self, given: Mapping[str, str], errors: ParameterErrors) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for name, text in given.items():
            if len(errors) == MOST_ERRORS:
                break
            if name not in self.query:
                shown = "…" if has_key(name) else name[:MAX_ECHO]
                errors.append((shown, f"parameter {shown!r} {unknown_name(shown, self.query)}"))
            elif name in read:
                errors.append((name, f"parameter {name!r} is given more than once"))
            else:
                read[name] = self.query[name].read(text, errors)
        missing = [parameter for name, parameter in self.query.items() if name not in read]
        errors += [(each.name, f"parameter {each.name!r} is required") for each in missing if each.required]
        return {name: read.get(name, parameter.default) for name, parameter in self.query.items()}

    def check_body(self, raw: bytes | bytearray) -> Any:
        """Parse and validate a body at once, for tests. Large bodies would block the event loop: see `body_steps`."""
        steps = self.body_steps(JsonReader(raw))
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def body_steps(self, reader: JsonReader) -> Generator[None, None, Any]:
        """Parse the rest of a body that has arrived, and validate it, a short step at a time; return its value. An error names
        the invalid member."""
        try:
            while not reader.step():
                yield
            if reader.has_long_strings:
                yield
            data = reader.value()
        except RefusedJson as exc:
            raise refused_body(exc) from None
        for long in reader.long_lists:
            self._check_length(long)
            long.show(0, ITEMS_PER_STEP)
        if reader.has_long_strings:
            yield
        validator = self.masked_body if reader.has_long_strings else self.body
        self._validate(validator, data)
        for long in reader.long_lists:
            long.show(0, 1)  # Only the part of the list that is validated next is shown in full.
        for long in reader.long_lists:
            for first in range(ITEMS_PER_STEP, len(long.items), ITEMS_PER_STEP):
                yield
                long.show(first, first + ITEMS_PER_STEP)
                self._validate(validator, data, long.path, first)
            long.show(0, 1)
        data = _whole(data)
        for long in reader.long_lists:
            long.restore()
        return data

    def _check_length(self, long: LongList) -> None:
        """Check the length of a list that is validated in parts. A list with a limit below ITEMS_PER_STEP is refused with its
        first part."""
        most = self.longest_lists.get(tuple(step for step in long.path if isinstance(step, str)))
        if most is not None and len(long.items) > most:
            path = ".".join(map(str, long.path))
            raise InvalidRequest(f"{path}: has {len(long.items)} items, at most {most} are allowed", param=path)

    def _validate(
        self,
        validator: jsonschema_rs.Draft202012Validator | None,
        data: Any,
        part_of: tuple[str | int, ...] | None = None,
        first: int = 0,
    ) -> None:
        """Validate the body, or a part of one of its lists, which begins with this item."""
        if validator is None:
            return
        try:
            validator.validate(data)  # `iter_errors` makes an object for each of thousands of errors
        except jsonschema_rs.ValidationError as exc:
            errors = [self._described(exc, part_of, first)]
        except ValueError:  # the validator's depth limit is lower than the parser's
            raise InvalidRequest("the body is nested too deeply", reason="body") from None
        else:
            return
        if part_of is None and _has_few_values(data):
            errors += [self._described(error) for error in validator.iter_errors(data)]
        raise InvalidRequest.listing([*dict.fromkeys(errors)][:MOST_ERRORS])

    def _described(
        self, error: jsonschema_rs.ValidationError, part_of: tuple[str | int, ...] | None = None, first: int = 0
    ) -> tuple[str, str]:
        """The member at fault, and what is wrong with it."""
        path = list(error.instance_path)
        if part_of is not None and len(path) > len(part_of) and tuple(path[: len(part_of)]) == part_of:
            path[len(part_of)] = int(path[len(part_of)]) + first
        assert self.schema is not None
        param = ".".join(filter(None, (*map(str, path), member_of(error))))[:MAX_ECHO] or "body"
        return param, f"{param}: {self.words.of(error, self.schema)}"


def _has_few_values(data: Any) -> bool:
    left, waiting = FEW_VALUES, [data]
    while waiting and left >= 0:
        left -= 1
        value = waiting.pop()
        if isinstance(value, dict | list):
            if len(value) > left:
                return False
            waiting += value.values() if isinstance(value, dict) else value
    return left >= 0


def refused_body(exc: RefusedJson) -> InvalidRequest:
    return InvalidRequest(f"the body {exc}", reason="body")


class ApiSpec:
    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.operations = {operation.id: operation for operation in _operations(document)}

    def __repr__(self) -> str:
        return f"<ApiSpec {len(self.operations)} operations>"


@cache
def load(schemas: Path) -> ApiSpec:
    """The API spec in this directory. It is read once; forked workers share the result."""
    document = orjson.loads((schemas / "openapi.json").read_bytes())
    components = document["components"]
    components.update({path.stem: orjson.loads(path.read_bytes()) for path in (schemas / "components").glob("*.json")})
    components["schemas"] = _merged(schemas / "http", schemas / "events")
    document["webhooks"] = _merged(schemas / "webhooks")
    document["paths"] = _mirrored(_merged(schemas / "paths"))
    return ApiSpec(document)


def _merged(*directories: Path) -> dict[str, Any]:
    """Merge the objects of all files in the directories; a name may be defined only once."""
    merged: dict[str, Any] = {}
    for path in sorted(path for directory in directories for path in directory.glob("*.json")):
        for name, value in orjson.loads(path.read_bytes()).items():
            if name in merged:
                raise ValueError(f"{path.parent.name}/{path.name}: {name} is defined twice")
            merged[name] = value
    return merged


def _mirrored(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Copy operations that account holders share with keys to /account, with a session. Keys with the scope may use either.

    Each copy follows its original: gzip finds repetitions only within 32 KB, and the document has 500 KB.
    """
    all_paths: dict[str, Any] = {}
    for path, item in paths.items():
        all_paths[path] = item
        if not path.startswith(MIRRORED):
            continue
        below = all_paths[f"/account{path}"] = dict(item)
        for method in METHODS:
            if method in item:
                spec = dict(item[method])
                spec["operationId"] = f"account_{spec['operationId']}"
                spec["tags"] = ["Account"]
                spec["x-session"] = "account"
                spec["x-permission"] = "view" if method == "get" else "manage"
                spec["security"] = [{"AccountSession": []}, *(_WITH_KEY if "x-scope" in spec else ())]
                below[method] = spec
    return all_paths


def _operations(document: dict[str, Any]) -> Iterator[ApiOperation]:
    words = ValidationMessages(document["components"] | document["paths"])
    sizes = BodySizes(document["components"]["schemas"], longer_than=ITEMS_PER_STEP)
    for path, item in document["paths"].items():
        for method in METHODS:
            if method not in item:
                continue
            spec = item[method]
            body = _body_schema(document, spec)
            parameters = [_resolved(document, p) for p in (*item.get("parameters", ()), *spec.get("parameters", ()))]
            yield ApiOperation(
                id=spec["operationId"],
                method=method.upper(),
                path=path,
                scope=spec.get("x-scope", ""),
                session=spec.get("x-session"),
                permission=_permission(spec),
                is_read=method == "get" and "application/json" in spec["responses"]["200"].get("content", {}),
                large_body=spec.get("x-large-body", False),
                path_parameters={p["name"]: _parameter(document, p, words) for p in parameters if p["in"] == "path"},
                query={p["name"]: _parameter(document, p, words) for p in parameters if p["in"] == "query"},
                schema=body,
                body=None if body is None else _validator(body),
                masked_body=None if body is None else _validator(body, masks=True),
                body_bytes=None if body is None else sizes.largest(body),
                longest_lists={} if body is None else sizes.long_lists(body),
                words=words,
            )


def _permission(spec: Mapping[str, Any]) -> Permission | None:
    """The permission that the operation needs. Each operation of an account must name one."""
    permission: Permission | None = spec.get("x-permission")
    if spec.get("x-session") == "account" and permission not in PERMISSIONS["owner"]:
        raise ValueError(
            f"{spec['operationId']}: x-permission must be one of {', '.join(sorted(PERMISSIONS['owner']))}"
        )
    return permission


def _parameter(document: dict[str, Any], spec: dict[str, Any], words: ValidationMessages) -> Parameter:
    schema, whole = _resolved(document, spec["schema"]), _with_components(document, spec["schema"])
    return Parameter(
        spec["name"],
        spec.get("required", False),
        schema.get("type", "string"),
        schema.get("default"),
        whole,
        _validator(whole),
        words,
        spec.get("x-slashes", False),
    )


def _body_schema(document: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any] | None:
    if "requestBody" not in spec:
        return None
    schema: dict[str, Any] = _resolved(document, spec["requestBody"])["content"]["application/json"]["schema"]
    return _with_components(document, schema)


def _with_components(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with only the components that it refers to: each validator keeps its own copy of them."""
    named: dict[str, Any] = {}
    _gather(schema, document["components"]["schemas"], named)
    return {**schema, "components": {"schemas": named}}


def _validator(schema: dict[str, Any], *, masks: bool = False) -> jsonschema_rs.Draft202012Validator:
    # An error may repeat the whole body, so in a schema with a secret no value is repeated.
    mask = "the value" if masks or _has_secret(schema) else None
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True, formats=_FORMATS, mask=mask)


def _has_secret(node: Any) -> bool:
    """Whether a member is marked `writeOnly`: a password or a token."""
    if isinstance(node, list):
        return any(map(_has_secret, node))
    return isinstance(node, dict) and (node.get("writeOnly") is True or _has_secret([*node.values()]))


def _gather(node: Any, schemas: Mapping[str, Any], named: dict[str, Any]) -> None:
    """Add all schemas that the node refers to, directly or indirectly, to `named`."""
    if isinstance(node, list):
        for part in node:
            _gather(part, schemas, named)
    if not isinstance(node, dict):
        return
    name = str(node.get("$ref", "")).removeprefix(SCHEMAS_AT).split("/")[0]
    if name in schemas and name not in named:
        named[name] = schemas[name]
        _gather(schemas[name], schemas, named)
    for part in node.values():
        _gather(part, schemas, named)


def _resolved(document: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        target: Any = document
        for step in node["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        node = {**target, **{name: value for name, value in node.items() if name != "$ref"}}
    return node


def _cast(text: str, kind: str) -> Any:
    """Convert a query parameter to the type in its schema. Text that does not parse stays text and fails validation."""
    if kind == "integer" and _INTEGER.fullmatch(text):
        return int(text)
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    return text.split(",") if kind == "array" else text


def _whole(data: Any) -> Any:
    """Convert whole floats to int, in place: JSON has one number type, so 60.0 passes an integer schema."""
    match data:
        case float():
            return int(data) if data.is_integer() else data
        case list():
            data[:] = map(_whole, data)
        case dict():
            data.update({name: _whole(each) for name, each in data.items()})
        case _:
            pass
    return data
