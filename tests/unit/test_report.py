"""The report of run folders of every kind: finished, stopped, failed, empty, live, long, damaged;
and what is inside the page."""

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from fake_run import fake_run

from rlbench.base.run_files import create_run_folder
from rlbench.views.report import report_html, write_report
from rlbench.views.report_rollouts import read_shown_rollouts
from rlbench.views.report_tables import read_scoring_failures
from rlbench.views.run_data import read_run_data
from rlbench.views.run_summary import read_summary

KINDS = {
    "finished": {},
    "stopped": {"batches": 7, "state": "stopped", "reason": "stopped by ada", "every": 100},
    "failed": {"batches": 0, "state": "failed", "reason": "trainer: out of memory", "evals": False, "closed": False},
    "live": {"batches": 31, "state": "running", "closed": False, "evals": False},
    "one": {"batches": 1, "planned": 1, "rollouts": 1, "every": 1},
    "start_only": {"batches": 0, "state": "stopped", "reason": "stopped by ada"},
}
VOID = {"meta", "br", "img", "input", "hr", "link"}


class Checked(HTMLParser):
    "Fails on tags that do not nest; collects attributes that could load something."

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_stands_alone_and_is_well_formed(kind, tmp_path):
    page = write_report(fake_run(tmp_path, kind, **KINDS[kind])).read_text(encoding="utf-8")
    checked = Checked()
    checked.feed(page)
    assert (
        not checked.open
        and not checked.loads
        and "script" not in checked.tags
        and "@import" not in page
        and "url(" not in page
    )
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        root = ElementTree.fromstring(svg)
        assert (
            root.get("role") == "img"
            and len(root.get("aria-label")) > 10
            and len(svg) < 30_000
            and "nan" not in svg.lower().replace("nanos", "")
        )
    assert (
        'name="viewport"' in page
        and "prefers-color-scheme:dark" in page
        and "@media print" in page
        and len(page) < 400_000
    )
    assert not list(tmp_path.glob("*/.report*"))


def test_a_finished_run(tmp_path):
    folder = fake_run(tmp_path)
    s = read_summary(folder)
    assert (s.state, s.versions, s.evaluations, s.eval, s.books_closed, s.missing) == (
        "finished",
        60,
        4,
        "held_out",
        True,
        (),
    )
    assert (
        s.solve_rate_start == pytest.approx(0.32)
        and s.solve_rate_end == pytest.approx(0.961, abs=1e-3)
        and 1.5 < s.length_growth < 2.5
        and s.wall_s == pytest.approx(93)
    )
    assert json.loads(json.dumps(asdict(s)))["commands"] == 2
    page = write_report(folder).read_text(encoding="utf-8")
    assert (
        "0.320<small> ± 0.021" in page
        and "0.961<small> ± 0.009" in page
        and "temperature" in page
        and "use group &gt;= 2" in page
        and "0123456789abcdef01" in page
    )
    assert page.count("<article>") == 20 and "<script>alert" not in page


def test_what_a_response_wrote_is_shown_and_never_run(tmp_path):
    folder = fake_run(tmp_path, rollouts=300)
    nasty = [r for r in read_shown_rollouts(folder) if "<script>" in r.text]
    assert nasty
    page = report_html(read_run_data(folder), nasty * 10)
    assert (
        "&lt;script&gt;alert" in page
        and "<script" not in page
        and "&amp;amp;" in page
        and "\u2400" in page
        and "\0" not in page
    )


def test_scoring_that_failed_is_told_with_its_first_message(tmp_path):
    folder = fake_run(tmp_path)
    failed, shown = read_scoring_failures(folder), [r for r in read_shown_rollouts(folder) if r.message]
    assert (
        failed.count == 33 == len(shown)
        and failed.message.endswith("make it <faster>")
        and all(r.reward is None for r in shown)
    )
    assert "Scoring failed 33 times:" in write_report(folder).read_text(encoding="utf-8")
    page = report_html(read_run_data(folder), shown * 2)
    assert (
        page.count("make it &lt;faster&gt;</p>") == 20
        and "line 3, in shaky" not in page
        and "no reward" in page
        and "Scoring failed" not in page
    )
    assert "1.1 over 20 versions" in page
    assert read_scoring_failures(create_run_folder(tmp_path, "empty")).count == 0


@pytest.mark.parametrize(
    "kind, told",
    [
        (
            "failed",
            (
                "failed after 0 finished batches (trainer: out of memory)",
                "No batch was trained",
                "configuration names no evaluation set",
                "books are not closed: 0 of 37",
            ),
        ),
        ("stopped", ("ended after 7 of 60 batches (stopped by ada)",)),
        ("start_only", ("No batch was trained", "Only one evaluation was finished")),
        ("live", ("not over when this was written", "books are not closed")),
    ],
)
def test_what_is_missing_is_said(kind, told, tmp_path):
    s = read_summary(fake_run(tmp_path, kind, **KINDS[kind]))
    for sentence in told:
        assert any(sentence in line for line in s.missing), s.missing


def test_folders_with_nothing_or_with_damage(tmp_path):
    empty = create_run_folder(tmp_path, "empty")
    assert "No batch was trained" in write_report(empty).read_text(encoding="utf-8") and "no status.json" in " ".join(
        read_summary(empty).missing
    )
    damaged = fake_run(tmp_path, "damaged")
    (damaged / "config.toml").write_text("steps = [", encoding="utf-8")
    (damaged / "provenance.json").write_text("{", encoding="utf-8")
    page = write_report(damaged).read_text(encoding="utf-8")
    assert (
        "config.toml is missing or cannot be read" in page
        and "provenance.json is missing or cannot be read" in page
        and read_summary(damaged).solve_rate_end is not None
    )
    with pytest.raises(FileNotFoundError, match="give the path of a run"):
        write_report(tmp_path / "nowhere")


def test_pairs_are_of_one_level_and_of_both_ends(tmp_path):
    folder = fake_run(tmp_path)
    rollouts = read_shown_rollouts(folder)
    assert (
        all((r.reward is not None or r.message) and r.fate != "evaluated" for r in rollouts)
        and len(read_shown_rollouts(folder, at_most=100)) < 120
    )
    from rlbench.views.report_rollouts import pair_early_and_late

    found = pair_early_and_late(rollouts)
    assert (
        len(found) == 10
        and all(a.level == b.level and a.rollout < 210 and b.rollout > 1790 for a, b in found)
        and found == pair_early_and_late(rollouts)
    )


@pytest.mark.slow
def test_a_long_run_is_reported_in_seconds(tmp_path):
    folder = fake_run(tmp_path, batches=2000, planned=2000, every=10, rollouts=25_000)
    began = time.monotonic()
    page = write_report(folder)
    assert time.monotonic() - began < 20 and page.stat().st_size < 400_000


def test_the_report_needs_neither_torch_nor_plotly(tmp_path):
    folder = fake_run(tmp_path)
    program = (
        f"import sys; from rlbench.views.report import write_report; write_report({str(folder)!r}); assert not "
        f"{{'torch', 'transformers', 'plotly'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=400)
