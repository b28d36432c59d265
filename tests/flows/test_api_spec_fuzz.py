"""Valid and invalid requests generated from the API spec: every reply must conform to it."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from proxy.settings import SCHEMAS
from proxy.web import api_spec
from tests.service import Service

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
OPERATIONS = ("list_token_balances", "read_token_metadata", "read_nft", "read_nft_collection", "list_owned_nfts")
SPEC = api_spec.load(SCHEMAS)
# Networks of this service whose upstreams only echo and serve no chain.
ONLY_ECHO = ("ethereum-sepolia", "ethereum-hoodi")
# Bounded and deterministic, so that a failure can be reproduced.
EXAMPLES = settings(
    max_examples=30, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_every_reply_conforms_to_the_api_spec(service: Service, name: str, mode: GenerationMode) -> None:
    operation = SPEC.operations[name]
    schema: Any = schemathesis.openapi.from_dict(copy.deepcopy(SPEC.document))
    ready = service.ready
    known = [found["address"] for found in (*ready["tokens"], *ready["nfts"], *ready["accounts"][:4])]
    # Generated names rarely exist, so half of them are replaced by existing ones.
    chains = st.one_of(st.none(), st.sampled_from(["dev", "dev-testnet", "31337"]))
    addresses = st.one_of(st.none(), st.sampled_from([*known, *ready["ens"]["names"]]))

    @EXAMPLES
    @given(schema[operation.path][operation.method].as_strategy(generation_mode=mode), chains, addresses)
    def run(case: Any, chain: str | None, address: str | None) -> None:
        for name, value in (("chain", chain), ("address", address), ("contract", address)):
            if value is not None and name in case.path_parameters:
                case.path_parameters[name] = value
        case.headers.pop("X-Min-Block", None)  # It waits for a block that the chain does not have, and gets a 503.
        if case.path_parameters["chain"] in ONLY_ECHO:
            case.path_parameters["chain"] = "dev"
        response = case.call(base_url=service.base, headers={"X-API-Key": service.keys["enterprise"]}, timeout=30)
        case.validate_response(response, checks=CHECKS)

    await asyncio.to_thread(run)
