"""Keys for tests without a database."""

from __future__ import annotations

from proxy.core.access import ALL_SCOPES, Account, Key
from proxy.core.limits import BucketRates


def key_of(**changes: object) -> Key:
    facts: dict[str, object] = {
        "id": "key_1",
        "lineage": "key_1",
        "digest": b"",
        "live": True,
        "scopes": ALL_SCOPES,
        "account": Account(id="acct_1", plan="free", day_limit=100),
        "rate": BucketRates(0, 10, 200),
        "disabled": False,
        "expires_at": 1.0,
    }
    return Key(**(facts | changes))  # type: ignore[arg-type]
