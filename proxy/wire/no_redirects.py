"""Sessions that follow no redirects, also for WebSockets, whose function has no option for it. The headers of a request may
have a key, and would go to another host."""

from __future__ import annotations

from types import SimpleNamespace

import aiohttp


class Redirected(aiohttp.ClientError):
    """A server has redirected a request. It was not followed."""


async def _refuse(
    _session: aiohttp.ClientSession, _context: SimpleNamespace, _params: aiohttp.TraceRequestRedirectParams
) -> None:
    raise Redirected


def no_redirects() -> aiohttp.TraceConfig:
    """For `trace_configs` of a session."""
    trace_config = aiohttp.TraceConfig()
    trace_config.on_request_redirect.append(_refuse)
    return trace_config
