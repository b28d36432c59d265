"""The settings as dataclasses, one per section of `config/default.toml`, where they are documented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import urlsplit

from proxy.core.data_bounds import DataKind
from proxy.core.node_operators import operator_of
from proxy.core.routing import EQUALLY_FAST
from proxy.core.routing_rules import RuleTerms


@dataclass(frozen=True, slots=True)
class TlsSettings:
    cert: str = ""
    key: str = ""
    directory: str = ""
    min_version: Literal["1.2", "1.3"] = "1.2"
    client_ca: str = ""
    client_certificates: Literal["none", "optional", "required"] = "none"
    hsts_s: int = 0

    @property
    def is_used(self) -> bool:
        return bool(self.cert or self.key or self.directory)

    @property
    def scheme(self) -> str:
        return "https" if self.is_used else "http"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str
    port: int
    workers: int
    dev: bool
    header_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float
    min_read_rate: int
    max_held_bytes: int
    keepalive_s: float
    keepalive_requests: int
    max_header_bytes: int
    max_body_bytes: int
    max_connections: int
    connections_per_address: int
    leave_s: float
    drain_s: float
    worker_timeout_s: float
    trusted_proxies: tuple[str, ...]
    cors_origins: tuple[str, ...]
    compress_from: int
    tls: TlsSettings


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class DataFileSettings:
    directory: str


# The setting that names the main database.
MAIN_URL = "database.url"


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    url: str
    direct_url: str
    replica_url: str
    replica_lag_s: float
    pool_size: int
    acquire_timeout_s: float
    request_timeout_s: float
    per_client: int

    @property
    def session_url(self) -> str:
        """The address for sessions that keep state, such as locks."""
        return self.direct_url or self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexDatabaseSettings:
    """Another Postgres, for the index of these networks."""

    name: str
    url: str
    direct_url: str = ""
    networks: tuple[str, ...]

    @property
    def session_url(self) -> str:
        return self.direct_url or self.url


@dataclass(frozen=True, slots=True)
class KeySettings:
    pepper: str
    previous_pepper: str
    reload_s: float
    auth_failures_per_minute: int


@dataclass(frozen=True, slots=True)
class QuotaSettings:
    chunk: int
    flush_s: float


@dataclass(frozen=True, slots=True)
class FollowerSettings:
    networks: tuple[str, ...]
    start: Mapping[str, int]
    keep_blocks: int
    renew: bool
    transfers: Mapping[str, tuple[str, ...]]
    keep_transfers: Mapping[str, int]

    def follows(self, network: str) -> bool:
        return "*" in self.networks or network in self.networks

    def transfer_categories(self, network: str) -> tuple[str, ...]:
        """The categories whose transfers are kept."""
        return self.transfers.get(network, self.transfers.get("*", ()))

    def transfer_blocks(self, network: str) -> int:
        """The number of blocks whose transfers are kept; 0: all."""
        return self.keep_transfers.get(network, self.keep_transfers.get("*", 0))


@dataclass(frozen=True, slots=True)
class UsageSettings:
    flush_s: float
    rollup_s: float
    keep_minutes_s: float
    keep_hours_s: float
    keep_days_s: float
    unit_prices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordSettings:
    slow_ms: float
    keep_days: int


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    url: str
    secure: bool
    session_s: float
    idle_s: float
    link_s: float
    invitation_s: float
    members: int
    tries: int
    requests_per_second: float
    report_s: float


@dataclass(frozen=True, slots=True)
class LogSettings:
    level: str
    access: bool
    slow_step_ms: float


@dataclass(frozen=True, slots=True)
class TracingSettings:
    endpoint: str
    ratio: float
    max_per_second: int
    flush_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class RpcSettings:
    call_timeout_s: float
    lag_s: float
    max_logs_blocks: int
    logs_chunk_blocks: int
    depth: int
    broadcast: int
    highest_nonces: int
    max_batch: int
    batch_wait_s: float
    show_upstream: bool
    max_batch_reply_bytes: int
    alchemy_methods: bool
    quicknode_methods: bool
    ankr_methods: bool

    @property
    def answered_services(self) -> frozenset[str]:
        """How the names of the methods begin that Penstock answers itself."""
        switches = {"alchemy": self.alchemy_methods, "qn": self.quicknode_methods, "ankr": self.ankr_methods}
        return frozenset(name for name, is_on in switches.items() if is_on)


@dataclass(frozen=True, slots=True)
class SocketSettings:
    max_message_bytes: int
    max_in_flight: int
    max_queue_bytes: int
    max_unread_bytes: int
    compress_from: int
    ping_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class CacheSettings:
    enabled: bool
    bytes: int
    coalesce: bool
    data_bytes: int


@dataclass(frozen=True, slots=True)
class ValkeySettings:
    limits_url: str
    cache_url: str


@dataclass(frozen=True, slots=True)
class EgressSettings:
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    http: bool
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NftSettings:
    ipfs_gateway: str
    arweave_gateway: str
    fetch_timeout_s: float
    max_metadata_bytes: int
    keep_s: float
    retry_s: float
    floor_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceFeed:
    network: str
    contract: str = ""
    feed: str
    max_age_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPrice:
    network: str
    contract: str = ""
    usd: Decimal


@dataclass(frozen=True, slots=True)
class PriceSources:
    sources: tuple[Literal["feeds", "http", "fixed"], ...]
    url: str
    key: str
    key_header: str
    timeout_s: float
    per_request: int
    keep_s: float
    stale_s: float
    feeds: tuple[PriceFeed, ...]
    fixed: tuple[FixedPrice, ...]


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    in_flight: int
    per_receiver: int
    timeout_s: float
    keep_days: int
    secret_key: str
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class MailSettings:
    host: str
    port: int
    security: Literal["starttls", "tls", "none"]
    username: str
    password: str
    sender: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WalletSettings:
    version: str


@dataclass(frozen=True, slots=True)
class BundlingSettings:
    call_timeout_s: float
    max_body_bytes: int
    search_blocks: int
    keep_days: int
    keep_unsent_days: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How an upstream or a bundler is reached, and what operators call it."""

    url: str
    name: str = ""
    labels: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    bearer: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    min_tls: Literal["1.2", "1.3"] = "1.2"
    proxy: str = ""
    socket: str = ""
    compress: bool | None = None

    @property
    def uses_tls(self) -> bool:
        return self.url.startswith(("https:", "wss:"))

    @property
    def asks_for_gzip(self) -> bool:
        return self.uses_tls if self.compress is None else self.compress

    @property
    def place(self) -> str:
        """The URL, and the socket if there is one: two sockets may have the same URL."""
        return f"{self.url} {self.socket}" if self.socket else self.url

    @property
    def host(self) -> str:
        """The host of the URL. Empty for a Unix socket, and if the URL is malformed, which is reported elsewhere."""
        try:
            return "" if self.socket else urlsplit(self.url).hostname or ""
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSettings:
    """`shared`: a name under which several upstreams have one budget together."""

    credits: int
    per: Literal["day", "month"] = "month"
    hard: bool = True
    paced: bool = False
    shared: str = ""
    # The most part of it that one account may use.
    account_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings(LinkSettings):
    network: str
    operator: str = ""
    weight: float = 1.0
    tier: int = 0
    archive: bool | None = None
    bounds: Mapping[DataKind, int] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    requests_per_second: float = 0.0
    method_rates: Mapping[str, float] = field(default_factory=dict)
    batch: int = 20
    connections: int = 72
    depth: int = 0
    cost: str = ""
    credits: Mapping[str, int] = field(default_factory=dict)
    credit_price: str = ""
    included_credits: int = 0
    billing_day: int = 1
    budget: BudgetSettings | None = None
    shadow: float = 0.0
    canary: bool = False
    # Ids of accounts whose reads are not used for its trial.
    trial_without: tuple[str, ...] = ()

    @property
    def is_metered(self) -> bool:
        """Whether its calls cost anything. Those of an own node do not."""
        return bool(self.cost or self.credits)

    @property
    def own_labels(self) -> frozenset[str]:
        """The labels by which rules choose it, without that of its client, which is not known yet."""
        name = {f"name={self.name}"} if self.name else frozenset[str]()
        paid = {"paid"} if self.is_metered else frozenset[str]()
        return frozenset(self.labels) | name | paid | {f"operator={self.operated_by}"}

    @property
    def operated_by(self) -> str:
        """Its operator, whose upstreams have one vote together."""
        return self.operator or operator_of(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlerSettings(LinkSettings):
    network: str
    weight: float = 1.0
    tier: int = 0
    requests_per_second: float = 0.0
    connections: int = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings(LinkSettings):
    """A private relay. The key that signs its requests is not a setting: `signer_env` or `signer_file` names where it is read
    from."""

    network: str
    style: Literal["plain", "flashbots"] = "plain"
    signer_env: str = ""
    signer_file: str = ""
    requests_per_second: float = 0.0
    connections: int = 16

    @property
    def signs(self) -> bool:
        return bool(self.signer_env or self.signer_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaymasterSettings:
    """The signing key itself is not a setting: `signer_env` or `signer_file` names where it is read from."""

    network: str
    entry_point: str
    address: str
    signer_env: str = ""
    signer_file: str = ""
    verification_gas: int = 60_000
    post_op_gas: int = 0
    any_fee_gwei: str = "2"


@dataclass(frozen=True, slots=True)
class VerifySettings:
    network: str
    methods: tuple[str, ...]
    by: str


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """A reply to calls with these params. All are JSON."""

    network: str
    method: str
    params: str = "[]"
    result: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings(RuleTerms):
    """A rule about the labels and figures of upstreams."""

    network: str


@dataclass(frozen=True, slots=True)
class CostRoutingSettings:
    """How much latency a cent is worth on a network: see `core/routing.CostPolicy`."""

    network: str
    equally_fast: float = EQUALLY_FAST
    ms_per_cent: float = 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. `tree` holds the same values as plain data, for printing and for passing to workers."""

    server: ServerSettings
    metrics: MetricsSettings
    data_files: DataFileSettings
    # Which aliases are switched on, by name.
    aliases: Mapping[str, bool]
    database: DatabaseSettings
    databases: tuple[IndexDatabaseSettings, ...]
    keys: KeySettings
    quotas: QuotaSettings
    rpc: RpcSettings
    sockets: SocketSettings
    cache: CacheSettings
    valkey: ValkeySettings
    follower: FollowerSettings
    usage: UsageSettings
    requests: RecordSettings
    dashboard: DashboardSettings
    log: LogSettings
    tracing: TracingSettings
    egress: EgressSettings
    nfts: NftSettings
    prices: PriceSources
    wallets: WalletSettings
    webhooks: WebhookSettings
    mail: MailSettings
    bundler: BundlingSettings
    upstreams: tuple[UpstreamSettings, ...]
    bundlers: tuple[BundlerSettings, ...]
    relays: tuple[RelaySettings, ...]
    paymasters: tuple[PaymasterSettings, ...]
    verify: tuple[VerifySettings, ...]
    routing: tuple[RoutingSettings, ...]
    cost_routing: tuple[CostRoutingSettings, ...]
    replies: tuple[ReplySettings, ...]
    tree: Mapping[str, Any]

    @property
    def session_urls(self) -> dict[str, str]:
        """The addresses of all databases, for sessions that keep state, by the name of the setting."""
        others = {f"databases.{each.name}.url": each.session_url for each in self.databases}
        return {MAIN_URL: self.database.session_url, **others}
