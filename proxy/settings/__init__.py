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
    BundlerSettings,
    BundlingSettings,
    CacheSettings,
    DashboardSettings,
    DatabaseSettings,
    EgressSettings,
    FixedPrice,
    FollowerSettings,
    KeySettings,
    LogSettings,
    MailSettings,
    MetricsSettings,
    NftSettings,
    PaymasterSettings,
    PriceFeed,
    PriceSources,
    QuotaSettings,
    RpcSettings,
    ServerSettings,
    Settings,
    SocketSettings,
    UpstreamSettings,
    UsageSettings,
    WalletSettings,
    WebhookSettings,
)
from proxy.settings.tables import Plan, Tables, load_tables

__all__ = [
    "CONFIG",
    "SCHEMAS",
    "BundlerSettings",
    "BundlingSettings",
    "CacheSettings",
    "DashboardSettings",
    "DatabaseSettings",
    "EgressSettings",
    "FixedPrice",
    "FollowerSettings",
    "KeySettings",
    "LogSettings",
    "MailSettings",
    "MetricsSettings",
    "NftSettings",
    "PaymasterSettings",
    "Plan",
    "PriceFeed",
    "PriceSources",
    "QuotaSettings",
    "RpcSettings",
    "ServerSettings",
    "Settings",
    "SocketSettings",
    "Tables",
    "UpstreamSettings",
    "UsageSettings",
    "WalletSettings",
    "WebhookSettings",
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
