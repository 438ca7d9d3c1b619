"""The service's own protobuf, compared with the official client's:
requests as the client writes them, answers as it reads them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from tinker.proto import tinker_public_pb2 as official
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
)

from rlbench.service import service_records as records
from rlbench.service.tinker_answers import encode_forward_backward, encode_sample
from rlbench.service.tinker_calls import RefusedRequest, RequestBounds
from rlbench.service.tinker_protobuf import ProtobufError, integer_of, read_fields, write_bytes, write_integer
from rlbench.service.tinker_requests import read_request

BOUNDS = RequestBounds(vocabulary=100, context=64)


def client_request(loss="ppo", config=None, with_spans=True) -> bytes:
    "A forward_backward request as the official client writes it: two sequences, one of them in two chunks."
    config = {"clip_low_threshold": 0.7} if config is None else config
    data = []
    for tokens in ([1, 2, 3, 4], [5, 6]):
        chunks = [EncodedTextChunk(tokens=tokens[:1]), EncodedTextChunk(tokens=tokens[1:])]
        n = len(tokens)
        datum = Datum(
            model_input=ModelInput(chunks=chunks),
            loss_fn_inputs={
                "target_tokens": np.array(tokens[1:] + [7]),
                "logprobs": np.linspace(-1, 0, n, dtype=np.float32),
                "advantages": np.full(n, -0.5, np.float32),
            },
        )
        if with_spans:
            spans = [
                PromptProvenanceSpan(sequence_id="a-0", offset=1, length=1),
                SampledProvenanceSpan(sequence_id="a-0", length=n - 1),
            ]
            datum = datum.with_provenance(model_input=spans, loss_fn_inputs=spans)
        data.append(datum)
    inner = ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = ForwardBackwardRequest(forward_backward_input=inner, model_id="s-1:train:0", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


def test_a_request_of_the_client_is_read_whole():
    "Tokens of several chunks are joined; inputs, settings and spans come back as they were sent."
    call = read_request("forward_backward", client_request(), BOUNDS)
    assert (call.model, call.seq, call.loss, call.forward_only, call.tokens) == ("s-1:train:0", 3, "ppo", False, 6)
    assert call.config == {"clip_low_threshold": 0.7}
    first = call.data[0]
    assert first.tokens.tolist() == [1, 2, 3, 4] and first.tokens.dtype == np.int32
    assert first.inputs["target_tokens"].tolist() == [2, 3, 4, 7]
    assert first.inputs["logprobs"].dtype == np.float32
    np.testing.assert_allclose(first.inputs["logprobs"], np.linspace(-1, 0, 4), rtol=1e-6)
    assert first.spans == (
        records.ProvenanceSpan("a-0", 1, 1, sampled=False),
        records.ProvenanceSpan("a-0", 0, 3, sampled=True),
    )


def test_the_client_reads_a_training_result():
    "One float32 row for each sequence, an empty one included, and the metrics."
    rows = (np.array([-1.5, -0.25], np.float32), np.zeros(0, np.float32), np.array([-2.0], np.float32))
    encoded = encode_forward_backward(records.ForwardBackwardOutput(rows, {"loss:sum": 1.25, "tokens:sum": 3.0}))
    read = deserialize_forward_backward_output(encoded.body)
    assert read.metrics == {"loss:sum": 1.25, "tokens:sum": 3.0}
    for row, output in zip(rows, read.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), row)


def test_the_client_reads_a_sample():
    "Tokens, log-probabilities, the reason of the end, alternatives and the prompt, NaN where nothing was asked for."
    top = records.TopTokens(np.array([[1, 2], [3, 0]]), np.array([[-0.1, -2.0], [-0.5, -99999.0]]))
    one = records.SampledSequence(np.array([4, 5]), np.array([-0.5, -1.0]), np.array([0, 1]), "stop", top)
    two = records.SampledSequence(np.array([6]), np.array([-0.1]), np.array([1]), "length")
    prompt = np.array([np.nan, -0.5, -0.25, -0.75], np.float32)
    output = records.SampleOutput((one, two), prompt, cached_tokens=3)
    read = deserialize_sample_response(encode_sample(output, prompt_last=2).body)
    assert [(s.stop_reason, list(s.tokens)) for s in read.sequences] == [("stop", [4, 5]), ("length", [6])]
    assert read.sequences[0].topk_logprobs == [[(1, pytest.approx(-0.1)), (2, -2.0)], [(3, -0.5)]]
    assert read.prompt_logprobs == [None, None, -0.25, -0.75] and read.prompt_cache_hit_tokens == 3
    message = official.SampleResponse.FromString(encode_sample(output).body)
    assert len(message.sequences) == 2 and message.prompt_logprobs == prompt.tobytes()


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_integers_survive(value):
    "Signed 64-bit integers are written as the official library reads them, and come back."
    data = write_integer(2, value) + write_bytes(1, "m")
    fields = {number: held for number, _, held in read_fields(data)}
    assert integer_of(fields[2], "seq") == value
    assert official.SampledProvenanceSpan.FromString(write_integer(2, value)).offset == value


@examples(300)
@given(st.data())
def test_damaged_requests_are_refused_in_words(data):
    "Bytes cut, changed or added anywhere in a request lead to a record or to RefusedRequest; nothing else escapes."
    body = bytearray(client_request())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        kind = data.draw(st.sampled_from(["cut", "change", "add"]))
        if kind == "cut":
            del body[at : at + data.draw(st.integers(1, 40))]
        elif kind == "change":
            body[at] = data.draw(st.integers(0, 255))
        else:
            body[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        if not body:
            break
    try:
        call = read_request("forward_backward", bytes(body), BOUNDS)
    except RefusedRequest as error:
        assert 400 <= error.status < 500 and len(str(error)) > 10
    else:
        assert all(len(datum.tokens) <= BOUNDS.context for datum in call.data)
        assert all(np.isfinite(values).all() for datum in call.data for values in datum.inputs.values())


@examples(200)
@given(st.binary(max_size=200))
def test_any_bytes_are_fields_or_an_error(data):
    "The reader of fields ends on any bytes."
    try:
        for _ in read_fields(data):
            pass
    except ProtobufError as error:
        assert str(error)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"loss": "stable_reinforce", "config": {}}, "loss_fn='importance_sampling'"),
        ({"loss": "dro", "config": {}}, "loss_fn_config.beta: dro needs it"),
        ({"loss": "cross_entropy", "config": {}}, "weights: cross_entropy needs it"),
        ({"loss": "cispo", "config": {"clip": 1.0}}, "loss_fn_config.clip: unknown to cispo"),
        ({"loss": "ppo", "config": {"clip_low_threshold": float("nan")}}, "is not a number from 0"),
        ({"loss": "mine", "config": {}}, "loss_fn: 'mine' is not served; cross_entropy"),
    ],
)
def test_losses_are_checked(change, words):
    "What a loss does not take is refused with the field, and the refusal keeps model and seq."
    with pytest.raises(RefusedRequest, match=words.replace("(", r"\(")) as caught:
        read_request("forward_backward", client_request(**change), BOUNDS)
    assert (caught.value.model, caught.value.seq) == ("s-1:train:0", 3)
