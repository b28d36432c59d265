"""Query parameters and bodies are validated against the published API spec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import MultiDict

from proxy.core.bounded_json import JsonReader
from proxy.errors import InvalidRequest
from proxy.settings import SCHEMAS
from proxy.web import api_spec
from proxy.web.api_spec import MOST_ERRORS, ApiOperation

SPEC = api_spec.load(SCHEMAS)
OWNER = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
LISTS = {"list_token_balances": 50, "list_owned_nfts": 50, "list_wallets": 25, "list_webhooks": 25}
WALLET = {"owner": OWNER, "chain": "ethereum"}
WEBHOOK = {"url": "https://hooks.example.com/x", "chain": "ethereum", "event_type": "address_activity"}
PATH = {"chain": "ethereum", "address": "0x" + "11" * 20, "id": "wh_1", "contract": "0x" + "11" * 20, "token_id": "1"}
POLICY = {"name": "Free transfers", "chain": "base", "rules": {"max_gas_usd": "0.50", "max_per_user_per_day": 3}}


def operation(name: str) -> ApiOperation:
    return SPEC.operations[name]


def query_refusal(name: str, *pairs: tuple[str, str]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read_query(name, *pairs)
    return caught.value.message


def read_query(name: str, *pairs: tuple[str, str]) -> dict[str, Any]:
    given = {each: PATH[each] for each in operation(name).path_parameters}
    return operation(name).check_parameters(given, MultiDict(pairs))[1]


def body_refusal(name: str, body: Any) -> str:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    with pytest.raises(InvalidRequest) as caught:
        operation(name).check_body(raw)
    assert caught.value.status == 400
    return caught.value.message


# Queries


@pytest.mark.parametrize(("name", "limit"), LISTS.items())
def test_list_without_a_query_uses_the_default_page_and_limit(name: str, limit: int) -> None:
    found = read_query(name)
    assert (found["page"], found["limit"]) == (1, limit)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(("page", "limit"), [(1, 1), (2, 100), (1_000_000, 50)])
def test_page_and_limit_in_range_are_parsed(name: str, page: int, limit: int) -> None:
    found = read_query(name, ("page", str(page)), ("limit", str(limit)))
    assert (found["page"], found["limit"]) == (page, limit)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("member", ["page", "limit"])
@pytest.mark.parametrize(
    "text",
    [
        *("0", "-1", "--1", "-", "", " 1", "1 ", "+1", "1.0", "1e2", "0x1", "1_0", "ten", "true", "null", "١", "²"),
        *("9" * 18, "9" * 19, "9" * 5000, "-" + "9" * 18, "1\n", "\0", "NaN"),
    ],
)
def test_invalid_page_or_limit_is_rejected_by_name(name: str, member: str, text: str) -> None:
    message = query_refusal(name, (member, text))
    assert message.startswith(f"parameter {member!r}: ")
    assert len(message) < 300


@pytest.mark.parametrize(("member", "text"), [("limit", "101"), ("page", "1000001")])
def test_number_above_the_maximum_is_rejected_by_name(member: str, text: str) -> None:
    assert query_refusal("list_wallets", (member, text)).startswith(f"parameter {member!r}: {text} is greater")


@given(st.text("0123456789-+ ._eE\n\u0661", max_size=25))
def test_any_page_text_is_parsed_or_rejected(text: str) -> None:
    try:
        found = read_query("list_wallets", ("page", text))
    except InvalidRequest:
        return
    assert 1 <= found["page"] <= 1_000_000


def test_unknown_parameter_is_rejected_with_the_known_ones() -> None:
    assert query_refusal("list_webhooks", ("pgae", "1")) == (
        "parameter 'pgae' is unknown; did you mean page? known: page, limit, status"
    )
    assert query_refusal("read_gas_prices", ("x", "")) == "parameter 'x' is unknown; known: none"
    assert len(query_refusal("list_webhooks", ("x" * 10_000, "1"))) < 300


def test_parameter_names_are_case_sensitive() -> None:
    for name in ("Page", "page ", "page[]", "limit\0"):
        assert "is unknown" in query_refusal("list_wallets", (name, "1"))


def test_repeated_parameter_is_rejected() -> None:
    message = "parameter 'page' is given more than once"
    assert query_refusal("list_wallets", ("page", "1"), ("page", "2")) == message
    assert query_refusal("list_wallets", ("page", "1"), ("limit", "2"), ("page", "1")) == message


def test_all_invalid_parameters_are_listed() -> None:
    query = (("limit", "0"), ("pgae", "1"), ("limit", "1"))
    with pytest.raises(InvalidRequest) as caught:
        operation("list_token_balances").check_parameters({**PATH, "address": "vitalik"}, MultiDict(query))
    assert [param for param, _ in caught.value.errors] == ["address", "limit", "pgae", "limit"]
    assert caught.value.body()["error"]["errors"][0]["message"] == caught.value.message
    with pytest.raises(InvalidRequest) as caught:
        operation("admin_list_actions").check_parameters({}, {"since": "yesterday", "until": "never", "limit": "0"})
    assert [param for param, _ in caught.value.errors] == ["since", "until", "limit"]
    assert caught.value.message == "parameter 'since': must be a time such as 2026-01-15T09:30:00Z"
    # A single one is not listed, and a long query gets the first ones.
    with pytest.raises(InvalidRequest) as caught:
        read_query("list_wallets", ("page", "x"))
    assert caught.value.errors == ()
    with pytest.raises(InvalidRequest) as caught:
        read_query("list_wallets", *((f"x{index}", "1") for index in range(5000)))
    assert len(caught.value.errors) == MOST_ERRORS


@pytest.mark.parametrize("status", ["active", "paused", "disabled"])
def test_webhook_status_filter_is_accepted(status: str) -> None:
    assert read_query("list_webhooks", ("status", status))["status"] == status
    assert read_query("list_webhooks")["status"] is None


@pytest.mark.parametrize("status", ["", "ACTIVE", "deleted"])
def test_unknown_webhook_status_is_rejected_by_name(status: str) -> None:
    assert query_refusal("list_webhooks", ("status", status)).startswith("parameter 'status': ")


def test_value_outside_an_enum_is_rejected_with_all_values() -> None:
    message = query_refusal("list_webhooks", ("status", "deleted"))
    assert message == """parameter 'status': must be one of "active", "paused", "disabled", not "deleted\""""
    kinds = SPEC.document["components"]["schemas"]["WebhookEventType"]["enum"]
    message = body_refusal("create_webhook", {**WEBHOOK, "event_type": "x"})
    assert all(f'"{kind}"' in message for kind in kinds)


def test_invalid_address_is_rejected_with_the_form_of_an_address() -> None:
    message = body_refusal("create_wallet", {**WALLET, "owner": "0x12"})
    assert message == 'owner: must be an EVM address: 0x and 40 hex digits, not "0x12"'
    with pytest.raises(InvalidRequest) as caught:
        operation("list_token_balances").check_parameters({"chain": "ethereum", "address": "vitalik"}, {})
    assert "parameter 'address': must be an address (0x and 40 hex digits, or" in caught.value.message


def test_no_pattern_of_a_request_is_without_a_form() -> None:
    """A refusal would show the regular expression."""
    for each in SPEC.operations.values():
        body = SPEC.document["paths"][each.path][each.method.lower()].get("requestBody", {})
        named: dict[str, Any] = {}
        api_spec._gather(body, SPEC.document["components"]["schemas"], named)
        for node in all_nodes([body, *named.values()]):
            assert "x-form" in node or not isinstance(node.get("pattern"), str), node


def all_nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        node = [*node.values()]
    if isinstance(node, list):
        for part in node:
            yield from all_nodes(part)


# Bodies


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("create_wallet", WALLET),
        ("create_wallet", {**WALLET, "salt": "savings"}),
        ("create_webhook", WEBHOOK),
        ("create_webhook", {**WEBHOOK, "config": {"addresses": [OWNER]}}),
        ("update_webhook", {}),
        ("update_webhook", {"status": "paused"}),
        ("create_gas_policy", POLICY),
        ("create_gas_policy", {**POLICY, "rules": {}}),
    ],
)
def test_valid_body_is_returned(name: str, body: dict[str, Any]) -> None:
    assert operation(name).check_body(orjson.dumps(body)) == body


@pytest.mark.parametrize(
    ("name", "body"), [("create_wallet", WALLET), ("create_webhook", WEBHOOK), ("create_gas_policy", POLICY)]
)
def test_missing_member_is_named(name: str, body: dict[str, Any]) -> None:
    for member in body:
        rest = {key: value for key, value in body.items() if key != member}
        assert body_refusal(name, rest) == f"{member}: is required"


@pytest.mark.parametrize(
    ("name", "body", "named"),
    [
        ("create_wallet", {**WALLET, "Owner": OWNER}, "Owner: is unknown; did you mean owner?"),
        ("create_wallet", {**WALLET, "owner": 1}, "owner: "),
        ("create_wallet", {**WALLET, "owner": OWNER[:-1]}, "owner: "),
        ("create_wallet", {**WALLET, "owner": OWNER + "\n"}, "owner: "),
        ("create_wallet", {**WALLET, "owner": None}, "owner: "),
        ("create_wallet", {**WALLET, "salt": ""}, "salt: "),
        ("create_wallet", {**WALLET, "salt": "x" * 257}, "salt: "),
        ("create_webhook", {**WEBHOOK, "url": "ftp://example.com"}, "url: "),
        ("create_webhook", {**WEBHOOK, "url": "https://"}, "url: "),
        ("create_webhook", {**WEBHOOK, "url": "https://example.com/" + "x" * 3000}, "url: "),
        ("create_webhook", {**WEBHOOK, "event_type": "address_Activity"}, "event_type: "),
        ("create_webhook", {**WEBHOOK, "config": []}, "config: "),
        ("update_webhook", {"status": "disabled"}, "status: "),
        ("update_webhook", {"id": "wh_1"}, "id: is unknown; "),
        ("create_gas_policy", {**POLICY, "rules": {"max_gas_usd": 0.5}}, "rules.max_gas_usd: "),
        ("create_gas_policy", {**POLICY, "rules": {"max_gas": "1"}}, "rules.max_gas: is unknown"),
        ("create_gas_policy", {**POLICY, "rules": {"max_per_user_per_day": -1}}, "rules.max_per_user_per_day: "),
        ("create_gas_policy", {**POLICY, "rules": {"allowed_contracts": [OWNER, "0x"]}}, "rules.allowed_contracts.1: "),
    ],
)
def test_invalid_member_is_named(name: str, body: dict[str, Any], named: str) -> None:
    message = body_refusal(name, body)
    assert named in message
    assert len(message) < 400


@pytest.mark.parametrize("name", ["create_wallet", "create_webhook", "update_webhook", "create_gas_policy"])
@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"text"', b"true"])
def test_body_that_is_not_an_object_is_rejected(name: str, body: bytes) -> None:
    assert body_refusal(name, body).startswith("body: ")


@pytest.mark.parametrize(
    "body",
    [b"{", b"{}x", b"\xff\xfe", b"{'a': 1}", b'{"a": NaN}', b"\xef\xbb\xbf{}", b'{"a": "\xed\xa0\x80"}', b"[" * 200],
)  # fmt: skip
def test_body_that_is_not_json_is_rejected(body: bytes) -> None:
    assert body_refusal("create_wallet", body).startswith("the body is not valid JSON")


def test_hostile_but_valid_json_is_rejected_briefly() -> None:
    for body in (b"[" * 900 + b"]" * 900, b'{"owner":' * 900 + b"1" + b"}" * 900, orjson.dumps({"x" * 100_000: 1})):
        assert len(body_refusal("create_wallet", body)) < 400


# The document


def test_small_body_gets_all_its_errors_and_a_large_one_the_first() -> None:
    wrong = {"name": "", "mode": "none", "allowed_ips": [1, 2], "colour": "red"}
    with pytest.raises(InvalidRequest) as refused:
        operation("create_key").check_body(orjson.dumps(wrong))
    fault = refused.value
    assert {param for param, _ in fault.errors} == {"name", "mode", "allowed_ips.0", "allowed_ips.1", "colour"}
    assert fault.errors[0] == (fault.param, fault.message)
    listed = fault.body()["error"]["errors"]
    assert listed[0] == {"param": fault.param, "message": fault.message}
    with pytest.raises(InvalidRequest) as refused:
        operation("create_key").check_body(orjson.dumps({**wrong, "allowed_ips": [1] * api_spec.FEW_VALUES}))
    assert refused.value.errors == ()
    with pytest.raises(InvalidRequest) as refused:
        operation("create_key").check_body(orjson.dumps({"name": "a key", "mode": "none"}))
    assert "errors" not in refused.value.body()["error"]


def test_document_is_merged_from_all_files() -> None:
    assert len(SPEC.document["components"]["schemas"]) > 40
    assert repr(SPEC) == f"<ApiSpec {len(SPEC.operations)} operations>"


@pytest.mark.parametrize(("directory", "name"), [("http", "Thing"), ("paths", "/things"), ("webhooks", "thing")])
def test_name_defined_in_two_files_is_an_error(tmp_path: Path, directory: str, name: str) -> None:
    (tmp_path / directory).mkdir()
    (tmp_path / "openapi.json").write_bytes(b'{"components": {}}')
    for stem in ("a", "b"):
        (tmp_path / directory / f"{stem}.json").write_bytes(orjson.dumps({name: {}}))
    with pytest.raises(ValueError, match=rf"{directory}/b\.json: {name} is defined twice"):
        api_spec.load(tmp_path)


def test_whole_float_is_returned_as_an_integer() -> None:
    rules = b'{"max_per_user_per_day": 60.0, "rate_limit": {"requests": 1e1, "per_seconds": 60}, "allowed_methods": []}'
    body = operation("create_gas_policy").check_body(b'{"name": "x", "chain": "base", "rules": %b}' % rules)
    found = body["rules"]["max_per_user_per_day"], body["rules"]["rate_limit"]["requests"]
    assert (found, [type(each) for each in found]) == ((60, 10), [int, int])
    wrong = {**POLICY, "rules": {"max_per_user_per_day": 60.5}}
    assert "rules.max_per_user_per_day" in body_refusal("create_gas_policy", wrong)


# Sizes

# Their params are checked inside JSON-RPC, or the body is the chain's own.
UNBOUNDED = {"rpc_call", "bundler_call", "paymaster_call", "rest_post"}


def test_every_body_has_a_largest_size_by_its_schema() -> None:
    """Give each string of a request a `maxLength`, each array a `maxItems`, and each object `additionalProperties: false`."""
    bodies = {name: each.body_bytes for name, each in SPEC.operations.items() if each.body is not None}
    assert {name for name, size in bodies.items() if size is None} == UNBOUNDED


def test_operation_with_a_small_schema_accepts_small_bodies_only() -> None:
    assert (operation("create_wallet").body_bytes or 0) < 10_000
    assert (operation("account_sign_in").body_bytes or 0) < 10_000
    assert (operation("create_webhook").body_bytes or 0) > 8_000_000


def test_largest_body_fits_with_all_characters_escaped_and_indented() -> None:
    body = {**WALLET, "salt": "x" * 256, "version": "0.7"}
    escaped = orjson.dumps(body, option=orjson.OPT_INDENT_2).replace(b"x" * 256, b"\\u0078" * 256)
    assert operation("create_wallet").check_body(escaped) == body
    assert len(escaped) <= (operation("create_wallet").body_bytes or 0)


def test_long_list_is_validated_in_steps() -> None:
    body = {**WEBHOOK, "config": {"addresses": [f"0x{number:040x}" for number in range(100_000)], "confirmations": 2.0}}
    raw = orjson.dumps(body)
    assert sum(1 for _ in operation("create_webhook").body_steps(JsonReader(raw))) > 100
    found = operation("create_webhook").check_body(raw)
    assert found == body
    assert type(found["config"]["confirmations"]) is int


def test_invalid_item_of_a_long_list_is_named_by_its_place() -> None:
    addresses = [f"0x{number:040x}" for number in range(50_000)]
    addresses[45_678] = "x" * 65
    assert body_refusal("update_webhook", {"add_addresses": addresses}).startswith("add_addresses.45678: ")
    assert body_refusal("create_webhook", {**WEBHOOK, "config": {"addresses": addresses}}).startswith(
        "config.addresses.45678: "
    )


def test_list_above_its_most_items_is_rejected_with_their_number() -> None:
    message = body_refusal("update_webhook", {"remove_addresses": ["0x"] * 100_001})
    assert message == "remove_addresses: has 100001 items, at most 100000 are allowed"
    for most in (9_999, 10_000):
        body = {**POLICY, "rules": {"allowed_contracts": [OWNER] * most}}
        assert operation("create_gas_policy").check_body(orjson.dumps(body)) == body
    assert "10001 items" in body_refusal(
        "create_gas_policy", {**POLICY, "rules": {"allowed_contracts": [OWNER] * 10_001}}
    )
    assert "10001 items" in body_refusal("update_gas_policy", {"rules": {"sender_denylist": [OWNER] * 10_001}})
    assert "scopes" in body_refusal("create_key", {"name": "x", "mode": "live", "scopes": ["rpc:read"] * 3_000})
