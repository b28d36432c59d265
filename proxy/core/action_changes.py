"""How a change altered an object, for the log of actions: the members that differ, with their values before and after.

Both sides are what a read of the object shows, so they have no secrets. They are bounded, because the log keeps them for a
year: long values are cut, and URLs are cut after the host, because paths of webhooks and nodes are often secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from proxy.core.request_records import shown_text

# Bounds of what the log keeps of one side.
MOST_MEMBERS = 40
MOST_ITEMS = 10
MOST_TEXT = 200
# The scheme and host of a URL, without the user.
_URL = re.compile(r"(https?://)(?:[^/?#]*@)?([^/?#]*)")
# Members that change by themselves.
_VOLATILE = frozenset(
    {
        *("updated_at", "changed_at", "last_used_at", "seen_at", "used_today", "active_keys", "slot"),
        *("health", "recent", "today", "used"),
    }
)

ChangedMembers = dict[str, Any]


def changed_members(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[ChangedMembers | None, ChangedMembers | None]:
    """The members of an object that a change altered. None stands for an object that is not there: of a new object all members
    are listed in `after`, of a deleted one in `before`. A change of an object is judged by the members that both sides have."""
    old = None if before is None else dict(_members(before))
    new = None if after is None else dict(_members(after))
    if old is not None and new is not None:
        names = [name for name in old if name in new and old[name] != new[name]]
        return _bounded(old, names), _bounded(new, names)
    return (None if old is None else _bounded(old, [*old])), (None if new is None else _bounded(new, [*new]))


def _members(view: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The members, those of objects inside with a dotted name."""
    for name, value in view.items():
        if name in _VOLATILE:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items() if inner not in _VOLATILE)
        else:
            yield name, value


def _bounded(members: Mapping[str, Any], names: list[str]) -> ChangedMembers:
    changed = {name[:MOST_TEXT]: _shown(members[name]) for name in names[:MOST_MEMBERS]}
    if more := len(names) - len(changed):
        changed["…"] = f"{more} more"
    return changed


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        listed = [_text(each) for each in value[:MOST_ITEMS]]
        return [*listed, f"… {len(value) - MOST_ITEMS} more"] if len(value) > MOST_ITEMS else listed
    return _text(value)


def _text(value: Any) -> str:
    text = str(value)
    if (url := _URL.match(text)) is not None:
        return f"{url[1]}{url[2][:MOST_TEXT]}{'/…' if text[url.end() :].strip('/') else ''}"
    return shown_text(text, MOST_TEXT)
