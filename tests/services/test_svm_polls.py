"""Polls of Solana after an upstream has reported a slot that does not exist."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from proxy.chains.svm.polled_params import PolledParams
from proxy.services.feed.svm_polls import MOST_SLOTS, AccountWatch, ProgramPoll, SlotPoll

ABSURD = 1 << 60
PARAMS = PolledParams("11111111111111111111111111111111", {}, "confirmed")


def account(lamports: int) -> bytes:
    return b'{"lamports":%d,"data":["","base64"],"owner":"1","executable":false,"rentEpoch":0,"space":0}' % lamports


def test_account_is_watched_after_an_absurd_slot() -> None:
    watch = AccountWatch(PARAMS)
    watch.saw(100, msgspec.Raw(account(1)))
    watch.saw(ABSURD, msgspec.Raw(account(1)))
    assert len(watch.saw(101, msgspec.Raw(account(2)))) == 1


def test_account_ignores_an_upstream_that_is_behind() -> None:
    watch = AccountWatch(PARAMS)
    watch.saw(100, msgspec.Raw(account(1)))
    assert watch.saw(99, msgspec.Raw(account(2))) == []


def test_program_is_polled_after_an_absurd_slot() -> None:
    replies = iter([(100, 1), (ABSURD, 1), (101, 2)])

    async def ask(_: str, __: list[Any]) -> bytes:
        slot, lamports = next(replies)
        return b'{"context":{"slot":%d},"value":[{"pubkey":"1","account":%b}]}' % (slot, account(lamports))

    async def poll() -> list[int]:
        program = ProgramPoll(PARAMS)
        return [len(await program.poll(ask, {})) for _ in range(3)]

    assert asyncio.run(poll()) == [0, 0, 1]


@pytest.mark.parametrize("behind", [1, MOST_SLOTS])
def test_slots_go_on_after_an_absurd_one(behind: int) -> None:
    async def ask(_: str, __: list[Any]) -> bytes:
        raise AssertionError

    async def poll() -> list[list[int]]:
        slots = SlotPoll("confirmed", lambda slot, _: b"%d" % slot)
        return [
            [event.block for event in await slots.poll(ask, {"confirmed": each})]
            for each in (100, ABSURD, 100 + behind, 101 + behind)
        ]

    assert asyncio.run(poll())[3] == [101 + behind]
