"""Named queries from `schemas/sql/queries/*.sql`.

A query starts at a line `-- name` and ends where the next one starts. Comment lines below the name describe it. Code refers
to a query as `sql.accounts.create_account`.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

from proxy.data_files import SCHEMAS

QUERIES = SCHEMAS / "sql" / "queries"
_NAME = re.compile(r"^-- ([a-z][a-z0-9_]*)$", re.MULTILINE)


def parse(text: str) -> dict[str, str]:
    parts = _NAME.split(text)
    names, bodies = parts[1::2], parts[2::2]
    if len(set(names)) != len(names):
        raise ValueError(f"a query name is used twice: {names}")
    return {name: body.strip().rstrip(";") for name, body in zip(names, bodies, strict=True)}


def load(stem: str) -> SimpleNamespace:
    return SimpleNamespace(**parse((QUERIES / f"{stem}.sql").read_text("utf-8")))


accounts = load("accounts")
actions = load("actions")
alerts = load("alerts")
announcements = load("announcements")
blocks = load("blocks")
contradictions = load("contradictions")
deliveries = load("deliveries")
events = load("events")
fleet = load("fleet")
holdings = load("holdings")
keys = load("keys")
ledger = load("ledger")
mails = load("mails")
members = load("members")
operations = load("operations")
peppers = load("peppers")
policies = load("policies")
private_transactions = load("private_transactions")
refusals = load("refusals")
replica = load("replica")
requests = load("requests")
second_factors = load("second_factors")
sessions = load("sessions")
spending = load("spending")
trace_jobs = load("trace_jobs")
transfers = load("transfers")
usage = load("usage")
wallets = load("wallets")
webhooks = load("webhooks")
