"""TOML and the environment -> frozen settings.

Order: `config/default.toml`, then the operator's file, then the environment. What the values may be is written in
`schemas/config/*.json`; everything wrong is collected and reported at once, each fault with the name of its key.
Only this room reads the environment.
"""

from __future__ import annotations

from proxy.settings.crosschecks import network_faults, paymaster_faults, signer_key
from proxy.settings.loading import data_directory, environment, from_tree, load, masked
from proxy.settings.schemas import CONFIG, SCHEMAS
from proxy.settings.sections import (
    Bundler,
    Bundling,
    Cache,
    Dashboard,
    Database,
    Egress,
    FixedPrice,
    Follower,
    Keys,
    Log,
    Mail,
    Metrics,
    Nfts,
    Paymaster,
    PriceFeed,
    PriceSources,
    Quotas,
    Rpc,
    Server,
    Settings,
    Sockets,
    Upstream,
    Usage,
    Wallets,
    Webhooks,
)
from proxy.settings.tables import Plan, Tables, load_tables

__all__ = [
    "CONFIG",
    "SCHEMAS",
    "Bundler",
    "Bundling",
    "Cache",
    "Dashboard",
    "Database",
    "Egress",
    "FixedPrice",
    "Follower",
    "Keys",
    "Log",
    "Mail",
    "Metrics",
    "Nfts",
    "Paymaster",
    "Plan",
    "PriceFeed",
    "PriceSources",
    "Quotas",
    "Rpc",
    "Server",
    "Settings",
    "Sockets",
    "Tables",
    "Upstream",
    "Usage",
    "Wallets",
    "Webhooks",
    "data_directory",
    "environment",
    "from_tree",
    "load",
    "load_tables",
    "masked",
    "network_faults",
    "paymaster_faults",
    "signer_key",
]
