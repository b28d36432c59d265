"""Settings of nodecore (nodecore.yml)."""

from __future__ import annotations

import re
from typing import Any

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.commands.imports.documents import Entry
from proxy.commands.imports.result import BUILT_IN, ImportResult

NAME = "nodecore"
_CALLS = ("json-rpc", "websocket")
# CometBFT's JSON-RPC, beside the REST API of the application.
_TENDERMINT = "tendermint"
# The interfaces of a node that are chains of their own here: cosmoshub-lcd, tron-evm.
_BESIDE = {"rest": "lcd", "json-rpc": "evm", "websocket": "evm"}
# nodecore's default port.
_PORT = 9090


def is_ours(document: Entry) -> bool:
    return document.get("upstream-config") is not None


class NodecoreImport:
    def __init__(self, document: Entry, result: ImportResult) -> None:
        self._document = document
        self._out = result

    def __repr__(self) -> str:
        return f"<NodecoreImport of {self._document!r}>"

    def run(self) -> None:
        document = self._document
        self._server(document.get("server"))
        self._cache(document.get("cache"))
        self._auth(document.get("auth"))
        upstreams = document.get("upstream-config")
        if upstreams is None:
            return
        self._failsafe(upstreams)
        for name, each in self._entries(upstreams.get("chain-defaults")):
            self._out.mapped(each.get("poll-interval"), f"heads of {name} are polled at its pace")
        self._out.differs(upstreams.get("score-policy-config"), "weight and tier of upstreams; the rest by itself")
        for entry in self._list(upstreams.get("upstreams")):
            self._upstream(entry)
        self._out.mapped(document.get("rate-limit"), "limits of the upstreams that use them")

    def _server(self, server: Entry | None) -> None:
        if server is None:
            return
        out = self._out
        for theirs, section in (("port", "server"), ("metrics-port", "metrics")):
            if (port := server.get(theirs)) is not None:
                out.put(section, "port", port.integer(), port)
        if (proxies := server.get("trusted-proxies")) is not None:
            out.put("server", "trusted_proxies", proxies.texts(), proxies)
        tls = server.get("tls")
        if tls is None or (enabled := tls.get("enabled")) is None or not enabled.is_true():
            return
        for theirs, ours in (("certificate", "cert"), ("key", "key"), ("ca", "client_ca")):
            if (entry := tls.get(theirs)) is not None:
                out.put("server.tls", ours, entry.text, entry)
        if "client_ca" in out.sections.get("server.tls", {}):
            out.sections["server.tls"]["client_certificates"] = "required"

    def _cache(self, cache: Entry | None) -> None:
        if cache is None:
            return
        out = self._out
        storages = {
            name.text: each
            for each in self._list(self._document.get("app-storages"))
            if (name := each.get("name")) is not None
        }
        for connector in self._list(cache.get("connectors")):
            driver = connector.get("driver")
            match driver.text if driver is not None else "":
                case "memory":
                    out.differs(connector, "cache.bytes: a memory cache in each worker, limited by bytes")
                case "redis":
                    named = connector.get("redis", "storage-name")
                    storage = storages.get(named.text) if named is not None else None
                    redis = None if storage is None else storage.get("redis")
                    address = None if redis is None else redis.get("full-url") or redis.get("address")
                    out.valkey("cache_url", address)
                    out.mapped(connector, "valkey.cache_url")
                    out.mapped(redis, "valkey.cache_url: user, password and database are parts of the URL")
                case other:
                    out.no_equal(connector, f"a cache in {other or 'an unknown store'}: use memory and Valkey")
        for policy in self._list(cache.get("policies")):
            out.differs(policy, "replies are cached by method and finality for as long as they are true")
        out.mapped(cache.get("receive-timeout"), BUILT_IN)

    def _auth(self, auth: Entry | None) -> None:
        if auth is None:
            return
        out = self._out
        out.differs(auth.get("enabled"), "every call needs an API key")
        if (strategy := auth.get("request-strategy")) is not None:
            kind = strategy.get("type")
            out.no_equal(strategy, f"{kind.text if kind is not None else 'this'} authentication: clients use API keys")
        for key in self._list(auth.get("key-management")):
            name, kind = key.get("id"), key.get("type")
            if kind is None or kind.text != "local":
                out.no_equal(key, "keys of another service")
                continue
            out.add_key(key, name.text if name is not None else "imported", self._key_options(key))

    def _key_options(self, key: Entry) -> list[tuple[str, str]]:
        options = list[tuple[str, str]]()
        for path, option in (
            (("allowed-ips",), "--allow-ip"),
            (("methods", "allowed"), "--allow-method"),
            (("contracts", "allowed"), "--allow-contract"),
        ):
            if (entry := key.get("local", "settings", *path)) is not None:
                options += [(option, each) for each in entry.texts()]
        self._out.no_equal(key.get("local", "settings", "methods", "forbidden"), "list the allowed methods instead")
        return options

    # Upstreams

    def _failsafe(self, entry: Entry) -> None:
        for name in ("retry", "hedge"):
            self._out.mapped(entry.get("failsafe-config", name), BUILT_IN)

    def _network(self, chain: Entry | None) -> Network | None:
        return None if chain is None else self._out.tables.find_network(chain.text.strip().lower())

    def _upstream(self, entry: Entry) -> None:
        out = self._out
        network = self._network(entry.get("chain"))
        settings = self._settings(entry, network)
        self._failsafe(entry)
        out.mapped(entry.get("poll-interval"), "heads are polled at the pace of the network")
        out.mapped(entry.get("head-connector"), BUILT_IN)
        for connector in self._list(entry.get("connectors")):
            kind, url, headers = connector.get("type"), connector.get("url"), connector.get("headers")
            text = kind.text if kind is not None else "json-rpc"
            served = self._served(text, network)
            if served is None and network is not None:
                out.no_equal(connector, f"a {text} connector: upstreams here are {_kind_of(network)}")
                continue
            out.no_equal(connector.get("response-header-deny"), "headers of replies are Penstock's own")
            given = {**settings, "headers": headers.plain() if headers is not None else None}
            place = next((each for name, each in connector.items() if name == "url"), connector)
            if served is not network:
                # The methods of its rules are those of the other interface.
                given |= {"deny": None, "method_rates": None}
            out.add_upstream(place, served, url.text if url is not None else "", **given)

    def _served(self, connector: str, network: Network | None) -> Network | None:
        """The network whose upstreams have the interface of the connector: this one, or its neighbour."""
        if network is None or _is_served(connector, network):
            return network
        name = f"{network.chain.name}-{_BESIDE.get(connector, 'none')}/{network.name}"
        beside = self._out.tables.find_network(name)
        return beside if beside is not None and _is_served(connector, beside) else None

    def _settings(self, entry: Entry, network: Network | None) -> dict[str, Any]:
        out = self._out
        name, labels = entry.get("id"), self._entries(entry.get("labels"))
        allow, deny = entry.get("methods", "enable"), entry.get("methods", "disable")
        out.differs(allow, "methods of config/methods are served; others need a file of your own")
        for _, each in labels:
            each.read()
        rate, by_method = self._rates(entry, network)
        return {
            "name": name.text if name is not None else "",
            "labels": [f"{key}={each.text}" for key, each in labels][:8],
            "deny": out.methods_like(deny.texts(), network) if deny is not None else None,
            "requests_per_second": rate,
            "method_rates": by_method,
        }

    def _rates(self, entry: Entry, network: Network | None) -> tuple[float | None, dict[str, float]]:
        """Requests per second of rules for all methods, and of those for some."""
        out, rates, by_method = self._out, list[float](), dict[str, float]()
        limit, named = entry.get("rate-limit"), entry.get("rate-limit-budget")
        rules = [] if limit is None else self._list(limit.get("rules"))
        if named is not None:
            rules += self._rules_of_budget(named)
        for rule in rules:
            method, pattern = rule.get("method"), rule.get("pattern")
            requests, period = rule.get("requests"), rule.get("period")
            word = method.text if method is not None else pattern.text if pattern is not None else ""
            if requests is None:
                out.no_equal(rule, "has no number of requests")
                continue
            rate = requests.number() / max(1e-3, period.seconds() if period is not None else 1.0)
            if word in ("*", ".*", ""):
                rates.append(rate)
                out.mapped(rule, f"requests_per_second = {rate:g}")
                continue
            for name, limit_of_rule in out.method_rates(rule, _names(word), rate, network).items():
                by_method[name] = min(limit_of_rule, by_method.get(name, limit_of_rule))
        if limit is not None:
            for name in ("auto", "auto-tune"):
                out.differs(limit.get(name), "the number of calls in flight adapts by itself")
        return min(rates, default=None), by_method

    def _rules_of_budget(self, named: Entry) -> list[Entry]:
        for group in self._list(self._document.get("rate-limit")):
            for budget in self._list(group.get("budgets")):
                name = budget.get("name")
                if name is not None and name.text == named.text:
                    return self._list(budget.get("config", "rules"))
        self._out.no_equal(named, f"there is no budget {named.text} in the file")
        return []

    def _list(self, entry: Entry | None) -> list[Entry]:
        if entry is None:
            return []
        if not isinstance(entry.value, list):
            raise entry.fault("must be a list")
        return entry.children()

    def _entries(self, entry: Entry | None) -> list[tuple[str, Entry]]:
        return [] if entry is None else entry.items()


def _names(pattern: str) -> list[str]:
    """The methods of a regular expression such as `eth_call|trace_.*`."""
    return [re.sub(r"[.][*]$", "*", each.strip("^$")) for each in pattern.split("|")]


def _has_rest(network: Network | None) -> bool:
    return network is not None and family_of(network).rest is not None


def _is_served(connector: str, network: Network | None) -> bool:
    """Whether upstreams of the network have the interface of the connector."""
    if connector == _TENDERMINT:
        return network is not None and network.family == "cosmos"
    return connector == "rest" if _has_rest(network) else connector in _CALLS


def _kind_of(network: Network | None) -> str:
    return (
        f"the REST API of {network.chain.title}"
        if network is not None and _has_rest(network)
        else "JSON-RPC over HTTP or WebSocket"
    )
