"""The scenario of a seed: the upstreams and their faults, the clients, and the weather.

A scenario is a value. Every part of the simulation draws from random numbers of its own, so a part can be left out without
changing what the others do: that is how a failing seed is shrunk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

from tests.simulation.memory_network import Weather
from tests.simulation.sim_clients import (
    CROWD_KINDS,
    HTTP_KINDS,
    Batcher,
    Director,
    HeadReader,
    Hoarders,
    Modest,
    NewBlockReader,
    Reader,
    SimClient,
)
from tests.simulation.sim_fleet import TROUBLES, FleetPlan
from tests.simulation.sim_sockets import Subscriber
from tests.simulation.sim_upstream import SPELLS, Habits, Nature

# The network with several upstreams, and the one with a single upstream, whose calls take the short path.
MANY, ONE = "dev/mainnet", "dev/testnet"
LASTS_S = 12.0
LOAD_LASTS_S = {"small": 60.0, "idle": 600.0}
# The remainders, by 12, of the seeds with several gateways: the second has no faults.
FLEET_SEEDS = (3, 8)
# The remainders, by 5, of the seeds with upstreams that announce their heads over WebSockets.
STREAM_SEEDS = (1, 2)
# The remainder, by 7, of the seeds with a crowd: its calls at a time, and how long upstreams take for each.
CROWDED_SEEDS = 6
CROWD, CROWDED_S = 20, (0.05, 0.15)
# The remainder, by 7, of the seeds with clients that hold connections by not reading: how many accounts of their own they have,
# and how many connections each. One account alone would leave a connection to others.
HOARDED_SEEDS = 2
HOARDING_ACCOUNTS, HOARDERS = 10, 2
# The remainder, by 8, of the calm seeds whose upstreams take as long: deadlines of clients pass before they answer.
SLOW_SEEDS = 4
# The accounts that all seeds have: see `world.py`.
COMMON_ACCOUNTS = 4
# The remainder, by 9, of the seeds in which the machine is busy with other work now and then, and for how long.
BUSY_SEEDS = 5
BUSY_S = (0.005, 0.25)
# The remainders, by 11, of the seeds whose upstreams get each block at another time, and how much later than the first one.
UNEVEN_SEEDS = (0, 4, 7)
UNEVEN_S = (0.0, 1.5)
# The remainders, by 13, of the seeds that repeat one trouble of one upstream, for clients that it hits hardest. They have it
# only if they are not calm.
FORKED_SEEDS, PAUSED_SEEDS, FALSE_STREAM_SEEDS, SWITCHING_SEEDS = 1, 5, 9, 11
# Behind one address, a node with an impossible head and a true one take turns this often.
SWITCHES_S = 0.02
# The other upstreams have each block this long after it.
SWITCHES_LATER_S = 0.5
HARD_HIT = 4
# The remainder, by 17, of the seeds with an upstream that is on trial.
TRIAL_SEEDS = 7
KINDS = (*HTTP_KINDS, Subscriber)
ALL_KINDS = (*KINDS, *CROWD_KINDS, HeadReader, Hoarders, NewBlockReader)

HABITS = Habits(
    late=0.01, hang=0.002, http_500=0.01, http_429=0.003, overloaded=0.003, twice=0.003, foreign=0.003, garbage=0.003,
    hang_up=0.005, cut_off=0.003, reply_lost=0.005, stream_mute=0.02, stream_repeats=0.05, stream_closed=0.05,
)  # fmt: skip
WEATHER = Weather(split=0.2, stall=0.002, reset=0.0005, refuse=0.01, silent=0.003, freeze=0.0003)
CLIENT_WEATHER = replace(WEATHER, refuse=0.0, silent=0.0, freeze=0.0)


@dataclass(frozen=True, slots=True)
class UpstreamPlan:
    name: str
    network: str
    nature: Nature
    habits: Habits
    weather: Weather
    spells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClientPlan:
    name: str
    kind: str
    network: str
    account: int
    # The number of the gateway that it uses.
    gateway: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    is_calm: bool
    lasts_s: float
    upstreams: tuple[UpstreamPlan, ...]
    clients: tuple[ClientPlan, ...]
    client_weather: Weather
    block_time_s: float
    reorg: float
    depth: int
    fleet: FleetPlan = FleetPlan()  # noqa: RUF009 - frozen
    # How many calls a crowd makes at a time; 0 without one. Upstreams then have few connections.
    crowd: int = 0
    # Whether the crowd does not read its results.
    hoards: bool = False
    # For how long the machine does nothing, now and then. Everything that is due meanwhile happens after it.
    busy_s: tuple[float, float] = (0.0, 0.0)
    # Parts that are left out, by their names.
    without: frozenset[str] = frozenset()

    @property
    def parts(self) -> list[str]:
        """Everything that may be left out."""
        habits = {field.name for field in fields(Habits) if field.name[-2:] != "_s"}
        faults = {f"habit {name}" for name in habits if any(getattr(each.habits, name) for each in self.upstreams)}
        spells = {f"spell {name}" for each in self.upstreams for name in each.spells}
        weather = {f"weather {name}" for name in ("split", "stall", "reset", "refuse", "silent", "freeze")}
        return [
            *(each.name for each in self.clients),
            *sorted(faults | spells | (set() if self.is_calm else weather)),
            *(("reorganisations",) if self.reorg else ()),
            *(f"trouble {name}" for name in self.fleet.troubles),
            *(("busy machine",) if self.busy_s[1] else ()),
        ]

    def leaving_out(self, names: frozenset[str]) -> Scenario:
        """The same without these parts. `first N s` keeps only that much of it."""

        def habits_of(habits: Habits) -> Habits:
            gone = {name.partition(" ")[2]: 0.0 for name in names if name.startswith("habit ")}
            return replace(habits, **gone)  # type: ignore[arg-type]

        def weather_of(weather: Weather) -> Weather:
            gone = {name.partition(" ")[2]: 0.0 for name in names if name.startswith("weather ")}
            return replace(weather, **gone)  # type: ignore[arg-type]

        return replace(
            self,
            upstreams=tuple(
                replace(
                    each,
                    habits=habits_of(each.habits),
                    weather=weather_of(each.weather),
                    spells=tuple(spell for spell in each.spells if f"spell {spell}" not in names),
                )
                for each in self.upstreams
            ),
            clients=tuple(each for each in self.clients if each.name not in names),
            client_weather=weather_of(self.client_weather),
            reorg=0.0 if "reorganisations" in names else self.reorg,
            busy_s=(0.0, 0.0) if "busy machine" in names else self.busy_s,
            fleet=self.fleet.leaving_out(names),
            lasts_s=min([self.lasts_s, *[float(name.split(" ")[1]) for name in names if name.startswith("first ")]]),
            without=names,
        )


def loaded(scenario: Scenario, load: str) -> Scenario:
    """The same with another load, for measurements: `small` calls only, or `idle` without any client. It lasts longer, so that
    the start and the end of a run count for little."""
    clients = {
        "idle": (),
        "small": tuple(
            ClientPlan(f"client {number + 1}", "Reader", ONE if number % 3 else MANY, account=number % 2)
            for number in range(8)
        ),
    }
    if not load:
        return scenario
    return replace(
        scenario,
        lasts_s=LOAD_LASTS_S[load],
        clients=clients[load],
        fleet=FleetPlan(),
        crowd=0,
        hoards=False,
        busy_s=(0.0, 0.0),
    )


def rng_of(seed: int, part: str) -> random.Random:
    return random.Random(f"{seed} {part}")


def scenario_of(seed: int) -> Scenario:
    rng = rng_of(seed, "scenario")
    is_calm = seed % 4 == 0
    count = rng.randint(3, 4)
    upstreams = [_upstream(seed, number, MANY, is_calm, is_first=number < 2) for number in range(count)]
    upstreams.append(_upstream(seed, count, ONE, is_calm, is_first=True))
    clients = []
    for number in range(rng.randint(4, 8)):
        kind, network = rng.choice(KINDS), MANY if rng.random() < 0.7 else ONE
        clients.append(ClientPlan(f"client {number + 1}", kind.__name__, network, account=rng.randint(0, 1)))
    if any(_is_special(each) for each in upstreams):
        # Calls that need a block are those that an impossible head would attract, or that only the first upstream with the
        # block can answer; calls that are not repeated get the replies of an upstream on a branch of its own, and calls that
        # are verified get no lie.
        clients.append(ClientPlan("client 9", Director.__name__, MANY, account=0))
    if not is_calm:
        upstreams, hit = _troubled(seed, upstreams)
        clients += hit
    fleet = _fleet(seed, is_calm)
    is_crowded, hoards = seed % 7 == CROWDED_SEEDS, seed % 7 == HOARDED_SEEDS
    if hoards:
        clients += [ClientPlan("client 31", Modest.__name__, ONE, 0)]
        clients += [
            ClientPlan(f"client {32 + place}", Hoarders.__name__, ONE, COMMON_ACCOUNTS + place)
            for place in range(HOARDING_ACCOUNTS)
        ]
    if is_crowded:
        clients += [
            ClientPlan(f"client {31 + place}", each.__name__, ONE, place) for place, each in enumerate(CROWD_KINDS)
        ]
        upstreams = [replace(each, habits=replace(each.habits, takes_s=CROWDED_S)) for each in upstreams]
    if seed % 17 == TRIAL_SEEDS:
        weather = Weather(split=0.2) if is_calm else WEATHER
        upstreams.append(UpstreamPlan("upstream 30", MANY, Nature(on_trial=True), Habits(), weather, ()))
    return Scenario(
        seed,
        is_calm,
        LASTS_S,
        tuple(upstreams),
        tuple(_over_gateways(seed, clients, fleet.hosts)),
        Weather(split=0.2) if is_calm else CLIENT_WEATHER,
        block_time_s=1.0,
        reorg=0.0 if is_calm else rng.choice((0.0, 0.05, 0.2)),
        depth=rng.choice((1, 1, 4)),
        fleet=fleet,
        crowd=CROWD if is_crowded else HOARDERS if hoards else 0,
        hoards=hoards,
        busy_s=BUSY_S if seed % 9 == BUSY_SEEDS else (0.0, 0.0),
    )


def _is_special(upstream: UpstreamPlan) -> bool:
    """Whether calls with directives meet something at this upstream that others do not."""
    nature = upstream.nature
    return bool(nature.head_liar or nature.sees_after_s or upstream.habits.lie or "fork" in upstream.spells)


def _troubled(seed: int, upstreams: list[UpstreamPlan]) -> tuple[list[UpstreamPlan], list[ClientPlan]]:
    """The upstreams if this seed repeats one trouble, and the clients that are hit. The upstream in trouble has no other one,
    which could hide it."""
    *many, single = upstreams
    *others, last = many
    match seed % 13:
        case remainder if remainder == FORKED_SEEDS:
            # Replies from a branch that was left while they were under way.
            forked = replace(last, nature=Nature(), habits=Habits(), spells=("fork",))
            return [*others, forked, single], _hit(NewBlockReader, MANY)
        case remainder if remainder == PAUSED_SEEDS:
            # Calls that are sent again when the only upstream is back, which then answers the first attempts, too.
            paused = replace(single, habits=Habits(), spells=("paused",))
            return [*many, paused], _hit(Batcher, ONE)
        case remainder if remainder == FALSE_STREAM_SEEDS:
            # The only stream announces blocks that do not exist.
            mute = [replace(each, nature=replace(each.nature, streams=False)) for each in others]
            false = replace(last, nature=Nature(head_liar=True, streams=True), habits=Habits(), spells=())
            return [*mute, false, single], _hit(Reader, MANY)
        case remainder if remainder == SWITCHING_SEEDS:
            # One upstream has each block first, and reports an impossible one every other moment. The others answer reliably,
            # so errors are its fault.
            later = Nature(sees_after_s=SWITCHES_LATER_S)
            steady = later, Habits(), Weather(split=0.2), ()
            reliable = [UpstreamPlan(each.name, each.network, *steady) for each in others]
            # Every other such host has two ports, which report the same. It is never slow: a second attempt that is sent before
            # the first reply cannot know that this one will be impossible.
            nature = Nature(head_liar=True, lies_for_s=SWITCHES_S, streams=seed % 2 == 0)
            weather = Weather(split=0.2) if nature.streams else last.weather
            false = replace(last, nature=nature, habits=Habits(), weather=weather, spells=())
            return [*reliable, false, single], _hit(HeadReader, MANY)
    return upstreams, []


def _hit(kind: type[SimClient], network: str) -> list[ClientPlan]:
    return [ClientPlan(f"client {51 + place}", kind.__name__, network, account=place % 2) for place in range(HARD_HIT)]


def _fleet(seed: int, is_calm: bool) -> FleetPlan:
    """One seed in six has several gateways."""
    if seed % 12 not in FLEET_SEEDS:
        return FleetPlan()
    rng = rng_of(seed, "fleet")
    hosts = rng.randint(2, 3)
    return FleetPlan(
        hosts,
        skews_s=tuple(round(rng.uniform(-5.0, 5.0), 3) for _ in range(hosts)),
        troubles=() if is_calm else tuple(sorted(rng.sample(TROUBLES, rng.randint(1, 4)))),
        weather=Weather() if is_calm else replace(WEATHER, split=0.05, freeze=0.0),
    )


def _over_gateways(seed: int, clients: list[ClientPlan], gateways: int) -> list[ClientPlan]:
    """Each client uses one gateway. In a fleet, an account with a low limit uses all of them at once."""
    if gateways == 1:
        return clients
    rng = rng_of(seed, "gateways of clients")
    spread = [replace(client, gateway=rng.randrange(gateways)) for client in clients]
    floods = [
        ClientPlan(f"client {21 + place}", "Flooder", rng.choice((MANY, ONE)), account=0, gateway=place)
        for place in range(gateways)
    ]
    return spread + floods


def _upstream(seed: int, number: int, network: str, is_calm: bool, *, is_first: bool) -> UpstreamPlan:
    """The first upstreams of a network are honest and never fork, so that the network has a truth that it can find."""
    rng = rng_of(seed, f"plan of upstream {number}")
    chunked = rng.random() < 0.3
    streams = seed % 5 in STREAM_SEEDS and rng_of(seed, f"stream of upstream {number}").random() < 0.6
    is_uneven = seed % 11 in UNEVEN_SEEDS and number > 0 and network == MANY
    sees_after_s = round(rng_of(seed, f"way to upstream {number}").uniform(*UNEVEN_S), 3) if is_uneven else 0.0
    if is_calm:
        nature = Nature(chunked=chunked, streams=streams, sees_after_s=sees_after_s)
        habits = Habits(takes_s=CROWDED_S) if seed % 8 == SLOW_SEEDS else Habits()
        return UpstreamPlan(f"upstream {number + 1}", network, nature, habits, Weather(split=0.2), ())
    nature = Nature(
        chunked=chunked,
        streams=streams,
        sees_after_s=sees_after_s,
        pruned=not is_first and rng.random() < 0.3,
        wrong_chain=not is_first and rng.random() < 0.1,
        head_liar=not is_first and rng.random() < 0.1,
    )
    spells = rng.sample(SPELLS[: 5 if is_first else 6], rng.randint(0, 3))
    habits = (
        replace(HABITS, lie=0.1 if not is_first and rng.random() < 0.2 else 0.0) if rng.random() < 0.8 else Habits()
    )
    return UpstreamPlan(f"upstream {number + 1}", network, nature, habits, WEATHER, tuple(sorted(spells)))
