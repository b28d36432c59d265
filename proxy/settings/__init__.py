"""Settings: TOML files and the environment, as frozen dataclasses.

Precedence, lowest first: `config/default.toml`, the operator's file, the environment. `schemas/config/*.json` defines the valid
values. All faults are collected and reported together, each with the name of its key. No other package reads the environment.
"""

from __future__ import annotations

from proxy.data_files import CONFIG, SCHEMAS
from proxy.settings.certificates import Certificates, client_context, read_certificates
from proxy.settings.crosschecks import network_faults, paymaster_faults, signer_key
from proxy.settings.loading import data_directory, environment, from_tree, load, load_with_tables, masked, own_directory
from proxy.settings.sections import (
    BundlerSettings,
    BundlingSettings,
    CacheSettings,
    DashboardSettings,
    DatabaseSettings,
    DataFileSettings,
    EgressSettings,
    FixedPrice,
    FollowerSettings,
    KeySettings,
    LinkSettings,
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
    TlsSettings,
    UpstreamSettings,
    UsageSettings,
    WalletSettings,
    WebhookSettings,
)
from proxy.settings.tables import Plan, Tables, file_versions, load_tables

__all__ = [
    "CONFIG",
    "SCHEMAS",
    "BundlerSettings",
    "BundlingSettings",
    "CacheSettings",
    "Certificates",
    "DashboardSettings",
    "DataFileSettings",
    "DatabaseSettings",
    "EgressSettings",
    "FixedPrice",
    "FollowerSettings",
    "KeySettings",
    "LinkSettings",
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
    "TlsSettings",
    "UpstreamSettings",
    "UsageSettings",
    "WalletSettings",
    "WebhookSettings",
    "client_context",
    "data_directory",
    "environment",
    "file_versions",
    "from_tree",
    "load",
    "load_tables",
    "load_with_tables",
    "masked",
    "network_faults",
    "own_directory",
    "paymaster_faults",
    "read_certificates",
    "signer_key",
]
