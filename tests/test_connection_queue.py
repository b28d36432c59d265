"""The order in which clients get connections: in turn, with a share left for the next, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from proxy.connection_queue import OWN_WORK, ConnectionQueue, TooManyWaiting


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Clients:
    """Requests that enter the queue and stay until they are released."""

    def __init__(self, queue: ConnectionQueue) -> None:
        self._queue = queue
        self.inside: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def add(self, *names: str, within_s: float = 60.0) -> None:
        for name in names:
            self.tasks.append(asyncio.get_running_loop().create_task(self._enter(name, within_s)))
        await settle()

    async def _enter(self, name: str, within_s: float) -> None:
        await self._queue.enter(name, within_s=within_s)
        self.inside.append(name)

    async def release(self, name: str) -> None:
        self.inside.remove(name)
        self._queue.leave(name)
        await settle()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


MakeClients = Callable[[ConnectionQueue], Clients]


@pytest.fixture
async def clients_of() -> AsyncIterator[MakeClients]:
    """Makes clients whose requests end with the test."""
    made: list[Clients] = []

    def make(queue: ConnectionQueue) -> Clients:
        made.append(Clients(queue))
        return made[-1]

    yield make
    for clients in made:
        await clients.end()


async def test_client_leaves_room_for_others(clients_of: MakeClients) -> None:
    clients = clients_of(ConnectionQueue(10, per_client=100))
    await clients.add(*["a"] * 50)
    assert clients.inside == ["a"] * 5
    await clients.add(*"bbbbb", *"ccc", "d")
    assert {name: clients.inside.count(name) for name in "abcd"} == {"a": 5, "b": 3, "c": 1, "d": 1}
    await clients.release("a")
    assert clients.inside.count("b") == 3
    assert clients.inside.count("c") == 1


async def test_waiting_clients_get_turns_one_after_the_other(clients_of: MakeClients) -> None:
    clients = clients_of(ConnectionQueue(1, per_client=100))
    await clients.add(*"aaaa", "b", "c")
    order = []
    for _ in range(6):
        order.append(clients.inside[0])
        await clients.release(clients.inside[0])
    assert order == ["a", "a", "b", "c", "a", "a"]


async def test_own_work_may_hold_every_connection(clients_of: MakeClients) -> None:
    clients = clients_of(ConnectionQueue(4, per_client=1))
    await clients.add(*[OWN_WORK] * 5)
    assert len(clients.inside) == 4
    await clients.release(OWN_WORK)
    assert len(clients.inside) == 4


@pytest.mark.parametrize("most", [1, 2, 7])
async def test_client_with_too_many_requests_is_refused_at_once(most: int, clients_of: MakeClients) -> None:
    queue = ConnectionQueue(4, per_client=most)
    clients = clients_of(queue)
    await clients.add(*["a"] * most)
    with pytest.raises(TooManyWaiting):
        await queue.enter("a", within_s=60.0)
    await queue.enter("b", within_s=60.0)
    await clients.release("a")
    await clients.add("a")
    assert not clients.tasks[-1].done() or clients.tasks[-1].exception() is None


async def test_request_that_gives_up_leaves_the_queue() -> None:
    queue = ConnectionQueue(1, per_client=100)
    await queue.enter("a", within_s=1.0)
    with pytest.raises(TimeoutError):
        await queue.enter("a", within_s=0.0)
    with pytest.raises(TimeoutError):
        await queue.enter("b", within_s=0.01)
    assert repr(queue) == "<ConnectionQueue 0 free, 1 held, 0 waiting>"
    queue.leave("a")
    assert repr(queue) == "<ConnectionQueue 1 free, 0 held, 0 waiting>"


async def test_turn_that_comes_with_a_cancellation_is_passed_on(clients_of: MakeClients) -> None:
    queue = ConnectionQueue(1, per_client=100)
    clients = clients_of(queue)
    await clients.add("a", "b", "c")
    queue.leave("a")
    clients.tasks[1].cancel()
    await settle()
    assert clients.inside == ["a", "c"]
    assert repr(queue) == "<ConnectionQueue 0 free, 1 held, 0 waiting>"


async def test_turn_that_comes_after_a_cancellation_is_passed_on(clients_of: MakeClients) -> None:
    queue = ConnectionQueue(1, per_client=100)
    clients = clients_of(queue)
    await clients.add("a", "b", "c")
    clients.tasks[1].cancel()
    queue.leave("a")
    await settle()
    assert clients.inside == ["a", "c"]
    assert repr(queue) == "<ConnectionQueue 0 free, 1 held, 0 waiting>"
