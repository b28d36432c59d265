"""Directives: valid and invalid values, permissions, and that the API spec documents the table."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from proxy.compiled import ROOT
from proxy.core import directives
from proxy.core.directives import BY_HEADER, BY_NAME, DIRECTIVES, USUAL, Directives
from proxy.data_files import SCHEMAS
from proxy.errors import InvalidRequest

HOSTILE = (
    "", " ", "-1", "+1", "1.5", "1e3", "0x10", "١", "1 1", "1,1", "NaN", "inf", "true", "9" * 400, "\x00", "a\tb", "é",
    "<script>", "'; drop table keys; --", "../../etc/passwd", "%0d%0aX-Evil: 1", "svc_live_" + "a" * 36, "null", "[]",
)  # fmt: skip
# Values that are hostile elsewhere, but valid here.
VALID = {"min_block": {"0x10", "1000000"}, "min_block_wait": {"1.5"}, "max_cost": {"1.5"}}
# Labels are free text, so some of these could be one.
NOT_LABELS = ("", " ", "é", "a\tb", "\x00", "a" * 65, "١")


def read(name: str, text: str) -> Directives | None:
    return directives.read([(BY_NAME[name], text)], fresh=False)


def test_request_without_directives_has_none() -> None:
    assert directives.read([], fresh=False) is None
    assert directives.read([], fresh=True) == directives.FRESH


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("timeout_ms", "1", 1), ("timeout_ms", " 300000 ", 300_000), ("max_stale", "0", 0), ("retry", "0", 0),
     ("retry", "2", 2), ("upstream", "node one", "node one")],
)  # fmt: skip
def test_value_is_read(name: str, text: str, value: Any) -> None:
    assert getattr(read(name, text), name) == value


@pytest.mark.parametrize("name", [each.name for each in DIRECTIVES])
def test_hostile_value_is_refused_by_name_and_not_repeated_in_full(name: str) -> None:
    hostile = {*HOSTILE, str(10**6), str(math.inf), str(2**63), "0x" + "f" * 16} - VALID.get(name, set())
    for text in NOT_LABELS if name == "upstream" else hostile:
        with pytest.raises(InvalidRequest) as refused:
            read(name, text)
        message = refused.value.message
        assert message.startswith(f"{BY_NAME[name].header} must be "), message
        assert len(message) < 200
        assert message.isprintable()
        assert "svc_live_" not in message


def test_directive_is_given_once() -> None:
    with pytest.raises(InvalidRequest, match="X-Retry must be given once"):
        directives.read([(BY_NAME["retry"], "0"), (BY_NAME["retry"], "0")], fresh=False)


def test_key_may_use_what_its_settings_list() -> None:
    assert directives.allowed_to(None) == USUAL
    assert "upstream" not in USUAL
    assert directives.allowed_to([]) == frozenset()
    found = directives.allowed_to(["upstream", "of a later version"])
    assert found == {"upstream"}
    assert type(found) is frozenset  # Compiled code accepts nothing else in a key.
    given = [(BY_NAME["upstream"], "a")]
    assert directives.refusal(given, frozenset({"upstream"})) is None
    refused = directives.refusal(given, USUAL)
    assert refused is not None
    assert refused.status == 403
    assert "X-Upstream" in refused.message


def test_api_spec_documents_the_table() -> None:
    text = json.loads((SCHEMAS / "openapi.json").read_bytes())["info"]["description"]
    parameters = json.loads((SCHEMAS / "components/parameters.json").read_bytes())
    described = {each["name"]: each["description"] for each in parameters.values() if each["in"] == "header"}
    for each in DIRECTIVES:
        assert f"| `{each.header}` | `{each.name}` | {each.values} | {each.about} |" in text
        assert described[each.header] == each.about
    keys = json.loads((SCHEMAS / "http/dashboard.json").read_bytes())
    assert keys["KeyDirective"]["enum"] == [*BY_NAME]
    for name in ("ApiKey", "NewApiKey", "NewApiKeyShown", "ApiKeyChange"):
        assert keys[name]["properties"]["directives"]["items"]["$ref"].endswith("/KeyDirective")
    assert {header.lower() for header in described} >= BY_HEADER.keys()


def test_dashboard_offers_every_usual_directive() -> None:
    page = (ROOT / "web/dashboard/static/views/keys.js").read_text("utf-8")
    listed = page.partition("const DIRECTIVES = {")[2].partition("};")[0]
    assert {name for name in BY_NAME if re.search(rf"\b{name}: ", listed)} == USUAL
