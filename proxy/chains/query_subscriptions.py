"""Subscriptions to events that match a query, as CometBFT has them: `subscribe {"query": "tm.event='NewBlock'"}`."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from proxy.chains.family import SubscriptionParams, SubscriptionRules

# CometBFT refuses longer ones (rpc/core/events.go).
LONGEST_QUERY: Final = 512
EVENT: Final = "streamed"


def read_query(method: str, params: Any) -> SubscriptionParams:
    """Params are an array or an object, with a query alone."""
    given = params if isinstance(params, dict) else dict(zip(("query",), params, strict=True)) if params else {}
    query = given.get("query")
    if len(given) != 1 or not isinstance(query, str) or not 0 < len(query) <= LONGEST_QUERY:
        raise ValueError(f'the params must have the member "query" alone, a text of up to {LONGEST_QUERY} characters')
    return SubscriptionParams("query", msgspec.json.encode({"query": query}), None, EVENT, b"")


QUERIES: Final = SubscriptionRules("stream", read_query, echoes_ids=True)
