"""Codes of second factors cannot be guessed over days, and strangers cannot keep the holder out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from proxy.errors import RateLimited, Unauthorized
from proxy.services.accounts.code_limits import MOST_PER_DAY, MOST_PER_MONTH, CodeLimits
from tests.dashboard.service import DashboardService

STRANGERS = ""
BROWSER = "device of the holder"
_serial = itertools.count(1)


@dataclass
class Guesses:
    """Codes that a person enters, and the mails about them."""

    service: DashboardService
    person: str = field(default_factory=lambda: f"person {next(_serial)}")
    mails: list[str] = field(default_factory=list)
    checked: int = 0

    def __post_init__(self) -> None:
        self.limits = CodeLimits(self.service.sessions, self.mails.append)

    async def enter(self, place: str, *, right: bool = False) -> None:
        async def check() -> None:
            self.checked += 1
            if not right:
                raise Unauthorized("wrong")

        await self.limits.checked(check, self.person, "holder@example.com", place)

    async def wrong(self, place: str, count: int) -> None:
        for _ in range(count):
            with pytest.raises(Unauthorized):
                await self.enter(place)

    async def refused(self, place: str) -> float:
        with pytest.raises(RateLimited) as caught:
            await self.enter(place, right=True)
        return float(caught.value.headers["Retry-After"])

    async def next_day(self) -> None:
        await self.service.sessions.clear_codes([("code day", f"{self.person}\0{STRANGERS}")])


@pytest.fixture
def guesses(service: DashboardService) -> Guesses:
    return Guesses(service)


async def test_strangers_have_a_few_codes_a_day_and_the_holder_is_informed_once(guesses: Guesses) -> None:
    await guesses.wrong(STRANGERS, MOST_PER_DAY)
    assert not guesses.mails
    for _ in range(5):
        assert await guesses.refused(STRANGERS) > 600
    assert guesses.checked == MOST_PER_DAY
    assert guesses.mails == ["holder@example.com"]


async def test_strangers_have_a_few_codes_a_month(guesses: Guesses) -> None:
    for _ in range(MOST_PER_MONTH // MOST_PER_DAY):
        await guesses.wrong(STRANGERS, MOST_PER_DAY)
        await guesses.next_day()
    assert await guesses.refused(STRANGERS) > 3600


async def test_counts_outlive_the_removal_of_old_attempts(guesses: Guesses) -> None:
    await guesses.wrong(STRANGERS, MOST_PER_DAY)
    await guesses.service.sessions.purge(idle_s=3600.0)
    await guesses.refused(STRANGERS)


async def test_holder_signs_in_at_a_known_place_while_strangers_are_refused(guesses: Guesses) -> None:
    await guesses.wrong(STRANGERS, MOST_PER_DAY)
    await guesses.refused(STRANGERS)
    await guesses.enter(BROWSER, right=True)
    # Another place's code does not give strangers more attempts.
    await guesses.refused(STRANGERS)
    await guesses.wrong(BROWSER, MOST_PER_DAY)
    await guesses.refused(BROWSER)


async def test_right_code_and_a_new_password_clear_the_count(guesses: Guesses) -> None:
    await guesses.wrong(STRANGERS, MOST_PER_DAY - 1)
    await guesses.enter(STRANGERS, right=True)
    await guesses.wrong(STRANGERS, MOST_PER_DAY)
    await guesses.refused(STRANGERS)
    await guesses.limits.clear(guesses.person)
    await guesses.enter(STRANGERS, right=True)
