"""One-time codes, by the test vectors of RFC 6238."""

from __future__ import annotations

import pytest

from proxy.core.one_time_codes import code_at, step_of

SECRET = b"12345678901234567890"


@pytest.mark.parametrize(
    ("time", "code"),
    [(59, "287082"), (1111111109, "081804"), (1234567890, "005924"), (2000000000, "279037"), (20000000000, "353130")],
)
def test_codes_are_those_of_the_rfc(time: int, code: str) -> None:
    assert code_at(SECRET, time // 30) == code
    assert step_of(SECRET, code, time) == time // 30


def test_codes_of_the_step_before_and_after_count_too() -> None:
    assert [step_of(SECRET, code_at(SECRET, step), 3000.0) for step in range(98, 103)] == [None, 99, 100, 101, None]
    assert step_of(SECRET, "", 3000.0) is None
    assert step_of(SECRET, "12345\u0663", 3000.0) is None
