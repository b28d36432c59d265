"""Examples of the published API spec name networks of the service."""

from __future__ import annotations

from typing import Any

from openapi_spec_validator import OpenAPIV31SpecValidator

from proxy.chains.registry import Network
from proxy.settings import SCHEMAS
from proxy.web import api_spec
from proxy.web.docs.local_examples import LocalExamples
from tests.shipped_tables import TABLES

SPEC = api_spec.load(SCHEMAS)


def applied(*served: str) -> Any:
    networks: list[Network] = [each for each in TABLES.chains.networks() if each.id in served]
    assert len(networks) == len(served)
    return LocalExamples(TABLES.chains, networks).applied(SPEC.document)


def values_of(document: Any, name: str) -> dict[str, str]:
    return {key: each["value"] for key, each in document["components"]["parameters"][name]["examples"].items()}


def test_routes_have_examples_of_the_served_families_only_and_in_the_same_order() -> None:
    document = applied("ethereum/mainnet", "tron/mainnet", "cosmoshub-lcd/mainnet")
    chains = values_of(document, "RestChain")
    assert chains == {"lcd": "cosmoshub-lcd", "tron": "tron"}
    for name in ("RestNetwork", "RestPath", "RestPostPath"):
        assert [*values_of(document, name)] == [*chains], name
    posted = document["paths"]["/rest/{chain}/{network}/{path}"]["post"]["requestBody"]["content"]["application/json"]
    assert posted["examples"].keys() == chains.keys()
    assert values_of(document, "RpcChain") == {"evm": "ethereum"}
    OpenAPIV31SpecValidator(document).validate()


def test_routes_keep_their_examples_where_no_such_chain_is_served() -> None:
    document = applied("ethereum/mainnet")
    for name in ("RestChain", "RestNetwork", "RestPath", "RestPostPath"):
        assert values_of(document, name) == values_of(SPEC.document, name), name


def test_calls_keep_their_examples_where_only_routes_are_served() -> None:
    document = applied("ethereum-beacon/mainnet")
    assert values_of(document, "RpcChain") == values_of(SPEC.document, "RpcChain")
    assert values_of(document, "RestPath") == {"beacon": "eth/v1/beacon/genesis"}
