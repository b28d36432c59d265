"""The words of an upstream's address and headers that no client may see.

Upstreams repeat them in errors: a gateway names the URL that it could not reach, and a vendor the key that it does not know.
The words are taken from the upstream's settings. Short parts of a path, such as `v2` or `mainnet`, occur in harmless texts, so
they are not included.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import SplitResult, unquote, urlsplit

# A part of a path, a query or a header counts as a key from this length on, or from the shorter one if it has a digit. Shorter
# words occur by chance.
_KEY_LENGTH = 12
_KEY_LENGTH_WITH_DIGIT = 6
# A user name or password is secret from this length on. Shorter ones occur in harmless texts.
_SECRET_LENGTH = 4
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def private_words(url: str, headers: Mapping[str, str], proxy: str = "") -> tuple[str, ...]:
    """The words in lower case. Errors are converted to lower case before the search, because nodes change the case of host
    names."""
    parts = urlsplit(url)
    words = {*_host(parts), *_user(parts), *_path(parts), *_header_values(headers)}
    if proxy:
        words |= {*_host(urlsplit(proxy)), *_user(urlsplit(proxy))}
    return tuple(sorted({word.lower() for word in _as_written(words)}))


def _host(parts: SplitResult) -> Iterator[str]:
    host = parts.hostname or ""
    yield f"{host}:{parts.port or _DEFAULT_PORTS.get(parts.scheme, 80)}"
    yield f"//{host}"
    # A name without a dot, such as `geth`, may be an ordinary word.
    if "." in host or ":" in host:
        yield host


def _user(parts: SplitResult) -> Iterator[str]:
    if parts.username is None:
        return
    password = parts.password or ""
    pair = f"{unquote(parts.username)}:{unquote(password)}"
    secrets = (parts.username, password, pair, base64.b64encode(pair.encode()).decode())
    yield from (each for each in secrets if len(each) >= _SECRET_LENGTH)


def _path(parts: SplitResult) -> Iterator[str]:
    values = [each.partition("=")[2] or each for each in parts.query.split("&")]
    yield from (each for each in [*parts.path.split("/"), *values] if _is_key(each))


def _is_key(text: str) -> bool:
    has_digit = any(map(str.isdigit, text))
    return len(text) >= (_KEY_LENGTH_WITH_DIGIT if has_digit else _KEY_LENGTH)


def _header_values(headers: Mapping[str, str]) -> Iterator[str]:
    """Each value, and its parts: `Bearer` and the token."""
    for value in headers.values():
        yield from (each for each in (value, *value.split()) if _is_key(each))


def _as_written(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        yield word
        yield unquote(word)
