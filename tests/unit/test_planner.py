"""The planner: what it refuses, what it says, what it reproduces, and its verb."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rlbench.bench.acceptance import ROWS, SIMULATED, check_rows
from rlbench.cli.main import app
from rlbench.planning.forecast import forecast_form, forecast_simulated
from rlbench.planning.plan_choices import (
    cheapest,
    compare_settings,
    compare_tenants,
    gpu_splits,
    input_swings,
    target_of,
)
from rlbench.planning.plan_cycle import calibrate_plan
from rlbench.planning.plan_drift import forecast_change
from rlbench.planning.plan_memory import memory_of
from rlbench.planning.plan_pace import pace_and_binding_limit, plan_warnings, rollout_limits
from rlbench.planning.plan_parts import value_at_version
from rlbench.planning.plan_sheets import best_words, forecast_facts, plan_facts
from rlbench.planning.planfile import load_plan, plan_names, with_value
from rlbench.planning.planner import override_plan, plan_run

PRIME = "prime-qwen3-235b"
SMALL = {
    "model": {"name": "Qwen3-8B"},
    "generators": {"gpu": "H100", "gpus": 4},
    "trainer": {"gpus": 4},
    "rollouts": {"prompt": 500, "response": 1500, "sigma": 0.5, "solve": [1, 1]},
    "run": {"batch": 64, "group": 8, "concurrency": 64, "staleness": 2, "filter": "zero_advantage"},
}
PUBLISHED = ("prime-glm-5", PRIME, "slime-qwen3-235b", "verl-gb300")


def refusal(source, changes) -> str:
    "The words of the error for a plan with a few fields changed."
    with pytest.raises(ValueError) as error:
        plan_run(source, changes, simulate=False)
    return str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"generators.gpu": "H2000"}, ("generators.gpu", "'H2000'", "did you mean 'H200'")),
        ({"trainer.gpu": "H2000"}, ("trainer.gpu", "'H2000'")),
        ({"model.name": "Qwen9"}, ("model.name", "'Qwen9'", "known:")),
        ({"model.config": "nowhere/config.json"}, ("model: give either name",)),
        ({"model.name": "", "model.config": "nowhere/config.json"}, ("model.config", "nowhere")),
        ({"rollouts.sgma": 1}, ("rollouts", "'sgma'", "did you mean 'sigma'")),
        ({"rollouts.sigma": "wide"}, ("rollouts.sigma", "'wide'", "give a number")),
        ({"rollouts.sigma": 9}, ("rollouts.sigma", "outside [0, 3]")),
        ({"rollouts.sigma": [0.5, 0.4, 0.6]}, ("rollouts.sigma", "does not rise")),
        ({"rollouts.solve": [1, -1]}, ("rollouts.solve", "Beta")),
        ({"rollouts.response": 0.0}, ("rollouts.response", "outside")),
        ({"generators.gpus": True}, ("generators.gpus", "bool")),
        ({"run.batch": 500}, ("run.batch", "use 496 or 512")),
        ({"run.clock": "real"}, ("run.clock", "leave it out")),
        ({"run.nonsense": 1}, ("run.nonsense",)),
        ({"prices.tokens": "Tonker"}, ("prices.tokens", "'Tonker'")),
        ({"trainer.transport": "pigeon"}, ("trainer.transport", "'pigeon'")),
        ({"environment.offer": "Modal", "environment.start": 2.0}, ("environment.start", "one of start and offer")),
        ({"drift.latency": []}, ("drift.latency", "[352, 1941]")),
        ({"generators.engine": 256}, ("generators.engine", "use at most 192")),
        (
            {"generators.engine": 1, "generators.tensor_parallel": 1},
            ("generators.engine", "Qwen3-235B-A22B in fp8 takes 235 GB", "use at least 2 GPUs an engine"),
        ),
        ({"trainer.gpus": 4}, ("trainer.gpus", "use at least 8")),
        ({"trainer.gpus": 8, "trainer.offload": False}, ("trainer.gpus", "trainer.offload = true")),
        ({"tenancy.runs": 9}, ("tenancy.runs", "9 runs", "at most 4 fit", "tenancy.rank")),
        ({"tenancy.runs": 500, "tenancy.adapter": 4.0}, ("tenancy.runs", "at most 181 fit")),
        ({"tenancy.runs": 2, "tenancy.rank": 32}, ("tenancy.rank", "tenancy.adapter")),
        ({"rollouts.latency": 60.0}, ("rollouts.latency", "at the very best")),
    ],
)
def test_what_cannot_be_is_refused_by_name_with_a_remedy(changes, words):
    told = refusal(PRIME, changes)
    assert all(word in told for word in words), told


def test_a_table_that_is_none_and_a_missing_field():
    for table, words in (
        ({**SMALL, "gpus": {}}, "unknown name 'gpus'"),
        ({**SMALL, "generators": 3}, "generators: 3 is no table"),
        ({**SMALL, "run": 3}, "run: 3 is no table"),
        ({**SMALL, "trainer": {}}, "trainer.gpus: missing, and a plan needs it"),
        ({**SMALL, "rollouts": {}}, "rollouts.response: missing, and a plan needs it"),
    ):
        assert words in refusal(table, {})


def test_files_ranges_tables_and_a_config_json(tmp_path):
    (tmp_path / "m").mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    (tmp_path / "mine.toml").write_text("[gpu.Mine]\npeak = 100\nmemory = 40\nbandwidth = 1.0\nhour = 0.5\n")
    (tmp_path / "a.toml").write_text(
        "[model]\n"
        'config = "m/config.json"\n'
        "[generators]\n"
        'gpu = "Mine"\n'
        "gpus = 2\n"
        "[trainer]\n"
        "gpus = 1\n"
        "[rollouts]\n"
        "response = [50, 60, 80]\n"
        "solve = [1.0, 2.0]\n"
        "[run]\n"
        "batch = 64\n"
        "group = 8\n"
        "concurrency = [8, 16, 16]\n"
        "staleness = 1\n"
    )
    found = load_plan(tmp_path / "a.toml", {"rollouts.sigma": 0.2}, tmp_path / "mine.toml")
    assert (
        found.shape.layers == 2
        and found.rollouts.response == 60
        and found.rollouts.sigma == 0.2
        and found.rollouts.solve == (1.0, 2.0)
        and found.hourly == 1.5
        and found.run.concurrency == 16
    )
    assert set(found.ranges) == {"rollouts.response", "run.concurrency"}
    (tmp_path / "bad.toml").write_text("[model\n")
    for source, words in ((tmp_path / "bad.toml", "not valid TOML"), (tmp_path / "none.toml", "there is no file")):
        with pytest.raises(ValueError, match=words):
            load_plan(source)


@pytest.mark.parametrize("name", sorted(plan_names()))
def test_every_number_of_a_plan_that_comes_along_says_where_it_is_from(name):
    from importlib.resources import files

    text = (files("rlbench.data") / "planner" / f"{name}.toml").read_text(encoding="utf-8")
    told = ("# published", "# derived", "# fitted", "# assumed", "# ours", "# read off")
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith(("about", "#"))]
    assert name == "tiny" or all(any(word in line for word in told) for line in lines), [
        line for line in lines if not any(word in line for word in told)
    ]


@pytest.mark.parametrize("name", sorted(plan_names()))
def test_a_plan_holds_together(name):
    found = plan_run(name, simulate=False)
    f = found.formed
    assert (
        abs(f.compute + f.sync + f.wait - 1) < 1e-6
        and 0 <= f.discarded < 1
        and 0.99 < sum(share for _, share in f.fates) <= 1 + 1e-9
    )
    assert (
        abs(f.ratio * f.compute - 1) < 1e-9
        and f.rate * f.step == pytest.approx(found.file.run.batch)
        and f.staleness <= found.file.run.staleness
    )
    assert str(found).count("$") > 5 and found.words and json.dumps(plan_facts(found), default=str)
    assert (
        max(len(line) for line in str(found).splitlines() if not line.startswith("!") and "  " in line) <= 80
    )  # tables; sentences are wrapped


def test_a_forecast_as_data_keeps_its_keys():
    "Fields of a record may get other names; the keys that `rlbench plan --json` prints stay."
    facts = forecast_facts(forecast_form(load_plan("prime-qwen3-235b")))
    assert {"rate", "oldest", "thrown", "thrown_tokens", "beside", "wall", "fates"} <= facts.keys()
    assert not {"max_staleness", "discarded", "discarded_tokens", "wall_with_other"} & facts.keys()


def test_the_published_plans_close():
    prime, glm, slime = (forecast_form(load_plan(name)) for name in (PRIME, "prime-glm-5", "slime-qwen3-235b"))
    assert (
        prime.rate == pytest.approx(1.95, rel=0.03)
        and prime.wait == pytest.approx(0.29, abs=0.015)
        and prime.mfu == pytest.approx(0.105, abs=0.001)
        and prime.staleness == pytest.approx(4.5, abs=0.3)
        and prime.listed == pytest.approx(3.43, abs=0.01)
    )
    assert (
        glm.wait == pytest.approx(0.74, abs=0.02)
        and glm.ratio == pytest.approx(5.0, abs=0.2)
        and glm.rate == pytest.approx(0.60, rel=0.05)
        and glm.zero_advantage == pytest.approx(0.55, abs=0.02)
    )
    assert (
        slime.wait == pytest.approx(0.60, abs=0.01)
        and slime.latency_billed == pytest.approx(16.17, rel=0.01)
        and slime.listed == pytest.approx(3.34, abs=0.01)
    )
    assert 0.3 < forecast_form(load_plan("verl-gb300")).wait < 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run.concurrency": 16},
        {"run.concurrency": 128},
        {"rollouts.latency": 40.0, "run.concurrency": 32},
        {"trainer.sync": 10.0, "run.concurrency": 24},
        {"rollouts.turns": 4, "rollouts.tool": 5.0},
        {"trainer.seconds": 60.0},
    ],
)
def test_form_and_simulation_agree(changes):
    file = load_plan(SMALL, {"run.staleness": 8, "generators.efficiency": 0.05, "trainer.mfu": 0.2, **changes})
    formed, simulated = forecast_form(file), forecast_simulated(file, look=45)
    assert (
        simulated.rate == pytest.approx(formed.rate, rel=0.1)
        and simulated.wait == pytest.approx(formed.wait, abs=0.06)
        and simulated.latency == pytest.approx(formed.latency, rel=0.16)
    )  # with turns, one waits in line for each
    assert simulated.staleness == pytest.approx(formed.staleness, abs=0.7)


@pytest.mark.slow
def test_what_binds_follows_the_lowest_limit():
    assert plan_run(PRIME, simulate=False).bind == "run.concurrency"
    assert plan_run(PRIME, {"run.concurrency": 9000, "trainer.seconds": 60.0}, simulate=False).bind == "memory"
    assert (
        plan_run(PRIME, {"run.concurrency": 9000, "environment.sandboxes": 100}, simulate=False).bind
        == "environment.sandboxes"
    )
    assert plan_run(PRIME, {"run.staleness": 1}, simulate=False).bind == "run.staleness"
    assert plan_run(PRIME, {"trainer.seconds": 900.0}, simulate=False).bind == "trainer"
    assert (
        plan_run(
            SMALL,
            {"rollouts.turns": 20, "rollouts.tool": 60.0, "trainer.mfu": 0.9, "run.concurrency": 8},
            simulate=False,
        ).bind
        == "tools"
    )
    unasked = {**SMALL, "run": {k: v for k, v in SMALL["run"].items() if k != "concurrency"}}
    assert "run.concurrency" not in {
        limit.name for limit in rollout_limits(load_plan(unasked), memory_of(load_plan(unasked)))
    }


@pytest.mark.slow
def test_flags_in_words():
    told = lambda **changes: " ".join(plan_run("verl-gb300", changes, simulate=False).flags)  # noqa: E731
    assert "over capacity: 960" in told(**{"run.concurrency": 960}) and "16,300" in told(**{"run.concurrency": 960})
    assert "over the quota: 960" in told(**{"run.concurrency": 960, "environment.sandboxes": 96}) and "9 times" in told(
        **{"run.concurrency": 960, "environment.sandboxes": 96}
    )
    assert "idle: 1 of 25" in told(**{"generators.gpus": 25}) and told() == ""
    assert any(
        flag.startswith("drift")
        for flag in plan_warnings(load_plan("prime-glm-5"), memory_of(load_plan("prime-glm-5")))
    )


@pytest.mark.slow
def test_the_best_split_keeps_the_target_and_is_the_cheapest():
    file = load_plan(PRIME)
    found, top = gpu_splits(file), cheapest(gpu_splits(file))
    assert all(
        choice.forecast.staleness <= target_of(file) + 1e-6
        and choice.writing + choice.training == 256
        and choice.extra_cost >= 0
        for choice in found
    )
    assert top.forecast.wall == min(choice.forecast.wall for choice in found) and 192 <= top.writing <= 208
    assert gpu_splits(replace(file, trainer=replace(file.trainer, gpu="H100"))) == ()
    tight = cheapest(gpu_splits(with_value(file, "target.staleness", 2.0)))
    assert tight.forecast.staleness <= 2.0 and tight.forecast.wall > top.forecast.wall


def test_settings_and_ranges_say_what_they_cost():
    file = load_plan(PRIME)
    priced = {(choice.place, choice.value): choice for choice in compare_settings(file)}
    assert (
        priced["run.concurrency", 589].forecast.rate
        < priced["run.concurrency", 1178].forecast.rate
        < priced["run.concurrency", 2356].forecast.rate
    )
    assert priced["run.publish_every", 4].forecast.staleness > priced["run.publish_every", 1].forecast.staleness
    swings = input_swings(file)
    assert (
        {swing.place for swing in swings} == set(file.ranges)
        and swings[0].place == "run.concurrency"
        and all(swing.is_given for swing in swings)
    )
    assert [swing.moves for swing in swings] == sorted((swing.moves for swing in swings), reverse=True)
    assert not any(swing.is_given for swing in input_swings(load_plan(SMALL)))


def test_a_fitted_plan_says_the_same_without_its_measurement():
    for name in PUBLISHED:
        file = load_plan(name)
        again = forecast_form(calibrate_plan(file))
        assert (
            again.rate == pytest.approx(forecast_form(file).rate, rel=0.02)
            and pace_and_binding_limit(calibrate_plan(file), memory_of(file))[0].fitted is False
        )


@pytest.mark.slow
def test_more_tenants_share_the_generators_and_need_memory():
    file = load_plan(SMALL, {"generators.efficiency": 0.05, "tenancy.rank": 16, "run.staleness": 0, "trainer.gpus": 2})
    found = compare_tenants(file, 6)
    assert [t.runs for t in found] == [1, 2, 3, 4, 5, 6] and all(
        a.rate >= b.rate - 1e-9 and a.weights < b.weights and a.room > b.room for a, b in zip(found, found[1:])
    )
    assert found[1].wall < found[0].wall
    shown = plan_run(with_value(file, "tenancy.runs", 3), simulate=False)
    assert any(flag.startswith("tenancy") for flag in shown.flags) and "Runs on the same generators" in str(shown)
    own = compare_tenants(with_value(file, "tenancy.rank", 0), 6)
    assert 1 < len(own) < 6  # each with weights of its own: an H100 holds a few


@pytest.mark.slow
def test_a_simulation_says_how_far_it_is():
    "Each of the three in its turn, every version of it once, up to the last one."
    heard = []
    plan_run(
        load_plan(SMALL, {"drift.response": [1500, 2000], "drift.over": 4, "generators.gpus": 2, "trainer.gpus": 6}),
        on_version=lambda *place: heard.append(place),
    )
    names = list(dict.fromkeys(name for name, _, _ in heard))
    assert names == ["the plan", "the best split", "the change"]
    for each in names:
        (last,) = {last for name, _, last in heard if name == each}
        assert [version for name, version, _ in heard if name == each] == list(range(1, last + 1))


def test_drift_is_named_not_the_mean():
    file = load_plan(
        "prime-glm-5",
        {
            "run.batch": 64,
            "run.concurrency": 192,
            "trainer.seconds": 21.0,
            "trainer.sync": 0.0,
            "run.filter": "none",
            "run.group": 8,
        },
    )
    found = forecast_change(file, 0, 20)
    assert (
        found.falls == pytest.approx(5.5, rel=0.15)
        and found.causes[0][0] == "latency"
        and found.causes[0][3] == pytest.approx(352 / 1941, rel=0.01)
    )
    assert value_at_version((1, 3), 5, 10) == 2
    with pytest.raises(ValueError, match="drift: the plan has none"):
        forecast_change(load_plan(PRIME))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in SIMULATED])
def test_fast_rows_are_met(name):
    found = check_rows(only=[name])[0]
    assert found.ok and found.id == name and found.got, found


@pytest.mark.slow
def test_simulated_rows_with_fewer_seeds():
    from rlbench.bench.acceptance import prime_row, queue_row, quota_row, unfinished_row

    assert list(ROWS) == [f"A{i}" for i in range(1, 20)]
    assert all(
        found.ok
        for found in (
            prime_row((0,), 40),
            quota_row(),
            unfinished_row((0,)),
            queue_row((0,), (("drop_oldest", 0.9, 1), ("drop_oldest", 1.1, 1), ("hold", 1.5, 2))),
        )
    )


def call(*arguments, code: int = 0):
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.mark.slow
def test_the_verb(tmp_path):
    listed = call("plan").output
    assert all(name in listed for name in plan_names()) and set(
        json.loads(call("plan", "--json").stdout)["plans"]
    ) == set(plan_names())
    shown = call("plan", "tiny", "--set", "run.concurrency=64", "--no-simulation").output
    assert "What binds" in shown and "closed form" in shown and "simulated" not in shown
    told = json.loads(call("plan", "tiny", "--json").stdout.splitlines()[-1])
    assert (
        told["plan"] == "tiny"
        and told["forecast"]["simulated"]["rate"] > 0
        and told["limits"]
        and told["splits"] is not None
    )
    assert "did you mean 'sigma'" in call("plan", "tiny", "--set", "rollouts.sgma=1", code=2).output
    assert "give the path of a .toml file" in call("plan", "nope", code=2).output
    checked = json.loads(call("plan", "--check", "--only", "A1", "--only", "A11", "--json").stdout.splitlines()[-1])
    assert (
        checked["ok"]
        and [(row["id"], row["ok"]) for row in checked["rows"]] == [("A1", True), ("A11", True)]
        and {"expected", "got"} <= set(checked["rows"][0])
    )
    assert "known: A1" in call("plan", "--check", "--only", "A0", code=2).output


@pytest.mark.parametrize(
    "overrides, rate, wall",
    [
        ({"generators.gpus": 96}, (1.0, 1.5), None),
        ({"trainer.gpus": 16}, (0.6, 0.8), None),
        ({"run.concurrency": 1767}, (2.2, 2.4), None),
        ({"trainer.mfu": 0.05}, (1.0, 1.6), None),
        ({"run.staleness": 8}, (1.94, 1.96), (3.15, 3.19)),
        ({"generators.gpu": "B200"}, (2.5, 20), None),
    ],
    ids=str,
)
def test_what_was_measured_does_not_outlive_what_it_was_measured_with(overrides, rate, wall):
    "Other machines or another load change the time of a rollout or of a batch; another bound does not."
    found = plan_run("prime-qwen3-235b", overrides, simulate=False)
    assert rate[0] < found.formed.rate < rate[1] and (wall is None or wall[0] < found.formed.wall < wall[1])
    if set(overrides) == {"run.concurrency"}:  # the table of other settings says the same
        plain = plan_run("prime-qwen3-235b", simulate=False)
        (same,) = [each for each in plain.alternatives if each.place == "run.concurrency" and each.value == 1767]
        assert found.formed.rate == pytest.approx(same.forecast.rate, rel=0.01) and found.formed.wall == pytest.approx(
            same.forecast.wall, rel=0.01
        )
    assert found.file.prices.gpu_hour == (0.0 if "generators.gpu" in overrides else 1.59)


def test_what_is_set_with_a_change_is_kept():
    found = override_plan(
        "prime-qwen3-235b",
        {"generators.gpus": 96, "rollouts.latency": 900.0, "trainer.gpus": 32, "trainer.seconds": 400.0},
    )
    assert (found.rollouts.latency, found.trainer.seconds) == (900.0, 400.0)
    assert (
        override_plan("prime-qwen3-235b", {"trainer.mfu": 0.05}).trainer.mfu == 0.05
        and override_plan(
            "prime-qwen3-235b", {"generators.gpus": 96, "generators.efficiency": 0.3}
        ).generators.efficiency
        == 0.3
    )


def test_a_split_that_is_dearer_when_simulated_is_not_advised():
    found = plan_run("prime-qwen3-235b", simulate=False)
    dear = replace(found, simulated=found.formed, confirmed=replace(found.formed, wall=1.1 * found.formed.wall))
    good = replace(found, simulated=found.formed, confirmed=replace(found.formed, wall=0.7 * found.formed.wall))
    assert "simulated it is not" in best_words(dear)[0] and best_words(dear)[0].startswith("As planned")
    assert best_words(good)[0].startswith("Best") and "instead of $3.17" in best_words(good)[0]


def test_gpus_that_all_read_and_a_file_that_is_not_there():
    with pytest.raises(
        ValueError, match="generators.prefill_gpus: 64 of 32 GPUs only read prompts, and none is left to write"
    ):
        plan_run("prime-glm-5", {"generators.gpus": 32}, simulate=False)
    with pytest.raises(ValueError, match="plan: there is no file 'mine/none.toml'"):
        plan_run("mine/none.toml")
