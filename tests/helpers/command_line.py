"""Verbs of the command line: in the process of the test, which is quick, or in one of their own,
as a person runs them."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from rlbench.cli.main import app


def run_verb(folder: Path, *arguments, code: int | None = 0) -> Result:
    "Run a verb in this process, in a folder; its exit status must be `code`, or any if that is None."
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, list(map(str, arguments)))
    assert code is None or done.exit_code == code, (arguments, done.output, done.exception)
    return done


def verb_facts(folder: Path, *arguments, code: int | None = 0) -> dict:
    "The JSON object that a verb in this process prints last."
    return json.loads(run_verb(folder, *arguments, "--json", code=code).stdout.splitlines()[-1])


def run_command(folder: Path, *arguments, code: int = 0) -> subprocess.CompletedProcess:
    "Run a verb in a process of its own, in a folder; its exit status must be `code`."
    command = [sys.executable, "-m", "rlbench.cli.main", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done


def command_facts(folder: Path, *arguments, code: int = 0) -> dict:
    "The JSON object that a verb in a process of its own prints last."
    return json.loads(run_command(folder, *arguments, "--json", code=code).stdout.splitlines()[-1])
