"""`fleet`: every process of every host, with its version and role, and the networks that followers index."""

from __future__ import annotations

import argparse
import time
from typing import Any

from proxy.commands import context, output
from proxy.commands.upstreams import fleet_store
from proxy.store.postgres.fleet import FleetStore

FLEET_COLUMNS = ("host", "role", "pid", "version", "up_s", "valkey", "leases", "follows")


def register(commands: Any) -> None:
    context.add_action(commands, "fleet", "list the processes of all hosts", _fleet, fleet_store)


async def _fleet(store: FleetStore, args: argparse.Namespace) -> None:
    processes = [{**each, "up_s": round(time.time() - each["started_at"])} for each in await store.processes()]
    if not args.json:
        processes = [
            {**each, "follows": _followed(each["follows"]), **_shared(each.get("valkey"))} for each in processes
        ]
    output.rows(processes, FLEET_COLUMNS, as_json=args.json)


def _shared(valkey: dict[str, Any] | None) -> dict[str, Any]:
    if valkey is None:
        return {"valkey": None, "leases": None}
    return {
        "valkey": f"{valkey['state']}, {valkey['round_trip_ms']:.1f} ms, {valkey['hosts']} hosts",
        "leases": valkey["leases"],
    }


def _followed(follows: dict[str, dict[str, int]]) -> str:
    """`ethereum/mainnet at 123, 2 behind`"""
    return "; ".join(
        f"{network} at {each['block']}, {max(0, each['head'] - each['block'])} behind"
        for network, each in sorted(follows.items())
    )
