"""Negotiating permessage-deflate (RFC 7692), without context takeover in either direction.

No memory is kept between messages, and a compressed message has the same bytes for all clients with the same window. An offer
with an unknown or invalid parameter is declined; without an acceptable offer, nothing is compressed.
"""

from __future__ import annotations

_NAME = "permessage-deflate"
_FLAGS = frozenset(("server_no_context_takeover", "client_no_context_takeover"))
_LARGEST_WINDOW = 15
_WINDOWS = {str(bits): bits for bits in range(9, _LARGEST_WINDOW + 1)}


def window_bits(offers: str) -> int:
    """The window for our messages, from the first acceptable offer of a Sec-WebSocket-Extensions header; 0 if there is none."""
    return next((bits for offer in offers.split(",") if (bits := _window_of(offer))), 0)


def acceptance(bits: int) -> str:
    """The reply's header. The largest window is the default, so it is not repeated."""
    window = f"; server_max_window_bits={bits}" if bits < _LARGEST_WINDOW else ""
    return f"{_NAME}; server_no_context_takeover; client_no_context_takeover{window}"


def _window_of(offer: str) -> int:
    name, *parameters = (part.strip().lower() for part in offer.split(";"))
    values = {key.strip(): value.strip(' "') for key, _, value in (each.partition("=") for each in parameters)}
    server = values.pop("server_max_window_bits", str(_LARGEST_WINDOW))
    client = values.pop("client_max_window_bits", "")
    is_known = all(each in _FLAGS and not value for each, value in values.items())
    # RFC 7692, 7.1: an offer with a parameter twice is not valid.
    is_unique = len({each.partition("=")[0].strip() for each in parameters}) == len(parameters)
    is_valid = name == _NAME and is_known and is_unique and (not client or client in _WINDOWS or client == "8")
    return _WINDOWS.get(server, 0) if is_valid else 0
