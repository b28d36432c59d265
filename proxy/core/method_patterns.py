"""Values of methods, given by name or by a pattern that ends in `*`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def fitting_value(values: Mapping[str, Value], method: str) -> Value | None:
    """The value of the method, or of the longest pattern that fits it."""
    exact = values.get(method)
    if exact is not None:
        return exact
    fitting = [name for name in values if name.endswith("*") and method.startswith(name[:-1])]
    return values[max(fitting, key=len)] if fitting else None
