"""Drawn configurations and commands, run in this process on the virtual clock, and what has to hold for each.

`python tests/helpers/fuzz.py 2000 [SEED]` runs so many cases and prints one line of figures,
and a block for each case that does not hold.
A case is drawn from the configuration's own schema:
every knob with both of its ends, what lies outside, and what is no number at all.

`python tests/helpers/fuzz.py 2000` on 24 November 2026, on two busy cores, printed: 2000 cases, 1000 with commands:
1508 done, 402 refused, 46 checked, 29 failed, 15 refused by an actor; 0 do not hold.
("failed": the run ended itself with a named reason, its books closed.)
"""

import collections
import json
import math
import re
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from inline import check_books
from pydantic import BaseModel

from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.environments.code_datasets import CODE_SETS
from rlbench.knobs import Knob, key_of, knobs_of
from rlbench.loop.config import RunConfig, make_config, with_knob
from rlbench.loop.config_files import read_config, to_toml
from rlbench.loop.config_tables import FUNCTIONS, ConfigError, EvalConfig
from rlbench.loop.ending import FINISHED
from rlbench.loop.journal import VERBS
from rlbench.loop.loop import step
from rlbench.loop.queue import queue_places
from rlbench.loop.state import count_live_groups, generators_up
from rlbench.loop.stragglers import UNFINISHED
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.prompts import make_pools

EVENTS = 1500  # after which a run is asked to stop
PATIENCE = 6000  # events after that in which it has to have ended
BASE = {
    "clock": "virtual",
    "generator": "scripted",
    "steps": 3,
    "batch": 8,
    "group": 4,
    "preflight": 0,
    "staleness": 2,
    "checkpoint_every": 0,
    "eval": [{"count": 4, "every": 2}],
}
ALONE = {
    "tasks": ("file", "hub", "verifiers", *CODE_SETS),
    "verifier": ("code",),
    "environment": ("code", "verifiers"),
}  # they need files, a network or programs: checked, not run

# What is drawn

JUNK = st.sampled_from(
    [
        None,
        True,
        "x",
        "",
        "nan",
        [],
        [1],
        {},
        {"name": 5},
        {"name": "x", "source": 7},
        {"name": "ppo", "source": "functions/no-000000000000.py"},
        [[[[]]]],
        "\ud800",
        "0x10",
        -1,
        0,
        2**31,
        2**53 + 1,
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        10**400,
        1e308,
        -0.0,
        5e-324,
        math.nan,
        math.inf,
        -math.inf,
    ]
)


def numbers(knob: Knob, default) -> st.SearchStrategy:
    "Both ends of a knob, its default, and what lies between."
    low, high = -1000 if knob.low is None else knob.low, 1000 if knob.high is None else knob.high
    if isinstance(default, int):
        return st.one_of(
            st.sampled_from([int(low), int(high), default]), st.integers(int(low), int(min(high, low + 20)))
        )
    return st.one_of(
        st.sampled_from([low, high, default]),
        st.floats(low, high, allow_subnormal=False),
        st.floats(low, min(high, low + 2), allow_subnormal=False),
    )


def beyond(knob: Knob, default) -> st.SearchStrategy:
    "What a knob does not take."
    ends = [
        each
        for end, away in ((knob.low, -1), (knob.high, 1))
        if end is not None
        for each in (end + away, end + away * 1e-9)
    ]
    return st.one_of(JUNK, st.sampled_from(ends)) if ends else JUNK


def knob_values(knob: Knob, default) -> st.SearchStrategy:
    "What a knob takes."
    if knob.choices:
        return st.sampled_from(knob.choices)
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, (int, float)):
        return numbers(knob, default)
    if isinstance(default, tuple) and default and isinstance(default[0], (int, float)):
        return st.tuples(numbers(knob, default[0]), numbers(knob, default[1])).map(lambda pair: sorted(pair))
    return st.just(list(default) if isinstance(default, tuple) else default)


@st.composite
def functions(draw, name: str, bad: bool):
    "A function of a field, by its bare name or with some of its knobs."
    key = draw(st.sampled_from(list(FUNCTIONS[name])))
    knobs = knobs_of(FUNCTIONS[name][key])
    if not knobs or draw(st.booleans()):
        return key
    chosen = draw(st.lists(st.sampled_from(list(knobs)), max_size=3, unique=True))
    return {
        "name": key,
        **{
            knob: draw(beyond(*knobs[knob]) if bad and draw(st.booleans()) else knob_values(*knobs[knob]))
            for knob in chosen
        },
    }


TEXTS = {
    "name": ["", "monday", "a/b", "..", "x" * 200],
    "model": ["tiny", "nowhere", ""],
    "device": ["auto", "cpu", "cuda", "gpu9"],
    "webhook": ["", "$HOOK", "http://localhost:1/", "ftp://x"],
    "teacher": ["", "tiny"],
    "reference": ["", "start", "tiny"],
    "reward_model": ["", "nowhere"],
    "demonstrations": ["", "/nowhere.jsonl"],
    "url": ["", "http://127.0.0.1:9/v1", "nonsense"],
    "template": ["", "{prompt} {response}", "{no}"],
    "key": ["", "$KEY", "secret"],
    "targets": ["all-linear", ["q_proj"], "nothing"],
    "when": [
        "loss is nan",
        "entropy < 0.1",
        "reward_mean > 0.2 for 2",
        "held_out < 1",
        "nonsense < 1",
        "entropy < 1e999",
        "staleness_mean >= 0",
    ],
    "do": ["alert", "pause", "stop", "temperature = 0.5", "temperature = 9", "loss = 5", "over = 1"],
    "folder": ["", "/nowhere"],
    "token": ["", "$TOKEN", "secret"],
}


@st.composite
def tables(draw, model: type[BaseModel], bad: bool, most: int):
    "A table of a configuration class with up to `most` fields."
    count = draw(st.integers(0, most))
    chosen = draw(st.lists(st.sampled_from(list(model.model_fields)), min_size=count, max_size=count, unique=True))
    return {name: draw(values(model, name, bad)) for name in chosen}


@st.composite
def values(draw, model: type[BaseModel], name: str, bad: bool):
    "A value of a field: mostly one that it takes; if `bad`, often one that it does not."
    info = model.model_fields[name]
    knob = next((meta for meta in info.metadata if isinstance(meta, Knob)), None)
    default = info.get_default(call_default_factory=True)
    if bad and draw(st.integers(0, 2)) == 0:
        return draw(beyond(knob or Knob(), default))
    if model is RunConfig and name in FUNCTIONS or name == "tasks":
        return draw(functions(name, bad))
    if isinstance(default, BaseModel):
        return draw(tables(type(default), bad, 4))
    if name == "eval":
        return draw(st.lists(tables(EvalConfig, bad, 3), max_size=2))
    if name == "guards":
        return draw(
            st.lists(
                st.fixed_dictionaries(
                    {"when": st.sampled_from(TEXTS["when"])}, optional={"do": st.sampled_from(TEXTS["do"])}
                ),
                max_size=2,
            )
        )
    if name == "alerts":
        return draw(st.one_of(st.booleans(), st.lists(st.sampled_from(TEXTS["when"]), max_size=2)))
    if name == "sinks":
        return draw(st.sampled_from([[], ["tensorboard"], ["nothing"], ["wandb", "wandb"]]))
    if name in ("vllm", "faults"):
        return draw(st.sampled_from([{}, {"tensor_parallel_size": 2}, {"lost": 0.5}, {"lost": 2}]))
    if knob is None or knob.low is None and not knob.choices and not isinstance(default, bool):
        return draw(st.sampled_from(TEXTS.get(name, ["", "x"])))
    return draw(knob_values(knob, default))


RAW = st.sampled_from(
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"knob": 5}',
        b'{"author": "me"}',
        b'{"knob": "temperature", "value": NaN}',
        b'{"knob": "temperature", "value": 1e999, "at": 1e999}',
        b'{"knob": "go", "at": NaN}',
        b'{"knob": "temperature", "value": ' + b"9" * 5000 + b"}",
        b'{"knob": "temperature", "value": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"knob": "loss", "value": ' + b"[" * 100_000,
        b'{"knob": "temperature", "over": true}',
        b'{"knob": "temperature", "value": 1.0, "over": 9223372036854775808}',
        b'{"knob": "\\ud800", "author": "\\ud800", "value": "\\ud800"}',
        b'{"knob": "temperature", "at": 1' + b"0" * 400 + b"}",
    ]
)
OVERS = st.one_of(
    st.just(0),
    st.just(0),
    st.integers(0, 5),
    st.sampled_from([10_000_000, 10_000_001, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -1, -(2**63)]),
)
DOTTED = [
    f"{head}.{rest}"
    for head, rest in [
        ("balance", "lag"),
        ("balance", "mode"),
        ("balance", "nothing"),
        ("loss", "low"),
        ("loss", "high"),
        ("loss", "name"),
        ("loss", "name.x"),
        ("sampler", "name"),
        ("virtual", "decode"),
        ("lora", "rank"),
        ("deadlines", "score"),
        ("eval", "0"),
        ("temperature", "x"),
        ("tasks", "levels"),
        ("advantage", "source"),
        ("", "x"),
        ("kl_schedule", "target"),
    ]
]


@st.composite
def spoken(draw):
    "The bytes of a command's file: a verb, a knob with its value, or what is none."
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(RAW)
    over = draw(OVERS)
    if kind <= 3:
        verb = draw(st.sampled_from(VERBS))
        value = draw(
            st.one_of(
                st.none(),
                JUNK,
                st.fixed_dictionaries({"when": st.sampled_from(TEXTS["when"]), "do": st.sampled_from(TEXTS["do"])}),
                st.sampled_from(["alert-1", "loss is nan"]),
            )
        )
        return say(verb, value, over if draw(st.booleans()) else 0)
    if kind == 4:
        return say(
            draw(st.sampled_from([*DOTTED, "nothing", "x" * 300, "VERBS", "model", "seed", "clock"])),
            draw(st.one_of(JUNK, st.floats(0, 2, allow_subnormal=False))),
            over,
        )
    name = draw(st.sampled_from(list(RunConfig.model_fields)))
    return say(name, draw(values(RunConfig, name, draw(st.integers(0, 3)) == 0)), over)


def say(knob: str, value, over: int) -> bytes:
    return json.dumps({"author": "fuzz", "knob": knob, "value": value, "over": over}).encode()


@dataclass
class Case:
    "A configuration's table, and commands: (number of events before it, bytes of its file)."

    table: dict
    told: list = field(default_factory=list)


@st.composite
def cases(draw, most: int):
    "A base that runs fast, some fields of it changed, and from 1 to `most` commands; 0: none."
    bad = draw(st.integers(0, 4)) == 0
    table = {**BASE, **draw(tables(RunConfig, bad, 8))}
    if not bad:
        group, groups = draw(st.sampled_from([(4, 2), (2, 3), (8, 1), (4, 8), (1, 4), (16, 2)]))
        table |= {"group": group, "batch": group * groups, "clock": "virtual", "generator": "scripted"}
    if draw(st.booleans()):
        table["virtual"] = draw(tables(type(RunConfig.model_fields["virtual"].default), bad, 4))
    table = table if bad else settled(table)
    count = draw(st.integers(min(1, most), most))
    told = draw(st.lists(st.tuples(st.integers(0, 120), spoken()), min_size=count, max_size=count))
    return Case(table, sorted(told, key=lambda each: each[0]))


def settled(table: dict) -> dict:
    "The table without the fields that do not go with the rest, one after the other, so that most cases run."
    while True:
        try:
            make_config(table)
            return table
        except ConfigError as error:
            named = re.match(r"\w+", str(error))[0]
            drop = (
                named
                if named in table and named not in BASE
                else next((name for name in table if name not in BASE), None)
            )
            if drop is None:
                return dict(BASE)
            table = {name: value for name, value in table.items() if name != drop}


# What has to hold

UNNAMED = re.compile(
    r"Traceback|\b(Type|Key|Index|Attribute|Assertion|ZeroDivision|Overflow|Recursion|Name|UnboundLocal|Runti"
    r"me|Memory|StopIteration|Unicode\w*)Error\b"
)
NAMED = re.compile(r"\s*[\w.$-]+(\[\d+\])?(: | )")
REMEDY = re.compile(
    r"use |give |set |choose |write |name |did you mean|known:|is not one of|should (be|have)|correct "
    r"it|rename|leave |start another|takes no|make |there are|than the generators|already|annotate|lower|pip "
    r"install|capture it|no such|knob|missing"
)


class Broken(AssertionError):
    "A property does not hold."


def hold(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


def check_refusal(text: str) -> None:
    "A refusal names the field and what to do. The traceback that follows a function's failure is for its author."
    text = text.partition("\nTraceback")[0]
    for line in text.splitlines():
        hold(bool(NAMED.match(line)) and not UNNAMED.search(line), f"an unnamed refusal: {line[:300]}")
    hold(bool(REMEDY.search(text)), f"a refusal without a remedy: {text[:300]}")


def work_of(c: RunConfig) -> bool:
    "Whether a run is small enough to be tried: memory and time of this process are finite."
    v = c.virtual
    length = min(
        c.max_tokens,
        v.scripted_length
        * max(1, v.scripted_growth)
        * max(1, v.scripted_hardship) ** 4
        * math.exp(2 * v.scripted_tail),
    )
    rollouts = c.batch * (min(c.staleness, 50) + 2) * (1 + c.oversample)
    evals = max([c.preflight * c.preflight_k, *(e.count * e.k for e in c.eval)])
    small = (
        rollouts <= 3000
        and evals <= 3000
        and length * min(rollouts + evals, 3000) * min(c.max_turns, 8) <= 3e6
        and c.replay_size <= 10_000
    )
    return small and not (
        c.webhook
        or c.sinks
        or c.demonstrations
        or c.sandbox.folder
        or c.judge.url
        or any(key_of(getattr(c, name)) in alone for name, alone in ALONE.items())
        or any(e.tasks and key_of(e.tasks) in ALONE["tasks"] for e in c.eval)
    )


class Fuzzed(Driver):
    "A driver that hears commands after stated numbers of events, and looks after each whether the bounds hold."

    told: list = []
    said = 0
    batch: tuple = ()
    most: dict = {}
    asked_to_stop = False

    def flush(self) -> None:
        super().flush()
        if self.state.phase in FINISHED:
            return
        self.commands.looked_at = math.inf  # commands come from here alone, so that a case is the same each time
        self.check()
        resting = self.state.commands.is_paused and self.quiet
        if self.state.seq > EVENTS and not self.asked_to_stop:
            self.asked_to_stop, self.told = True, [(0, say("stop", None, 0)), *self.told]
        elif resting and not self.told:
            self.told = [(0, say("go", None, 0))]
        hold(
            self.state.seq < EVENTS + PATIENCE and self.ticks < 4 * (EVENTS + PATIENCE),
            f"it goes on after a stop, {self.state.phase}",
        )
        while self.told and self.state.phase not in FINISHED and (self.told[0][0] <= self.state.seq or resting):
            self.hear(self.told.pop(0)[1])
            resting = False

    def hear(self, text: bytes) -> None:
        "A command in its file."
        if not safe(self.state.config, text):
            return
        self.said += 1
        (self.folder / "commands" / f"{self.said:06d}.json").write_bytes(text)
        for event in self.commands.read_folder():
            self.note_happened(event)
            for action in step(self.state, replace(event, at=self.clock.now())):
                self.carry(action)

    def is_unwritten(self, group) -> bool:
        "True for a group of which a rollout waits for a generator, or is with one."
        return any(self.state.rollouts[i].status in UNFINISHED for i in group.rollouts)

    def most_unwritten(self) -> int:
        """Groups that may have rollouts still to be written, where the queue drops the oldest:
        each generator may be given what it runs and an eighth more, as much again may wait for it,
        and the last group may go beyond."""
        c = self.state.config
        running = [min(a.slots, c.concurrency) for a in generators_up(self.state).values()]
        return 2 * sum(n + max(2, n // 8) for n in running) + 1

    def check(self) -> None:
        "Nothing is over its bound."
        s, c, m = self.state, self.state.config, self.most
        self.most = m = {
            "live": max(
                m.get("live", 0),
                (c.staleness + 1) * c.batch_groups + math.ceil(c.oversample * c.batch_groups),
                queue_places(c.queue_batches, c.staleness, c.batch_groups),
            ),
            "unwritten": max(m.get("unwritten", 0), self.most_unwritten()),
            "queue": max(m.get("queue", 0), queue_places(c.queue_batches, c.staleness, c.batch_groups)),
            "running": max(m.get("running", 0), c.concurrency),
            "staleness": max(m.get("staleness", 0), c.staleness),
        }
        if c.backlog == "hold":
            hold(count_live_groups(s) <= m["live"], f"{count_live_groups(s)} groups are alive, and {m['live']} may be")
        unwritten = [g for g in s.groups.values() if not g.eval and g.discarded is None and self.is_unwritten(g)]
        hold(
            len(unwritten) <= max(m["live"], m["unwritten"]),
            f"{len(unwritten)} groups have rollouts still to be written, and {m['unwritten']} may",
        )
        hold(
            c.backlog != "drop_oldest" or len(s.training.queue) <= m["queue"],
            f"{len(s.training.queue)} groups wait, and {m['queue']} may",
        )
        hold(
            all(r.running <= m["running"] for r in self.meters.generators.values()),
            f"more than {m['running']} sequences run",
        )
        if s.training.batch and tuple(s.training.batch) != self.batch:
            members = [s.rollouts[i] for g in s.training.batch for i in s.groups[g].rollouts]
            hold(
                len(s.training.batch) == c.batch_groups == len(set(s.training.batch)),
                f"a batch of {len(s.training.batch)} groups in place of {c.batch_groups}",
            )
            for member in members:
                if member.reward is not None and not member.masked and not member.unrewarded:
                    hold(
                        0 <= s.version - member.oldest <= c.staleness,
                        f"a rollout {s.version - member.oldest} versions old is trained, the bound is {c.staleness}",
                    )
        self.batch = tuple(s.training.batch)


def safe(config: RunConfig, text: bytes) -> bool:
    "Whether a command leaves a run small enough to be tried."
    try:
        told = json.loads(text)
        target = with_knob(config, told["knob"], told["value"])
    except Exception:
        return True
    return work_of(target)


def run_case(case: Case, root: Path) -> str:
    """How a case ended: refused, checked (too large or not to be run here), or as its run did.

    Raises what does not hold."""
    try:
        config = make_config(case.table)
    except ConfigError as error:
        check_refusal(str(error))
        return "refused"
    hold(make_config(config.model_dump()) == config, "a configuration does not survive its own table")
    if config.generator != "scripted" or config.clock != "virtual" or not work_of(config):
        return "checked"
    folder = create_run_folder(root, f"case-{len(list(root.iterdir()))}")
    (folder / "config.toml").write_text(to_toml(config))
    hold(read_config(folder) == config, "a configuration does not survive its file")
    try:
        driver = Fuzzed(folder, config, make_pools(config))
    except (ValueError, OSError) as error:
        check_refusal(str(error))
        return "refused"
    driver.told = [*case.told]
    try:
        drive(driver)
    except (ValueError, OSError) as error:
        if driver.state.dispatch.attempts or isinstance(error, UnicodeError):
            raise
        check_refusal(str(error))
        return "refused by an actor"
    return check_end(driver)


def check_end(driver: Fuzzed) -> str:
    "The books are closed, the bounds were kept, every command is in the journal with its reason."
    check_books(driver)
    state, rows = driver.state, read_table(driver.folder, "commands")
    trained = read_table(driver.folder, "rollouts").filter(fate="trained")
    hold(
        state.phase in FINISHED and bool(state.reason or state.phase == "done"),
        f"it ended as {state.phase} without a reason",
    )
    hold(not UNNAMED.search(state.reason), f"it ended unnamed: {state.reason}")
    hold(
        (trained["trained_at"] - 1 - trained["oldest"] <= driver.most.get("staleness", 0)).all(),
        "a trained rollout was too old",
    )
    own = rows.filter(rows["command"].is_in([f"{n:06d}" for n in range(1, driver.said + 1)]))
    hold(
        len(own) == own["command"].n_unique() == driver.said,
        f"{driver.said} commands were given, and {len(own)} rows tell of them",
    )
    for row in rows.filter(status="refused").iter_rows(named=True):
        check_refusal(row["reason"])
    return state.phase


# By hand


def survey(count: int, number: int, limit: int = 120) -> int:
    """Run so many cases, print each that does not hold, and a line with what became of all.

    Returns how many did not hold."""
    ends, kinds, broken = collections.Counter(), collections.Counter(), collections.Counter()

    def late(*_):
        raise Broken(f"it hangs: no end after {limit} s")

    signal.signal(signal.SIGALRM, late)

    def each(case):
        kinds["with commands" if case.told else "without"] += 1
        with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
            try:
                signal.alarm(limit)
                ends[run_case(case, Path(root))] += 1
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} {str(error)[:90]!r} {Path(where.filename).name}:{where.name}"
                broken[kind] += 1
                if broken[kind] <= 2:
                    print(
                        f"--- {kind}\n"
                        f"{case.table}\n"
                        f"{case.told}\n"
                        f"{''.join(traceback.format_exception(error)[-6:])[-1500:]}",
                        flush=True,
                    )
            finally:
                signal.alarm(0)

    for most, share in ((0, count - count // 2), (8, count // 2)):
        some = settings(
            max_examples=share,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(number)(some(given(cases(most))(each)))()
    print(
        f"{sum(kinds.values())} cases, {kinds['with commands']} with commands: "
        f"{', '.join(f'{n} {end}' for end, n in ends.most_common())}; {sum(broken.values())} do not hold",
        flush=True,
    )
    for kind, times in broken.most_common():
        print(f"{times} x {kind}", flush=True)
    return sum(broken.values())


if __name__ == "__main__":
    sys.exit(
        bool(survey(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    )
