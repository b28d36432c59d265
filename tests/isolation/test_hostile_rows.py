"""Hostile values for each background loop: it sets bad rows aside and goes on, and every good row of others is handled.

`PENSTOCK_HOSTILE_ROWS=10000` feeds that many rows to each loop.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.access import Account
from proxy.core.request_records import RequestRecord
from proxy.core.usage import BUCKETS, UsageSums
from proxy.memory_budget import MemoryBudget
from proxy.services.accounts.keyring import Keyring
from proxy.services.accounts.quotas import Quotas
from proxy.services.delivery.alert_watch import AlertWatch
from proxy.services.delivery.mails import Mails
from proxy.services.request_log import RequestLog
from proxy.services.request_recorder import RequestRecorder
from proxy.services.sponsor.refusals import RefusalLog
from proxy.services.usage import UsageService
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.mails import MailStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.quotas import QuotaStore
from proxy.store.postgres.refusals import RefusalStore
from proxy.store.postgres.request_store import RequestStore
from proxy.store.postgres.usage import UsageStore
from proxy.store.postgres.usage_spool import UsageSpool
from proxy.store.shared_memory import rate_buckets
from proxy.store.shared_memory.rate_buckets import UnsharedBuckets
from proxy.tasks import Tasks
from proxy.wire.receiver import DeliveryReply
from tests.chain_upstream import erc20
from tests.delivery.conftest import harness as delivery
from tests.delivery.harness import DeliveryHarness
from tests.delivery.test_alerts import Accounts
from tests.delivery.test_mails import MailServer, mail_server
from tests.follower.conftest import harness as events
from tests.follower.event_harness import COIN, A, B, EventHarness
from tests.follower.harness import NETWORK
from tests.service import until
from tests.shipped_tables import TABLES
from tests.store.test_refusals import policy_id

__all__ = ("delivery", "events", "mail_server", "policy_id")

ROWS = int(os.environ.get("PENSTOCK_HOSTILE_ROWS", "200"))
SEED = 31
# Each bad row takes a few statements.
WITHIN_S = 60.0 + ROWS / 20
pytestmark = pytest.mark.timeout(120.0 + ROWS / 10)
# One in this many rows is good.
GOOD = 10
TEXTS = (
    "", "\0", "a\0b", "\ud800", "x\udfffy", "\N{RIGHT-TO-LEFT OVERRIDE}", "NaN", "\r\nBcc: a@b", "{", "null", "0x", "-1",
    "{}{0}%s", "\U0010ffff", "a" * 3000,
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    2**31,
    -(2**31) - 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**400,
    math.nan,
    math.inf,
    -0.0,
    1e308,
)
OTHERS: tuple[Any, ...] = (None, [], {}, True, b"\xff\0", (), object(), [None], {"a": [[]]}, datetime.date(1, 1, 1))
MEGABYTE = "\0" + "a" * 1_000_000


def hostile(chance: random.Random) -> Any:
    if chance.random() < 5 / max(ROWS, 1000):
        return MEGABYTE
    return chance.choice(chance.choice((TEXTS, NUMBERS, OTHERS)))


def mutated(chance: random.Random, row: dict[str, Any], *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The row with one to three hostile values."""
    names = chance.sample([name for name in row if name not in but], k=chance.randint(1, 3))
    return {**row, **{name: hostile(chance) for name in names}}


def mutated_in_type(chance: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """The row with hostile values. A column of numbers has no other values, in Postgres: a list times 2³¹ would fill the
    machine's memory."""
    bad = mutated(chance, row)
    numbers = {name for name, value in row.items() if isinstance(value, int) and not isinstance(bad[name], int | float)}
    return bad | {name: chance.choice((None, *NUMBERS)) for name in numbers}


@pytest.fixture
def chance() -> random.Random:
    return random.Random(SEED)


@asynccontextmanager
async def running(name: str, loop: Callable[[], Any]) -> AsyncIterator[None]:
    """Run a loop. It must be running at the end."""
    tasks = Tasks()
    tasks.start(name, loop)
    try:
        yield
        assert name in repr(tasks)
    finally:
        await tasks.close()


async def fetch(pool: Pool, query: str, *values: Any) -> list[Any]:
    async with pool.connection(within_s=45.0) as connection:
        return await connection.fetch(query, *values)


def record(number: int) -> dict[str, Any]:
    return {
        "id": f"req_{number}", "at": time.time(), "account": "acct_other", "key": "key_1", "network": "dev/mainnet",
        "surface": "http", "method": "eth_call", "status": 200, "reason": "failed", "units": 1, "cache": "", "took_s": 0.1,
        "bytes": 1, "block": 1, "error": "reverted", "blame": "chain", "code": "3",
        "attempts": [("u1", 0.0, 0.1, "answered")], "params": None,
    }  # fmt: skip


async def test_request_log(pool: Pool, chance: random.Random) -> None:
    recorder = RequestRecorder(MemoryBudget(1 << 27).of("records"), slow_s=1.0, is_on=True)
    good = set[str]()
    for number in range(ROWS):
        row = record(number)
        if number % GOOD:
            row = mutated(chance, {**row, "id": f"bad_{number}"}, but=("at",))
        else:
            good.add(row["id"])
        recorder.waiting.append(RequestRecord(**row))
    requests = RequestLog(recorder, RequestStore(pool), keep_days=3)
    async with running("requests", requests.run):
        await until(lambda: not recorder.waiting, within_s=WITHIN_S)
        found = {row["id"] for row in await fetch(pool, "select id from requests")}
        assert good <= found
        recorder.waiting.append(RequestRecord(**record(ROWS)))
        await until(lambda: not recorder.waiting)
    assert await fetch(pool, "select from requests where id = $1", f"req_{ROWS}")


@pytest.mark.parametrize("spooled", [False, True])
async def test_usage(pool: Pool, chance: random.Random, tmp_path: Path, spooled: bool) -> None:
    minute = int(time.time()) // 60
    store = UsageStore(pool)
    spool = UsageSpool(store, tmp_path / "run" / "usage") if spooled else None
    service = UsageService(store, [], flush_s=0.2, keep_s={}, spool=spool)
    # Each row is written five times: by key, network, method and account too.
    for number in range(ROWS // 5):
        series = ("acct_other", f"key_{number}", NETWORK, "eth_call")
        sums = UsageSums(1, 0, 2, 0, [1] + [0] * (BUCKETS - 1))
        if number % GOOD:
            texts = [chance.choice((*TEXTS, MEGABYTE) if number % 1000 == 1 else TEXTS) for _ in range(4)]
            series = (f"acct_{number}{texts[0]}", texts[1], texts[2], texts[3])
            sums.requests, sums.units = chance.choice((2**62, 2**63 - 1)), chance.choice((-(2**63), 2**63 - 1, 5))
        service._waiting[series, minute] = sums
    if spooled:
        inbox = tmp_path / "run" / "usage" / "inbox"
        inbox.mkdir(parents=True)
        for number in range(50):
            (inbox / f"bad-{number}").write_bytes(chance.randbytes(number))
    query = (
        "select sum(requests) from usage u join usage_series s on s.id = u.series"
        " where step = 'minute' and account_id = 'acct_other' and key_id <> '' and network <> ''"
    )

    async def is_written() -> bool:
        return bool((await fetch(pool, query))[0]["sum"] == math.ceil(ROWS // 5 / GOOD))

    async with running("usage", service.run):
        await until(is_written, within_s=WITHIN_S)


async def test_refusals(pool: Pool, chance: random.Random, policy_id: str) -> None:
    log = RefusalLog(RefusalStore(pool))
    for number in range(ROWS):
        given: dict[str, Any] = {
            "policy": policy_id,
            "sender": bytes(20),
            "rule": "status",
            "message": f"good {number}",
        }
        if number % GOOD:
            given = mutated(chance, {**given, "policy": f"gp_{number % 900}"}, but=("policy",))
        log.note(**given)
    async with running("refusals", log.run):
        await until(lambda: "0 policies" in repr(log), within_s=WITHIN_S)

        async def is_written() -> bool:
            return len(await log.latest(policy_id, 50)) == min(50, math.ceil(ROWS / GOOD))

        await until(is_written, within_s=WITHIN_S)


async def test_keyring(pool: Pool, chance: random.Random) -> None:
    store = KeyStore(pool, pepper="p" * 32, plans={"free": 10})
    account = (await store.create_account(name="a", email="a@b.example", plan="free"))["id"]
    _, text = await store.create_key(account, name="k", mode="live")
    (row,) = [dict(each) for each in await store.load(datetime.date(2026, 1, 15))]
    fd = rate_buckets.create()
    try:
        keyring = Keyring(store, UnsharedBuckets(fd), plans=TABLES.plans, pepper="p" * 32, reload_s=0.05)
        # Postgres numbers the slots.
        own = ("id", "digest", "slot", "account_slot")
        rows = []
        for number in range(ROWS):
            whole = {**row, "id": f"key_{number}", "digest": number.to_bytes(32, "big")}
            rows.append(mutated(chance, whole, but=own))
        keyring._apply([*rows[: ROWS // 2], row, *rows[ROWS // 2 :]])
        assert keyring.find(text, time.monotonic()) is not None
        # A record that cannot be read any more is not valid: the restrictions that it may have are not known.
        keyring._apply([{**row, "scopes": ["unknown"]}])
        assert keyring.find(text, time.monotonic()) is None
        async with running("keyring", keyring.follow):
            await until(lambda: keyring.find(text, time.monotonic()))
    finally:
        os.close(fd)


async def test_quotas(pool: Pool, chance: random.Random) -> None:
    store = KeyStore(pool, pepper="p" * 32, plans={"free": 10})
    other = (await store.create_account(name="a", email="a@b.example", plan="free"))["id"]
    good = Account(id=other, plan="free", day_limit=10_000)
    accounts = [good]
    for number in range(ROWS):
        account = Account(id=f"acct_{number}{chance.choice(TEXTS)}", plan="free", day_limit=10_000)
        account.day_limit = chance.choice((1, 2**31, 2**63, 10**40))
        account.left = chance.choice((0, -(2**63), -(10**40)))
        accounts.append(account)
    today = datetime.datetime.now(datetime.UTC).date()
    quotas = Quotas(QuotaStore(pool), chunk=10, flush_s=0.05, day=lambda: today, accounts=lambda: accounts)
    async with running("quotas", quotas.run):
        for account in accounts:
            quotas.count(account, 1)
        await until(lambda: good.left == 10, within_s=WITHIN_S)


async def test_alerts(delivery: DeliveryHarness, chance: random.Random) -> None:
    accounts = Accounts(delivery)
    others = [await accounts.account("day_usage", used=600) for _ in range(3)]
    (row, *_) = await accounts.store.watched("", 10, datetime.datetime.now(datetime.UTC).date())
    watch = AlertWatch(accounts.store, TABLES.plans, check_s=0.1)
    for number in range(ROWS):
        budget = {"used": 1, "max_total": 1, "name": "n", "reset": "daily", "id": "g"}
        bad = mutated_in_type(chance, {**row, "budgets": [budget]})
        await watch._check_account({"account_id": f"acct_{number}", **bad}, datetime.date(2026, 1, 15))
    async with running("alerts", watch.run):
        for each in others:

            async def is_raised(account: str = each) -> bool:
                return bool(await delivery.rows("select from alerts where account_id = $1", account))

            await until(is_raised)


FULL_ABOUT: dict[str, Any] = {
    "webhook": "wh_good", "event_type": "log", "network": "n", "url": "u", "event": "e", "attempts": 1, "status": 503,
    "outcome": "answered",
}  # fmt: skip
GOOD_ABOUT = orjson.dumps(FULL_ABOUT).decode()
ABOUTS = (
    "null", "[]", "{}", '"a"', "1e400", '{"alerts": null, "more": "x"}', '{"alerts": [{}], "more": 1}',
    GOOD_ABOUT.replace("wh_good", "\\ud800"), GOOD_ABOUT.replace("wh_good", "\\u0000"), GOOD_ABOUT.replace("503", "1e999"),
    GOOD_ABOUT.replace("wh_good", "a\\r\\nBcc: x@y"), GOOD_ABOUT.replace('"log"', "[]").replace("wh_good", "x"),
    "[" * 500 + "]" * 500,
)  # fmt: skip


async def test_mails(delivery: DeliveryHarness, mail_server: MailServer, chance: random.Random) -> None:
    other, bad = await delivery.account(), await delivery.account()
    await delivery.execute("update accounts set name = $2 where id = $1", bad, "N\r\nSubject: x")
    abouts = [chance.choice(ABOUTS) for _ in range(ROWS)]
    query = "insert into mails (account_id, kind, about) select $1, $2, about::json from unnest($3::text[]) as about"
    for kind in ("webhook_paused", "alert"):
        await delivery.execute(query, bad, kind, abouts[: ROWS // 2])
    await delivery.execute(query, other, "webhook_paused", [GOOD_ABOUT] * 5)
    await delivery.execute("analyze")
    mails = Mails(MailStore(delivery.pool), mail_server.mailer(), check_s=0.05)

    def received() -> int:
        return sum("wh_good" in str(mail["Subject"]) for mail in mail_server.mails)

    async def are_ended() -> bool:
        return not await delivery.rows("select from mails where ended_at is null limit 1")

    async with running("mails", mails.run):
        await until(lambda: received() == 5, within_s=WITHIN_S)
        await until(are_ended, within_s=WITHIN_S)


REPLIES = (
    b"", b"\0", b"HTTP/1.1 200\r\n\r\n", b"HTTP/1.1 999 \xff\r\nRetry-After: 1e999\r\nContent-Length: 2\r\n\r\n\0\xff",
    b"HTTP/1.1 503 x\r\nRetry-After: 99999999999999999999\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 x\r\nRetry-After: Mon, 01 Jan 0001 00:00:00 +2359\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 x\r\nRetry-After: Fri, 31 Dec 9999 23:59:59 -2359\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 500 x\r\nX: \xed\xa0\x80\r\nContent-Length: 3\r\n\r\n\xed\xa0\x80",
    b"HTTP/1.1 500 x\r\nContent-Length: 5\r\n\r\nab", b"HTTP/1.1 -1 x\r\n\r\n", b"HTTP/9.9 500 x\r\n\r\n",
    b"HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n",
    b"HTTP/1.1 500 x\r\nContent-Length: 1000000\r\n\r\n" + b"\0" * 1_000_000,
)  # fmt: skip


RECEIVERS = 20


async def test_replies_of_receivers(delivery: DeliveryHarness, chance: random.Random) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(chance.choice(REPLIES))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        writer.close()

    good, bad, servers = await delivery.webhook("/good"), [], []
    # A receiver that fails gets one delivery of an account at a time.
    for _ in range(RECEIVERS):
        servers.append(await asyncio.start_server(reply, "127.0.0.1", 0))
        hook = await delivery.webhook("/", "TOKEN_TRANSFER", account=await delivery.account())
        url = f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}/"
        await delivery.execute("update webhooks set url = $2 where id = $1", hook.id, url)
        bad.append(hook)
    never: dict[Any, Any] = {"A": (), "B": ()}
    async with delivery.delivering(schedules=never) as deliverer:
        for hook in bad:
            await delivery.events(hook, ROWS // RECEIVERS)
        await delivery.execute("analyze")
        names = await delivery.events(good, 20)
        await until(lambda: {*names} <= delivery.inbox.ids(), within_s=WITHIN_S)

        async def are_finished() -> bool:
            return not [hook for hook in bad if "due" in (await delivery.states(hook)).values()]

        await until(are_finished, within_s=WITHIN_S)
        await delivery.events(good, 1)
        await until(lambda: len(delivery.inbox.at("/good")) >= 21)
        assert "stopping" not in repr(deliverer)
    for server in servers:
        server.close()


async def test_results_of_deliveries(delivery: DeliveryHarness, chance: random.Random) -> None:
    """Replies that no HTTP parser of ours returns at present."""
    good, bad = await delivery.webhook("/good"), await delivery.webhook("/bad", "TOKEN_TRANSFER")
    async with delivery.deliverer(total=1 << 30, each=1 << 30) as deliverer:
        for hook in (bad, good):
            await delivery.events(hook, ROWS if hook is bad else 5)
        await delivery.execute("analyze")
        claimed = []
        for hook in (bad, good):
            claimed += (await delivery.store.claim({hook.id: ROWS + 5}, day_limits={}))[0]
        replies = []
        for each in claimed:
            deliverer._lanes.begin(each.account, each.url)
            reply = DeliveryReply("answered", 200)
            if each.webhook_id == bad.id:
                fields: dict[str, Any] = {"excerpt": "x", "retry_after": "1", "exchange": ("a", "b", "c")}
                status = chance.choice((None, -1, 0, 500, 99_999, 2**31, 2**63))
                reply = DeliveryReply("answered", status, **mutated(chance, fields))
            replies.append((each, reply, time.monotonic(), 0.1))
        for start in range(0, len(replies), 48):
            await deliverer._write(replies[start : start + 48])
        assert await delivery.are_all(good, "delivered")
        # Most results of the other are stored too, without the words of its receiver.
        rows = await delivery.rows("select count(*) from attempts")
        assert rows[0]["count"] > ROWS / 2


async def test_stored_webhooks(delivery: DeliveryHarness, chance: random.Random) -> None:
    """Their URLs, secrets and fault plans."""
    good = await delivery.webhook("/good")
    account = await delivery.account("free")
    webhooks = [await delivery.webhook("/bad", account=account) for _ in range(min(ROWS, 300))]
    texts = [text for text in TEXTS if "\0" not in text and text.isprintable()]
    for hook in webhooks:
        url = chance.choice(
            (*texts, "http://[", "http://a:99999999/", "http://\u2100/", "https://" + "a" * 3000, hook.url)
        )
        await delivery.execute(
            "update webhooks set url = $2, secret = $3, fault = $4, event_type = $5 where id = $1",
            hook.id, url, chance.randbytes(chance.randint(0, 40)), chance.choice((None, *texts)), chance.choice(texts),
        )  # fmt: skip
        await delivery.events(hook, 1)
    async with delivery.delivering():
        names = await delivery.events(good, 5)
        await until(lambda: {*names} <= delivery.inbox.ids(), within_s=WITHIN_S)
        await asyncio.sleep(1.0)
        names = await delivery.events(good, 5)
        await until(lambda: {*names} <= delivery.inbox.ids(), within_s=WITHIN_S)


CONFIGS = (
    "null", "[]", "1", '"a"', "{}", '{"addresses": 5}', '{"topics": {"a": 1}}', '{"topics": [[[[]]]]}', '{"min_value": "NaN"}',
    '{"contracts": [null, 1, "0x"]}', '{"finality": 5, "confirmations": -1}', '{"confirmations": 1e400}', '{"a": "\\\\u0000"}',
    '{"a": "\\\\ud800"}', '{"from": [], "to": {}}', '{"tx_hashes": ["\\\\u0000"]}', "[" * 500 + "]" * 500,
    '{"direction": [], "categories": "x"}', '{"function": 1e999, "selector": {}}', '{"token_ids": ["1e999"], "min_value": 10}',
)  # fmt: skip
TYPES = (
    "log", "token_transfer", "nft_transfer", "transaction", "ADDRESS_ACTIVITY", "TOKEN_TRANSFER", "NFT_TRANSFER", "NEW_BLOCK",
    "MINED_TRANSACTION", "CONTRACT_EVENT", "INTERNAL_TRANSFER", "PENDING_TRANSACTION", "", "unknown",
)  # fmt: skip


async def test_configs_of_webhooks(events: EventHarness, chance: random.Random) -> None:
    await events.step()
    good = await events.webhook("token_transfer", contracts=["0x" + COIN.hex()])
    template = "insert into webhooks select (json_populate_record(w, $2::json)).* from webhooks w where id = $1"
    pool = events.inner.running.pool
    (version,) = await fetch(pool, "select version, number from webhooks where id = $1", good.id)
    async with pool.connection(within_s=30.0, for_s=300.0) as connection:
        for number in range(ROWS):
            changed = {
                "id": f"wh_{number}", "number": version["number"] + 1 + number, "event_type": chance.choice(TYPES),
                "addresses": chance.choice((None, 0, 1, -1)), "version": version["version"] + 1,
                "addresses_version": version["version"] + 1,
            }  # fmt: skip
            await connection.execute(template, good.id, orjson.dumps(changed).decode())
            config = chance.choice(CONFIGS)
            await connection.execute("update webhooks set config = $2::json where id = $1", changed["id"], config)
            if number % 3 == 0:
                await connection.execute(
                    "insert into mined_lookups (webhook_id, network, tx_hash) values ($1, $2, $3)",
                    f"wh_{number}", NETWORK, chance.choice([text for text in TEXTS if "\0" not in text and text.isprintable()]),
                )  # fmt: skip
        await connection.execute("update webhook_versions set version = version + 1")
    for _ in range(2):
        await events.mine([erc20(COIN, A, B, 5)])
    await events.events.enricher.enrich()
    hostile_block = {"blockNumber": hex(2**70), "blockHash": "0x" + "ab" * 32}
    events.inner.upstream.answers["eth_getTransactionByHash"] = lambda _: chance.choice((None, hostile_block, [], 5))
    await events.events.mined_lookups.look_up()
    bodies = [row["body"] for row in await events.rows("select body from events")]
    assert sum(good.id.encode() in body for body in bodies) == 2
    assert events.events.watch.index.find(good.id) is not None
