"""Clients for programs, generated from the API spec: a Python and a TypeScript module with a method for each operation that
takes an API key, and the types of its parameters, bodies and replies.

The part that sends requests is the same for every operation: a file in `schemas/clients`. `ClientCode` walks the schemas and
lets a `Language` write them. Objects become named types, also those that the spec does not name.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from proxy.web.api_spec import METHODS, SCHEMAS_AT

# Copies of other operations: the originals do the same.
_COPY = "account_"
_SENTENCE = re.compile(r"(?<=\.)\s")
_WIDTH = 110
# The line of the fixed part in Python that the types need more names in.
_IMPORTED = "from typing import Any"


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an object, or a parameter."""

    name: str
    type: str
    required: bool
    description: str = ""
    # Whether it is a path of its own, whose slashes are not encoded.
    has_slashes: bool = False


@dataclass(frozen=True, slots=True)
class ClientOperation:
    id: str
    method: str
    path: str
    summary: str
    path_members: Sequence[Member]
    query: Sequence[Member]
    # The type of the body; empty if there is none.
    body: str
    result: str

    def path_with(self, write: Callable[[Member], str]) -> str:
        """The path with its parameters as an expression of the language."""
        members = {each.name: each for each in self.path_members}
        return re.sub(r"\{(\w+)\}", lambda match: write(members[match[1]]), self.path)


class Language(Protocol):
    """Writes types and operations in one language."""

    basic: Mapping[str, str]

    def literal(self, values: Sequence[Any]) -> str: ...
    def union(self, types: Sequence[str]) -> str: ...
    def array(self, item: str) -> str: ...
    def mapping(self, value: str) -> str: ...
    def declare(self, name: str, description: str, members: Sequence[Member]) -> str: ...
    def alias(self, name: str, description: str, type_: str) -> str: ...
    def operation(self, operation: ClientOperation) -> str: ...
    def module(self, fixed: str, types: Sequence[str], operations: Sequence[str]) -> str: ...


@dataclass
class ClientCode:
    """The client of a document in one language."""

    document: Mapping[str, Any]
    language: Language
    # The declared types by name, in the order in which they can be written.
    _objects: dict[str, str] = field(default_factory=dict)
    _aliases: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<ClientCode {type(self.language).__name__}, {len(self._objects) + len(self._aliases)} types>"

    def text(self, fixed: str) -> str:
        """The module. `fixed`: the part that sends requests."""
        operations = [self.language.operation(each) for each in self._operations()]
        return self.language.module(fixed, [*self._objects.values(), *self._aliases.values()], operations)

    def _operations(self) -> Iterator[ClientOperation]:
        for path, item in self.document["paths"].items():
            for method in METHODS:
                spec = item.get(method)
                if spec is None or not self._takes_key(spec) or spec["operationId"].startswith(_COPY):
                    continue
                parameters = [
                    self._resolved(each) for each in (*item.get("parameters", ()), *spec.get("parameters", ()))
                ]
                yield ClientOperation(
                    id=spec["operationId"],
                    method=method.upper(),
                    path=path,
                    summary=spec["summary"],
                    path_members=[self._parameter(each) for each in parameters if each["in"] == "path"],
                    query=[self._parameter(each) for each in parameters if each["in"] == "query"],
                    body=self._body(spec),
                    result=self._result(spec),
                )

    def _takes_key(self, spec: Mapping[str, Any]) -> bool:
        return any("ApiKeyHeader" in way for way in spec.get("security", self.document["security"]))

    def _parameter(self, spec: Mapping[str, Any]) -> Member:
        type_ = self._type(spec["schema"], _pascal(spec["name"]))
        required, has_slashes = spec.get("required", False), spec.get("x-slashes", False)
        return Member(spec["name"], type_, required, spec.get("description", ""), has_slashes)

    def _body(self, spec: Mapping[str, Any]) -> str:
        if "requestBody" not in spec:
            return ""
        body = self._resolved(spec["requestBody"])
        return self._type(body["content"]["application/json"]["schema"], _pascal(spec["operationId"]) + "Body")

    def _result(self, spec: Mapping[str, Any]) -> str:
        good = next(self._resolved(each) for status, each in spec["responses"].items() if status[0] == "2")
        content = good.get("content", {})
        if "application/json" not in content:
            return self.language.basic["string"]
        return self._type(content["application/json"]["schema"], _pascal(spec["operationId"]) + "Result")

    # Types

    def _type(self, schema: Mapping[str, Any], name: str) -> str:
        """The type of a schema. `name`: for an object that has none."""
        if "$ref" in schema:
            named = schema["$ref"].removeprefix(SCHEMAS_AT)
            return self._type(self._resolved(schema), name) if "/" in named else self._named(named)
        if "const" in schema or "enum" in schema:
            return self.language.literal([schema["const"]] if "const" in schema else schema["enum"])
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not kinds and (
            ways := [each for key in ("oneOf", "anyOf") for each in schema.get(key, ()) if _is_typed(each)]
        ):
            return self.language.union([self._type(each, name) for each in ways])
        if not kinds:
            return self.language.basic["any"]
        return self.language.union([self._of_kind(kind, schema, name) for kind in kinds])

    def _of_kind(self, kind: str, schema: Mapping[str, Any], name: str) -> str:
        if kind == "array":
            return self.language.array(self._type(schema.get("items", {}), name + "Item"))
        if kind != "object":
            return self.language.basic[kind]
        if "properties" in schema:
            self._declare(name, schema)
            return name
        rest = schema.get("additionalProperties")
        return self.language.mapping(
            self._type(rest, name + "Value") if isinstance(rest, dict) else self.language.basic["any"]
        )

    def _named(self, name: str) -> str:
        if name in self._objects or name in self._aliases:
            return name
        schema = self.document["components"]["schemas"][name]
        if "properties" in schema and schema.get("type") == "object":
            self._declare(name, schema)
            return name
        inner = self._type(schema, name + "Object")
        self._aliases[name] = self.language.alias(name, _first(schema), inner)
        return name

    def _declare(self, name: str, schema: Mapping[str, Any]) -> None:
        if name in self._objects:
            return
        self._objects[name] = ""  # a type may contain itself
        required = schema.get("required", ())
        members = [
            Member(each, self._type(part, name + _pascal(each)), each in required, part.get("description", ""))
            for each, part in schema["properties"].items()
        ]
        self._objects[name] = self.language.declare(name, _first(schema), members)

    def _resolved(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in node:
            target: Any = self.document
            for step in node["$ref"].removeprefix("#/").split("/"):
                target = target[step]
            node = target
        return node


def _is_typed(schema: Mapping[str, Any]) -> bool:
    """Some alternatives say only which members are required."""
    return bool({"$ref", "type", "const", "enum", "oneOf", "anyOf"} & set(schema))


def _first(schema: Mapping[str, Any]) -> str:
    """The first sentence of the description."""
    return _SENTENCE.split(str(schema.get("description", "")))[0]


def _pascal(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[^A-Za-z0-9]+", name))


class Python:
    basic: Mapping[str, str] = {
        "string": "str",
        "integer": "int",
        "number": "float",
        "boolean": "bool",
        "null": "None",
        "any": "Any",
    }

    def literal(self, values: Sequence[Any]) -> str:
        return f"Literal[{', '.join(_quoted(each) if isinstance(each, str) else repr(each) for each in values)}]"

    def union(self, types: Sequence[str]) -> str:
        return " | ".join(dict.fromkeys(types))

    def array(self, item: str) -> str:
        return f"list[{item}]"

    def mapping(self, value: str) -> str:
        return f"dict[str, {value}]"

    def declare(self, name: str, description: str, members: Sequence[Member]) -> str:
        types = {each.name: each.type if each.required else f"NotRequired[{each.type}]" for each in members}
        if not all(each.isidentifier() and not keyword.iskeyword(each) for each in types):
            fields = "".join(f"    {_quoted(each)}: {_quoted(type_)},\n" for each, type_ in types.items())
            return f"{name} = TypedDict({_quoted(name)}, {{\n{fields}}})"
        fields = "".join(f"    {each}: {type_}\n" for each, type_ in types.items())
        said = f'    """{_said(description)}"""\n\n' if description else ""
        return f"class {name}(TypedDict):\n{said}{fields or '    pass'}".rstrip()

    def alias(self, name: str, description: str, type_: str) -> str:
        return f"{name} = {type_}"

    def operation(self, operation: ClientOperation) -> str:
        given = ["self", *(f"{_safe(each.name)}: {each.type}" for each in operation.path_members)]
        if operation.body:
            given.append(f"body: {operation.body}")
        if operation.query:
            needed = [f"{_safe(each.name)}: {each.type}" for each in operation.query if each.required]
            others = [f"{_safe(each.name)}: {each.type} | None = None" for each in operation.query if not each.required]
            given += ["*", *needed, *others]
        path = operation.path_with(
            lambda each: f"{{{_safe(each.name)}}}" if each.has_slashes else f"{{_at({_safe(each.name)})}}"
        )
        sent = [_quoted(operation.method), f"f{_quoted(path)}" if "{" in path else _quoted(path)]
        if operation.query:
            sent.append("{" + ", ".join(f"{_quoted(each.name)}: {_safe(each.name)}" for each in operation.query) + "}")
        if operation.body:
            sent.append("body=body")
        head = f"    def {operation.id}({', '.join(given)}) -> {operation.result}:"
        if len(head) > _WIDTH:
            lines = "".join(f"        {each},\n" for each in given)
            head = f"    def {operation.id}(\n{lines}    ) -> {operation.result}:"
        said = f'        """{_said(operation.summary)}: {operation.method} /v1{operation.path}."""'
        unchecked = "" if operation.result == self.basic["any"] else "  # type: ignore[no-any-return]"
        return f"{head}\n{said}\n        return self._send({', '.join(sent)}){unchecked}"

    def module(self, fixed: str, types: Sequence[str], operations: Sequence[str]) -> str:
        head = 'class Penstock(Transport):\n    """The operations of the API that take a key."""'
        fixed = fixed.replace(_IMPORTED, f"{_IMPORTED}, Literal, NotRequired, TypedDict", 1)
        return "\n\n\n".join([fixed.rstrip(), *types, "\n\n".join([head, *operations])]) + "\n"


class TypeScript:
    basic: Mapping[str, str] = {
        "string": "string",
        "integer": "number",
        "number": "number",
        "boolean": "boolean",
        "null": "null",
        "any": "unknown",
    }

    def literal(self, values: Sequence[Any]) -> str:
        return " | ".join(orjson.dumps(each).decode() for each in values)

    def union(self, types: Sequence[str]) -> str:
        return " | ".join(dict.fromkeys(types))

    def array(self, item: str) -> str:
        return f"({item})[]" if " " in item else f"{item}[]"

    def mapping(self, value: str) -> str:
        return f"Record<string, {value}>"

    def declare(self, name: str, description: str, members: Sequence[Member]) -> str:
        fields = "".join(
            f"  {each.name if each.name.isidentifier() else _quoted(each.name)}{'' if each.required else '?'}: {each.type};\n"
            for each in members
        )
        return f"{_comment(description)}export interface {name} {{\n{fields}}}"

    def alias(self, name: str, description: str, type_: str) -> str:
        return f"{_comment(description)}export type {name} = {type_};"

    def operation(self, operation: ClientOperation) -> str:
        given = [f"{_camel(each.name)}: {each.type}" for each in operation.path_members]
        if operation.body:
            given.append(f"body: {operation.body}")
        if operation.query:
            optional = not any(each.required for each in operation.query)
            members = " ".join(f"{each.name}{'' if each.required else '?'}: {each.type};" for each in operation.query)
            given.append(f"query: {{ {members} }}{' = {}' if optional else ''}")
        path = operation.path_with(
            lambda each: f"${{{_camel(each.name)}}}" if each.has_slashes else f"${{at({_camel(each.name)})}}"
        )
        sent = [_quoted(operation.method), f"`{path}`" if "$" in path else _quoted(path)]
        sent += ["query"] if operation.query else ["{}"] if operation.body else []
        sent += ["body"] if operation.body else []
        head = f"  {_camel(operation.id)}({', '.join(given)}): Promise<{operation.result}> {{"
        if len(head) > _WIDTH:
            lines = "".join(f"    {each},\n" for each in given)
            head = f"  {_camel(operation.id)}(\n{lines}  ): Promise<{operation.result}> {{"
        said = f"  /** {operation.summary}: {operation.method} /v1{operation.path}. */"
        return f"{said}\n{head}\n    return this.send({', '.join(sent)});\n  }}"

    def module(self, fixed: str, types: Sequence[str], operations: Sequence[str]) -> str:
        head = "/** The operations of the API that take a key. */\nexport class Penstock extends Transport {\n"
        return "\n\n".join([fixed.rstrip(), *types, head + "\n\n".join(operations)]) + "\n}\n"


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


def _said(text: str) -> str:
    """Text for a docstring of one paragraph."""
    return "\n    ".join(textwrap.wrap(text.replace("\\", "\\\\"), _WIDTH))


def _safe(name: str) -> str:
    """A parameter whose name may be a keyword."""
    return f"{name}_" if keyword.iskeyword(name) else name


def _camel(name: str) -> str:
    pascal = _pascal(name)
    return pascal[:1].lower() + pascal[1:]


def _comment(text: str) -> str:
    return f"/** {text} */\n" if text else ""


@dataclass(frozen=True, slots=True)
class ClientKind:
    """The file of a client, its language, and its fixed part in `schemas/clients`."""

    file: str
    language: type[Python] | type[TypeScript]
    fixed: str


LANGUAGES = {
    "python": ClientKind("penstock_client.py", Python, "client.py"),
    "typescript": ClientKind("penstock.ts", TypeScript, "client.ts"),
}


def client_module(document: Mapping[str, Any], kind: ClientKind, schemas: Path) -> str:
    """The source of a client."""
    fixed = (schemas / "clients" / kind.fixed).read_text("utf-8")
    return ClientCode(document, kind.language()).text(fixed)
