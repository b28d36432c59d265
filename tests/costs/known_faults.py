"""Rows above their bounds that wait for a repair, with the bounds that they exceed. The list may only become shorter."""

from __future__ import annotations

KNOWN: dict[str, set[str]] = {
    # The largest filter is parsed and added to the index in one step.
    "eth_subscribe logs": {"step"},
    # Replays send many events in one step.
    "eth_subscribe newHeads": {"step"},
}
