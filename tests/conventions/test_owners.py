"""State on the data plane has one owner: an object's attributes are assigned by its own methods.

Another class that has to change them calls a method named after the event. The exceptions are listed, each with its reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from tests.conventions.source import modules

DATA_PLANE = ("proxy.services.rpc", "proxy.web.front", "proxy.wire")
# Assignments to attributes of other objects, by module and target. This list may only get shorter.
ALLOWED = {
    # Settings of the ssl module, which have no other way to be made.
    "proxy.web.front.tls_listener: self._base.sni_callback": 1,
    "proxy.web.front.tls_listener: connection.context": 1,
}


def foreign_assignments(tree: ast.Module) -> Iterator[str]:
    """The targets of assignments to attributes of anything but `self` or `cls`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
            continue
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls"):
            yield ast.unparse(node)


def found() -> Counter[str]:
    return Counter(
        f"{name}: {target}"
        for name, tree in modules().items()
        if name.startswith(DATA_PLANE)
        for target in foreign_assignments(tree)
    )


def test_every_way_to_assign_a_foreign_attribute_is_seen() -> None:
    source = """
other.a = 1
other.b += 1
other.c: int = 1
other.d, (self.own, [other.e, *other.f]) = values
self.other.g = self.own = 1
for other.h in values: ...
with opened as other.i: ...
del other.j
cls.own = 1
"""
    assert sorted(foreign_assignments(ast.parse(source))) == [
        *(f"other.{letter}" for letter in "abcdefhij"),
        "self.other.g",
    ]


def test_attributes_of_the_data_plane_are_assigned_by_their_owners() -> None:
    counted = found()
    new = {target: count for target, count in counted.items() if count > ALLOWED.get(target, 0)}
    assert not new, "give the owner a method that is named after the event, and call it"
    assert counted == Counter(ALLOWED), "one is gone: take it from the list"
