"""The errors that a caller can receive, and the error that stops a start.

A `Fault` is a reply: it has a status, a code from the API's error table and a message for the caller. It never contains an
upstream's address, a stack or SQL. Statuses that the table does not list (405, 408, 413, 415, 426, 503, 504) have the same
body and the nearest of its six codes.

A `StartError` is for the operator. It is fatal and lists all faults at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, TypeVar, get_args

# Why a request failed, for programs: narrower than the six codes. The list is closed and part of the API spec. Each reason is
# an anchor of the guide's page of errors.
Reason = Literal[
    "request", "parameter", "body", "state", "http_method", "media_type", "size", "timeout",
    "key", "session",
    "scope", "mode", "ip", "origin", "url", "contract", "disabled", "directive", "policy", "plan", "role",
    "path", "network", "resource",
    "rate", "quota", "concurrency",
    "internal", "unavailable", "upstream", "block", "verification", "deadline",
]  # fmt: skip
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
# The page of errors in the guide, on this installation.
ERRORS_PAGE: Final = "/docs/guide/errors/"

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """The error, to be replied. The frames in its traceback keep their variables, such as a large body. If one of them names
    the error, they are a cycle, which would wait for the garbage collector."""
    error.__traceback__ = error.__context__ = None
    return error


class Fault(Exception):
    """An HTTP error with the API's error body."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    # The reason of a fault that is given none.
    usual_reason: ClassVar[Reason] = "internal"
    # Units of upstream calls that were made before the failure, and that are not refunded.
    _kept_units = 0
    # The price of the call is not refunded either.
    _keeps_price = False

    def __init__(
        self, message: str, *, details: dict[str, Any] | None = None, param: str = "", reason: Reason | None = None
    ) -> None:
        """`param`: the parameter, member or header at fault, as the caller named it."""
        super().__init__(message)
        self.message = message
        self.details = details
        self.param = param
        self.reason: Reason = reason or ("parameter" if param else self.usual_reason)

    @property
    def headers(self) -> dict[str, str]:
        return {}

    @property
    def messages(self) -> list[str]:
        """Everything that is wrong, for people."""
        return [self.message]

    def keep(self, units: int) -> None:
        """These units of the request stay charged."""
        self._kept_units += units

    def keep_price(self) -> None:
        """Calls were made for the price of the call: it stays charged."""
        self._keeps_price = True

    def take_kept(self) -> tuple[int, bool]:
        """The units that stay charged, and whether the price does, for the first caller that counts them: others share the
        failure, not the cost."""
        kept = self._kept_units, self._keeps_price
        self._kept_units, self._keeps_price = 0, False
        return kept

    def body(self, site: str = "") -> dict[str, Any]:
        """`site`: the public URL of this installation, if it is known."""
        error: dict[str, Any] = {"code": self.code, "message": self.message, "status": self.status}
        if self.param:
            error["param"] = self.param
        error["reason"] = self.reason
        error["docs"] = f"{site}{ERRORS_PAGE}#{self.reason}"
        if self.details:
            error["details"] = self.details
        return {"error": error}


class InvalidRequest(Fault):
    status, code = 400, "invalid_request"
    usual_reason: ClassVar[Reason] = "request"
    # All parameters at fault with their messages, if there are several. The first is that of the fault itself.
    errors: Sequence[tuple[str, str]] = ()

    @property
    def messages(self) -> list[str]:
        return [message for _, message in self.errors] or [self.message]

    def body(self, site: str = "") -> dict[str, Any]:
        body = super().body(site)
        if self.errors:
            body["error"]["errors"] = [{"param": param, "message": message} for param, message in self.errors]
        return body

    @classmethod
    def listing(cls, errors: Sequence[tuple[str, str]]) -> InvalidRequest:
        """For one or more parameters with their messages."""
        param, message = errors[0]
        error = cls(message, param=param)
        if len(errors) > 1:
            error.errors = errors
        return error

    @classmethod
    def naming(cls, text: str) -> InvalidRequest:
        """For a text of the form `member: why`."""
        return cls(text, param=text.partition(":")[0])


class BadValue(InvalidRequest):
    """A value that cannot be stored. A request with it is refused; a background loop sets its row aside (`bad_rows`)."""


class Unauthorized(Fault):
    status, code = 401, "unauthorized"
    usual_reason = "key"

    @property
    def headers(self) -> dict[str, str]:
        """RFC 9110, 15.5.2: "The server generating a 401 response MUST send a WWW-Authenticate header field"."""
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(Fault):
    status, code = 403, "forbidden"
    usual_reason = "role"


class NotFound(Fault):
    status, code = 404, "not_found"
    usual_reason = "resource"


class MethodNotAllowed(InvalidRequest):
    status = 405
    usual_reason = "http_method"

    def __init__(self, message: str, *, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": ", ".join(self.allowed)}


class RequestTimeout(InvalidRequest):
    status = 408
    usual_reason = "timeout"


class TooLarge(InvalidRequest):
    status = 413
    usual_reason = "size"


class TargetTooLong(InvalidRequest):
    status = 414
    usual_reason = "size"


class UnsupportedMedia(InvalidRequest):
    status = 415
    usual_reason = "media_type"


class ExpectationFailed(InvalidRequest):
    status = 417


class UpgradeRequired(InvalidRequest):
    status = 426

    @property
    def headers(self) -> dict[str, str]:
        return {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}


class HeadersTooLarge(InvalidRequest):
    status = 431
    usual_reason = "size"


class RateLimited(Fault):
    status, code = 429, "rate_limited"
    usual_reason = "concurrency"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int,
        details: dict[str, Any] | None = None,
        wait_s: float | None = None,
        reason: Reason | None = None,
    ) -> None:
        """`wait_s`: the exact time, if it is known; `Retry-After` has whole seconds."""
        super().__init__(message, details=details, reason=reason)
        self.retry_after_s = max(1, retry_after_s)
        self.wait_s = float(retry_after_s) if wait_s is None else wait_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class LeasePending(RateLimited):
    """The host has to ask for a part of the limit that all hosts share. The caller waits, or tries again soon."""


# The message of a reply that an upstream did not complete.
BROKEN_REPLY: Final = "the upstream's reply broke off"


class InternalError(Fault):
    """A fault of the service: a bug, or all upstreams failed."""


class NotSent(InternalError):
    """A call that certainly reached no upstream."""


class Unavailable(InternalError):
    """A part that the service needs is away for a moment."""

    status = 503
    usual_reason = "unavailable"
    retry_after_s: ClassVar[int] = 1

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class BehindBlock(Fault):
    """A request needs a block that has not been reached: it is not there yet, which is no fault of the service, and worth a
    retry. Paid for: upstreams were polled, or the index was read, for it."""

    status, code = 503, "not_found"
    usual_reason = "block"
    retry_after_s: ClassVar[int] = 1

    def __init__(self, what: str, min_block: int, block: int) -> None:
        """`what` is at `block` and has not reached `min_block`."""
        super().__init__(f"{what} is at block {block}, before block {min_block}", details={"block": block})
        self.block = block

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s), "X-Block-Number": str(self.block)}


class UpstreamTimeout(InternalError):
    status = 504
    usual_reason = "upstream"


class DeadlinePassed(Fault):
    """The caller's own deadline has passed. Upstreams were asked, so it is paid for: it is no fault of the service."""

    status = 504
    usual_reason = "deadline"


class NotVerified(Fault):
    """Upstreams were asked, and their replies could not be verified. Paid for, like any call that they answered."""

    status = 503
    usual_reason = "verification"
    retry_after_s: ClassVar[int] = 1

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


_BY_STATUS: dict[int, type[Fault]] = {
    kind.status: kind
    for kind in (
        InvalidRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        RequestTimeout,
        TooLarge,
        UnsupportedMedia,
        ExpectationFailed,
    )
}


def of_status(status: int, message: str) -> Fault:
    """The fault for a status that aiohttp's router or parser chose."""
    if kind := _BY_STATUS.get(status):
        return kind(message)
    return InvalidRequest(message) if 400 <= status < 500 else InternalError(message)


class StartError(Exception):
    """The program cannot start. Each fault names the setting or file to change."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)
