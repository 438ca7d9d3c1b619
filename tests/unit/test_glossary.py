"""The glossary and the code say the same: every name on the page exists,
and every noun of the tables is on the page."""

import ast
import json
import re
from functools import cache

import pytest
from rooms import PACKAGE, ROOT, module_path, modules, room_of

from rlbench import records
from rlbench.base import tables
from rlbench.base.tables import TABLES
from rlbench.loop.config import RunConfig

PLAIN_ROOMS = (
    "",
    "base",
    "loop",
    "runtime",
    "planning",
    "foreign",
)  # their names do without the words that the page avoids
ALLOWED = {  # name: why it keeps a word that the page avoids
    "writer": "column of the table `rollouts`, and the field of records and events that leads to it",
    "oldest_writer": "the same",
    "scripted_hardship": "field of the configuration, which keeps its name",
    "elsewhere": "field of an event: journals hold it",
    "said": "field inside a room: what a turn of an actor, or a replay, has still to hand over; another system's texts",
    "told": "field of the balance rule's memory, which checkpoints hold",
    "beside": "the same, and a field of plan files",
    "room": "property of the balance rule's settings, and of the worker's half; key of a plan as data",
    "whole": "property of a digest: all parts in one hash",
}


@cache
def sections() -> dict[str, str]:
    "The text of each cell of the page by its id."
    notebook = json.loads((ROOT / "nbs/glossary.ipynb").read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}


def entries() -> list[list[str]]:
    "The rows of the tables of words: word, meaning, places in code."
    rows = []
    for name, text in sections().items():
        if name not in ("glossary-avoid", "glossary-alone", "glossary-plain"):
            rows += [
                [cell.strip() for cell in line.strip("|").split("|")]
                for line in text.splitlines()
                if line.startswith("| ") and not line.startswith("| word |")
            ]
    return rows


def avoided_words(table: str) -> set[str]:
    "The words in the left column of a table of words to avoid."
    rows = re.findall(r"^\| ([a-z, ]+) \| ", sections()[table], re.M)
    return {word for row in rows[1:] for word in row.split(", ")}


def plain_words() -> set[str]:
    "The words of column names that the page calls plain English."
    return set(re.findall(r"`(\w+)`", sections()["glossary-plain"]))


@cache
def definitions() -> tuple[dict[str, set[str]], set[str]]:
    "Every class of the package with the names inside it, and every function."
    classes, functions = {}, set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                inside = classes.setdefault(node.name, set())
                for part in node.body:
                    if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        inside.add(part.name)
                    elif isinstance(part, ast.AnnAssign):
                        inside.add(ast.unparse(part.target))
                    elif isinstance(part, ast.Assign):
                        inside |= {ast.unparse(target) for target in part.targets}
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.add(node.name)
    return classes, functions


def is_there(name: str) -> bool:
    "A class, a part of a class, a column, a table, a field of the configuration, or a function exists under this name."
    classes, functions = definitions()
    if name.endswith("()"):
        return name[:-2] in functions
    owner, _, part = name.partition(".")
    if owner in TABLES and part:
        return part in {column.name for column in TABLES[owner]}
    if part:
        return part in classes.get(owner, ())
    return owner in classes or owner in RunConfig.model_fields or hasattr(records, owner) or hasattr(tables, owner)


def words_of(name: str) -> list[str]:
    "The words of a name in snake_case or CamelCase, in lower case."
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def test_every_name_on_the_page_exists():
    """The third column names classes, parts of classes, columns, fields of the configuration and functions that are
    there."""
    assert len(entries()) > 100
    wrong = [name for *_, places in entries() for name in re.findall(r"`([^`]+)`", places) if not is_there(name)]
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["Rollouts", "Rollout.fates", "rollouts.fates", "stalenes", "no_function()"])
def test_a_name_that_is_not_there_is_found(name):
    "The check looks: a class, a part, a column, a field and a function that do not exist."
    assert not is_there(name)


def test_a_word_has_one_entry():
    "No word stands twice on the page."
    words = [word.strip() for entry, *_ in entries() for word in entry.split(",")]
    assert sorted(words) == sorted(set(words))


def test_every_record_is_on_the_page():
    "Each class of `records` is named in the third column."
    named = {name.partition(".")[0] for *_, places in entries() for name in re.findall(r"`([^`]+)`", places)}
    tree = ast.parse(module_path("records").read_text(encoding="utf-8"))
    missing = {node.name for node in tree.body if isinstance(node, ast.ClassDef)} - named
    assert not missing, missing


def test_every_noun_of_a_column_is_on_the_page():
    "Each word of a column's name has an entry, is named with its column, or is plain English by the page's own list."
    known = plain_words()
    for entry, _, places in entries():
        known |= {form for word in re.findall(r"\w+", entry.lower()) for form in (word, f"{word}s")}
        known |= {
            word for name in re.findall(r"`(\w+)\.(\w+)`", places) if name[0] in TABLES for word in words_of(name[1])
        }
    missing = {word for columns in TABLES.values() for column in columns for word in words_of(column.name)} - known
    assert not missing, (
        f"{missing}: words of columns without a place in nbs/glossary.ipynb: an entry, or the list of plain words"
    )


def test_names_do_without_the_words_that_the_page_avoids():
    "Functions, classes and their fields in the rooms that the page names."
    avoided, alone = avoided_words("glossary-avoid"), avoided_words("glossary-alone")
    assert len(avoided) > 8 and len(alone) > 6
    found = []
    for module in modules():
        if room_of(module) not in PLAIN_ROOMS:
            continue
        for node in ast.walk(ast.parse(module_path(module).read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [node.name]
            elif isinstance(node, ast.ClassDef):
                names = [
                    node.name,
                    *(ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)),
                ]
            found += [
                f"{module}: {name}"
                for name in names
                if name not in ALLOWED
                and (avoided & set(words_of(name)) or name.lower().strip("_").removesuffix("_of") in alone)
            ]
    assert not found, found


def test_exceptions_are_used():
    "A name that no longer exists is no exception any more."
    text = "\n".join(module_path(module).read_text(encoding="utf-8") for module in modules())
    unused = [name for name in ALLOWED if not re.search(rf"\b{name}\b", text)]
    assert not unused, unused
