"""The members that a change altered, as the log of actions keeps them."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.access import hint_of
from proxy.core.action_changes import MOST_ITEMS, MOST_MEMBERS, MOST_TEXT, changed_members


def test_only_members_that_differ_are_listed() -> None:
    before: dict[str, Any] = {"name": "a", "plan": "free", "limits": {"day": 1, "second": 2}, "used_today": 5}
    after: dict[str, Any] = {"name": "a", "plan": "growth", "limits": {"day": 3, "second": 2}, "used_today": 6}
    assert changed_members(before, after) == ({"plan": "free", "limits.day": 1}, {"plan": "growth", "limits.day": 3})
    assert changed_members(before, before) == ({}, {})


def test_members_of_one_side_only_are_left_out() -> None:
    assert changed_members({"a": 1, "b": 2}, {"a": 2, "c": 3}) == ({"a": 1}, {"a": 2})


def test_new_and_deleted_objects_are_listed_whole() -> None:
    assert changed_members(None, {"name": "a", "health": {"failing": True}}) == (None, {"name": "a"})
    assert changed_members({"name": "a"}, None) == ({"name": "a"}, None)


def test_urls_are_cut_after_the_host_and_keys_are_masked() -> None:
    urls = "https://user:word@hooks.example.com/services/T0/secret", "https://hooks.example.com/services/other"
    before, after = changed_members({"url": urls[0]}, {"url": urls[1]})
    assert before == after == {"url": "https://hooks.example.com/…"}
    key = "svc_live_" + "a" * 36
    assert changed_members(None, {"note": f"uses {key}"}) == (None, {"note": "uses svc_…"})
    assert changed_members(None, {"hint": hint_of(key)}) == (None, {"hint": "svc_live_…aaaa"})
    assert changed_members(None, {"url": "https://example.com/"}) == (None, {"url": "https://example.com"})


def test_large_objects_are_bounded() -> None:
    large = {f"member {number}": "x" * 1000 for number in range(1000)} | {"list": [*range(1000)]}
    _, after = changed_members(None, {"list": [*range(1000)], **large})
    assert after is not None
    assert len(after) == MOST_MEMBERS + 1
    assert after["list"][-1] == f"… {1000 - MOST_ITEMS} more"
    assert len(orjson.dumps(after)) < (MOST_MEMBERS + 1) * (MOST_TEXT + 50)
