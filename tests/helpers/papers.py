"""The page of claims, nbs/papers.ipynb, made of the studies' records: `make readme`."""

import json

from rooms import ROOT

from rlbench.studies.study_record import (
    VERDICTS,
    StudyRecord,
    comparison_in_words,
    stored_studies,
    study_verdict,
)

RECORDS = ROOT / "data" / "studies" / "records"
TITLE = """# Claims of the field, run here

> Each claim on RL post-training with its paper, what was measured there and here, and whether it holds at this size."""
HOW = """A study takes one claim and states it as comparisons, each with the sign that the claim expects. \
It sums exactly what can be enumerated, and trains the rest with paired seeds and an arm that must show nothing. \
**Whether the claim holds is not written by anybody**: one function derives it from the stored numbers, after Holm's \
adjustment for all comparisons of the study ([studies/study_record](studies/03_study_record.ipynb)).

* **holds**: every comparison has the expected sign.
* **holds not**: one has the other sign, or is smaller than what would count.
* **cannot be told**: the seeds are too few for the scatter, or the null arm is not null. \
That is a result, too: it says how much a claim needs.

A verdict is about policies of a fifth of a million weights, and about tables. \
It is no verdict on a paper: beside it stands, in a sentence, what was learned, and each page says what it \
contradicts and what it does not. Where a sum contradicts a claim, the page begins with the sum."""
OWN = """## Your own

```sh
rlbench study --list --json         # all rows of this page, with intervals
rlbench study entropy_law           # make a study's runs again; interrupted, it goes on from where it was
rlbench study new my_claim          # a page in this form, with three arms that run in half a minute
```

`runs_of_ablation` takes the trials of `rl.ablate` into the form, and `run_of_folder` a run that another system has \
made ([studies/study_recipe](studies/05_study_recipe.ipynb))."""
LIMITS = """## Limits

* What a small policy cannot show is not here: experts and their routing, kernels of an engine, long reasoning, \
pretraining.
* Several studies have a single run of each arm; their verdict is that nothing can be told.
* A margin, the smallest difference that counts, is a judgement. It stands in the record."""
HEADS = "| claim | paper | measured there | measured here | result | verdict | again |\n|---|---|---|---|---|---|---|"


def is_of_a_paper(record: StudyRecord) -> bool:
    "True for a claim that was published as a paper, rather than by or about a system."
    return bool(record.source.identifier) and "SemiAnalysis" not in record.source.identifier


def cell_text(text: str) -> str:
    "Text inside a cell of a table."
    return text.replace("|", "\\|").replace("\n", " ")


def results_in_words(record: StudyRecord) -> str:
    "The comparisons with their intervals, by what was measured; a measure stands once."
    by_measure: dict[str, list[str]] = {}
    for test in record.tests:
        by_measure.setdefault(test.measure, []).append(comparison_in_words(test))
    return "<br>".join(f"*{measure}*: {'; '.join(found)}" for measure, found in by_measure.items())


def claim_row(record: StudyRecord) -> str:
    "A study as a row of the table."
    source = record.source
    verdict = study_verdict(record)
    paper = ", ".join(part for part in (f"*{source.title}*", str(source.year), source.identifier) if part)
    seeds = f"{record.seeds} seeds" if record.seeds > 1 else ("one run" if record.seeds else "exact")
    cells = [
        f"[{record.claim}]({record.page})",
        paper,
        record.measured_there,
        f"{record.measured_here} ({seeds})",
        results_in_words(record),
        f"**{verdict.word}**: {verdict.reason}. {record.reading}",
        f"`{record.command}`",
    ]
    return f"| {' | '.join(map(cell_text, cells))} |"


def claim_table(title: str, records: list[StudyRecord]) -> str:
    "A heading and the rows of some studies."
    return "\n".join([f"## {title}\n", HEADS, *map(claim_row, records)])


def counted_verdicts(records: tuple[StudyRecord, ...]) -> str:
    "How many claims there are, and how many of them come out each way."
    words = [study_verdict(record).word for record in records]
    counts = {word: words.count(word) for word in VERDICTS}
    hold, not_hold, untold = counts.values()
    return f"**{len(records)} claims: {hold} hold here, {not_hold} do not, {untold} cannot be told.**"


def papers_sections() -> dict[str, str]:
    "The text of the page by cell id."
    records = stored_studies(RECORDS)
    papers = [record for record in records if is_of_a_paper(record)]
    others = [record for record in records if not is_of_a_paper(record)]
    return {
        "papers-title": TITLE,
        "papers-how": HOW,
        "papers-count": counted_verdicts(records),
        "papers-papers": claim_table("Claims of papers", papers),
        "papers-others": claim_table("Claims about published runs, and about the policies here", others),
        "papers-own": OWN,
        "papers-limits": LIMITS,
    }


def papers_notebook() -> str:
    "The text of the file nbs/papers.ipynb."
    cells = [
        {"cell_type": "markdown", "id": id, "metadata": {}, "source": text.splitlines(keepends=True)}
        for id, text in papers_sections().items()
    ]
    kernel = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
