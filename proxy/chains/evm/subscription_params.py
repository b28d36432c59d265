"""The params of `eth_subscribe`, parsed strictly. Errors name the member that is wrong."""

from __future__ import annotations

from typing import Any

from proxy.chains.evm import log_filter
from proxy.chains.family import SubscriptionParams

HEADS, LOGS, PENDING, SYNCING = "newHeads", "logs", "newPendingTransactions", "syncing"
KINDS = (HEADS, LOGS, PENDING, SYNCING)
NOTIFICATION = b"eth_subscription"


def read(method: str, params: list[Any]) -> SubscriptionParams:
    kind = params[0] if params else None
    option = params[1] if len(params) > 1 else None
    if kind not in KINDS:
        raise ValueError(f"the first param must be one of {', '.join(KINDS)}")
    if len(params) > 2:
        raise ValueError(f"{kind} takes at most one option")
    detail, from_block = _option(kind, option)
    return SubscriptionParams(kind, detail, from_block, kind, NOTIFICATION)


def _option(kind: str, option: Any) -> tuple[Any, int | None]:
    """The option as the feed uses it, and the block to replay from."""
    match kind:
        case "logs":
            return log_filter.parse(option), log_filter.read_cursor(option.get("fromBlock")) if option else None
        case "newHeads":
            return None, log_filter.read_cursor(_only_cursor(option))
        case "newPendingTransactions":
            return _is_full(option), None
        case _:
            if option is not None:
                raise ValueError("syncing takes no option")
            return None, None


def _only_cursor(option: Any) -> Any:
    if option is None:
        return None
    if not isinstance(option, dict) or set(option) - {"fromBlock"}:
        raise ValueError('the option of newHeads must be an object with the member "fromBlock"')
    return option.get("fromBlock")


def _is_full(option: Any) -> bool:
    """Nodes accept `true`; some accept an object with the same meaning."""
    if isinstance(option, dict) and not set(option) - {"includeTransactions", "hashesOnly"}:
        return bool(option.get("includeTransactions", not option.get("hashesOnly", True)))
    if option is None or isinstance(option, bool):
        return bool(option)
    raise ValueError("the option of newPendingTransactions must be a boolean: true to receive whole transactions")
