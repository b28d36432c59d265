"""`upstreams rules`: recorded health against the limits of the settings."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from proxy import settings
from proxy.commands.rules import RuleSource, _rows
from proxy.store.postgres.upstream_samples import UpstreamSamples
from tests.shipped_tables import TABLES

CONFIG = """
database.url = "postgresql://nobody@127.0.0.1:1/nothing"
keys.pepper = "a pepper that no attacker can guess"
[[upstreams]]
network = "ethereum/mainnet"
url = "http://127.0.0.1:1"
[[upstreams]]
network = "ethereum/mainnet"
url = "https://provider.example.com"
name = "dear"
cost = "alchemy"
credit_price = "1.00"
[[routing]]
network = "ethereum/mainnet"
above = { lag_blocks = 10 }
[[routing]]
network = "ethereum/mainnet"
methods = ["debug_traceCall"]
labels = ["paid"]
above = { cost_usd = 0.00003, latency_ms = 1000 }
dry_run = true
"""
BEGAN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def samples(label: str, *lags: int) -> list[dict[str, Any]]:
    return [
        {"at": BEGAN + datetime.timedelta(minutes=n), "network": "ethereum/mainnet", "label": label, "lag_blocks": lag}
        | {"error_rate": None, "p50_ms": 12.0}
        for n, lag in enumerate(lags)
    ]


def test_replay_counts_how_often_each_rule_would_exclude_an_upstream(tmp_path: Path) -> None:
    path = tmp_path / "edited.toml"
    path.write_text(CONFIG)
    source = RuleSource(settings.load(path, environ={}), TABLES, UpstreamSamples(None))  # type: ignore[arg-type]
    found = samples("ethereum/mainnet#1", 0, 14, 12, 3, 11) + samples("ethereum/mainnet#dear", 0, 1)
    rows = [*_rows(source, [*found, *samples("ethereum/mainnet#gone", 99)])]
    shown = [
        (row["rule"], row["upstream"][17:], row["effect"], row["times"], row["samples"], row["of"]) for row in rows
    ]
    assert shown == [
        (1, "1", "excluded", 2, 3, 5),
        (1, "dear", "excluded", 0, 0, 2),
        (2, "dear", "would be excluded", 1, 2, 2),
    ]
    assert (rows[0]["last"], rows[0]["reason"]) == (BEGAN + datetime.timedelta(minutes=4), "11 blocks behind")
    assert rows[2]["reason"] == "a cost of 0.000040000 US dollars"
