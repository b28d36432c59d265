"""Members that are alive agree on who owns a name."""

from __future__ import annotations

from pathlib import Path

from proxy.compose.fleet import link_to
from proxy.core.rendezvous import owner_of
from proxy.store.valkey.live_members import LiveMembers
from proxy.tasks import Tasks
from tests.redis_server import redis_server, require_redis
from tests.service import until

NAMES = [f"https://receiver{number}.example:443" for number in range(300)]


def test_only_names_of_a_member_that_leaves_get_another_owner() -> None:
    before = {name: owner_of(name, ("a", "b", "c")) for name in NAMES}
    after = {name: owner_of(name, ("a", "b")) for name in NAMES}
    assert {*before.values()} == {"a", "b", "c"}
    assert all(after[name] == owner for name, owner in before.items() if owner != "c")
    assert owner_of("name", ()) == ""


async def test_each_name_has_one_owner_and_a_dead_member_none(tmp_path: Path) -> None:
    require_redis()
    tasks = [Tasks(), Tasks()]
    async with redis_server(tmp_path) as redis:
        links = [link_to(redis.url), link_to(redis.url)]
        members = [LiveMembers(link, "deliverers", str(number)) for number, link in enumerate(links)]
        for task, link, member in zip(tasks, links, members, strict=True):
            task.start("valkey", link.run)
            task.start("members", member.run)
        # A reply that is late on a busy machine makes each own all, for a moment.
        await until(lambda: all([member.owns(name) for member in members].count(True) == 1 for name in NAMES))
        assert any(members[0].owns(name) for name in NAMES)
        await tasks[1].close()
        await until(lambda: all(members[0].owns(name) for name in NAMES))
        await until(lambda: members[0].names == {"0"})
        await tasks[0].close()
    assert all(members[0].owns(name) for name in NAMES)
