"""Times as text."""

from __future__ import annotations

import datetime

from proxy.core import iso_time

MOMENT = datetime.datetime(2026, 1, 15, 9, 30, 0, 250_999, datetime.UTC)
IN_KATHMANDU = MOMENT.astimezone(datetime.timezone(datetime.timedelta(hours=5, minutes=45)))


def test_seconds_have_no_fraction() -> None:
    assert iso_time.iso_seconds(MOMENT) == "2026-01-15T09:30:00Z"


def test_milliseconds_are_cut_and_not_rounded() -> None:
    assert iso_time.iso_millis(MOMENT) == "2026-01-15T09:30:00.250Z"


def test_every_time_zone_is_written_in_utc() -> None:
    assert iso_time.iso_seconds(IN_KATHMANDU) == iso_time.iso_seconds(MOMENT)
    assert iso_time.iso_millis(IN_KATHMANDU) == iso_time.iso_millis(MOMENT)


def test_unix_time_is_read_in_utc() -> None:
    assert iso_time.iso_of_unix(MOMENT.timestamp()) == "2026-01-15T09:30:00Z"
    assert iso_time.iso_of_unix(0) == "1970-01-01T00:00:00Z"
