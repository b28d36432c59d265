"""The API spec agrees with the routes, the scopes and the prices."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import orjson
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from proxy import settings
from proxy.chains.evm.bundler_methods import BUNDLER
from proxy.compose.app import App
from proxy.core.access import ACCOUNT_SCOPES, SCOPES
from proxy.settings import CONFIG, SCHEMAS
from proxy.store.shared_memory import rate_buckets
from proxy.store.shared_memory.rate_buckets import SharedBuckets
from proxy.web import api_spec
from tests.shipped_tables import TABLES

SPEC = api_spec.load(SCHEMAS)
DOCUMENT = SPEC.document
OPERATIONS = SPEC.operations
SHAPES: dict[str, dict[str, Any]] = DOCUMENT["components"]["schemas"]
PRICES = TABLES.prices
BASE = "/v1"
# Members of the root file; everything else is assembled from the directories beside it.
ROOT_MEMBERS = ("openapi", "info", "servers", "tags", "security")
# Operations that take only an API key; the others take a session, and a key too if they have a scope.
KEY_OPERATIONS = {name: op for name, op in OPERATIONS.items() if op.session is None}
# Operations of the account that keys can use, without copies of other operations.
ACCOUNT_OPERATIONS = {
    name: op for name, op in OPERATIONS.items() if op.session == "account" and op.scope in ACCOUNT_SCOPES
}
# Calls of a chain are priced by method or route, not by operation.
BY_METHOD = {"rpc_call", "rest_get", "rest_post", "bundler_call", "paymaster_call"}

# The endpoints of the specification (section 4) and their scopes.
ENDPOINTS = {
    ("POST", "/rpc/{chain}/{network}"): "rpc:read",
    ("GET", "/tokens/{chain}/balances/{address}"): "data:read",
    ("GET", "/tokens/{chain}/metadata/{contract}"): "data:read",
    ("GET", "/nfts/{chain}/metadata/{contract}/{token_id}"): "data:read",
    ("GET", "/nfts/{chain}/collection/{contract}"): "data:read",
    ("GET", "/nfts/{chain}/owned/{address}"): "data:read",
    ("POST", "/wallets/create"): "wallets:manage",
    ("GET", "/wallets/{address}"): "wallets:manage",
    ("GET", "/wallets"): "wallets:manage",
    ("POST", "/webhooks"): "webhooks:manage",
    ("GET", "/webhooks"): "webhooks:manage",
    ("PATCH", "/webhooks/{id}"): "webhooks:manage",
    ("DELETE", "/webhooks/{id}"): "webhooks:manage",
    ("GET", "/gas/{chain}/prices"): "rpc:read",
    ("POST", "/gas/policies"): "gas:manage",
    ("POST", "/gas/sponsor"): "gas:manage",
    ("POST", "/bundler/{chain}/{network}"): "bundler:send",
}
# Endpoints beyond the specification: the networks (for every key), managing policies and webhooks, and the paymaster of wallet
# libraries (ERC-7677).
ADDED = {
    # The shapes of other services, for their SDKs.
    ("GET", "/alchemy/{chain}/getNFTsForOwner"): "data:read",
    ("GET", "/alchemy/{chain}/getNFTMetadata"): "data:read",
    ("GET", "/alchemy/{chain}/getContractMetadata"): "data:read",
    ("GET", "/infura/{chain}/suggestedGasFees"): "rpc:read",
    ("GET", "/chains"): "",
    ("GET", "/rest/{chain}/{network}/{path}"): "rpc:read",
    ("POST", "/rest/{chain}/{network}/{path}"): "rpc:read",
    ("GET", "/tokens/{chain}/holders/{contract}"): "data:read",
    ("GET", "/transfers/{chain}/{address}"): "data:read",
    ("GET", "/transfers/{chain}/contract/{contract}"): "data:read",
    ("GET", "/transfers/{chain}/transaction/{hash}"): "data:read",
    ("POST", "/simulate/{chain}"): "rpc:read",
    ("GET", "/requests"): "requests:read",
    ("GET", "/requests/{id}"): "",
    ("GET", "/errors"): "requests:read",
    ("GET", "/gas/policies"): "gas:manage",
    ("GET", "/gas/policies/{id}"): "gas:manage",
    ("PATCH", "/gas/policies/{id}"): "gas:manage",
    ("DELETE", "/gas/policies/{id}"): "gas:manage",
    ("GET", "/gas/policies/{id}/spend"): "gas:manage",
    ("GET", "/gas/policies/{id}/refusals"): "gas:manage",
    ("POST", "/paymaster/{chain}/{network}"): "gas:manage",
    ("GET", "/webhooks/{id}"): "webhooks:manage",
    ("POST", "/webhooks/{id}/resume"): "webhooks:manage",
    ("POST", "/webhooks/{id}/rotate"): "webhooks:manage",
    ("POST", "/webhooks/backtest"): "webhooks:manage",
    ("GET", "/webhooks/{id}/deliveries"): "webhooks:manage",
    ("GET", "/webhooks/{id}/deliveries/{event_id}"): "webhooks:manage",
    ("POST", "/webhooks/{id}/deliveries/{event_id}/redeliver"): "webhooks:manage",
    ("POST", "/webhooks/{id}/redeliver"): "webhooks:manage",
    ("POST", "/webhooks/{id}/test"): "webhooks:manage",
    ("GET", "/alerts"): "webhooks:manage",
    ("PATCH", "/alerts"): "webhooks:manage",
    ("POST", "/alerts/test"): "webhooks:manage",
}
# Operations that call an upstream.
CALLS_UPSTREAM = {
    *BY_METHOD,
    *("list_token_balances", "read_token_metadata", "read_nft", "read_nft_collection", "list_owned_nfts"),
    *("list_transfers", "list_contract_transfers", "list_transaction_transfers", "list_token_holders"),
    "simulate_transactions",
    *("read_wallet", "sponsor_operation", "backtest_webhook"),
}
# Pages without authentication, which the API spec does not describe.
PUBLIC = {"/healthz", "/readyz", "/llms.txt", "/docs", "/docs/", "/docs/{name}", f"{BASE}/openapi.json"}
PUBLIC |= {"/docs/guide", "/docs/guide/{name}", "/", "/dashboard", "/dashboard/", "/dashboard/{digest}/{name}"}
PUBLIC |= {"/dashboard/request-forms.json", "/dashboard/options.json"}
# A GET that is upgraded to a WebSocket. OpenAPI cannot describe the messages, so the introduction does.
SOCKET = f"{BASE}/ws/{{chain}}/{{network}}"


@pytest.fixture
async def app() -> AsyncIterator[App]:
    """An application as a worker builds it, not started."""
    environ = {"DATABASE_URL": "postgresql://nowhere/none", "PENSTOCK_KEYS__PEPPER": "p" * 32}
    fd = rate_buckets.create()
    yield App(settings.load(environ=environ), TABLES, SharedBuckets(fd))
    os.close(fd)


async def test_routes_are_the_operations_of_the_spec(app: App) -> None:
    routed = {
        (route.method, route.resource.canonical)
        for route in app.web.router.routes()
        if route.resource is not None and route.method != "HEAD" and route.resource.canonical not in {*PUBLIC, SOCKET}
    }
    assert routed == {(op.method, BASE + op.path) for op in OPERATIONS.values()}


async def test_public_pages_are_routed(app: App) -> None:
    paths = {route.resource.canonical for route in app.web.router.routes() if route.resource is not None}
    assert paths >= {*PUBLIC, SOCKET}


def test_websocket_is_described_and_every_subscription_type_has_a_price() -> None:
    assert SOCKET in DOCUMENT["info"]["description"]
    assert set(PRICES.events) == {"newHeads", "logs", "newPendingTransactions", "syncing", "svm", "streamed"}


def test_endpoints_and_scopes_match_the_specification() -> None:
    assert {(op.method, op.path): op.scope for op in KEY_OPERATIONS.values()} == {**ENDPOINTS, **ADDED}


def test_session_operations_are_under_account_and_admin_and_only_those_of_accounts_have_a_scope() -> None:
    for op in OPERATIONS.values():
        stem = op.path.split("/")[1]
        assert (op.session is not None) == (stem in ("account", "admin")), op.path
        assert op.session in (None, "none", stem), op.path
        assert op.session in (None, "account") or not op.scope, op.path
        schemes = {each for way in DOCUMENT["paths"][op.path][op.method.lower()].get("security", ()) for each in way}
        assert op.session is None or ("ApiKeyHeader" in schemes) == bool(op.scope), op.path


def test_only_signing_in_and_mailed_links_work_without_a_session() -> None:
    free = {op.path for op in OPERATIONS.values() if op.session == "none"}
    signing_in = {"/account/sign-in", "/account/sign-in/link", "/account/sign-in/redeem", "/admin/sign-in"}
    invitation = {"/account/sign-in/invitation", "/account/sign-in/invitation/accept"}
    assert free == {*signing_in, *invitation, "/account/email/confirm"}


def test_root_file_has_no_paths_and_each_path_file_holds_one_resource() -> None:
    assert set(orjson.loads((SCHEMAS / "openapi.json").read_bytes())) <= {*ROOT_MEMBERS, "components"}
    for file in (SCHEMAS / "paths").glob("*.json"):
        assert {path.split("/")[1] for path in orjson.loads(file.read_bytes())} == {file.stem}


def test_document_is_valid_openapi() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_operations_use_every_scope_except_rpc_write() -> None:
    used = {op.scope for op in OPERATIONS.values() if op.scope}
    assert used <= set(SCOPES)
    assert set(SCOPES) - used == {"rpc:write"}  # the method decides, on the path of rpc:read


def test_priced_operations_are_exactly_those_with_a_key() -> None:
    assert set(PRICES.rest) == set(KEY_OPERATIONS | ACCOUNT_OPERATIONS) - BY_METHOD


def test_every_bundler_method_is_described() -> None:
    methods = DOCUMENT["paths"]["/bundler/{chain}/{network}"]["post"]["x-rpc-methods"]
    assert set(settings.load_tables().methods[BUNDLER.name]) == set(methods)


def test_every_paymaster_method_has_a_price() -> None:
    methods = DOCUMENT["paths"]["/paymaster/{chain}/{network}"]["post"]["x-rpc-methods"]
    assert set(PRICES.paymaster) == set(methods)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_documents_its_errors_and_authentication(name: str) -> None:
    operation = OPERATIONS[name]
    spec = DOCUMENT["paths"][operation.path][operation.method.lower()]
    assert {"400", "401", "403", "429", "500"} <= set(spec["responses"])
    assert {status[0] for status in spec["responses"]} >= {"2", "4", "5"}
    assert spec.get("security", DOCUMENT["security"])
    for key in ("summary", "description", "tags"):
        assert spec[key]


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_with_a_body_documents_large_slow_and_non_json_bodies(name: str) -> None:
    spec = DOCUMENT["paths"][OPERATIONS[name].path][OPERATIONS[name].method.lower()]
    assert ({"408", "413", "415"} <= set(spec["responses"])) == (OPERATIONS[name].body is not None)


@pytest.mark.parametrize("name", sorted(CALLS_UPSTREAM))
def test_operation_that_calls_an_upstream_documents_timeouts(name: str) -> None:
    spec = DOCUMENT["paths"][OPERATIONS[name].path][OPERATIONS[name].method.lower()]
    assert {"404", "503", "504"} <= set(spec["responses"])


@pytest.mark.parametrize("name", [name for name, schema in SHAPES.items() if "examples" in schema])
def test_examples_conform_to_their_schema(name: str) -> None:
    whole = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    validator = jsonschema_rs.Draft202012Validator(whole, validate_formats=True)
    for example in SHAPES[name]["examples"]:
        validator.validate(example)


def test_plans_match_the_specification() -> None:
    limits = {name: (p.requests_per_second, p.requests_per_day, p.units_per_second) for name, p in TABLES.plans.items()}
    assert limits["free"] == (10, 100_000, 200)
    assert limits["growth"] == (100, 5_000_000, 2_000)
    assert TABLES.plans["free"].webhook_deliveries_per_day == 1_000
    assert limits["enterprise"][1] == 0


def test_spec_and_guide_say_how_long_calls_of_a_batch_wait() -> None:
    waits = tomllib.loads((CONFIG / "default.toml").read_text())["rpc"]["batch_wait_s"]
    guide = (SCHEMAS.parent / "docs" / "limits.md").read_text()
    for text in (DOCUMENT["info"]["description"], SHAPES["JsonRpcBatch"]["description"], guide):
        assert re.findall(r"above the rate(?: limit)? wait for up to (\d+) seconds", text) == [f"{waits:.0f}"]
