"""When a delivery is tried again, to the second."""

from __future__ import annotations

import datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import attempts
from proxy.core.attempts import Format
from proxy.core.retry_after import retry_after_s

NOW = 1_768_469_400.0  # 2026-01-15T09:30:00Z
MINUTE, HOUR = 60, 3600
# The specification's words, section 6.
A = [10, 1 * MINUTE, 10 * MINUTE, 1 * HOUR, 6 * HOUR]
B = [1, 5, 30, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 8 * HOUR]


@pytest.mark.parametrize(("form", "delays"), [("A", A), ("B", B)])
def test_schedule_is_the_specifications(form: Format, delays: list[int]) -> None:
    tries = range(1, len(delays) + 1)
    assert [attempts.pause_s(form, each) for each in tries] == delays
    assert attempts.pause_s(form, len(delays) + 1) is None


def test_all_retries_of_format_b_take_about_ten_hours() -> None:
    assert 10 * HOUR < sum(attempts.SCHEDULES["B"]) < 11 * HOUR


def test_receiver_may_ask_for_more_time_and_not_for_less() -> None:
    assert attempts.pause_s("A", 1, wait_s=25.0) == 25
    assert attempts.pause_s("A", 1, wait_s=3.0) == 10


def test_receiver_cannot_put_a_delivery_off_for_ever() -> None:
    assert attempts.pause_s("B", 1, wait_s=1e9) == attempts.LONGEST_S


def test_another_schedule_can_be_given() -> None:
    assert attempts.pause_s("A", 2, schedule=(1, 2)) == 2
    assert attempts.pause_s("A", 3, schedule=(1, 2)) is None


@pytest.mark.parametrize(
    ("event_type", "form"), [("log", "A"), ("address_activity", "A"), ("NEW_BLOCK", "B"), ("CORRECTION", "B")]
)
def test_case_of_the_type_picks_the_format(event_type: str, form: Format) -> None:
    assert attempts.format_of(event_type) == form


@pytest.mark.parametrize("text", ["", "soon", "-5", "1.5", "Tue, 99 Foo 2026 00:00:00 GMT", "9" * 12, "１２"])
def test_retry_after_that_says_nothing_asks_for_nothing(text: str) -> None:
    assert retry_after_s(text, NOW) == 0.0


def test_retry_after_in_seconds() -> None:
    assert retry_after_s(" 120 ", NOW) == 120.0


@given(st.integers(0, 4_000_000_000))
def test_retry_after_as_a_date_is_what_the_standard_library_reads(seconds: int) -> None:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    text = format_datetime(moment, usegmt=True)
    assert retry_after_s(text, NOW) == max(0.0, seconds - NOW)


_PARTS = st.sampled_from(
    ["Thu,", "15", "Jan", "2026", "09:30:00", "GMT", "+9999", "-0000", "9:99", "99999999999", ":", ",", "-", ""]
)


@given(st.one_of(st.text(max_size=40), st.lists(_PARTS, max_size=8).map(" ".join)))
def test_no_retry_after_raises_or_asks_for_less_than_nothing(text: str) -> None:
    assert retry_after_s(text, NOW) >= 0.0
