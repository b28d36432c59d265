"""The params of Solana's subscriptions, read for polling. Upstreams with a WebSocket validate them themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.chains.svm.address import FORMAT, decoded

# From the least to the most certain.
COMMITMENTS = ("processed", "confirmed", "finalized")
SIGNATURE_BYTES = 64
# getMultipleAccounts has another default than accountSubscribe.
DEFAULT_ENCODING = "binary"


class PolledParams(msgspec.Struct, frozen=True):
    """`target`: the account, program or signature, or the account that logs must mention; empty for all logs. `config`: the
    call's options without the commitment."""

    target: str = ""
    config: dict[str, Any] = {}
    commitment: str = "finalized"
    with_votes: bool = False

    @property
    def at_least_confirmed(self) -> str:
        """Blocks and histories can be read at no lower commitment."""
        return "confirmed" if self.commitment == "processed" else self.commitment


def read_polled(method: str, params: bytes) -> PolledParams:
    """Raises ValueError if the params are not valid."""
    given = msgspec.json.decode(params)
    config = given[1] if len(given) > 1 and given[1] is not None else {}
    if not isinstance(config, dict):
        raise ValueError("the config must be an object")
    commitment = config.pop("commitment", None) or "finalized"
    if commitment not in COMMITMENTS:
        raise ValueError("commitment must be processed, confirmed or finalized")
    match method:
        case "accountSubscribe" | "programSubscribe":
            return PolledParams(_address(given), config, commitment)
        case "signatureSubscribe":
            return PolledParams(_signature(given), {}, commitment)
        case "logsSubscribe":
            target, with_votes = _logs_filter(given)
            return PolledParams(target, {}, commitment, with_votes)
        case _:
            return PolledParams()


def _address(given: list[Any]) -> str:
    if not given or not isinstance(given[0], str) or FORMAT.parse(given[0]) is None:
        raise ValueError("the first param must be an address in base 58")
    return given[0]


def _signature(given: list[Any]) -> str:
    if not given or not isinstance(given[0], str) or decoded(given[0], SIGNATURE_BYTES) is None:
        raise ValueError("the first param must be a signature in base 58")
    return given[0]


def _logs_filter(given: list[Any]) -> tuple[str, bool]:
    match given[:1]:
        case ["all" | "allWithVotes" as word]:
            return "", word == "allWithVotes"
        case [{"mentions": [str() as address]}] if FORMAT.parse(address) is not None:
            return address, True
        case _:
            raise ValueError('the filter must be "all", "allWithVotes" or {"mentions": [one address]}')
