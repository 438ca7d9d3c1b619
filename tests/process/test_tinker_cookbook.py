"""The recipes `rl_loop` and `sl_loop` of tinker-cookbook 0.6.1, unmodified, for two steps on our service.

`helpers/cookbook_recipe.py` says what is replaced to run without the Hugging Face Hub: data set and tokenizer.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from rlbench.service.tinker_service import serve_tinker

HELPERS = Path(__file__).parents[1] / "helpers"
RECIPES = ("rl_loop", "sl_loop")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    "A service that answers under the name of a model that the cookbook knows."
    folder = tmp_path_factory.mktemp("cookbook")
    with serve_tinker("tiny", runs=folder, name="shared", aliases=["Qwen/Qwen3-8B-Base"]) as started:
        yield started


@pytest.fixture(scope="module")
def logs(service, tmp_path_factory) -> Path:
    "A folder with what each recipe logged. One process runs both: its imports take longer than they do."
    folder = tmp_path_factory.mktemp("logs")
    command = [sys.executable, str(HELPERS / "cookbook_recipe.py"), service.url, str(folder), *RECIPES]
    environment = {**os.environ, "TINKER_API_KEY": service.key, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_unmodified_recipe_trains_two_steps(recipe, logs):
    "The installed file is the published one; it logs two steps with a gradient and saves a state at the end."
    (file,) = [each for each in distribution("tinker-cookbook").files if each.match(f"recipes/{recipe}.py")]
    digest = hashlib.sha256(Path(file.locate()).read_bytes()).digest()
    assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value

    logged = [json.loads(line) for line in (logs / recipe / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [0, 1]
    assert all(row["grad_norm:mean"] > 0 for row in logged)
    if recipe == "rl_loop":
        assert all(0 < row["reward/total"] < 1 for row in logged)
    else:
        assert logged[1]["train_mean_nll"] < logged[0]["train_mean_nll"]
    (saved,) = (logs / recipe / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(saved)["state_path"].startswith("tinker://")
