"""The API spec as it is served: with examples for the networks of this service, its plans and its prices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import orjson

from proxy.chains.evm.bundler_methods import BUNDLER
from proxy.chains.registry import Network
from proxy.settings import Tables
from proxy.web.api_spec import METHODS, ApiSpec
from proxy.web.docs.local_examples import LocalExamples

_LEAD = re.compile(r"^\*\*([^*]+?)\.?\*\*\s+")
_SENTENCE = re.compile(r"(?<=\.)\s")


class PublishedSpec:
    def __init__(self, spec: ApiSpec, tables: Tables, served: Iterable[Network]) -> None:
        self._spec = spec
        self._tables = tables
        self._networks = list(served)

    def __repr__(self) -> str:
        return f"<PublishedSpec {len(self._spec.document['paths'])} paths, {len(self._networks)} networks>"

    @cached_property
    def document(self) -> dict[str, Any]:
        return {
            **LocalExamples(self._tables.chains, self._networks).applied(self._spec.document),
            "x-networks": [network.id for network in self._networks],
            "x-plans": {name: asdict(plan) for name, plan in self._tables.plans.items()},
            "x-units": _units(self._tables, {network.family for network in self._networks}),
        }

    @property
    def raw(self) -> bytes:
        return orjson.dumps(self.document)

    def index(self, guide: Sequence[str]) -> str:
        """The contents of the reference for language models (https://llmstxt.org), and links to the guide."""
        info = self.document["info"]
        parts = [f"# {info['title']}", f"> {info['summary']}", *self._guide(), "## Operations", *self._operations()]
        events = [f"- [{name}](/docs#event-{name})" for name in self.document["webhooks"]]
        pages = [f"- {link}" for link in guide]
        parts += ["## Webhook events", "\n".join(events), "## Guide", "\n".join(pages)]
        parts += ["## More", "- [OpenAPI 3.1 document](/v1/openapi.json)"]
        return "\n\n".join(parts) + "\n"

    def _guide(self) -> list[str]:
        """The introduction, with a heading for each of its run-in titles."""
        blocks = self.document["info"]["description"].split("\n\n")
        return [_LEAD.sub(lambda lead: f"## {lead[1]}\n\n", block) for block in blocks]

    def _operations(self) -> list[str]:
        return [
            "\n".join(
                f"- [{method.upper()} /v1{path}](/docs#{item[method]['operationId']}): "
                f"{_SENTENCE.split(item[method]['description'])[0]}"
                for path, item in self.document["paths"].items()
                for method in METHODS
                if method in item
            )
        ]


def _units(tables: Tables, families: set[str]) -> dict[str, Any]:
    """The prices in compute units: of JSON-RPC methods by family, of REST operations and of events."""
    named = {*families, BUNDLER.name}
    return {
        "archive_minimum": tables.prices.archive_minimum,
        "methods": {
            family: {name: method.price for name, method in methods.items()}
            for family, methods in tables.methods.items()
            if family in named
        },
        "operations": {**tables.prices.rest, **tables.prices.paymaster},
        "events": dict(tables.prices.events),
    }
