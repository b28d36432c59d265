"""Validates replies against the schemas of the API spec."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema_rs

from proxy.settings import SCHEMAS
from proxy.web import api_spec


@cache
def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = api_spec.load(SCHEMAS).document["components"]["schemas"]
    return found


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    whole = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas()}}
    return jsonschema_rs.Draft202012Validator(whole, validate_formats=True)


def conforms(data: Any, name: str) -> Any:
    """Check that the data conforms to the named schema and has no other members; return it."""
    _validator(name).validate(data)
    known = _schemas()[name]["properties"]
    assert set(data) <= set(known), f"{name} has no members {sorted(set(data) - set(known))}"
    return data
