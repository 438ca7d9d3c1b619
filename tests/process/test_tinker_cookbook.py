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

from rlbench.service.serve_tinker import serve_tinker

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    "A service that answers under the name of a model that the cookbook knows."
    folder = tmp_path_factory.mktemp("cookbook")
    with serve_tinker("tiny", runs=folder, name="shared", aliases=["Qwen/Qwen3-8B-Base"]) as started:
        yield started


@pytest.mark.parametrize("recipe", ["rl_loop", "sl_loop"])
def test_an_unmodified_recipe_trains_two_steps(recipe, service, tmp_path):
    "The installed file is the published one; it logs two steps with a gradient and saves a state at the end."
    (file,) = [each for each in distribution("tinker-cookbook").files if each.match(f"recipes/{recipe}.py")]
    digest = hashlib.sha256(Path(file.locate()).read_bytes()).digest()
    assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value

    command = [sys.executable, str(HELPERS / "cookbook_recipe.py"), recipe, service.url, str(tmp_path)]
    environment = {**os.environ, "TINKER_API_KEY": service.key, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [0, 1]
    assert all(row["grad_norm:mean"] > 0 for row in logged)
    if recipe == "rl_loop":
        assert all(0 < row["reward/total"] < 1 for row in logged)
    else:
        assert logged[1]["train_mean_nll"] < logged[0]["train_mean_nll"]
    (saved,) = (tmp_path / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(saved)["state_path"].startswith("tinker://")
