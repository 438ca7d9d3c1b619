"""Looking at rollouts and runs: a real run and hostile text, widgets driven by traits and from threads,
choices written by several processes at once."""

import json
import threading
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from fake_run import fake_run

from rlbench.base.ledger import Ledger
from rlbench.base.run_files import create_run_folder
from rlbench.views.comparison import compare
from rlbench.views.decode import load_decoder, token_pieces
from rlbench.views.preferences import JOURNAL, read_choices, read_preferences
from rlbench.views.ranking import Ranking
from rlbench.views.response_pairs import draw_pairs
from rlbench.views.rollout_browser import OTHER_REWARD, OTHER_VERSION, browse
from rlbench.views.rollout_html import prompt_html
from rlbench.views.rollout_search import find_rollouts, pairs_of_task
from rlbench.views.stored_rollout import StoredRollout, read_rollout, rollout_html
from rlbench.workbench.handle import attach, run

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</pre></article><b onclick=alert(1)>",
    "&lt;&amp;\x00\x1b[31m",
    "\u202egnal",
    "'\"`${x}",
    "</style><style>*{display:none}",
    "\ud800",
)
TAGS = {
    "div",
    "style",
    "article",
    "p",
    "span",
    "b",
    "small",
    "h4",
    "pre",
    "details",
    "summary",
    "em",
    "i",
    "section",
    "h5",
}


class Tags(HTMLParser):
    "The tags and attributes of a page; fails where they do not nest."

    def __init__(self, page: str):
        super().__init__()
        self.open, self.tags, self.attributes = [], set(), set()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "Three versions of the tiny policy, all in one process; held-out tasks come back at the end."
    held_out = {"name": "held_out", "count": 16, "every": 0}
    r = run(
        "tiny",
        runs=tmp_path_factory.mktemp("runs"),
        name="tiny",
        steps=3,
        group=4,
        batch=16,
        staleness=1,
        clock="virtual",
        preflight=0,
        eval=(held_out,),
    )
    assert r.wait(400) == "finished", (r.folder / "run.log").read_text()
    return r.folder


def groups(folder, count=20, size=4):
    "A run folder with groups of one task each that say different things."
    made = create_run_folder(folder, "groups")
    ledger = Ledger(made, 0)
    for i in range(count * size):
        ledger.append(
            "rollouts",
            at=1.0,
            rollout=i,
            **{"try": 0},
            group=i // size,
            k=i % size,
            task=f"task {i // size}",
            fate="trained",
            correct=True,
            reward=1.0,
            length=3,
            oldest=1,
            newest=1,
            trained_at=2,
            prompt=f"prompt {i // size}",
            text=f"response {i}",
            answer="",
        )
    ledger.close()
    return made


def hostile(folder):
    "A run folder whose prompts, responses, answers, names and messages try to be something else."
    made = create_run_folder(folder, "hostile")
    (made / "config.toml").write_text('model = "tiny"\n')
    ledger = Ledger(made, 0)
    for i, words in enumerate(HOSTILE):
        ledger.append(
            "rollouts",
            at=1.0,
            rollout=i,
            **{"try": 0},
            group=0,
            k=i,
            task=HOSTILE[1],
            set=words,
            level=i,
            fate="trained",
            reason="stop",
            outcome="ok",
            correct=None,
            reward=None,
            part_names=[words],
            part_values=[1.0],
            length=3,
            turns=1,
            oldest=1,
            newest=1,
            trained_at=3,
            message=words,
            prompt=HOSTILE[0],
            text=words,
            answer=words,
        )
        ledger.append(
            "tokens",
            at=1.0,
            rollout=i,
            **{"try": 0},
            prompt_tokens=[3],
            tokens=[3, 10**6, 1],
            logprobs=[0.0, float("-inf"), float("nan")],
            versions=[1, 1, 2],
            mask=[1, 0, 1],
        )
    for attempt, fate in enumerate(
        ("rewound", "aborted", "trained")
    ):  # an episode of two turns that was begun three times
        row = {"at": 1.0, "rollout": 50, "try": attempt}
        ledger.append(
            "rollouts",
            **row,
            group=2,
            k=0,
            task="t",
            set="s",
            level=1,
            fate=fate,
            reason="turns",
            outcome="ok",
            correct=False,
            reward=0.0,
            part_names=[],
            part_values=[],
            length=3,
            turns=2,
            oldest=1,
            newest=4,
            writer=1,
            trained_at=6,
            prompt=HOSTILE[0],
            text=HOSTILE[1],
            answer="",
            said=[*HOSTILE[:3]],
            states=["", HOSTILE[1]],
            writers=[-1, 1],
        )
        ledger.append(
            "tokens",
            **row,
            prompt_tokens=[3],
            tokens=[3, 4, 1],
            logprobs=[0.0, -1.0, -2.0],
            versions=[1, 4, 4],
            mask=[1, 1, 1],
            turn=[0, 1, 1],
            observed=[5, 6],
            observed_turn=[1, 1],
        )
    ledger.append(
        "rollouts", at=1.0, rollout=99, **{"try": 0}, group=1, fate="left_at_stop", length=0, trained_at=-1
    )  # never sent: nothing else is known
    ledger.close()
    return made


def test_a_real_run_is_read_token_by_token(trained):
    rows = find_rollouts(trained, last=None)
    assert (
        set(rows["fate"]) <= {"trained", "filtered", "evaluated"}
        and (rows.filter(rows["fate"] == "trained")["lag"] <= 1).all()
    )
    for number in rows["rollout"].sample(10, seed=0):
        r = read_rollout(trained, number)
        assert (
            len(r.tokens) == len(r.logprobs) == len(r.versions) == len(r.mask) == r.length > 0
            and (r.logprobs <= 1e-6).all()
        )
        assert (r.versions.min(), r.versions.max()) == (r.oldest, r.newest)
        assert "".join(token_pieces(load_decoder(trained), r.tokens.tolist())).removesuffix("<eos>") == r.text
        assert Tags(rollout_html(trained, number)).tags <= TAGS


def test_a_held_out_task_at_two_versions(trained):
    asked = find_rollouts(trained, fate="evaluated", version=3)
    met = pairs_of_task(trained, asked["task"][0], set="held_out")
    assert met.select("early_version", "late_version").rows() == [(0, 3)]
    b = browse(trained, fate="evaluated")
    b.parts.beside.value = OTHER_VERSION
    assert (
        b.parts.note.value == ""
        and b.parts.view.value.count("<article") == 2
        and "by v0" in b.parts.view.value
        and "selected, rollout" in b.parts.view.value
    )


def test_hostile_text_stays_text(tmp_path):
    folder = hostile(tmp_path)
    b = browse(folder)
    for value in [v for _, v in b.parts.found.options]:
        b.parts.found.value = value
        for beside in ("nothing", OTHER_VERSION, OTHER_REWARD):
            b.parts.beside.value = beside
            assert b.parts.note.value == ""
            page = Tags(b.parts.view.value)
            assert page.tags <= TAGS and page.attributes <= {"class", "title", "aria-label", "role", "open"}
    b.parts.text.value = "ONERROR"
    assert len(b.parts.found.options) == 4, "one rollout, and three attempts at an episode"
    told = rollout_html(folder, 50)
    for words in (
        "Turn 2",
        "2 tokens · by v4 · taken up 3 versions after turn 1",
        "written by v1, 3 versions old",
        "environment, 2 tokens",
        "4 of the environment&#39;s state",
        "cut at the limit of turns",
        "attempt 0 was put back to before turn 1: its turns 1 to 2, 3 tokens, were undone",
        "attempt 1 ended (aborted) and was begun again at turn 1",
    ):
        assert words in told, words
    for pair in draw_pairs(folder):
        assert pair.left.text != pair.right.text
    view = Ranking(folder, HOSTILE[0], least=0)
    for _ in range(30):
        assert Tags(view.parts.view.value).tags <= TAGS and "<script" not in view.parts.count.value
        view.parts.right.click()
    assert view.pair is None and len(read_preferences(folder)) == 12, "of one group at most twelve"


def test_browser_reads_what_a_live_run_adds(tmp_path):
    folder = fake_run(tmp_path, rollouts=600)
    b = browse(folder, fate="trained", reward=(1, 1))
    total = len(find_rollouts(folder, fate="trained", reward=1))
    assert f"of {total} found" in b.parts.place.value and b.parts.before.disabled and not b.parts.after.disabled
    first = b.parts.found.value
    b.parts.after.click()
    assert b.parts.found.value[0] < first[0] and not b.parts.before.disabled and "51 – " in b.parts.place.value
    b.parts.up.click()
    assert b.parts.found.index == 49 and b.page == 0
    b.parts.down.click()
    assert b.parts.found.index == 0 and b.page == 1
    b.parts.before.click()
    assert b.parts.found.value == first
    ledger = Ledger(folder, 1)
    ledger.append(
        "rollouts",
        at=99.0,
        rollout=5000,
        **{"try": 0},
        group=9,
        k=0,
        task="t",
        level=9,
        fate="trained",
        correct=True,
        reward=3.0,
        length=1,
        oldest=70,
        newest=70,
        trained_at=80,
        prompt="new",
        text="<new>",
    )
    ledger.flush()
    b.parts.again.click()
    assert (
        b.parts.reward.max == 3
        and b.parts.version.max == 70
        and b.parts.lag.max == 9
        and b.parts.level.options[-1] == ("level 9", 9)
    )
    b.parts.reward.value = (3, 3)
    assert b.parts.found.value == (5000, 0) and "&lt;new&gt;" in b.parts.view.value
    ledger.close()


def test_errors_are_said_and_do_not_stay(tmp_path):
    folder = fake_run(tmp_path, rollouts=100)
    with pytest.raises(ValueError, match="level: no rollout has 8; there are 2, 3, 4"):
        browse(folder, level=8)
    with pytest.raises(ValueError, match="did you mean 'fate'"):
        browse(folder, fat="trained")
    with pytest.raises(FileNotFoundError, match="no folder"):
        browse(tmp_path / "nobody")
    b = browse(folder)
    schema = folder / "ledger" / "schema.json"
    before = schema.read_text()
    schema.write_text('{"schema": 99}')
    b.parts.text.value = "x"
    assert 'role="alert"' in b.parts.note.value and "install a newer rlbench" in b.parts.note.value
    schema.write_text(before)
    b.parts.text.value = ""
    assert b.parts.note.value == "" and len(b.parts.found.options) == 50
    empty = browse(create_run_folder(tmp_path, "empty"))
    assert "nothing found" in empty.parts.place.value and empty.parts.view.value == "" and empty.parts.note.value == ""


def test_handlers_on_threads(tmp_path):
    "Clicks and slides from several threads at once leave the browser in a state that fits together."
    folder = fake_run(tmp_path, rollouts=400)
    b, fates = browse(folder), ("trained", "filtered", "evaluated", "")

    def fiddle(n: int) -> None:
        for i in range(6):
            b.parts.fate.value = fates[(n + i) % 4]
            b.parts.after.click()
            b.parts.text.value = "+" if i % 2 else ""

    threads = [threading.Thread(target=fiddle, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    b.again()
    found = find_rollouts(folder, fate=b.parts.fate.value, text=b.parts.text.value)
    assert b.parts.note.value == "" and [v[0] for _, v in b.parts.found.options] == found["rollout"].head(50).to_list()


def test_choices_by_several_processes(tmp_path, script):
    "Three people choose at the same time; no line is torn, and the preference file holds all of them."
    folder = groups(tmp_path)
    work = """
import sys
from rlbench.views.ranking import Ranking
view = Ranking(sys.argv[1], sys.argv[2], least=0)
print("ready", flush=True); input()
for i in range(12):
    (view.parts.left, view.parts.right, view.parts.same)[i % 3].click()
assert view.parts.note.value == "", view.parts.note.value
"""
    people = [script(work, folder, f"person {i}", stdin=-1) for i in range(3)]
    for each in people:
        assert each.stdout.readline() == "ready\n", each.stderr.read()
    for each in people:
        each.stdin.write("\n")
        each.stdin.flush()
    assert [each.wait(400) for each in people] == [0] * 3, people[0].stderr.read()
    lines = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    assert len(lines) == 36 and len({line["id"] for line in lines}) == 36
    kept = [json.loads(line) for line in (folder / "preferences.jsonl").read_text().splitlines()]
    assert [line["id"] for line in kept] == [line["id"] for line in lines if line["verdict"] == "better"] and len(
        kept
    ) == 24
    again = Ranking(folder, "person 0", least=0)
    assert again.pair.key not in {c.key for c in read_choices(folder) if c.author == "person 0"}


def test_a_choice_that_cannot_be_kept_is_said(tmp_path):
    "With no place for the journal nothing is recorded, the pair stays, and the view says why."
    folder = groups(tmp_path)
    (folder / JOURNAL).mkdir()
    view = Ranking(folder, "ada", least=0)
    assert "Is a directory" in view.parts.note.value
    (folder / JOURNAL).rmdir()
    view = Ranking(folder, "ada", least=0)
    shown = view.pair
    (folder / "preferences.jsonl").mkdir()
    view.parts.left.click()
    assert 'role="alert"' in view.parts.note.value and view.pair == shown and read_choices(folder) == []
    (folder / "preferences.jsonl").rmdir()
    view.parts.left.click()
    assert view.parts.note.value == "" and len(read_choices(folder)) == 1 and view.pair != shown


def test_runs_beside_each_other(tmp_path, trained, script):
    runs = tmp_path / "runs"
    folders = fake_run(runs, "monday"), fake_run(runs, "friday", batches=31, state="running", closed=False, seed=2)
    both = compare("monday", attach("friday", runs=runs), runs=runs)
    assert [c.name for c in both.compared] == ["monday", "friday"] and both.cautions[0].startswith("friday is running")
    assert {d.field for d in both.differences} >= {"seed", "commands"} and both.endings[0].solve_rate_end > 0.9
    for x in ("version", "tokens", "minutes"):
        page = compare(*folders, trained, x=x)._repr_html_()
        assert page.count("<svg") == 7 + 2 * 3 and "<script" not in page
    frame = both.frame()
    assert (
        frame.filter(run="monday")["tokens"].is_sorted()
        and frame.filter(run="monday", version=60)["held_out"].is_not_null().all()
    )
    told = script("from rlbench.cli.main import main; main()", "compare", "monday", "friday", "--runs", runs, "--json")
    out, err = told.communicate(timeout=400)
    assert told.returncode == 0, err
    assert [r["run"] for r in json.loads(out)["runs"]] == ["monday", "friday"]
    lost = script("from rlbench.cli.main import main; main()", "compare", "mondy", "friday", "--runs", runs)
    assert "the nearest: monday" in lost.communicate(timeout=400)[1] and lost.returncode == 2


def test_looking_loads_no_model(trained, script):
    "A rollout is decoded without torch, and `import rlbench` brings in neither widgets nor tables."
    told = script(
        """
import sys
import rlbench.views.rollout_browser, rlbench.views.comparison, rlbench.views.ranking
print(*sys.modules)
page = rlbench.views.stored_rollout.rollout_html(sys.argv[1], int(sys.argv[2]))
assert "[3]" not in page and not {"torch", "transformers"} & set(sys.modules)
""",
        trained,
        0,
    )
    out, err = told.communicate(timeout=400)
    assert told.returncode == 0, err
    assert not {"torch", "transformers", "ipywidgets", "polars", "plotly", "tokenizers"} & set(out.split())


def test_the_prompt_is_shown_as_the_model_read_it():
    "The template and special tokens are seen; where the tokens are not known the task's words stand alone."
    words = {1: "<|im_start|>user\n", 2: "2+2=", 3: "<|im_end|>"}
    stored = StoredRollout(Path("run"), 1, 0, prompt="2+2=", prompt_tokens=np.array([1, 2, 3]))
    read = prompt_html(stored, lambda ids: "".join(words[token] for token in ids))
    assert (
        "<pre>&lt;|im_start|&gt;user\n2+2=&lt;|im_end|&gt;</pre>" in read
        and "3 tokens" in read
        and "<pre>2+2=</pre>" in read
    )
    assert prompt_html(stored, None) == "<h4>Prompt</h4><pre>2+2=</pre>"
