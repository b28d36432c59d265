"""Settings of proxyd (TOML). A proxyd serves one network, which its file does not name: --network does."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

from proxy.chains.registry import Network
from proxy.commands.imports.documents import Entry
from proxy.commands.imports.result import BUILT_IN, ImportResult

NAME = "proxyd"
_QUORUM_STRATEGIES = ("consensus_aware", "consensus_aware_consensus_layer")

_FILES = {"ca_file": "ca", "client_cert_file": "cert", "client_key_file": "key"}


def is_ours(document: Entry) -> bool:
    return document.get("backends") is not None or document.get("backend_groups") is not None


class ProxydImport:
    def __init__(self, document: Entry, result: ImportResult, network: Network | None) -> None:
        self._document = document
        self._out = result
        self._network = network

    def __repr__(self) -> str:
        return f"<ProxydImport of {self._document!r}>"

    def run(self) -> None:
        document, out = self._document, self._out
        self._server(document.get("server"))
        self._limits(document)
        metrics = document.get("metrics")
        if metrics is not None:
            out.mapped(metrics.get("enabled"), "metrics are always on")
            if (host := metrics.get("host")) is not None:
                out.put("metrics", "host", host.text, host)
            if (port := metrics.get("port")) is not None:
                out.put("metrics", "port", port.integer(), port)
        tiers, weighted = self._groups(document.get("backend_groups"))
        allowed = self._methods_by_backend(document.get("rpc_method_mappings"), document.get("backend_groups"))
        backends = document.get("backends")
        for name, backend in [] if backends is None else backends.items():
            self._backend(name, backend, tier=tiers.get(name, 0), weighted=name in weighted, allow=allowed.get(name))
        self._keys(document.get("authentication"))
        for name in ("ws_backend_group", "ws_method_whitelist"):
            out.differs(document.get(name), "/v1/ws serves the methods of config/methods; limit keys by --allow-method")

    def _server(self, server: Entry | None) -> None:
        if server is None:
            return
        out = self._out
        for theirs, ours in (("rpc_host", "host"), ("rpc_port", "port"), ("max_body_size_bytes", "max_body_bytes")):
            if (entry := server.get(theirs)) is not None:
                value = entry.text if ours == "host" else entry.integer()
                out.put("server", ours, max(1024, value) if ours == "max_body_bytes" else value, entry)
        for name in ("ws_host", "ws_port"):
            out.differs(server.get(name), "WebSockets share the port: /v1/ws")
        out.log_level(server.get("log_level"))
        if (timeout := server.get("timeout_seconds")) is not None and timeout.number() > 0:
            out.put_most("rpc", "call_timeout_s", min(600.0, timeout.number()), timeout)
        if (drain := server.get("graceful_shutdown_seconds")) is not None:
            out.put("server", "leave_s", drain.number(), drain)
        if (served := server.get("enable_served_by_header")) is not None:
            out.put("rpc", "show_upstream", served.is_true(), served)
        if (origins := server.get("allow_all_origins")) is not None and origins.is_true():
            out.put("server", "cors_origins", ["*"], origins)
        if (access := server.get("enable_request_log")) is not None:
            out.put("log", "access", access.is_true(), access)
        out.no_equal(server.get("public_access"), "every call needs an API key")
        for name in ("max_concurrent_rpcs", "max_concurrent_ws_rpcs", "disable_concurrent_request_semaphore"):
            out.differs(server.get(name), "server.max_connections, sockets.max_in_flight; fair shares per account")

    def _limits(self, document: Entry) -> None:
        out = self._out
        if (options := document.get("backend")) is not None:
            self._options(options)
        if (cache := document.get("cache")) is not None:
            enabled = cache.get("enabled")
            if enabled is not None:
                out.put("cache", "enabled", enabled.is_true(), enabled)
            out.differs(cache.get("ttl"), "replies are cached for as long as they are true")
        if (redis := document.get("redis")) is not None:
            rate = document.get("rate_limit", "use_redis")
            is_cached = document.get("cache", "enabled")
            address = redis.get("url")
            if rate is not None and rate.is_true() and address is not None:
                out.valkey("limits_url", address)
            elif is_cached is None or is_cached.is_true():
                out.valkey("cache_url", address)
            out.mapped(redis.get("fallback_to_memory"), BUILT_IN)
        if (most := document.get("batch", "max_size")) is not None:
            out.put("rpc", "max_batch", max(1, min(10_000, most.integer())), most)
        if (limit := document.get("rate_limit")) is not None:
            base, interval = limit.get("base_rate"), limit.get("base_interval")
            if base is not None:
                per_second = base.number() / (interval.seconds() if interval is not None else 1.0)
                out.differs(
                    base, f"limits of an account's plan or a key; here {per_second:g} requests per second and address"
                )
            for name, override in [] if (overrides := limit.get("method_overrides")) is None else overrides.items():
                out.no_equal(override, f"a limit for {name} alone")

    def _options(self, options: Entry) -> None:
        out = self._out
        for name, scale in (("response_timeout_milliseconds", 0.001), ("response_timeout_seconds", 1.0)):
            if (timeout := options.get(name)) is not None and timeout.number() > 0:
                out.differs(
                    timeout,
                    f"rpc.call_timeout_s holds for a call with its retries; here {timeout.number() * scale:g} s",
                )
        for name in (
            *("max_retries", "out_of_service_seconds", "max_latency_threshold", "max_degraded_latency_threshold"),
            "max_error_rate_threshold",
        ):
            out.mapped(options.get(name), BUILT_IN)

    def _groups(self, groups: Entry | None) -> tuple[dict[str, int], set[str]]:
        """The tier of each backend, and the backends whose weights count."""
        tiers: dict[str, int] = {}
        weighted: set[str] = set()
        for _, group in [] if groups is None else groups.items():
            backends, fallbacks = group.get("backends"), group.get("fallbacks")
            for name in fallbacks.texts() if fallbacks is not None else []:
                tiers[name] = 1
            members = backends.texts() if backends is not None else []
            weights = group.get("weighted_routing")
            if weights is not None and weights.is_true():
                weighted |= {*members}
            self._group(group)
        return tiers, weighted

    def _group(self, group: Entry) -> None:
        out = self._out
        out.differs(
            group.get("backends"), "the upstreams of a network, chosen by health, lag, latency, weight and tier"
        )
        out.mapped(group.get("fallbacks"), "tier = 1")
        out.mapped(group.get("weighted_routing"), "weight")
        strategy = group.get("routing_strategy")
        if strategy is not None and strategy.text == "multicall":
            out.differs(strategy, "rpc.broadcast: writes go to several upstreams; their first result counts")
        elif strategy is not None or group.get("consensus_aware") is not None:
            aware = strategy is not None and strategy.text in _QUORUM_STRATEGIES
            out.mapped(strategy or group.get("consensus_aware"), "built in: heads are compared" if aware else BUILT_IN)
        for name in ("consensus_max_block_range", "max_block_range"):
            if (most := group.get(name)) is not None:
                out.put_most("rpc", "max_logs_blocks", max(1, most.integer()), most)
        out.differs(group.get("consensus_max_block_lag"), "rpc.lag_s: seconds instead of blocks")
        for name, each in group.items():
            if name.startswith("consensus_") and not each.is_read:
                out.mapped(each, BUILT_IN)

    def _methods_by_backend(self, mappings: Entry | None, groups: Entry | None) -> dict[str, list[str]]:
        """The methods of each backend, if groups serve different ones. One group: `allow` would only repeat it."""
        out = self._out
        by_group: dict[str, list[str]] = {}
        for method, group in [] if mappings is None else mappings.items():
            by_group.setdefault(group.read().text, []).append(method)
        out.differs(mappings, "config/methods lists the methods; `allow` of an upstream, `--allow-method` of a key")
        if len(by_group) < 2:
            return {}
        by_backend: dict[str, list[str]] = {}
        for name, methods in by_group.items():
            backends = None if groups is None else groups.get(name, "backends")
            for backend in backends.texts() if backends is not None else []:
                by_backend.setdefault(backend, []).extend(methods)
        return by_backend

    def _backend(self, name: str, backend: Entry, *, tier: int, weighted: bool, allow: list[str] | None) -> None:
        out = self._out
        settings = self._backend_settings(name, backend, weighted=weighted)
        for key in ("rpc_url", "ws_url"):
            url = backend.get(key)
            if url is None or (key == "ws_url" and not url.text):
                continue
            # WebSockets carry subscriptions only.
            given = {**settings, "tier": tier or None, "allow": allow if key == "rpc_url" else None}
            if key == "ws_url":
                given = {**given, "requests_per_second": None, "name": f"{name}-ws"}
            out.add_upstream(url, self._network, self._with_user(url.text, backend), **given)

    def _with_user(self, url: str, backend: Entry) -> str:
        user, password = backend.get("username"), backend.get("password")
        if not url or user is None or not user.text:
            return url
        parts = urlsplit(url)
        pair = f"{quote(user.text, safe='')}:{quote(password.text if password is not None else '', safe='')}"
        return parts._replace(netloc=f"{pair}@{parts.netloc}").geturl()

    def _backend_settings(self, name: str, backend: Entry, *, weighted: bool) -> dict[str, Any]:
        out = self._out
        rate, weight, headers = backend.get("max_rps"), backend.get("weight"), backend.get("headers")
        files = {ours: backend.get(theirs) for theirs, ours in _FILES.items()}
        out.mapped(rate, "requests_per_second")
        out.mapped(weight, "weight" if weighted else "weight of 1: the group does not use weights")
        out.no_equal(backend.get("max_ws_conns"), "a WebSocket upstream is one connection for all clients")
        out.differs(backend.get("consensus_receipts_target"), "methods are not translated")
        for key in ("username", "password"):
            out.mapped(backend.get(key), "user and password of the URL")
        for key, each in backend.items():
            if (
                key.startswith(("consensus_", "probe_", "skip_", "safe_", "finalized_", "max_retries"))
                and not each.is_read
            ):
                out.mapped(each, BUILT_IN)
        return {
            "name": name,
            "requests_per_second": rate.number() if rate is not None and rate.number() > 0 else None,
            "weight": weight.number() if weighted and weight is not None and weight.number() > 0 else None,
            "headers": headers.plain() if headers is not None else None,
            **{ours: each.text for ours, each in files.items() if each is not None},
        }

    def _keys(self, authentication: Entry | None) -> None:
        for _, alias in [] if authentication is None else authentication.items():
            # The name of the setting is the secret.
            alias.path = "authentication.*"
            self._out.add_key(alias, alias.text)
