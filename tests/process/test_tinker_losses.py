"""The official client's losses: the same adapters after five steps through a service as directly, for each loss."""

import numpy as np
import pytest
import torch
from loss_data import ADAM, CONFIG, STEPS, carry_out, some_data
from tinker import types
from tinker_clients import open_client

from rlbench.service.service_records import CreateModel, ForwardBackward, LoraShape, OptimStep
from rlbench.service.tenant_adapters import read_adapter
from rlbench.service.tinker_service import serve_tinker
from rlbench.service.token_losses import TOKEN_LOSSES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
SHAPE = LoraShape(rank=8, seed=3, unembed=True)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    "One service for all losses."
    with serve_tinker("tiny", runs=tmp_path_factory.mktemp("service"), name="losses") as started:
        yield started


@pytest.fixture(scope="module")
def client(service):
    "The official client."
    with open_client(service.url, service.key) as opened:
        yield opened


def client_datum(datum, names: tuple[str, ...]) -> types.Datum:
    "A datum as the client sends it, with the inputs that its loss needs."
    inputs = {name: datum.inputs[name] for name in ("target_tokens", *names)}
    return types.Datum(model_input=types.ModelInput.from_ints(datum.tokens.tolist()), loss_fn_inputs=inputs)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_adapters_after_five_steps_equal_those_of_the_same_steps_done_directly(service, client, tenant_trainer, name):
    remote = client.create_lora_training_client(base_model="tiny", rank=SHAPE.rank, seed=SHAPE.seed).result()
    carry_out(tenant_trainer, CreateModel(0, name, SHAPE))
    config = CONFIG.get(name, {})
    adam = types.AdamParams(
        learning_rate=ADAM.learning_rate,
        beta1=ADAM.beta1,
        beta2=ADAM.beta2,
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
        grad_clip_norm=ADAM.grad_clip_norm,
    )
    for step in range(STEPS):
        data = some_data(tenant_trainer.policy, step)
        sent = [client_datum(datum, TOKEN_LOSSES[name].inputs) for datum in data]
        computed = remote.forward_backward(sent, name, loss_fn_config=config or None)
        stepped = remote.optim_step(adam)
        direct = carry_out(tenant_trainer, ForwardBackward(1, name, data, name, config))
        carry_out(tenant_trainer, OptimStep(2, name, ADAM))
        out = computed.result()
        assert out.metrics["loss:sum"] == pytest.approx(direct.metrics["loss:sum"], rel=1e-5)
        for ours, theirs in zip(direct.logprobs, out.loss_fn_outputs, strict=True):
            assert np.abs(ours - theirs["logprobs"].to_numpy()).max() < 1e-5
        stepped.result()
    remote.save_state(name).result()
    (folder,) = service.folder.glob(f"saved/*-{name}-*")
    served, local = read_adapter(folder).weights, tenant_trainer.models[name].trained
    apart = max(float((served[key] - tensor.detach()).abs().max()) for key, tensor in local.items())
    print(f"{name}: {apart:.1e} apart")
    assert served.keys() == local.keys() and apart < 1e-5


def test_the_clients_own_loss_trains_like_the_same_loss_of_the_service(service, client, tenant_trainer):
    "`forward_backward_custom`: the client differentiates, the service adds the gradient up."
    data = some_data(tenant_trainer.policy, 0)
    remote = client.create_lora_training_client(base_model="tiny", rank=SHAPE.rank, seed=SHAPE.seed).result()
    sent = [client_datum(datum, ("weights",)) for datum in data]

    def importance_sampling(batch, logprobs):
        total = torch.zeros(())
        for datum, p in zip(data, logprobs, strict=True):
            q, a = (torch.as_tensor(datum.inputs[key]) for key in ("logprobs", "advantages"))
            total = total - (torch.exp(p - q) * a).sum()
        return total, {"custom_loss": float(total.detach())}

    out = remote.forward_backward_custom(sent, importance_sampling).result()
    remote.optim_step(types.AdamParams(learning_rate=ADAM.learning_rate, eps=ADAM.eps)).result()
    carry_out(tenant_trainer, CreateModel(0, "own", SHAPE))
    direct = carry_out(tenant_trainer, ForwardBackward(1, "own", data, "importance_sampling", {}))
    carry_out(tenant_trainer, OptimStep(2, "own", type(ADAM)(learning_rate=ADAM.learning_rate, eps=ADAM.eps)))
    assert out.metrics["custom_loss"] == pytest.approx(direct.metrics["loss:sum"], rel=1e-4)
    remote.save_state("own").result()
    (folder,) = service.folder.glob("saved/*-own-*")
    served, local = read_adapter(folder).weights, tenant_trainer.models["own"].trained
    assert max(float((served[key] - tensor.detach()).abs().max()) for key, tensor in local.items()) < 1e-5


def test_what_a_loss_cannot_be_computed_on_is_the_users_error_in_words(client, tenant_trainer):
    remote = client.create_lora_training_client(base_model="tiny", rank=2).result()
    sent = [client_datum(datum, ("logprobs", "advantages")) for datum in some_data(tenant_trainer.policy, 0)]
    for loss, said in (("stable_reinforce", "importance_sampling"), ("cross_entropy", "weights")):
        with pytest.raises(Exception, match=said):
            remote.forward_backward(sent, loss).result()
    assert remote.forward_backward(sent, "ppo").result().metrics["tokens:sum"] > 0
