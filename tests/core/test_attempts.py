"""The consequences of an attempt, to the second, for both formats."""

from __future__ import annotations

from typing import get_args

import pytest

from proxy.core import attempts, lifecycle
from proxy.core.attempts import AttemptVerdict, Format, judge

A = (10, 60, 600, 3600, 21600)
B = (1, 5, 30, 300, 1800, 7200, 28800)


@pytest.mark.parametrize(("form", "delays"), [("A", A), ("B", B)])
def test_failures_follow_the_schedule_of_the_specification_to_the_second(form: Format, delays: tuple[int, ...]) -> None:
    now, tries, due = 1_700_000_000.0, 0, []
    while True:
        verdict = judge(form, tries, 500)
        if verdict.state != "due":
            break
        assert verdict.again_s is not None
        now += verdict.again_s
        tries = verdict.tries
        due.append(now)
    assert due == [1_700_000_000.0 + sum(delays[: n + 1]) for n in range(len(delays))]
    assert verdict == (AttemptVerdict("parked", 0, cause="exhaust") if form == "A" else AttemptVerdict("failed", 8))


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_every_2xx_is_delivered(status: int) -> None:
    assert judge("A", 3, status) == AttemptVerdict("delivered", 3)


@pytest.mark.parametrize("status", [None, 100, 199, 300, 301, 302, 304, 307, 400, 401, 404, 429, 500, 503, 599])
def test_nothing_else_is(status: int | None) -> None:
    assert judge("A", 0, status) == AttemptVerdict("due", 1, 10)
    assert judge("B", 0, status) == AttemptVerdict("due", 1, 1)


def test_410_is_retried_in_format_a_and_disables_a_webhook_of_format_b() -> None:
    assert judge("A", 2, 410) == AttemptVerdict("due", 3, 600)
    assert judge("A", 5, 410) == AttemptVerdict("parked", 0, cause="exhaust")
    assert judge("B", 2, 410) == AttemptVerdict("failed", 3, cause="gone")
    assert lifecycle.after("active", "gone") == "disabled"


def test_receiver_may_ask_for_more_time_but_not_for_less_and_not_for_ever() -> None:
    assert judge("B", 0, 429, wait_s=120).again_s == 120
    assert judge("A", 1, 503, wait_s=3).again_s == 60
    assert judge("B", 0, 429, wait_s=10**9).again_s == attempts.LONGEST_S


def test_waiting_does_not_add_attempts() -> None:
    assert judge("A", 5, 429, wait_s=120) == AttemptVerdict("parked", 0, cause="exhaust")


@pytest.mark.parametrize("form", get_args(Format))
def test_test_is_tried_once_and_says_nothing_about_the_webhook(form: Format) -> None:
    assert judge(form, 0, 500, test=True) == AttemptVerdict("failed", 1)
    assert judge(form, 0, 410, test=True) == AttemptVerdict("failed", 1)
    assert judge(form, 0, 204, test=True).state == "delivered"


def test_only_what_exhausts_format_a_or_is_gone_changes_the_webhook() -> None:
    causes = {(form, tries, judge(form, tries, 500).cause) for form in get_args(Format) for tries in range(9)}
    assert {(form, tries) for form, tries, cause in causes if cause} == {("A", tries) for tries in range(5, 9)}
    assert attempts.is_delivered(200)
    assert not attempts.is_delivered(None)
