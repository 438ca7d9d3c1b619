"""The modelled actors of `world` on several hosts, which are lost and join at random moments;
every order to start an actor is checked."""

import random
from collections import Counter

from small_loops import a_config
from world import World

from rlbench.loop.actions import Abort, Notify, Start
from rlbench.loop.config import make_config
from rlbench.loop.ending import FINISHED
from rlbench.loop.events import HostJoined, HostLost, Lost, Started, Ticked
from rlbench.loop.losses import MAX_RESTARTS

TICK_S = 0.01  # beyond a deadline


class HostsWorld(World):
    """Plays the driver of a run on several hosts. `lives` counts the lives of each actor, so that a start which was
    under way when its host was lost comes to nothing."""

    def __init__(self, *args, hosts: int = 3, keeps_trainer: bool = True, **more):
        super().__init__(*args, **more)
        self.names = ("trainer", *self.environments, *self.machines)
        self.hosts = {f"host-{i + 1}": True for i in range(hosts)}  # name -> it is up
        places = list(self.hosts)
        self.homes = {name: self.random.choice(places) for name in self.names}
        if keeps_trainer:
            self.homes["trainer"] = "head"
            self.hosts["head"] = True
        self.lives: Counter = Counter()
        self.starting = set(self.names)  # asked to start, and neither started nor lost
        self.running: set[str] = set()
        self.homeless: set[str] = set()  # its host is lost, and none has joined for it
        self.unsaid: set[str] = set()  # its host is lost, and its own loss is not said yet
        self.reported: dict[str, tuple] = {}  # of an unsaid loss: the tokens that are known of unfinished responses
        self.uncharged: dict[str, int] = {}  # restarts of an actor when its host was lost
        self.notified: list[str] = []
        self.losses = 0
        self.returns = 0

    # orders

    def do_start(self, a: Start) -> None:
        name = a.actor
        assert name not in self.starting | self.running, f"{name} is started twice"
        assert name not in self.unsaid, f"{name} is started before it is lost"
        assert name not in self.homeless and self.hosts[self.homes[name]], f"{name} is started on a lost host"
        if name in self.uncharged:
            assert self.state.actors[name].restarts <= self.uncharged.pop(name), f"{name} was charged a restart"
        self.starting.add(name)
        self.later(self.random.random(), self.begin, name, self.lives[name])

    def start(self, name: str) -> None:
        self.begin(name, self.lives[name])

    def begin(self, name: str, life: int) -> None:
        if self.lives[name] == life and name in self.starting:
            super().start(name)

    def do_abort(self, a: Abort) -> None:
        if a.actor not in self.unsaid:  # otherwise its loss is the answer
            super().do_abort(a)

    def do_notify(self, a: Notify) -> None:
        self.notified.append(a.firing.when)

    def step(self, event) -> None:
        if isinstance(event, Started):
            self.starting.discard(event.actor)
            self.running.add(event.actor)
        if isinstance(event, Lost):
            self.starting.discard(event.actor)
            self.running.discard(event.actor)
            self.unsaid.discard(event.actor)
        super().step(event)
        state = self.state
        for name in state.hosts.waiting:
            assert not state.actors[name].up, f"{name} waits for a host and is up"
        assert all(actor.restarts <= MAX_RESTARTS for actor in state.actors.values())

    def is_heard(self, name: str) -> bool:
        return name not in self.unsaid

    def deliver(self, name: str, event, life: int) -> None:
        if name not in self.unsaid:  # what a host had sent is read before its loss is said, or never
            super().deliver(name, event, life)

    # faults

    def lose(self, kind: str) -> None:
        if kind == "host":
            self.lose_host()
        elif not any(name in self.unsaid for name in self.names):
            super().lose(kind)

    def end_actor(self, name: str) -> tuple:
        self.lives[name] += 1
        return super().end_actor(name)

    def lose_host(self, chosen: str = "") -> None:
        "A host goes. The losses of its actors are said at once or a little later; another host may join, or none."
        up = [name for name, is_up in self.hosts.items() if is_up and name != "head"]
        if not up or self.state.phase in FINISHED:
            return
        host = chosen or self.random.choice(up)
        self.hosts[host] = False
        there = self.starting | self.running | self.unsaid
        lived = tuple(name for name, home in self.homes.items() if home == host and name in there)
        for name in lived:
            if name not in self.unsaid:  # otherwise it has ended before
                self.reported[name] = self.end_actor(name)
        self.losses += 1
        self.homeless |= set(lived)
        self.unsaid |= set(lived)
        for name in lived:
            if name in self.state.actors:
                self.uncharged[name] = self.state.actors[name].restarts
        self.step(HostLost(host, "power cut", lived))
        for name in self.random.sample(lived, len(lived)):
            if self.random.random() < 0.6:
                self.say_lost(name)
            else:
                self.later(0.3 * self.random.random(), self.say_lost, name)
        if self.random.random() < 0.3:
            self.step(HostLost(host, "power cut", lived[:1]))  # said twice
        patience = self.state.config.deadlines.start
        if self.random.random() < 0.8:
            self.later(self.random.choice((0.1, 0.8, 1.5)) * patience * self.random.random(), self.join_host)
        self.later(patience + TICK_S, lambda: self.step(Ticked()))

    def say_lost(self, name: str) -> None:
        if name in self.unsaid:
            self.step(Lost(name, "its host is lost", self.reported.pop(name)))

    def join_host(self) -> None:
        "A host that was lost comes back, or a new one comes. It takes some of the actors without a host."
        if self.state.phase in FINISHED:
            return
        lost = [name for name, is_up in self.hosts.items() if not is_up]
        is_new = not lost or self.random.random() < 0.4
        host = f"host-{len(self.hosts) + 1}" if is_new else self.random.choice(lost)
        self.hosts[host] = True
        taken = [name for name in sorted(self.homeless) if self.random.random() < 0.7]
        for name in taken:
            self.homes[name] = host
            self.homeless.discard(name)
        self.returns += bool(taken) or not is_new
        up = sorted(self.running - self.homeless - self.unsaid)
        others = self.random.sample(up, min(1, len(up)))  # a host may name them; they stay where they are
        self.step(HostJoined(host, (*taken, *others)))
        if self.random.random() < 0.2:
            self.lose_host(host)  # it does not stay
        if self.homeless and self.random.random() < 0.7:
            self.later(self.state.config.deadlines.start * self.random.random(), self.join_host)


def a_world_of_hosts(seed: int, commands: dict | None = None) -> HostsWorld:
    "A world of several hosts drawn from its number. Faults: hosts, and generators and environments alone."
    r = random.Random(seed)
    config = make_config({**a_config(r), "deadlines": {"start": r.choice((1, 3, 30))}, "minutes": 0.0})
    kinds = ("host", "host", "host", "generator", "environment")
    faults = {r.randint(1, 400): r.choice(kinds) for _ in range(r.randint(1, 7))}
    slots = tuple(r.choice((1, 4, 16)) for _ in range(r.choice((1, 2, 2, 3))))
    world = HostsWorld(
        config,
        seed,
        slots,
        commands,
        faults,
        r.choice((0.0, 0.1)),
        turns=r.choice((1, 1, 3)),
        hosts=r.choice((1, 2, 3)),
        keeps_trainer=r.random() < 0.85,
    )
    return world
