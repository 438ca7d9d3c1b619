"""Modelled actors around the loop: several generators, faults, late and unexpected answers,
and a watch that checks every action."""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

from rlbench.loop.actions import Abort, Configure, Generate, MarkOld, Publish, Save, Score, Start, Train, Write
from rlbench.loop.config import RunConfig
from rlbench.loop.ending import FINISHED
from rlbench.loop.events import (
    Checkpointed,
    Commanded,
    Generated,
    Lost,
    Published,
    Saved,
    Scored,
    Started,
    Ticked,
    Trained,
    TurnEnded,
)
from rlbench.loop.fates import are_books_closed
from rlbench.loop.loop import step
from rlbench.loop.state import Checkpoint, count_live_groups, start_state
from rlbench.records import CommandRow, EvalRow, Fate, GroupRow, Outcome, RolloutRow, Served, StepRow, StopReason
from rlbench.runtime.actors import actor_names, kind_of
from rlbench.runtime.driver import describe_stuck


@dataclass
class Machine:
    "A modelled generator: what it runs, with which weights."

    slots: int
    life: int = 0
    up: bool = False
    version: int = 0
    waiting: list = field(default_factory=list)
    running: dict = field(
        default_factory=dict
    )  # (rollout, attempt) -> (oldest version, began, tokens, of them there before)
    heard: float = 0.0  # when its last message arrives; a pipe keeps the order


@dataclass
class Watch:
    "What was seen, and whether it may be."

    sent: dict = field(default_factory=dict)  # (rollout, attempt) -> Item of its newest turn
    told: dict = field(default_factory=dict)  # (rollout, attempt) -> (tokens, oldest, newest) of all its turns
    marks: dict = field(default_factory=dict)  # (rollout, attempt) -> what was told after each of its finished turns
    states: dict = field(default_factory=dict)  # (rollout, attempt) -> [(name, writer)] in which its turns began
    rewound: int = 0
    scores: dict = field(default_factory=dict)  # (rollout, attempt) -> reward or None
    fates: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    evals: list = field(default_factory=list)
    commands: list = field(default_factory=list)
    scoring: dict = field(default_factory=dict)  # (rollout, attempt) -> the environment that was asked
    homes: dict = field(default_factory=dict)  # rollout -> the environment that scored its last turn
    training: tuple = ()
    lags: list = field(default_factory=list)
    full_edges: int = 0  # batches whose groups all stood at the edge of the bound
    stopped: set = field(default_factory=set)  # answered with "aborted" and neither dead nor taken up again
    partials: int = 0  # taken up with their tokens
    weightless: set = field(default_factory=set)

    def generate(self, world: "World", a: Generate) -> None:
        state, actor = world.state, world.state.actors[a.actor]
        assert a.items and actor.up
        for item in a.items:
            key = (item.rollout, item.attempt)
            assert key not in self.sent or key in self.stopped or item.turn, f"{key} was sent twice"
            assert item.turn == len(self.marks.get(key, ())), f"{key} is sent in another turn than it is in"
            assert not item.turn or item.sampling.max_tokens == world.config.max_tokens - self.marks[key][-1][0] > 0, (
                "the budget is that of the whole episode"
            )
            assert key not in self.fates and (item.partial or item.turn > 0) == (self.told.get(key, (0,))[0] > 0), (
                f"{key}: a stopped one is sent with its tokens, or from nothing under another attempt"
            )
            assert item.old_tokens == (
                "" if not item.partial else "mask" if state.config.staleness == 0 else state.config.old_tokens
            )
            self.partials += item.partial
            self.stopped.discard(key)
            self.sent[key] = item
            if item.eval:
                assert actor.version == state.evaluation.under_way[item.eval].version
            elif not item.turn:
                assert state.version + bool(state.training.batch) - actor.version <= state.config.staleness, (
                    "started too late to be trained in time"
                )

    def score(self, world: "World", a: Score) -> None:
        key, actors = (a.rollout, a.attempt), world.state.actors
        assert key in self.told and key not in self.scoring, "scored before it was written, or twice at once"
        assert actors[a.actor].kind == "environment" and actors[a.actor].up, "sent to an environment that is not there"
        home = self.homes.get(a.rollout)
        if self.marks.get(key) and actors[home].up:
            assert a.actor == home, f"{key}: its episode is with {home}, and {a.actor} is asked"
        elif world.turns == 1:
            alive = {(r.id, r.attempt) for r in world.state.rollouts.values() if r.status == "scoring"}
            asked = Counter(actor for key, actor in self.scoring.items() if key in alive)
            up = [name for name, actor in actors.items() if actor.kind == "environment" and actor.up]
            assert asked[a.actor] == min(asked[name] for name in up), f"{a.actor} has more to do than another"
        self.scoring[key] = self.homes[a.rollout] = a.actor

    def train(self, world: "World", a: Train) -> None:
        state = world.state
        assert (
            not self.training
            and a.version == state.version + 1
            and len(a.groups) == state.config.batch_groups == len(set(a.groups))
        )
        assert not set(a.groups) & set(self.groups), "a group that ended came back"
        self.training = a.groups
        edge = state.version - state.config.staleness
        oldest = {group: min(self.told[key][1] for key in self._counted(group)) for group in a.groups}
        self.full_edges += all(version <= edge for version in oldest.values())
        for key, item in self.sent.items():
            if item.group in a.groups and key not in self.fates:
                assert key not in self.stopped, f"{key} is trained unfinished"
            if (
                item.group in a.groups
                and self.scores.get(key) is not None
                and key not in self.fates
                and key not in self.weightless
            ):
                self.lags.append(state.version - self.told[key][1])
                assert 0 <= self.lags[-1] <= state.config.staleness, (
                    f"{key} is {self.lags[-1]} versions old, the bound is {state.config.staleness}"
                )

    def _counted(self, group: int) -> list[tuple[int, int]]:
        "The attempts of a group whose tokens are trained on."
        return [
            key
            for key, item in self.sent.items()
            if item.group == group and key not in self.fates and key not in self.weightless
        ]

    def hand_on(self, row: RolloutRow, world: "World") -> None:
        """The first turns go to the next attempt; of a rewound one only those after the state that its rule allows may
        be gone."""
        key, heir = (row.rollout, row.attempt), (row.rollout, row.heir)
        states = [("", -1), *self.states.get(key, ())]
        if row.fate is Fate.REWOUND:
            c, now = world.state.config, world.state.version
            fresh = [t for t, (_, writer) in enumerate(states) if writer < 0 or writer >= now - c.max_state_lag]
            assert (
                row.kept == (0 if c.on_resume == "restart" else fresh[-1]) < len(states) - 1
                and c.on_resume != "continue"
            )
            self.rewound += 1
        if row.kept:
            self.marks[heir], self.states[heir] = self.marks[key][: row.kept], states[1 : row.kept + 1]
            self.told[heir] = self.marks[heir][-1]
            self.told[key] = (self.told[key][0] - self.told[heir][0], -1, -1)
            if key in self.weightless:
                self.weightless.add(heir)

    def write(self, row, world: "World") -> None:
        match row:
            case RolloutRow():
                key = (row.rollout, row.attempt)
                assert key not in self.fates, f"{key} ended as {self.fates[key]} and as {row.fate}"
                assert (row.trained_at > 0) == (row.fate is Fate.TRAINED)
                assert not (row.fate is Fate.TRAINED and key in self.weightless) and not (
                    row.fate is Fate.SURPLUS and key in self.stopped and self.told[key][0]
                )
                self.fates[key] = row.fate
                if row.fate in (Fate.REWOUND, Fate.LOST_GENERATOR):
                    self.hand_on(row, world)
            case GroupRow():
                assert row.group not in self.groups
                self.groups[row.group] = row.fate
            case StepRow():
                assert row.groups == self.training
                self.training = ()
                self.steps.append(row)
            case EvalRow():
                keys = [
                    key
                    for key, item in self.sent.items()
                    if item.group in row.groups
                    and key in self.told
                    and self.fates[key] not in (Fate.LOST_GENERATOR, Fate.REWOUND)
                ]
                assert len(keys) == row.k * len(row.groups) and all(
                    self.told[key][1:] == (row.version, row.version) for key in keys
                ), "an evaluation mixes versions"
                self.evals.append(row)
            case CommandRow():
                self.commands.append(row)
            case Served():
                pass


class World:
    """Carries the actions of a loop out on modelled actors.

    Everything is drawn from one random stream, so a world can be run again."""

    def __init__(
        self,
        config: RunConfig,
        seed: int,
        slots: tuple[int, ...] = (8,),
        commands: dict | None = None,
        faults: dict | None = None,
        errors: float = 0.0,
        pace: float = 0.001,
        turns: int = 1,
        waits: float = 0.0,
    ):
        self.random, self.config, self.errors, self.pace = random.Random(seed), config, errors, pace
        self.turns, self.waits = (
            turns,
            waits,
        )  # an episode has 1 to `turns` of them; share of turns after which it is left lying
        self.state = start_state(config, [1 + i % 3 for i in range(40)], {e.name: 10 for e in config.eval})
        self.machines = {f"generator-{i}": Machine(n) for i, n in enumerate(slots)}
        self.commands, self.faults, self.watch = commands or {}, faults or {}, Watch()
        self.heap, self.now, self.count, self.events, self.trainer_up = [], 0.0, 0, 0, True
        self.environments = actor_names("environment", config.environments)
        self.env_lives: Counter = Counter()  # by environment
        self.rolled: Counter = Counter()

    # time

    def later(self, delay: float, call, *args) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay, self.count, call, args))

    def run(self, closing: bool = True) -> "World":
        for name in ("trainer", *self.environments, *self.machines):
            self.later(self.random.random(), self.start, name)
        idle = 0
        while self.state.phase not in FINISHED:
            assert self.events < 100_000, "the run does not end"
            if self.heap:
                self.now, _, call, args = heapq.heappop(self.heap)
                call(*args)
                idle = 0
            elif self.state.commands.is_paused and self.state.phase in ("running", "draining") and idle:
                self.step(Commanded(f"unpause-{self.events}", "test", self.random.choice(("go", "go", "step"))))
            else:
                idle += 1
                assert idle < 3, f"stuck: {describe_stuck(self.state)}"
                self.step(Ticked())
        if closing:
            self.close()
        return self

    def step(self, event) -> None:
        self.events += 1
        object.__setattr__(event, "at", self.now)
        for action in step(self.state, event):
            match action:
                case Write():
                    self.watch.write(action.row, self)
                case Configure():
                    self.config = action.config
                case _:
                    getattr(self, f"do_{type(action).__name__.lower()}")(action)
        s = self.state
        assert count_live_groups(s) == sum(
            not g.eval and g.status != "training" and g.discarded is None for g in s.groups.values()
        )
        self.check_scoring()
        for command in self.commands.pop(self.events, ()):
            self.step(Commanded(*command))
        if self.events in self.faults:
            self.lose(self.faults.pop(self.events))

    def check_scoring(self) -> None:
        "What the loop has in scoring is with the environment that it remembers; nothing waits while one is up."
        s = self.state
        for rollout in s.rollouts.values():
            if rollout.status == "scoring" and self.is_heard(rollout.environment):
                key = (rollout.id, rollout.attempt)
                assert self.watch.scoring.get(key) == rollout.environment, f"{key} is not with {rollout.environment}"
        if any(actor.kind == "environment" and actor.up for actor in s.actors.values()) and s.phase not in FINISHED:
            assert not s.scoring.to_score, "responses wait, and an environment is up"

    def is_heard(self, name: str) -> bool:
        "False for an actor that is gone, of which the loop has not been told."
        return True

    # actions

    def start(self, name: str) -> None:
        if name in self.machines:
            machine = self.machines[name]
            machine.up, machine.version = True, 0
            self.say(name, Started(name, "generator", machine.slots, 0))
        else:
            self.step(Started(name, kind_of(name)))

    def do_start(self, a: Start) -> None:
        self.later(self.random.random(), self.start, a.actor)

    def do_generate(self, a: Generate) -> None:
        self.watch.generate(self, a)
        self.machines[a.actor].waiting.extend(a.items)
        self.fill(a.actor)

    def do_score(self, a: Score) -> None:
        self.watch.score(self, a)
        key = (a.rollout, a.attempt)
        self.later(0.05 * self.random.random(), self.scored, key, a.actor, self.env_lives[a.actor], a.last)

    def do_train(self, a: Train) -> None:
        self.watch.train(self, a)
        self.later(self.random.uniform(0.01, 2 * self.state.config.batch * self.pace), self.trained, a.version)

    def do_publish(self, a: Publish) -> None:
        machine = self.machines[a.actor]
        assert a.version <= self.state.version and self.state.actors[a.actor].up
        assert self.state.config.stragglers in ("in_flight", "oversample") or not (
            machine.running or machine.waiting
        ), "a generator is emptied before it loads"
        self.later(self.random.choice((0.01, 0.05, 0.4)), self.load, a.actor, a.version, self.machines[a.actor].life)

    def do_abort(self, a: Abort) -> None:
        if kind_of(a.actor) == "environment":
            asked = self.watch.scoring
            assert all(asked.get(key) == a.actor for key in a.keys), "stopped, and not being scored there"
            for key in a.keys:
                self.later(0.02 * self.random.random(), self.given_up, key, a.actor, self.env_lives[a.actor])
            return
        self.later(0.01, self.abort, a.actor, a.keys, self.machines[a.actor].life)

    def do_notify(self, a) -> None:
        "Whoever listens hears of it."

    def do_prepareweights(self, a) -> None:
        assert a.version <= self.state.version

    def do_markold(self, a: MarkOld) -> None:
        for key in a.keys if a.how == "mask" else ():
            self.watch.weightless.add(key)
            self.watch.told[key] = (
                self.watch.told[key][0],
                -1,
                -1,
            )  # of no version that counts, until it writes another turn
            self.watch.marks[key] = [(tokens, -1, -1) for tokens, *_ in self.watch.marks.get(key, ())]

    def do_save(self, a: Save) -> None:
        assert a.version == self.state.version
        self.later(0.1, lambda: self.step(Saved(a.version, "policy")) if self.trainer_up else None)

    def do_checkpoint(self, a: Checkpoint) -> None:
        assert a.version == self.state.version and not self.watch.training, "the state is not that of the weights"
        self.later(
            0.1 * self.random.random(),
            lambda: (
                self.step(Checkpointed(a.version, "checkpoint", self.random.choice(("", "", "no room"))))
                if self.trainer_up
                else None
            ),
        )

    # generators

    def say(self, name: str, event) -> None:
        "Through a pipe that keeps the order; what was said before a loss may arrive after it."
        machine = self.machines[name]
        machine.heard = max(machine.heard, self.now + 0.02 * self.random.random())
        self.later(machine.heard - self.now, self.deliver, name, event, machine.life)

    def deliver(self, name: str, event, life: int) -> None:
        machine = self.machines[name]
        if machine.life != life:
            if isinstance(event, Generated) and self.random.random() < 0.5:
                self.step(event)  # late: about an attempt that is over
            return
        if isinstance(event, Generated):
            key = (event.rollout, event.attempt)
            self.watch.told[key] = (event.tokens, event.oldest, event.newest)
            self.watch.weightless -= {key} if event.oldest >= 0 else set()
            self.watch.stopped.update({key} if event.reason is StopReason.ABORTED else ())
        self.step(event)

    def fill(self, name: str) -> None:
        machine = self.machines[name]
        while (
            machine.up and machine.waiting and len(machine.running) < min(machine.slots, self.state.config.concurrency)
        ):
            item = machine.waiting.pop(0)
            key, tokens = (item.rollout, item.attempt), 1 + min(200, int(self.random.lognormvariate(2.5, 0.8)))
            before, oldest, _ = self.watch.told[key] if item.partial or item.turn else (0, -1, 0)
            oldest = machine.version if item.old_tokens == "mask" or oldest < 0 else min(oldest, machine.version)
            tokens = min(tokens, max(1, self.config.max_tokens - before)) if self.turns > 1 else tokens
            machine.running[key] = (oldest, self.now, before + tokens, before)
            self.later(tokens * 0.01, self.finish, name, key, machine.life)

    def finish(self, name: str, key: tuple, life: int) -> None:
        machine = self.machines[name]
        if machine.life == life and key in machine.running:
            oldest, _, tokens, _ = machine.running.pop(key)
            self.say(
                name,
                Generated(
                    name,
                    *key,
                    self.random.choice((StopReason.STOP, StopReason.LENGTH)),
                    tokens,
                    oldest,
                    machine.version,
                    0.01 * tokens,
                    f"{key}{tokens}",
                ),
            )
            self.fill(name)

    def abort(self, name: str, keys: tuple, life: int) -> None:
        machine = self.machines[name]
        if machine.life != life:
            return
        for key in keys:
            if key in machine.running and self.random.random() < 0.2:
                self.finish(name, key, life)  # the answer to an abort may be "finished"
            elif key in machine.running:
                oldest, began, _, before = machine.running.pop(key)
                tokens = before + int((self.now - began) / 0.01)
                self.say(
                    name,
                    Generated(
                        name,
                        *key,
                        StopReason.ABORTED,
                        tokens,
                        *((oldest, machine.version) if tokens else (-1, -1)),
                        0.0,
                    ),
                )
            elif any((i.rollout, i.attempt) == key for i in machine.waiting):
                partial = next(i.partial or i.turn for i in machine.waiting if (i.rollout, i.attempt) == key)
                machine.waiting = [i for i in machine.waiting if (i.rollout, i.attempt) != key]
                self.say(
                    name,
                    Generated(name, *key, StopReason.ABORTED, *(self.watch.told[key] if partial else (0, -1, -1)), 0.0),
                )
        self.fill(name)

    def load(self, name: str, version: int, life: int) -> None:
        machine = self.machines[name]
        if machine.life == life and version > machine.version:
            machine.version = version
        if machine.life == life:
            self.say(name, Published(name, version, 0.01))

    # the others

    def has(self, actor: str, life: int, key: tuple) -> bool:
        "True if an environment has not been lost since, and has to answer for this one."
        return life == self.env_lives[actor] and self.watch.scoring.get(key) == actor

    def scored(self, key: tuple, actor: str, life: int, last: bool) -> None:
        if not self.has(actor, life, key):
            return
        self.rolled[key] += 1
        roll = random.Random(f"{key} {self.rolled[key]}")
        del self.watch.scoring[key]
        if roll.random() < self.errors:
            self.watch.scores[key] = None
            self.step(
                Scored(
                    *key,
                    None,
                    None,
                    roll.choice((Outcome.TIMEOUT, Outcome.FUNCTION_ERROR, Outcome.ENVIRONMENT_ERROR)),
                    0.01,
                    "it failed",
                )
            )
        elif not last and len(self.watch.marks.get(key, ())) + 1 < random.Random(key[0]).randint(1, self.turns):
            self.observe(key, roll)
        else:
            right = roll.random() < 0.5
            self.watch.scores[key] = float(right)
            self.step(Scored(*key, float(right), right, Outcome.OK, 0.01))
        if roll.random() < 0.05:
            self.step(Scored(*key, 7.0, True, Outcome.OK, 0.01))  # said twice

    def given_up(self, key: tuple, actor: str, life: int) -> None:
        if self.has(actor, life, key):
            del self.watch.scoring[key]
            self.step(Scored(*key, None, None, Outcome.ENVIRONMENT_ERROR, 0.0))

    def observe(self, key: tuple, roll: random.Random) -> None:
        "The environment asks for another turn, in a state that this one may have written."
        states, marks = self.watch.states.setdefault(key, []), self.watch.marks.setdefault(key, [])
        marks.append(self.watch.told[key])
        turn = len(marks)
        now = states[-1] if states else ("", -1)
        state = (
            (f"{key} {turn}", self.watch.told[key][2]) if roll.random() < 0.5 else roll.choice([now, ("", -1), *states])
        )
        states.append(state)
        member = self.state.rollouts.get(key[0])
        if member and member.attempt == key[1] and roll.random() < self.waits:
            member.waited = True
        self.step(TurnEnded(*key, turn, *state))
        if roll.random() < 0.1:
            self.step(TurnEnded(*key, turn, *state))  # said twice

    def trained(self, version: int) -> None:
        if self.trainer_up:
            self.step(Trained("trainer", version, 1))

    def lose(self, kind: str) -> None:
        "A fault, if what is to fail is up."
        names = [
            n
            for n, a in self.state.actors.items()
            if a.kind == kind and a.up and (kind != "generator" or self.machines[n].up)
        ]
        if not names or self.state.phase in FINISHED:
            return
        name, at_work = self.random.choice(names), ()
        if kind == "environment":
            own = tuple(key for key, actor in self.watch.scoring.items() if actor == name)
            at_work = self.random.choice(((), own[:1]))
        self.step(Lost(name, "pulled out", self.end_actor(name), at_work))

    def end_actor(self, name: str) -> tuple:
        "An actor ends, with all it had; returns the tokens that are known of its unfinished responses."
        reported = ()
        if name in self.machines:
            machine = self.machines[name]
            reported = tuple(
                (key, before + int((self.now - began) / 0.01))
                for key, (_, began, _, before) in machine.running.items()
                if self.random.random() < 0.5
            )
            machine.life, machine.up, machine.waiting, machine.running = machine.life + 1, False, [], {}
            alive = {
                (m.id, m.attempt): m
                for m in self.state.rollouts.values()
                if m.actor == name and m.status == "generating"
            }
            for key in alive:  # what it had said without being heard is lost, too
                self.watch.told[key] = (
                    max(
                        self.watch.told[key][0] if self.watch.sent[key].partial or self.watch.sent[key].turn else 0,
                        dict(reported).get(key, 0),
                    ),
                    -1,
                    -1,
                )
        elif name in self.environments:
            self.env_lives[name] += 1
            self.watch.scoring = {key: actor for key, actor in self.watch.scoring.items() if actor != name}
        else:
            self.trainer_up = False
        return reported

    # the end

    def close(self) -> None:
        "The books of the loop are those of the watch."
        s, w = self.state, self.watch
        assert not (
            s.groups
            or s.rollouts
            or s.dispatch.to_send
            or s.scoring.to_score
            or s.training.queue
            or s.evaluation.under_way
            or s.commands.waiting
        ), "something outlived the run"
        assert are_books_closed(s) and len(w.fates) == s.dispatch.attempts and set(w.sent) <= set(w.fates)
        books: dict[str, list] = {}
        for key, fate in w.fates.items():
            entry = books.setdefault(fate.value, [0, 0])
            entry[0] += 1
            entry[1] += w.told.get(key, (0,))[0]
        assert books == {fate: entry[:2] for fate, entry in s.books.items()}, "fates and tokens"
        assert [row.version for row in w.steps] == list(range(1, s.version + 1))
        assert len({row.id for row in w.commands}) == len(w.commands)

    def record(self) -> tuple:
        "What two equal runs have in common."
        return (
            self.state.digest,
            self.state.phase,
            self.state.reason,
            self.state.seq,
            self.watch.steps,
            self.watch.evals,
            self.watch.commands,
            self.watch.fates,
        )
