"""Ids of upstreams: digests of their addresses. Operators see them, and they are stored; addresses contain credentials."""

from __future__ import annotations

import hmac

from proxy.settings import Settings, Tables

# Distinguish a network's bundlers and relays from its upstreams.
BUNDLER = "bundler "
RELAY = "relay "


def upstream_id_of(pepper: str, network_id: str, url: str, kind: str) -> str:
    return hmac.digest(pepper.encode(), f"{network_id}\0{kind}\0{url}".encode(), "sha256")[:8].hex()


def renewed_ids(settings: Settings, tables: Tables) -> dict[str, str]:
    """The id of each upstream, bundler and relay under the previous pepper, with its id under the current one."""
    keys = settings.keys
    renewed = {}
    for kind, section in (("", settings.upstreams), (BUNDLER, settings.bundlers), (RELAY, settings.relays)):
        for each in section:
            network = tables.chains.find(*each.network.split("/"))
            assert network is not None  # The settings were validated.
            old = upstream_id_of(keys.previous_pepper, network.id, each.place, kind)
            renewed[old] = upstream_id_of(keys.pepper, network.id, each.place, kind)
    return renewed
