"""The operations that take an API key, as the explorer's forms need them: a small part of the API spec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from proxy.web.api_spec import METHODS

# JSON-RPC and the routes of REST chains have a separate form, and these tags take a session instead of a key.
_LEFT_OUT = {"rpc_call", "rest_get", "rest_post"}
_SESSION_TAGS = {"Account", "Operator"}
_SENTENCE = re.compile(r"(?<=\.)\s")


def request_forms(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One form for each operation: its fields, and a sample of its body or None."""
    return [
        {
            "id": spec["operationId"],
            "tag": spec["tags"][0],
            "method": method.upper(),
            "path": path,
            "summary": spec["summary"],
            "scope": spec.get("x-scope", ""),
            "fields": [*_fields(document, [*item.get("parameters", ()), *spec.get("parameters", ())])],
            "body": _body(document, spec),
        }
        for path, item in document["paths"].items()
        for method in METHODS
        if (spec := item.get(method)) is not None
        and spec["operationId"] not in _LEFT_OUT
        and spec["tags"][0] not in _SESSION_TAGS
    ]


def _fields(document: Mapping[str, Any], parameters: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for given in parameters:
        parameter = _resolved(document, given)
        if parameter["in"] == "header":
            continue
        schema = _resolved(document, parameter["schema"])
        yield {
            "name": parameter["name"],
            "in": parameter["in"],
            "required": parameter.get("required", False),
            "hint": _SENTENCE.split(parameter.get("description", ""))[0].replace("`", ""),
            "options": schema.get("enum"),
            "sample": _sample(parameter, schema),
        }


def _sample(parameter: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    named = [each["value"] for each in parameter.get("examples", {}).values()]
    examples = [parameter.get("example"), *named, *schema.get("examples", ()), schema.get("default")]
    return next((each for each in examples if each is not None), None)


def _body(document: Mapping[str, Any], spec: Mapping[str, Any]) -> Any:
    content = _resolved(document, spec.get("requestBody", {})).get("content", {}).get("application/json")
    if content is None:
        return None
    named = [each["value"] for each in content.get("examples", {}).values()]
    return next(iter([*named, *_resolved(document, content["schema"]).get("examples", ())]), {})


def _resolved(document: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """The node that a reference points to, with the members beside the reference."""
    if "$ref" not in node:
        return node
    target: Any = document
    for name in node["$ref"].removeprefix("#/").split("/"):
        target = target[name]
    return {**_resolved(document, target), **{name: value for name, value in node.items() if name != "$ref"}}
