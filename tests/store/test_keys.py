"""Accounts and keys in Postgres: create, read, change, rotate, revoke."""

from __future__ import annotations

import asyncio
import datetime
import math
from typing import Any

import pytest

from proxy.core import access
from proxy.core.paging import Page
from proxy.errors import Forbidden, InvalidRequest, NotFound
from proxy.store.postgres.keys import KeyStore, LimitChange
from proxy.store.postgres.pool import Pool
from tests.service import until

PEPPER = "p" * 32
DAY = datetime.date(2026, 1, 15)
LONG_AGO = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def store(pool: Pool) -> KeyStore:
    return KeyStore(pool, pepper=PEPPER, plans={"free": 10, "growth": 100, "enterprise": 1000})


@pytest.fixture
async def account(store: KeyStore) -> str:
    return str((await store.create_account(name="Acme", email="ops@example.com", plan="free"))["id"])


async def create(store: KeyStore, account: str, **facts: Any) -> tuple[dict[str, Any], str]:
    return await store.create_key(account, **({"name": "default", "mode": "live"} | facts))


# Accounts


async def test_account_is_read_as_created(store: KeyStore) -> None:
    own = LimitChange(requests_per_second=50, units_per_second=900, requests_per_day=0)
    made = await store.create_account(name=" Acme ", email="ops@example.com", plan="growth", own=own)
    assert made["id"].startswith("acct_")
    assert made["name"] == "Acme"
    assert (made["requests_per_second"], made["units_per_second"], made["requests_per_day"]) == (50, 900, 0)
    assert await store.read_account(made["id"]) == made


async def test_accounts_are_listed_in_order_of_creation(store: KeyStore) -> None:
    assert await store.list_accounts() == []
    ids = [(await store.create_account(name=f"a{n}", email=f"a{n}@b", plan="free"))["id"] for n in range(3)]
    await create(store, ids[1])
    listed = await store.list_accounts()
    assert [row["id"] for row in listed] == ids
    assert [row["active_keys"] for row in listed] == [0, 1, 0]


async def test_account_is_found_by_email_case_insensitively(store: KeyStore, account: str) -> None:
    found = await store.find_account("OPS@Example.COM")
    assert found is not None
    assert found["id"] == account
    assert await store.find_account("nobody@example.com") is None


async def test_two_accounts_cannot_share_an_email(store: KeyStore, account: str) -> None:
    async def create(n: int) -> bool:
        try:
            await store.create_account(name=f"a{n}", email="A@Example.com" if n % 2 else "a@example.com", plan="free")
        except InvalidRequest:
            return False
        return True

    assert sum(await asyncio.gather(*(create(n) for n in range(8)))) == 1
    with pytest.raises(InvalidRequest, match="email"):
        await store.update_account(account, email="a@EXAMPLE.com")
    assert (await store.update_account(account, name="Still", email="OPS@example.com"))["email"] == "OPS@example.com"


async def test_account_keeps_an_email_shared_before_the_rule(store: KeyStore, account: str, pool: Pool) -> None:
    other = (await store.create_account(name="b", email="b@b", plan="free"))["id"]
    async with pool.connection() as connection:
        await connection.execute("update accounts set email = 'ops@example.com' where id = $1", other)
    assert (await store.update_account(other, email="ops@example.com", plan="growth"))["plan"] == "growth"


async def test_page_past_the_end_still_has_the_total(store: KeyStore, account: str) -> None:
    await store.create_account(name="b", email="b@b", plan="growth")
    assert [await store.page_accounts("", Page(number, 1)) for number in (3, 9)] == [([], 2), ([], 2)]
    rows, total = await store.page_accounts("B@B", Page(1, 1))
    assert ([row["name"] for row in rows], total) == (["b"], 1)


async def test_account_update_changes_only_given_values(store: KeyStore, account: str) -> None:
    own = LimitChange(requests_per_second=5, requests_per_day=7)
    changed = await store.update_account(account, plan="growth", own=own)
    assert (changed["name"], changed["plan"], changed["requests_per_second"]) == ("Acme", "growth", 5)
    again = await store.update_account(account, name="Other", email="x@y.z")
    assert (again["name"], again["email"], again["requests_per_day"]) == ("Other", "x@y.z", 7)
    assert again["changed_at"] > changed["changed_at"]


async def test_limit_of_minus_one_restores_inheritance(store: KeyStore, account: str) -> None:
    inherit = LimitChange(requests_per_second=-1, units_per_second=-1, requests_per_day=-1)
    await store.update_account(account, own=LimitChange(requests_per_second=5, units_per_second=6, requests_per_day=7))
    for row in (
        await store.update_account(account, own=inherit),
        await store.create_account(name="New", email="n@b", plan="free", own=inherit),
    ):
        assert (row["requests_per_second"], row["units_per_second"], row["requests_per_day"]) == (None, None, None)
    row, _ = await create(store, account, own=inherit)
    assert (row["requests_per_second"], row["units_per_second"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"plan": "gold"}, "plan"),
        ({"name": ""}, "name"),
        ({"name": " "}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"email": ""}, "email"),
        ({"email": "nobody"}, "email"),
        ({"email": "@example.com"}, "email"),
        ({"email": "a b@example.com"}, "email"),
        ({"own": LimitChange(requests_per_second=0)}, "requests_per_second"),
        ({"own": LimitChange(requests_per_second=2**31)}, "requests_per_second"),
        ({"own": LimitChange(units_per_second=-2)}, "units_per_second"),
        ({"own": LimitChange(requests_per_day=2**63)}, "requests_per_day"),
    ],
)
async def test_invalid_value_is_refused_by_name_on_create_and_update(
    store: KeyStore, account: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        await store.create_account(**({"name": "a", "email": "a@b", "plan": "free"} | change))
    with pytest.raises(InvalidRequest, match=named):
        await store.update_account(account, **change)
    assert len(await store.list_accounts()) == 1


async def test_largest_limits_are_stored_exactly(store: KeyStore) -> None:
    own = LimitChange(requests_per_second=2**31 - 1, units_per_second=2**31 - 1, requests_per_day=2**63 - 1)
    made = await store.create_account(name="a", email="a@b", plan="enterprise", own=own)
    assert made["requests_per_day"] == 2**63 - 1


async def test_absent_account_is_not_found(store: KeyStore) -> None:
    for work in (store.read_account("acct_0"), store.update_account("acct_0", name="x"), create(store, "acct_0")):
        with pytest.raises(NotFound, match="acct_0"):
            await work


# Keys


async def test_key_is_returned_once_and_only_its_digest_is_stored(store: KeyStore, account: str, pool: Pool) -> None:
    row, key = await create(store, account, mode="test", scopes=["rpc:read"])
    assert access.is_well_formed(key)
    assert key.startswith("svc_test_")
    assert row["mode"] == "test"
    assert row["hint"] == access.hint_of(key)
    assert row["scopes"] == ["rpc:read"]
    assert "digest" not in row
    assert "digest" not in await store.read_key(row["id"])
    async with pool.connection() as connection:
        kept = await connection.fetchrow("select * from keys where id = $1", row["id"])
    assert kept is not None
    assert kept["digest"] == access.digest(PEPPER.encode(), key)
    assert key not in repr(dict(kept))


async def test_each_account_and_each_new_key_has_its_own_slot(store: KeyStore, account: str) -> None:
    owner = await store.read_account(account)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(create(store, account)) for _ in range(10)]
    rows = [task.result()[0] for task in tasks]
    assert sorted(row["slot"] for row in (owner, *rows)) == list(range(11))
    assert all(row["lineage_id"] == row["id"] for row in rows)


async def test_keys_are_listed_by_account(store: KeyStore, account: str) -> None:
    other = (await store.create_account(name="b", email="b@b", plan="growth"))["id"]
    first, second, third = [(await create(store, owner))[0]["id"] for owner in (account, other, account)]
    assert [row["id"] for row in await store.list_keys()] == [first, second, third]
    assert [row["id"] for row in await store.list_keys(account)] == [first, third]
    assert (await store.list_keys(other))[0]["plan"] == "growth"
    assert await store.list_keys("acct_0") == []


async def test_key_update_changes_only_given_values(store: KeyStore, account: str) -> None:
    row, _ = await create(store, account, scopes=["rpc:read"], own=LimitChange(requests_per_second=3))
    changed = await store.update_key(row["id"], name="renamed")
    assert (changed["name"], changed["scopes"], changed["requests_per_second"]) == ("renamed", ["rpc:read"], 3)
    changed = await store.update_key(row["id"], scopes=[], own=LimitChange(requests_per_second=-1, units_per_second=9))
    assert (changed["scopes"], changed["requests_per_second"], changed["units_per_second"]) == ([], None, 9)


async def test_invalid_scope_name_or_limit_of_a_key_is_refused(store: KeyStore, account: str) -> None:
    row, _ = await create(store, account)
    changes: list[dict[str, Any]] = [{"scopes": ["rpc:reed"]}, {"name": ""}, {"own": LimitChange(units_per_second=0)}]
    for change in changes:
        with pytest.raises(InvalidRequest):
            await create(store, account, **change)
        with pytest.raises(InvalidRequest):
            await store.update_key(row["id"], **change)


async def test_disabled_key_can_be_enabled_but_a_revoked_one_cannot(store: KeyStore, account: str) -> None:
    row, _ = await create(store, account)
    for status in ("disabled", "active", "revoked"):
        assert (await store.set_key_status(row["id"], status))["status"] == status
    for work in (store.set_key_status(row["id"], "active"), store.update_key(row["id"], name="x")):
        with pytest.raises(NotFound, match="revoked"):
            await work


async def test_absent_key_is_not_found(store: KeyStore) -> None:
    for work in (
        store.read_key("key_0"),
        store.update_key("key_0", name="x"),
        store.set_key_status("key_0", "revoked"),
        store.rotate_key("key_0", overlap_s=1),
    ):
        with pytest.raises(NotFound, match="key_0"):
            await work


# Rotation


async def test_successor_inherits_lineage_slot_and_settings(store: KeyStore, account: str) -> None:
    facts = {"mode": "test", "scopes": ["data:read"], "own": LimitChange(requests_per_second=3)}
    old, old_key = await create(store, account, **facts)
    new, new_key = await store.rotate_key(old["id"], overlap_s=60)
    for name in ("account_id", "lineage_id", "slot", "name", "mode", "scopes", "requests_per_second"):
        assert new[name] == old[name]
    assert new["id"] != old["id"]
    assert new_key != old_key
    assert new["expires_at"] is None
    third, _ = await store.rotate_key(new["id"], overlap_s=60)
    assert (third["lineage_id"], third["slot"]) == (old["id"], old["slot"])


async def test_old_key_works_until_the_overlap_ends(store: KeyStore, account: str) -> None:
    old, _ = await create(store, account)
    new, _ = await store.rotate_key(old["id"], overlap_s=3600)
    rows = {row["id"]: row for row in await store.load(DAY)}
    assert rows[old["id"]]["expires_in_s"] == pytest.approx(3600, abs=5)
    assert rows[new["id"]]["expires_in_s"] is None
    last, _ = await store.rotate_key(new["id"], overlap_s=0)
    assert {row["id"] for row in await store.load(DAY)} == {old["id"], last["id"]}


async def test_second_rotation_cannot_extend_the_old_key(store: KeyStore, account: str) -> None:
    old, _ = await create(store, account)
    await store.rotate_key(old["id"], overlap_s=10)
    first = (await store.read_key(old["id"]))["expires_at"]
    await store.rotate_key(old["id"], overlap_s=1000)
    assert (await store.read_key(old["id"]))["expires_at"] == first


@pytest.mark.parametrize("status", ["disabled", "revoked"])
async def test_inactive_key_cannot_be_rotated(store: KeyStore, account: str, status: str) -> None:
    old, _ = await create(store, account)
    await store.set_key_status(old["id"], status)
    with pytest.raises(InvalidRequest, match=status):
        await store.rotate_key(old["id"], overlap_s=1)
    assert len(await store.list_keys()) == 1


async def test_expired_key_is_neither_rotated_nor_counted(store: KeyStore, account: str) -> None:
    old, _ = await create(store, account)
    await store.rotate_key(old["id"], overlap_s=0)
    with pytest.raises(InvalidRequest, match="expired"):
        await store.rotate_key(old["id"], overlap_s=1)
    assert len(await store.list_keys()) == 2
    paged, _ = await store.page_accounts("", Page(1, 10))
    assert [row["active_keys"] for row in (*await store.list_accounts(), *paged)] == [1, 1]


@pytest.mark.parametrize("overlap_s", [-1, 366 * 86400 + 1, math.inf, math.nan])
async def test_overlap_out_of_range_is_refused(store: KeyStore, account: str, overlap_s: float) -> None:
    old, _ = await create(store, account)
    with pytest.raises(InvalidRequest, match="overlap_s"):
        await store.rotate_key(old["id"], overlap_s=overlap_s)


# Loading by workers


async def test_load_skips_keys_that_can_never_work_again(store: KeyStore, account: str) -> None:
    assert await store.load(DAY) == []
    active, disabled, revoked = [(await create(store, account))[0]["id"] for _ in range(3)]
    await store.set_key_status(disabled, "disabled")
    await store.set_key_status(revoked, "revoked")
    assert {row["id"]: row["status"] for row in await store.load(DAY)} == {active: "active", disabled: "disabled"}


async def test_limits_of_the_key_and_its_account_are_loaded(store: KeyStore, account: str) -> None:
    await store.update_account(account, own=LimitChange(requests_per_second=50, units_per_second=500))
    row, _ = await create(store, account, own=LimitChange(requests_per_second=5))
    (loaded,) = await store.load(DAY)
    assert (loaded["id"], loaded["requests_per_second"], loaded["units_per_second"]) == (row["id"], 5, None)
    assert (loaded["account_requests_per_second"], loaded["account_units_per_second"]) == (50, 500)
    assert (loaded["plan"], loaded["requests_per_day"], loaded["used_today"]) == ("free", None, 0)


async def test_changes_are_found_by_key_account_and_time(store: KeyStore, account: str) -> None:
    first, second = [(await create(store, account))[0]["id"] for _ in range(2)]
    now = await store.clock()

    async def changed(**which: object) -> set[str]:
        asked = {"keys": [], "accounts": [], "since": now} | which
        return {row["id"] for row in await store.load_changed(DAY, **asked)}  # type: ignore[arg-type]

    assert await changed() == set()
    assert await changed(keys=[first, "key_0"]) == {first}
    assert await changed(accounts=[account]) == {first, second}
    assert await changed(since=LONG_AGO) == {first, second}
    await store.set_key_status(second, "revoked")
    assert await changed() == {second}
    await store.update_account(account, plan="growth")
    assert await changed() == {first, second}


async def test_every_change_sends_a_notification(store: KeyStore, account: str, pool: Pool) -> None:
    notifications: list[tuple[str, object]] = []
    listener = await pool.dedicated()
    for channel in ("penstock_keys", "penstock_accounts"):
        await listener.add_listener(channel, lambda _c, _p, channel, payload: notifications.append((channel, payload)))
    old, _ = await create(store, account)
    new, _ = await store.rotate_key(old["id"], overlap_s=5)
    await store.set_key_status(new["id"], "revoked")
    await store.update_account(account, plan="growth")
    expected = [("penstock_keys", key) for key in (old["id"], new["id"], old["id"], new["id"])]
    await until(lambda: notifications == [*expected, ("penstock_accounts", account)])
    await listener.close()


async def test_usage_of_an_unused_day_is_zero(store: KeyStore, account: str) -> None:
    assert await store.usage_of_today(account) == 0


# How many keys an account may have


async def test_account_has_at_most_the_keys_of_its_plan(store: KeyStore, account: str) -> None:
    """Created at the same time, so that a count without a lock would let more in."""

    async def is_made() -> bool:
        try:
            await create(store, account)
        except Forbidden:
            return False
        return True

    assert sum(await asyncio.gather(*(is_made() for _ in range(14)))) == 10
    rows = await store.list_keys(account)
    await store.set_key_status(rows[0]["id"], "disabled")
    with pytest.raises(Forbidden, match="plan allows 10 API keys: revoke one first"):
        await create(store, account)
    await store.set_key_status(rows[0]["id"], "revoked")
    assert await is_made()
    await store.update_account(account, plan="growth")
    assert await is_made()


async def test_account_above_its_plan_may_still_rotate_its_keys(store: KeyStore, account: str) -> None:
    await store.update_account(account, plan="growth")
    made = [(await create(store, account))[0]["id"] for _ in range(12)]
    await store.update_account(account, plan="free")
    for key in made:
        await store.rotate_key(key, overlap_s=3600.0)
    with pytest.raises(Forbidden, match="plan allows 10"):
        await create(store, account)


async def test_rotated_keys_are_as_many_as_keys_at_most(store: KeyStore, account: str) -> None:
    """Otherwise rotating one key again and again would make any number of them."""
    row, _ = await create(store, account)
    for _ in range(10):
        row, _ = await store.rotate_key(row["id"], overlap_s=3600.0)
    with pytest.raises(Forbidden, match="10 rotated keys of this account have not expired"):
        await store.rotate_key(row["id"], overlap_s=3600.0)
    ending = [each for each in await store.list_keys(account) if each["expires_at"]]
    await store.set_key_status(ending[0]["id"], "revoked")
    assert await store.rotate_key(row["id"], overlap_s=0.0)
