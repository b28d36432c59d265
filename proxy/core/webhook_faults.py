"""How the fault plan of a webhook (`core/fault_plans.py`) changes a delivery: it is late, repeated, or taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from proxy.core import fault_plans, webhook_bodies
from proxy.core.attempts import AttemptVerdict
from proxy.core.fault_plans import FaultPlan

# A copy follows the delivery after this time, like a repetition after the result of an attempt was lost.
COPY_AFTER_S = 1.0
# Bounds the cache of parsed plans.
READ_PLANS = 1000


@dataclass(frozen=True, slots=True)
class DeliveryFault:
    """The fault of a claimed delivery. `age_s`: since it was added. `copies`: how often it was delivered before."""

    plan: FaultPlan
    age_s: float
    copies: int
    is_correction: bool

    @property
    def wait_s(self) -> float:
        """How much longer the delivery waits."""
        return max(0.0, self.plan.delay_ms / 1000 - self.age_s)

    def after(self, verdict: AttemptVerdict) -> AttemptVerdict:
        """A delivered event is due again while copies are to follow."""
        if verdict.state == "delivered" and self.copies < self.plan.duplicate:
            return AttemptVerdict("due", verdict.tries, COPY_AFTER_S)
        return verdict

    def takes_back(self, verdict: AttemptVerdict) -> bool:
        """Whether the event is taken back now. Corrections are not taken back."""
        return self.plan.correction and not self.is_correction and verdict.state == "delivered"


def fault_of(
    text: str, event_id: str, *, age_s: float, copies: int, is_correction: bool = False
) -> DeliveryFault | None:
    """The fault of a delivery, or None if the plan does not affect its event."""
    plan = _plan_of(text)
    if plan is None or not fault_plans.affects(plan, event_id):
        return None
    return DeliveryFault(plan, age_s, copies, is_correction)


@lru_cache(READ_PLANS)
def _plan_of(text: str) -> FaultPlan | None:
    try:
        return fault_plans.plan_of(text)
    except ValueError:  # A later version of the program wrote it.
        return None


@dataclass(frozen=True, slots=True)
class InjectedEvent:
    """An event that a fault adds. `takes_back`: the event that it corrects."""

    id: str
    type: str
    body: bytes
    takes_back: str | None = None


def reorganised(event_id: str, event_type: str, webhook_id: str, body: bytes, *, at: str) -> Sequence[InjectedEvent]:
    """The events that follow when the block of an event is removed and comes back: a correction, and the event again."""
    kind, data = webhook_bodies.correction_of(body)
    corrects = webhook_bodies.event_id(webhook_id, kind, event_id)
    repeats = webhook_bodies.event_id(webhook_id, event_type, event_id, time=1)
    correction = webhook_bodies.body_of(
        corrects,
        kind,
        webhook_id,
        chain=webhook_bodies.chain_of(body),
        at=at,
        data=data,
        test=webhook_bodies.is_test(body),
    )
    again = body.replace(event_id.encode(), repeats.encode(), 1)
    return (
        InjectedEvent(corrects, kind, correction, takes_back=event_id),
        InjectedEvent(repeats, event_type, again),
    )
