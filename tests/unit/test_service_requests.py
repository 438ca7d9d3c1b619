"""Requests of Tinker's protocol as the service reads them: what is taken, what is refused, and in which words."""

import json

import pytest
from service_world import train_body

from rlbench.service.service_settings import read_keys_file
from rlbench.service.tinker_calls import RefusedRequest, RequestBounds
from rlbench.service.tinker_requests import read_request

BOUNDS = RequestBounds(vocabulary=50, context=16)


def ask(endpoint: str, **body):
    "Read a JSON request."
    return read_request(endpoint, json.dumps(body).encode(), BOUNDS)


def sample(**more):
    "Read an asample request."
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    return ask("asample", **{"sampling_session_id": "s", "seq_id": 0, "prompt": prompt, "sampling_params": {}, **more})


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/b",
        "/etc/passwd",
        "",
        ".",
        "..",
        "a..b",
        ".hidden",
        "a\x00b",
        "a b",
        "é",
        "x" * 129,
        7,
        None,
        "C:\\x",
        "-x",
    ],
)
def test_names_are_never_paths(name):
    """A name of saved weights with a slash, a dot first, a space or anything else odd is refused,
    in names and addresses."""
    if name is not None:
        with pytest.raises(RefusedRequest, match="path: .* is not a name"):
            ask("save_weights_for_sampler", model_id="m", seq_id=1, path=name)
    with pytest.raises(RefusedRequest, match="path: .* is not a name"):
        ask("save_weights", model_id="m", seq_id=1, path=name)
    address = f"tinker://session-a:train:0/weights/{name}" if isinstance(name, str) else name
    with pytest.raises(RefusedRequest, match="path: .* is not an address"):
        ask("load_weights", model_id="m", seq_id=1, path=address, optimizer=False)


@pytest.mark.parametrize("name", ["000012", "final", "step-3.best", "A", "x" * 128])
def test_names_of_the_cookbook_are_taken(name):
    "Names as recipes write them."
    assert ask("save_weights", model_id="m", seq_id=1, path=name).name == name


def test_stops_are_read_in_all_their_forms():
    "None: those of the base; an empty list: none; a text, texts, ids."
    forms = [None, [], "ab", ["a", "b"], [1, 2]]
    read = [sample(sampling_params={"stop": stop}) for stop in forms]
    assert [(call.stop_ids, call.stop_texts) for call in read] == [
        (None, ()),
        ((), ()),
        ((), ("ab",)),
        ((), ("a", "b")),
        ((1, 2), ()),
    ]
    for wrong in (["a", 1], [99], [""], {"a": 1}, 1.5, [True]):
        with pytest.raises(RefusedRequest, match="sampling_params.stop"):
            sample(sampling_params={"stop": wrong})


def test_a_response_ends_at_the_context():
    "max_tokens beyond what fits is cut; a prompt that fills the context is refused."
    assert sample(sampling_params={"max_tokens": 1000}).max_tokens == 14 == sample().max_tokens
    full = {"chunks": [{"type": "encoded_text", "tokens": [1] * 16}]}
    with pytest.raises(RefusedRequest, match="leave no room"):
        sample(prompt=full)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "prompt.chunks\\[0\\]: 'image' is not served"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 1 << 80]}]}}, "is not in the vocabulary of 50"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [True]}]}}, "not all integers"),
        ({"prompt_alt_tokens_k": 3}, "prompt_alt_tokens_k: not served"),
        ({"sampling_params": {"temperature": -1}}, "temperature: -1 is not a number from 0 to 100"),
        ({"sampling_params": {"temperature": 1e999}}, "temperature: inf is not a number"),
        ({"num_samples": 0}, "num_samples: 0 is not an integer from 1 to 1024"),
        ({"seq_id": "1"}, "seq_id: '1' is not an integer"),
    ],
)
def test_samples_are_refused_by_field(more, words):
    "Every refusal names the field, the value and what is allowed."
    with pytest.raises(RefusedRequest, match=words):
        sample(**more)


def test_other_optimizers_are_refused_by_name():
    "dimuon, at creation and at a step."
    with pytest.raises(RefusedRequest, match="optimizer_config.type: 'dimuon' is not served; adamw is"):
        ask("create_model", session_id="s", model_seq_id=0, base_model="b", optimizer_config={"type": "dimuon"})
    with pytest.raises(RefusedRequest, match="optimizer_params.type: 'dimuon' is not served"):
        ask("optim_step", model_id="m", seq_id=1, optimizer_params={"type": "dimuon", "learning_rate": 0.1})


def test_unknown_fields_are_ignored():
    "A newer client may send more."
    call = ask("optim_step", model_id="m", seq_id=1, adam_params={"learning_rate": 0.1, "new": 3}, newer={"a": 1})
    assert call.adam.learning_rate == 0.1


def test_a_refused_request_keeps_its_place():
    "The error of a request that names its model and number has both."
    with pytest.raises(RefusedRequest) as caught:
        ask("optim_step", model_id="m", seq_id=7, adam_params={"beta1": 2})
    assert (caught.value.model, caught.value.seq) == ("m", 7)
    with pytest.raises(RefusedRequest) as caught:
        read_request("forward_backward", train_body("m", 8, [1] * 20), BOUNDS)
    assert (caught.value.model, caught.value.seq) == ("m", 8) and "from 1 to 16 fit" in str(caught.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no tenant"),
        ("[a]\nmodel = 3", "\\[a\\] model: unknown field; known are key, models"),
        ("[a]\nmodels = 0", "models: 0 is not a whole number from 1"),
        ("[a]\nkey = 'secret'", "a key begins with 'tml-'"),
        ("['../a']", "'../a' is not a name; use 1 to 100 letters"),
        ("[a]\nkey='tml-0123456789'\n[b]\nkey='tml-0123456789'", "two tenants have the same key"),
        ("a = 3", "a: a table is expected"),
        ("[a", "not a TOML file"),
    ],
)
def test_keys_files_are_checked(tmp_path, text, words):
    "What a keys file says wrong is named."
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_keys_file(tmp_path / "keys.toml")


def test_a_key_outside_a_table_is_not_repeated(tmp_path):
    "The error of a keys file never shows a key."
    (tmp_path / "keys.toml").write_text("key = 'tml-0123456789'")
    with pytest.raises(ValueError, match="a table is expected") as found:
        read_keys_file(tmp_path / "keys.toml")
    assert "0123456789" not in str(found.value)
