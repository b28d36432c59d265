"""The HTTP proxy for an upstream whose `proxy` setting is `env`: HTTPS_PROXY or HTTP_PROXY, unless NO_PROXY names its host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

ENVIRONMENT = "env"


def with_proxies(tree: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings with the proxies of the environment in place."""
    settings = dict(tree)
    for section in ("upstreams", "bundlers", "relays"):
        if isinstance(given := tree.get(section), list):
            settings[section] = [_with_proxy(each, environ) for each in given]
    return settings


def _with_proxy(upstream: Any, environ: Mapping[str, str]) -> Any:
    if not isinstance(upstream, Mapping) or upstream.get("proxy") != ENVIRONMENT:
        return upstream
    return {**upstream, "proxy": proxy_for(str(upstream.get("url", "")), environ)}


def proxy_for(url: str, environ: Mapping[str, str]) -> str:
    """Variables in lower case come first, as for curl."""
    parts = urlsplit(url)
    name = "https_proxy" if parts.scheme in ("https", "wss") else "http_proxy"
    if _is_exempt(parts.hostname or "", _variable("no_proxy", environ)):
        return ""
    return _variable(name, environ)


def _variable(name: str, environ: Mapping[str, str]) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""


def _is_exempt(host: str, no_proxy: str) -> bool:
    """A name in NO_PROXY also exempts its subdomains."""
    names = [name.strip().lower().removeprefix("*").lstrip(".") for name in no_proxy.split(",") if name.strip()]
    return any(not name or host == name or host.endswith(f".{name}") for name in names)
