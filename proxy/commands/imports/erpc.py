"""Settings of eRPC (erpc.yaml)."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

import orjson

from proxy.chains.registry import Network
from proxy.commands.imports.documents import Entry
from proxy.commands.imports.result import BUILT_IN, ImportResult
from proxy.core.data_bounds import DATA_KINDS

NAME = "eRPC"
# eRPC's name of the main network of an SVM chain.
_MAIN_CLUSTER = "mainnet-beta"
# Calls per second of a shadow upstream without a limit of its own.
_TRIAL_RATE = 100.0


def is_ours(document: Entry) -> bool:
    return document.get("projects") is not None


class ErpcImport:
    def __init__(self, document: Entry, result: ImportResult) -> None:
        self._document = document
        self._out = result
        self._budgets = {each.get("id"): each for each in _list(document.get("rateLimiters", "budgets"))}
        self._rates = {name.text: self._rate(each) for name, each in self._budgets.items() if name is not None}
        self._rules = {name.text: _rules(each) for name, each in self._budgets.items() if name is not None}
        self._networks: list[Network] = []
        # Consensus policies, with their networks and methods: they follow when all upstreams are known.
        self._consensus: list[tuple[Entry, Network, str]] = []

    def __repr__(self) -> str:
        return f"<ErpcImport of {self._document!r}>"

    def run(self) -> None:
        document, out = self._document, self._out
        out.log_level(document.get("logLevel"))
        self._server(document.get("server"))
        self._metrics(document.get("metrics"))
        self._database(document.get("database"))
        projects = _list(document.get("projects"))
        for project in projects:
            self._project(project, alone=len(projects) == 1)
        self._limiters(document.get("rateLimiters"))
        out.differs(document.get("tracing", "endpoint"), "tracing.endpoint takes OTLP over HTTP: set it yourself")

    def _server(self, server: Entry | None) -> None:
        if server is None:
            return
        out = self._out
        for names, setting in ((("httpHostV4", "httpHost"), "host"), (("httpPortV4", "httpPort"), "port")):
            entry = next((setting_entry for name in names if (setting_entry := server.get(name)) is not None), None)
            if entry is not None:
                out.put("server", setting, entry.integer() if setting == "port" else entry.text, entry)
        if (timeout := server.get("maxTimeout")) is not None:
            out.put_most("rpc", "call_timeout_s", timeout.seconds(), timeout)
        if (wait := server.get("waitBeforeShutdown")) is not None:
            out.put("server", "leave_s", wait.seconds(), wait)
        if (proxies := server.get("trustedIPForwarders")) is not None:
            out.put("server", "trusted_proxies", proxies.texts(), proxies)
        out.mapped(server.get("enableGzip"), "server.compress_from, on by default")
        if (mode := server.get("executionHeaders")) is not None:
            out.put("rpc", "show_upstream", mode.text != "off", mode)
        self._tls(server.get("tls"))
        out.differs(server.get("aliasing"), "config/aliases: host names and paths of other gateways")

    def _tls(self, tls: Entry | None) -> None:
        if tls is None or not ((enabled := tls.get("enabled")) is None or enabled.is_true()):
            return
        for theirs, ours in (("certFile", "cert"), ("keyFile", "key"), ("caFile", "client_ca")):
            if (entry := tls.get(theirs)) is not None:
                self._out.put("server.tls", ours, entry.text, entry)
        if "client_ca" in self._out.sections.get("server.tls", {}):
            self._out.sections["server.tls"]["client_certificates"] = "required"

    def _metrics(self, metrics: Entry | None) -> None:
        if metrics is None:
            return
        self._out.mapped(metrics.get("enabled"), "metrics are always on")
        if (host := metrics.get("hostV4")) is not None:
            self._out.put("metrics", "host", host.text, host)
        if (port := metrics.get("port")) is not None:
            self._out.put("metrics", "port", port.integer(), port)

    # Caches

    def _database(self, database: Entry | None) -> None:
        if database is None:
            return
        raw = database.value.get("evmJsonRpcCache") if isinstance(database.value, dict) else None
        if raw is not None and raw.value is None:
            self._out.put("cache", "enabled", False, raw)
        for name in ("evmJsonRpcCache", "svmJsonRpcCache"):
            if (cache := database.get(name)) is not None:
                self._cache(cache)
        if (shared := database.get("sharedState", "connector")) is not None:
            if (address := shared.get("redis", "addr") or shared.get("redis", "uri")) is not None:
                self._out.valkey("limits_url", address)
            self._out.mapped(shared.get("driver"), "valkey.limits_url")

    def _cache(self, cache: Entry) -> None:
        out = self._out
        for connector in _list(cache.get("connectors")):
            driver = connector.get("driver")
            match driver.text if driver is not None else "":
                case "memory":
                    if (size := connector.get("memory", "maxTotalSize")) is not None:
                        out.put("cache", "bytes", max(1 << 20, size.size()), size)
                    out.mapped(connector, "cache.bytes: a memory cache in each worker")
                case "redis":
                    out.valkey("cache_url", connector.get("redis", "addr") or connector.get("redis", "uri"))
                    out.mapped(connector, "valkey.cache_url")
                case other:
                    out.no_equal(connector, f"a cache in {other or 'an unknown store'}: use memory and Valkey")
        for policy in _list(cache.get("policies")):
            out.differs(policy, "replies are cached by method and finality for as long as they are true")
        out.mapped(cache.get("compression"), BUILT_IN)

    # Projects

    def _project(self, project: Entry, *, alone: bool) -> None:
        out = self._out
        name = project.get("id")
        out.differs(name, "an account" if alone else "an account for each project: `penstock accounts create`")
        for strategy in _list(project.get("auth", "strategies")):
            self._auth(strategy)
        if (origins := project.get("cors", "allowedOrigins")) is not None:
            out.put("server", "cors_origins", origins.texts(), origins)
        out.mapped(project.get("cors"), BUILT_IN)
        self._client_budget(project.get("rateLimitBudget"))
        defaults = project.get("upstreamDefaults")
        self._networks = [each for entry in _list(project.get("networks")) if (each := self._network(entry))]
        for entry in _list(project.get("upstreams")):
            self._upstream(entry, defaults)
        for entry in _list(project.get("providers")):
            self._provider(entry)
        for entry, network, method in self._consensus:
            self._quorum(entry, network, method)
        self._consensus.clear()
        self._failsafe(project.get("networkDefaults", "failsafe"), None)
        for common in (defaults, project.get("networkDefaults")):
            self._evm_defaults(common)

    def _evm_defaults(self, defaults: Entry | None) -> None:
        if defaults is None:
            return
        self._failsafe(defaults.get("failsafe"), None)
        for name in ("statePollerInterval", "statePollerDebounce"):
            self._out.mapped(defaults.get("evm", name), "heads are polled at the pace of the network")

    def _auth(self, strategy: Entry) -> None:
        kind = strategy.get("type")
        match kind.text if kind is not None else "":
            case "secret":
                name = strategy.get("secret", "id")
                self._client_budget(strategy.get("rateLimitBudget"))
                self._out.add_key(strategy, name.text if name is not None else "imported")
            case "network":
                cidrs = strategy.get("network", "allowedCIDRs")
                options = [("--allow-ip", each) for each in (cidrs.texts() if cidrs is not None else [])]
                self._out.add_key(strategy, "by-address", options)
            case other:
                self._out.no_equal(strategy, f"{other or 'unknown'} authentication: clients use API keys")

    def _client_budget(self, budget: Entry | None) -> None:
        if budget is None:
            return
        rate = self._rates.get(budget.text)
        limit = "" if rate is None else f"; {rate:g} requests per second"
        self._out.differs(budget, f"limits of an account's plan or of a key (--requests-per-second){limit}")

    # Networks

    def _network_of(self, entry: Entry | None) -> Network | None:
        """The network of an `evm` or `svm` block."""
        if entry is None:
            return None
        if (chain := entry.get("evm", "chainId")) is not None:
            return self._out.tables.find_network(str(chain.integer()))
        if (cluster := entry.get("svm", "cluster")) is not None:
            wanted = "mainnet" if cluster.text == _MAIN_CLUSTER else cluster.text
            chains = self._out.tables.chains.networks()
            return next((each for each in chains if each.family == "svm" and each.name == wanted), None)
        return None

    def _network(self, entry: Entry) -> Network | None:
        out = self._out
        out.mapped(entry.get("architecture"), "the network's family")
        network = self._network_of(entry)
        if network is None:
            out.no_equal(entry, "there is no such network: `penstock chains add` writes a file for it")
            return None
        out.mapped(entry.get("evm", "chainId") or entry.get("svm", "cluster"), network.id)
        out.mapped(entry.get("alias"), f"{network.id} has its own names")
        self._client_budget(entry.get("rateLimitBudget"))
        self._failsafe(entry.get("failsafe"), network)
        if (most := entry.get("evm", "getLogsMaxAllowedRange")) is not None:
            out.put_most("rpc", "max_logs_blocks", most.integer(), most)
        for name in ("getLogsSplitOnError", "integrity"):
            out.mapped(entry.get("evm", name), BUILT_IN)
        out.differs(entry.get("selectionPolicy"), "weight and tier of upstreams; health, lag and latency by themselves")
        for fixed in _list(entry.get("staticResponses")):
            self._fixed_reply(fixed, network)
        return network

    def _fixed_reply(self, entry: Entry, network: Network) -> None:
        method, params = entry.get("method"), entry.get("params")
        name = method.text if method is not None else ""
        body = entry.get("response")
        given = {} if body is None else {key: each.plain() for key, each in body.items() if key in ("result", "error")}
        if name not in self._out.tables.methods[network.family] or len(given) != 1:
            self._out.no_equal(entry, f"a reply of {name or 'no method'}: {network.id} has no such method")
            return
        texts = {key: orjson.dumps(each).decode() for key, each in given.items()}
        asked = orjson.dumps(params.plain() if params is not None else []).decode()
        self._out.replies.append({"network": network.id, "method": name, "params": asked, **texts})
        self._out.mapped(entry, f"[[replies]] {network.id} {name}")

    def _failsafe(self, failsafe: Entry | None, network: Network | None) -> None:
        """One policy or a list of them. `network`: None for an upstream."""
        if failsafe is None:
            return
        for policy in failsafe.children() if isinstance(failsafe.value, list) else [failsafe]:
            out = self._out
            match = policy.get("matchMethod")
            if (duration := policy.get("timeout", "duration")) is not None and not isinstance(duration.value, dict):
                if network is None:
                    out.differs(duration, "rpc.call_timeout_s holds for a call with its retries")
                else:
                    out.put_most("rpc", "call_timeout_s", min(600.0, duration.seconds()), duration)
            for name in ("timeout", "retry", "hedge", "circuitBreaker"):
                if (part := policy.get(name)) is not None and any(part.unread()):
                    out.mapped(part, BUILT_IN)
            if (consensus := policy.get("consensus")) is not None and network is not None:
                self._consensus.append((consensus, network, match.text if match is not None else "*"))
            for name in ("matchFinality", "matchRequestKind"):
                out.no_equal(policy.get(name))

    def _quorum(self, entry: Entry, network: Network, pattern: str) -> None:
        of, agree = entry.get("maxParticipants"), entry.get("agreementThreshold")
        known = self._out.tables.methods[network.family]
        patterns = [each.strip() for each in pattern.split("|")]
        methods = [name for name in known if any(fnmatchcase(name, each) for each in patterns)]
        count = of.integer() if of is not None else 3
        self._out.add_quorum(entry, network, methods, agree.integer() if agree is not None else count, count)

    # Upstreams

    def _upstream(self, entry: Entry, defaults: Entry | None) -> None:
        endpoint = entry.get("endpoint")
        network = self._network_of(entry)
        for name in ("chainId", "cluster"):
            entry.get("evm", name), entry.get("svm", name)
        url = endpoint.text if endpoint is not None else ""
        settings = self._upstream_settings(entry, network, defaults)
        settings |= self._trial(entry, settings["requests_per_second"]) | self._bounds(entry, defaults)
        settings |= self._credits(entry, url, defaults)
        if url.startswith("chainstack://"):
            self._out.no_equal(entry, "eRPC's key lists nodes by Chainstack's API: write chainstack://KEY of each node")
            return
        if url.startswith("quicknode://"):
            self._out.no_equal(entry, "eRPC's key lists endpoints by QuickNode's API: write quicknode://NAME/TOKEN")
            return
        failsafe = entry.get("failsafe")
        for each in [each for name, each in entry.items() if name in ("routing", "integrity")]:
            self._out.no_equal(each)
        self._failsafe(failsafe, None)
        for name in ("statePollerInterval", "statePollerDebounce", "skipWhenSyncing", "skipSyncingCheck"):
            self._out.mapped(entry.get("evm", name), BUILT_IN)
        for name in ("getLogsAutoSplittingRangeThreshold", "getLogsMaxBlockRange", "getLogsMaxAllowedRange"):
            self._out.mapped(entry.get("evm", name), "ranges are split by what the upstream accepts")
        line = next((each for name, each in entry.items() if name == "endpoint"), entry)
        # A provider's key serves any network in eRPC when a client asks for it. Here every network is polled at rest, so only
        # those that the file lists are taken.
        self._out.add_upstream(line, network, url, only=self._networks, **settings)

    def _upstream_settings(self, entry: Entry, network: Network | None, defaults: Entry | None) -> dict[str, Any]:
        out = self._out

        def given(*names: str) -> Entry | None:
            own = entry.get(*names)
            return own if own is not None or defaults is None else defaults.get(*names)

        name, kind, batch = given("id"), given("evm", "nodeType"), given("jsonRpc", "batchMaxSize")
        recent, supports = given("evm", "maxAvailableRecentBlocks"), given("jsonRpc", "supportsBatch")
        gzip = given("jsonRpc", "enableGzip")
        labels = [text for each in ("tags", "group", "cohort") if (tags := given(each)) for text in tags.texts()]
        allow, deny, headers = given("allowMethods"), given("ignoreMethods"), given("jsonRpc", "headers")
        is_pruned = (kind is not None and kind.text == "full") or (recent is not None and recent.integer() > 0)
        if (tune := given("rateLimitAutoTune")) is not None and not tune.is_read:
            out.differs(tune, "the number of calls in flight adapts by itself")
        out.mapped(given("autoIgnoreUnsupportedMethods"), BUILT_IN)
        out.mapped(given("type"), "the network's family")
        out.mapped(given("vendorName"), "found by its URL")
        denied = out.methods_like(deny.texts(), network) if deny is not None else []
        allowed = out.methods_like(allow.texts(), network) if allow is not None else []
        return {
            "name": name.text if name is not None else "",
            "labels": [text for text in labels if text.replace(":", "").replace("-", "").isalnum()][:8],
            "tier": 1 if any(text in ("fallback", "tier:fallback") for text in labels) else None,
            "archive": False if is_pruned else None,
            "allow": allowed,
            # eRPC's allowMethods brings methods back that ignoreMethods excludes.
            "deny": [each for each in denied if each not in allowed],
            "headers": headers.plain() if headers is not None else None,
            "batch": 1
            if supports is not None and not supports.is_true()
            else max(1, batch.integer())
            if batch
            else None,
            "compress": gzip.is_true() if gzip is not None else None,
            "proxy": self._proxy(given("jsonRpc", "proxyPool")),
            "requests_per_second": self._upstream_rate(given("rateLimitBudget"), given("rateLimitCountMode")),
            "method_rates": self._method_rates(given("rateLimitBudget"), given("rateLimitCountMode"), network),
        }

    def _method_rates(self, budget: Entry | None, mode: Entry | None, network: Network | None) -> dict[str, float]:
        rates: dict[str, float] = {}
        if budget is None or _counts_credits(mode):
            return rates
        for rule, names, rate in self._rules.get(budget.text, ()):
            for name, limit in self._out.method_rates(rule, names, rate, network).items():
                rates[name] = min(limit, rates.get(name, limit))
        return rates

    def _trial(self, entry: Entry, rate: float | None) -> dict[str, Any]:
        """A shadow upstream gets copies of calls, and nothing else."""
        enabled = entry.get("shadow", "enabled")
        if (shadow := entry.get("shadow")) is None or enabled is None or not enabled.is_true():
            return {}
        share = entry.get("shadow", "sampleRate")
        trial = {"shadow": min(1.0, share.number()) if share is not None and share.number() > 0 else 1.0}
        bound = "" if rate else f"; with at most {_TRIAL_RATE:g} calls per second, because a trial needs a limit"
        self._out.differs(shadow, f"shadow = {trial['shadow']:g}: members that change are left out by method{bound}")
        return trial if rate else {**trial, "requests_per_second": _TRIAL_RATE}

    def _bounds(self, entry: Entry, defaults: Entry | None) -> dict[str, Any]:
        """The oldest block that it has."""
        given = entry.get("evm", "blockAvailability")
        if given is None and defaults is not None:
            given = defaults.get("evm", "blockAvailability")
        if given is None:
            return {}
        self._out.no_equal(given.get("upper"), "all upstreams go to the newest block that they have")
        exact, recent = given.get("lower", "exactBlock"), given.get("lower", "latestBlockMinus")
        if exact is None and recent is None:
            self._out.mapped(given.get("lower"), "bounds are found by asking")
            return {}
        oldest = exact.integer() if exact is not None else -max(1, recent.integer() if recent is not None else 1)
        self._out.mapped(given.get("lower"), f"bounds = {oldest} for all kinds of data")
        return {"archive": None, "bounds": dict.fromkeys(DATA_KINDS, oldest)}

    def _credits(self, entry: Entry, url: str, defaults: Entry | None) -> dict[str, Any]:
        """The prices of its calls at the provider, and a budget in the same credits."""
        settings: dict[str, Any] = {}
        if (units := entry.get("creditUnits")) is not None:
            settings["credits"] = {name: each.integer() for name, each in units.items()}
            self._out.mapped(units, "credits of methods")
        mode, budget = entry.get("rateLimitCountMode"), entry.get("rateLimitBudget")
        if budget is None and defaults is not None:
            mode, budget = mode or defaults.get("rateLimitCountMode"), defaults.get("rateLimitBudget")
        if not _counts_credits(mode) or budget is None:
            return settings
        provider = self._out.providers.get(urlsplit(url).scheme)
        if provider is not None and provider.credits is not None:
            settings["cost"] = provider.name
        for rule in _list(self._budget(budget.text, "rules")):
            count, period, method = rule.get("maxCount"), rule.get("period"), rule.get("method")
            per = period.text if period is not None else ""
            is_whole = method is None or method.text == "*"
            if count is None or per not in ("day", "month") or not is_whole or not settings or count.integer() < 1:
                self._out.no_equal(rule, "a budget of credits is for all methods, by day or month, with known credits")
                continue
            shared = re.sub(r"[^a-z0-9._-]+", "-", budget.text.lower()).strip("-._")[:40]
            settings["budget"] = {"credits": count.integer(), "per": per, "shared": shared}
            self._out.mapped(rule, f"budget = {count.integer()} credits a {per}, shared by all that name it")
        return settings

    def _budget(self, name: str, *path: str) -> Entry | None:
        budget = next((each for key, each in self._budgets.items() if key is not None and key.text == name), None)
        return None if budget is None else budget.get(*path)

    def _upstream_rate(self, budget: Entry | None, mode: Entry | None) -> float | None:
        if budget is None or _counts_credits(mode):
            return None
        if budget.text not in self._rates:
            self._out.no_equal(budget, f"there is no budget {budget.text} in the file")
            return None
        rate = self._rates[budget.text]
        if rate is None and self._rules[budget.text]:
            self._out.mapped(budget, "method_rates")
        elif rate is None:
            self._out.no_equal(budget, "the budget has no rules")
        else:
            self._out.mapped(budget, f"requests_per_second = {rate:g}; each upstream has its own count")
        return rate

    def _proxy(self, pool: Entry | None) -> str | None:
        pools = {each.get("id"): each for each in _list(self._document.get("proxyPools"))}
        for name, each in pools.items():
            if pool is not None and name is not None and name.text == pool.text:
                urls = each.get("urls")
                usable = [url for url in (urls.texts() if urls is not None else []) if url.startswith("http://")]
                self._out.differs(pool, "proxy: the first HTTP proxy of the pool" if usable else "no HTTP proxy in it")
                return usable[0] if usable else None
        return None

    def _provider(self, entry: Entry) -> None:
        vendor, key = entry.get("vendor"), entry.get("settings", "apiKey")
        only = entry.get("onlyNetworks")
        url = f"{vendor.text if vendor is not None else ''}://{key.text if key is not None else ''}"
        if vendor is None or vendor.text not in self._out.providers or vendor.text in ("quicknode", "chainstack"):
            self._out.no_equal(entry, "a provider that Penstock has no file for: name its URLs")
            return
        names = [each.removeprefix("evm:") for each in (only.texts() if only is not None else [])]
        networks = [network for name in names if (network := self._out.tables.find_network(name)) is not None]
        name = entry.get("id")
        for network in (*networks,) or (None,):
            given = name.text if name is not None else vendor.text
            self._out.add_upstream(entry, network, url, only=self._networks, name=given)

    # Limits

    def _rate(self, budget: Entry) -> float | None:
        """Requests per second of the rule for all methods."""
        rates = []
        for rule in _list(budget.get("rules")):
            method, count, period = rule.get("method"), rule.get("maxCount"), rule.get("period")
            if count is not None and (method is None or method.text == "*"):
                rates.append(count.number() / (period.seconds() if period is not None else 1.0))
        return min(rates, default=None)

    def _limiters(self, limiters: Entry | None) -> None:
        if limiters is None:
            return
        if (address := limiters.get("store", "redis", "uri") or limiters.get("store", "redis", "addr")) is not None:
            self._out.valkey("limits_url", address)
        self._out.mapped(limiters.get("store", "driver"), "memory of the host, or valkey.limits_url")
        for budget in _list(limiters.get("budgets")):
            name = budget.get("id")
            for rule in _list(budget.get("rules")):
                method = rule.get("method")
                if (
                    method is not None
                    and method.text != "*"
                    and rule.path not in {row.theirs for row in self._out.rows}
                ):
                    self._out.no_equal(rule, f"a limit for {method.text} alone, of clients or of nobody")
            text = name.text if name is not None else "a budget"
            self._out.mapped(budget, f"limits of the upstreams and clients that use {text}")


def _rules(budget: Entry) -> list[tuple[Entry, list[str], float]]:
    """The rules for some methods, with their names and calls per second."""
    rules = []
    for rule in _list(budget.get("rules")):
        method, count, period = rule.get("method"), rule.get("maxCount"), rule.get("period")
        if count is not None and method is not None and method.text != "*":
            rate = count.number() / max(1e-3, period.seconds() if period is not None else 1.0)
            rules.append((rule, [each.strip() for each in method.text.split("|")], rate))
    return rules


def _counts_credits(mode: Entry | None) -> bool:
    return mode is not None and mode.text == "credit"


def _list(entry: Entry | None) -> list[Entry]:
    if entry is None:
        return []
    if not isinstance(entry.value, list):
        raise entry.fault("must be a list")
    return entry.children()
