"""The training service on a virtual clock: order, idempotence, promises, tenants, quotas,
and what losses leave behind."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples
from service_world import CONTEXT, ServiceWorld, make_model, sample_body, step_body, train_body, weights_of

from rlbench.service import service_records as records
from rlbench.service.service_journal import read_entries
from rlbench.service.service_state import Quota, ServiceRules

FEW = settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def test_requests_are_carried_out_by_number_in_whatever_order_they_arrive(tmp_path):
    "Six requests arrive shuffled and twice; the model is the one of the requests in their order."
    finals = []
    for order in ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [2, 2, 1, 6, 3, 3, 5, 4, 1]):
        world = ServiceWorld(tmp_path / str(len(finals)))
        model = make_model(world)
        promises = {}
        for seq in order:
            if seq % 3 == 0:
                call = world.call("a", "optim_step", step_body(model, seq))
            else:
                call = world.call("a", "forward_backward", train_body(model, seq, [seq, 1]))
            assert call.status == 200 and promises.setdefault(seq, call.json["request_id"]) == call.json["request_id"]
        world.settle()
        assert world.fetch("a", promises[6]).json["metrics"] == {"steps:max": 2.0}
        finals.append(weights_of(world, model)["weights"])
    assert len(set(finals)) == 1


def expected_weights(world: ServiceWorld, model: str, requests: list[tuple]) -> dict:
    "The requests carried out one after the other, without a service."
    from service_world import ScriptedTrainer

    trainer = ScriptedTrainer()
    trainer.answer(records.CreateModel(0, model, records.LoraShape(4, unembed=True)))
    for kind, seq, token in requests:
        if kind == "step":
            trainer.answer(records.OptimStep(0, model, records.AdamParams(learning_rate=0.5, eps=1e-12)))
        elif kind == "train":
            datum = records.Datum(np.array([token, 1]), {})
            trainer.answer(records.ForwardBackward(0, model, (datum,), "cross_entropy", {}))
    return trainer.models[model]


@FEW
@given(data=st.data())
def test_whatever_is_lost_a_model_is_what_its_requests_make_of_it(tmp_path_factory, data):
    """Trainer, generator and server die at random while requests of two models arrive shuffled and repeated: every
    request is settled once, and each model ends as if nothing had happened."""
    # a kill passes a minute here, which is no reason to give up a request that is still to come
    rules = ServiceRules(checkpoint_steps=data.draw(st.integers(1, 3)), tries=1000, gap_s=1e6)
    world = ServiceWorld(tmp_path_factory.mktemp("world"), rules=rules)
    models = {"a": make_model(world, "a"), "b": make_model(world, "b")}
    plan = {}
    for tenant, model in models.items():
        kinds = data.draw(st.lists(st.sampled_from(["train", "train", "step", "look", "bad"]), min_size=3, max_size=12))
        plan[tenant] = [
            (kind, seq, 13 if kind == "bad" else seq + 1 + 12 * (seq == 12)) for seq, kind in enumerate(kinds, 1)
        ]
    calls = [(tenant, request) for tenant, requests in plan.items() for request in requests]
    calls = data.draw(st.permutations(calls + data.draw(st.lists(st.sampled_from(calls), max_size=8))))
    if data.draw(st.booleans()):
        calls.sort(key=lambda call: call[1][1])  # so that more is done before something is lost
    for tenant, (kind, seq, token) in calls:
        model = models[tenant]
        if kind == "step":
            call = world.call(tenant, "optim_step", step_body(model, seq))
        else:
            call = world.call(tenant, "forward_backward", train_body(model, seq, [token, 1], kind == "look"))
        assert call.status == 200, call.json
        match data.draw(st.sampled_from(["nothing", "work", "work", "settle", "trainer", "generator", "server"])):
            case "work":
                world.work()
            case "settle":
                world.settle()
            case "server":
                world.kill_server()
            case "trainer" | "generator" as name:
                world.driver.workers.handles[name].die()
                world.hear()
                world.pass_time(60.0)
    world.settle()
    world.call("a", "create_session", {})  # a model is only brought back when something waits for it
    for tenant, model in models.items():
        requests = plan[tenant]
        for kind, seq, _ in requests:
            fetched = world.fetch(tenant, f"{model}:{seq}")
            assert fetched.status == 200
            if kind == "bad":
                assert fetched.json == {"error": "thirteen is refused", "category": "user"}
            elif kind == "step":
                assert fetched.json["metrics"]["steps:max"] == sum(k == "step" for k, s, _ in requests if s <= seq)
        last = world.call(tenant, "save_weights", {"model_id": model, "seq_id": len(requests) + 1, "path": "end"})
        world.settle()
        assert world.fetch(tenant, last.json["request_id"]).json["path"] == f"tinker://{model}/weights/end"
        assert weights_of(world, model) == expected_weights(world, model, requests)
    settled = [
        entry.entry for entry in read_entries(world.journals["a"].path) if type(entry.entry).__name__ == "ResultKept"
    ]
    assert [entry.seq for entry in settled] == list(range(len(plan["a"]) + 2))
    trained = [fact.seq for fact in world.facts if isinstance(fact, records.BatchTrained) and fact.tenant == "a"]
    assert len(trained) == len(set(trained))
    world.remove()


def test_a_lost_sample_is_drawn_again_with_the_same_tokens(tmp_path):
    "The generator dies with samples under way; they are sent again and give what they would have given."
    world = ServiceWorld(tmp_path)
    session = world.open_session("a")
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "Known/Name"}
    sampler = world.call("a", "create_sampling_session", body).json["sampling_session_id"]
    promises = [world.call("a", "asample", sample_body(sampler, seq)).json for seq in range(4)]
    assert promises[2]["sample_sequence_ids"] == [f"{sampler}:2-0"]
    world.driver.workers.handles["generator"].die()
    world.hear()
    world.settle()
    first = [world.fetch("a", each["request_id"]).result.body for each in promises]
    world.kill_server()
    gone = world.fetch("a", promises[0]["request_id"])
    assert gone.status == 410 and "send the request again" in gone.json["detail"]
    again = [world.call("a", "asample", sample_body(sampler, seq)).json for seq in range(4)]
    world.settle()
    assert [world.fetch("a", each["request_id"]).result.body for each in again] == first
    assert len({bytes(body) for body in first}) > 1


def test_a_request_that_kills_the_trainer_fails_and_the_others_go_on(tmp_path):
    "After three losses over the same request it has failed as the server's fault; the next request of the model works."
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    deadly = world.call("a", "forward_backward", train_body(model, 1, [7, 7])).json["request_id"]
    after = world.call("a", "optim_step", step_body(model, 2)).json["request_id"]
    for _ in range(40):
        handle = world.driver.workers.handles["trainer"]
        first = handle.orders[0] if handle.orders else None
        if isinstance(first, records.ForwardBackward):
            handle.die()
            world.hear()
            world.pass_time(60.0)
        else:
            world.work()
    failed = world.fetch("a", deadly).json
    assert failed["category"] == "server" and "lost 3 times over this request: killed" in failed["error"]
    assert world.fetch("a", after).json["metrics"] == {"steps:max": 1.0}


def test_promises_are_held_and_answered_at_once_when_they_are_done(tmp_path):
    """A call for a result waits ten seconds, then hears that it has to ask again;
    one that waits hears the result when it is there."""
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    promise = world.call("a", "optim_step", step_body(model, 1)).json["request_id"]
    held = world.fetch("a", promise)
    world.pass_time(9.0)
    assert held.answers == 0
    world.pass_time(2.0)
    assert held.json == {"type": "try_again", "request_id": promise, "queue_state": "active"}
    waiting = [world.fetch("a", promise) for _ in range(2)]
    world.driver.hang_up(waiting[0].number)
    world.settle()
    assert waiting[0].answers == 0 and waiting[1].json["metrics"] == {"steps:max": 1.0}
    world.pass_time(10_000 / 10)
    assert promise not in world.driver.state.promises and world.driver.results == {}
    assert world.fetch("a", promise).json["metrics"] == {"steps:max": 1.0}, "the journal has it"
    assert [call.answers for call in waiting] == [0, 1]


def test_a_missing_request_is_waited_for_and_then_named(tmp_path):
    "Request 2 never arrives: request 3 waits for more than five minutes, fails in words, and request 4 works."
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    world.call("a", "optim_step", step_body(model, 1))
    third = world.call("a", "optim_step", step_body(model, 3)).json["request_id"]
    world.settle()
    world.pass_time(320)
    assert world.driver.state.promises[third].done_at < 0
    world.pass_time(20)
    assert world.fetch("a", third).json["error"] == "seq_id: request 2 did not arrive within 330 s"
    fourth = world.call("a", "optim_step", step_body(model, 4)).json["request_id"]
    world.settle()
    assert world.fetch("a", fourth).json["metrics"] == {"steps:max": 2.0}


def test_a_refused_request_takes_its_place_among_the_others(tmp_path):
    "A request with a bad loss is answered 400 and counts as settled, so the next one of the model is not held up."
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    bad = train_body(model, 1, [3, 99])
    refused = world.call("a", "forward_backward", bad)
    assert refused.status == 400 and "token 99 is not in the vocabulary of 50" in refused.json["detail"]
    step = world.call("a", "optim_step", step_body(model, 2)).json["request_id"]
    world.settle()
    assert world.fetch("a", step).json["metrics"] == {"steps:max": 1.0}
    world.kill_server()
    assert world.fetch("a", f"{model}:1").json["category"] == "user"


def test_tenants_share_the_trainer_by_tokens_and_a_flood_is_only_its_own(tmp_path):
    "Tenant a has fifty requests waiting when b sends its first: b's request is among the next few, not behind them."
    world = ServiceWorld(tmp_path)
    first, second = make_model(world, "a"), make_model(world, "b")
    for seq in range(1, 51):
        world.call("a", "forward_backward", train_body(first, seq, [1] * CONTEXT))
    for _ in range(10):
        world.work()
    promise = world.call("b", "optim_step", step_body(second, 1)).json["request_id"]
    for _ in range(4):
        world.work()
    assert world.driver.state.promises[promise].done_at >= 0
    world.settle()
    served = [fact.tenant for fact in world.facts if isinstance(fact, (records.BatchTrained, records.StepTaken))]
    assert served.index("b") <= 14 and served.count("a") == 50


def test_quotas_hold_and_are_given_back(tmp_path):
    "Models, tokens in flight and disk: beyond the quota a tenant hears why, and another tenant is served."
    quotas = {"a": Quota(models=1, tokens_in_flight=20, disk_mb=1), "b": Quota()}
    world = ServiceWorld(tmp_path, quotas)
    model = make_model(world)
    session = model.partition(":")[0]
    body = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert world.call("a", "create_model", body).json["detail"].startswith("quota: 1 models of 1 are taken")
    make_model(world, "b")
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = world.call("a", "create_sampling_session", body).json["sampling_session_id"]
    too_large = world.call("a", "asample", sample_body(sampler, 0, samples=10))
    assert (too_large.status, too_large.json["detail"][:6]) == (400, "quota:")
    assert [world.call("a", "asample", sample_body(sampler, seq, 4)).status for seq in range(3)] == [200, 200, 429]
    world.settle()
    assert world.driver.state.tenants["a"].tokens_in_flight == 0
    assert world.call("a", "asample", sample_body(sampler, 3, 4)).status == 200
    world.driver.state.tenants["a"].disk_bytes = 2_000_000
    save = world.call("a", "save_weights", {"model_id": model, "seq_id": 1, "path": "x"}).json["request_id"]
    world.settle()
    assert world.fetch("a", save).json["error"].startswith("quota: 2.0 of 1 MB of disk are taken (weights 2.0, ")


def test_nobody_sees_what_is_another_tenants(tmp_path):
    """Models, samplers, weights, sessions and promises of a are unknown to b,
    in the same words as those that never were."""
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    session = model.partition(":")[0]
    save = world.call("a", "save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "x"}).json["request_id"]
    state = world.call("a", "save_weights", {"model_id": model, "seq_id": 2, "path": "x"}).json["request_id"]
    world.settle()
    sampled = world.fetch("a", save).json["path"]
    saved = world.fetch("a", state).json["path"]
    own = world.open_session("b")
    tries = [
        ("get_info", {"model_id": model}),
        ("optim_step", step_body(model, 3)),
        ("unload_model", {"model_id": model}),
        ("weights_info", {"tinker_path": saved}),
        ("load_weights", {"session_id": own, "model_seq_id": 0, "path": saved, "optimizer": True}),
        ("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": sampled}),
        ("create_model", {"session_id": session, "model_seq_id": 5, "base_model": "tiny", "lora_config": {"rank": 4}}),
        ("session_heartbeat", {"session_id": session}),
        ("retrieve_future", {"request_id": save}),
    ]
    for endpoint, body in tries:
        answer = world.call("b", endpoint, body)
        assert answer.status in (404, 410), (endpoint, answer.json)
    world.settle()
    assert world.driver.state.models[model].done_seq == 2
    assert world.call("a", "get_info", {"model_id": model}).json["lora_rank"] == 4


def test_saved_weights_come_back_in_a_new_model_and_in_a_sampler(tmp_path):
    """Create-via-load continues with the weights and the optimizer; a sampler on the saved weights draws with them;
    all of it after a restart, too."""
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    for seq in (1, 2):
        world.call("a", "optim_step", step_body(model, seq, seq / 10))
    world.call("a", "save_weights", {"model_id": model, "seq_id": 3, "path": "kept"})
    world.call("a", "save_weights_for_sampler", {"model_id": model, "seq_id": 4, "path": "kept"})
    world.settle()
    weights = weights_of(world, model)["weights"]
    world.kill_server()
    session = world.open_session("a")
    body = {"session_id": session, "model_seq_id": 0, "path": f"tinker://{model}/weights/kept", "optimizer": True}
    promised = world.call("a", "load_weights", body).json
    world.settle()
    assert world.fetch("a", promised["request_id"]).json["model_id"] == f"{session}:train:0"
    assert weights_of(world, f"{session}:train:0") == {"weights": weights, "gradient": "", "steps": 2}
    assert world.call("a", "weights_info", {"tinker_path": body["path"]}).json["lora_rank"] == 4
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": f"tinker://{model}/sampler_weights/kept"}
    sampler = world.call("a", "create_sampling_session", body).json["sampling_session_id"]
    world.call("a", "asample", sample_body(sampler, 0))
    world.settle()
    assert weights in world.driver.workers.handles["generator"].actor.adapters.values()


def test_inflight_weights_replace_each_other_under_running_samples(tmp_path):
    "The second in-flight save loads its weights at the generator at once, and both sessions sample from them."
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    sessions = []
    for seq in (1, 3):
        world.call("a", "optim_step", step_body(model, seq, seq / 10))
        body = {"model_id": model, "seq_id": seq + 1, "sampling_session_seq_id": seq, "kind": "inflight"}
        promise = world.call("a", "save_weights_for_sampler", body).json["request_id"]
        world.settle()
        sessions.append(world.fetch("a", promise).json["sampling_session_id"])
        world.call("a", "asample", sample_body(sessions[0], seq))
        world.settle()
    adapters = world.driver.workers.handles["generator"].actor.adapters
    assert adapters == {f"{model}@inflight": weights_of(world, model)["weights"]}
    assert len(set(sessions)) == 2


def test_a_finished_session_leaves_nothing_but_what_has_a_name(tmp_path):
    "Its models, samplers and folders go; named weights stay; its heartbeat hears 410."
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    session = model.partition(":")[0]
    world.call("a", "save_weights", {"model_id": model, "seq_id": 1, "path": "kept"})
    body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
    world.call("a", "save_weights_for_sampler", body)
    world.settle()
    from rlbench.service.tinker_calls import FinishSessionCall

    world.driver.ask("a", FinishSessionCall(session), lambda status, result: None)
    world.settle()
    state = world.driver.state
    assert not state.models and not state.samplers and not world.driver.workers.handles["trainer"].actor.models
    assert [path.name for path in (tmp_path / "models").iterdir()] == []
    assert len(list((tmp_path / "saved").iterdir())) == 1
    assert world.call("a", "session_heartbeat", {"session_id": session}).status == 410
    world.kill_server()
    assert not world.driver.state.models and list(world.driver.state.saved) == [f"tinker://{model}/weights/kept"]


def test_a_silent_client_is_forgotten_after_half_an_hour(tmp_path):
    "Heartbeats keep a session; without them it ends, and its models with it."
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    for _ in range(5):
        world.pass_time(1000)
        assert world.call("a", "session_heartbeat", {"session_id": model.partition(":")[0]}).status == 200
    world.pass_time(1900)
    assert world.call("a", "get_info", {"model_id": model}).status == 404


def test_a_cancelled_sample_fails_and_gives_its_tokens_back(tmp_path):
    "One that waits fails at once."
    world = ServiceWorld(tmp_path)
    session = world.open_session("a")
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = world.call("a", "create_sampling_session", body).json["sampling_session_id"]
    promises = [world.call("a", "asample", sample_body(sampler, seq, 8)).json["request_id"] for seq in range(3)]
    assert world.call("a", "cancel_future", {"request_id": promises[2]}).json == {}
    assert world.fetch("a", promises[2]).json == {"error": "cancelled", "category": "user"}
    world.settle()
    assert world.driver.state.tenants["a"].tokens_in_flight == 0


def test_old_unnamed_snapshots_are_deleted(tmp_path):
    "Of forty snapshots the newest stay on disk and in the generator; a sample of a deleted one is told what to do."
    world = ServiceWorld(tmp_path, rules=ServiceRules(snapshots=3, adapters=2))
    model = make_model(world)
    for seq in range(1, 9):
        body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
        world.call("a", "save_weights_for_sampler", body)
        world.settle()
        world.pass_time(1.0)
        world.call("a", "asample", sample_body(f"{model.partition(':')[0]}:sample:{seq}", 0))
        world.settle()
    world.pass_time(1.0)
    world.settle()
    assert len(list((tmp_path / "models/000001").glob("snapshot-*"))) == 3
    assert len(world.driver.workers.handles["generator"].actor.adapters) == 2
    assert world.driver.state.tenants["a"].disk_bytes == 3000
    gone = world.call("a", "asample", sample_body(f"{model.partition(':')[0]}:sample:1", 1))
    assert gone.status == 404 and "save them under a name" in gone.json["detail"]


def test_a_torn_journal_is_cut_where_it_tears(tmp_path):
    "A server dies in the middle of an entry: what was whole is there, and the file goes on behind it."
    world = ServiceWorld(tmp_path)
    model = make_model(world)
    world.call("a", "optim_step", step_body(model, 1))
    world.settle()
    path = world.journals["a"].path
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\x20\x00\x00\x00\x05\x00\x00\x00half of an ent")
    world.kill_server()
    assert path.stat().st_size == whole
    promise = world.call("a", "optim_step", step_body(model, 2)).json["request_id"]
    world.settle()
    assert world.fetch("a", promise).json["metrics"] == {"steps:max": 2.0}
    assert json.loads(json.dumps([type(entry.entry).__name__ for entry in read_entries(path)]))[-1] == "ResultKept"


@pytest.mark.parametrize("listener", ["note", "beat"])
def test_a_listener_that_raises_is_dropped_and_the_service_goes_on(tmp_path, listener, capfd):
    "The books are not worth the service."
    world = ServiceWorld(tmp_path)

    def fail(*arguments):
        raise OSError("no space")

    setattr(world, listener, fail)
    make_model(world)
    world.pass_time(1.0)
    assert world.driver.listeners.listeners == [] and "is dropped: OSError: no space" in capfd.readouterr().err
