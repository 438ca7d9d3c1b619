"Shapes of real checkpoints from their config.json, and what an engine holds of them."

import json

import pytest

from rlbench.models.hardware import (
    HARDWARE,
    MODELS,
    TABLES,
    engine_of,
    find_row,
    kv_bytes_per_token,
    kv_replication,
    pools_of,
    publish_seconds,
    sequence_bytes,
)

GLM_LIKE = {"first_k_dense_replace": 3, "n_shared_experts": 1, "num_experts_per_tok": 8, "tie_word_embeddings": False}
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": False,
}
LATENT = {
    **GLM_LIKE,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}
CONFIGS = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
    },
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 36,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "Qwen3-30B-A3B": {
        **QWEN_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
    },
    "Qwen3-235B-A22B": {
        **QWEN_MOE,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
    },
    "DeepSeek-V3": {
        **LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 129280,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    },
    "GLM-5": {
        **LATENT,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "qk_head_dim": 256,
        "head_dim": 64,
        "v_head_dim": 256,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "vocab_size": 154880,
    },
    "GLM-4.5": {
        **GLM_LIKE,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 96,
        "num_hidden_layers": 92,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "vocab_size": 151552,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
}
PARAMETERS = {
    "Llama-3.1-8B": 8.030e9,
    "Qwen3-8B": 8.191e9,
    "Qwen2.5-7B": 7.616e9,
    "Qwen3-30B-A3B": 30.53e9,
    "Qwen3-235B-A22B": 235.1e9,
    "DeepSeek-V3": 671.0e9,
    "GLM-5": 743.9e9,
    "GLM-4.5": 352.8e9,
    "gemma-3-4b-it": 4.30e9,
    "gemma-3-1b-it": 1.000e9,
    "gpt-oss-20b": 20.91e9,
    "Mistral-7B-v0.1": 7.242e9,
}
ACTIVE = {
    "Qwen3-30B-A3B": 3.35e9,
    "Qwen3-235B-A22B": 22.2e9,
    "DeepSeek-V3": 37.5e9,
    "GLM-5": 41.8e9,
    "GLM-4.5": 33.6e9,
    "gpt-oss-20b": 4.19e9,
}
KV = {
    "Llama-3.1-8B": 131_072,
    "Qwen3-8B": 147_456,
    "Qwen2.5-7B": 57_344,
    "Qwen3-30B-A3B": 98_304,
    "Qwen3-235B-A22B": 192_512,
    "DeepSeek-V3": 70_272,
    "GLM-5": 89_856,
    "GLM-4.5": 376_832,
    "gemma-3-4b-it": 139_264,
    "gemma-3-1b-it": 26_624,
    "gpt-oss-20b": 49_152,
    "Mistral-7B-v0.1": 131_072,
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    from rlbench.runtime.model_shapes import shape_of

    found = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp("shapes") / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        found[name] = shape_of(str(folder))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_shape_of_a_real_checkpoint(shapes, name):
    shape = shapes[name]
    assert shape.parameters == pytest.approx(PARAMETERS[name], rel=0.002)
    assert shape.passed == pytest.approx(ACTIVE.get(name, shape.parameters), rel=0.005)
    assert kv_bytes_per_token(shape) == KV[name]


def test_what_is_special_is_read(shapes):
    assert (
        shapes["GLM-5"].indexer,
        shapes["GLM-5"].latent,
        shapes["DeepSeek-V3"].indexer,
        shapes["DeepSeek-V3"].latent,
    ) == (132, 576, 0, 576)
    assert {name: (s.window, s.windowed) for name, s in shapes.items() if s.window} == {
        "gemma-3-4b-it": (1024, 29),
        "gemma-3-1b-it": (512, 22),
        "gpt-oss-20b": (128, 12),
        "Mistral-7B-v0.1": (4096, 32),
    }
    assert {name: (s.experts, s.routed) for name, s in shapes.items() if s.experts} == {
        "Qwen3-30B-A3B": (128, 8),
        "Qwen3-235B-A22B": (128, 8),
        "DeepSeek-V3": (256, 8),
        "GLM-5": (256, 8),
        "GLM-4.5": (160, 8),
        "gpt-oss-20b": (32, 4),
    }
    assert (
        shapes["gpt-oss-20b"].inner == 4 * 2880
        and shapes["Qwen3-235B-A22B"].inner == 8 * 1536
        and shapes["GLM-5"].inner == 9 * 2048
    ), "what a token passes through"
    assert (shapes["GLM-5"].head_dim, shapes["DeepSeek-V3"].head_dim) == (256, 160), (
        "queries and values differ: their mean"
    )
    assert shapes["gemma-3-4b-it"].heads == 8 and shapes["gemma-3-4b-it"].vocab == 262_208, (
        "of the text, not of the pictures"
    )


@pytest.mark.parametrize(
    "name", ["Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "GLM-5", "DeepSeek-V3", "GLM-4.5", "Qwen2.5-7B"]
)
def test_the_table_agrees_with_the_configs(shapes, name):
    ours, told = shapes[name], MODELS[name]
    assert (
        ours.layers,
        ours.width,
        ours.heads,
        ours.kv_heads,
        ours.head_dim,
        ours.latent,
        ours.indexer,
        ours.experts,
        ours.routed,
        ours.window,
    ) == (
        told.layers,
        told.width,
        told.heads,
        told.kv_heads,
        told.head_dim,
        told.latent,
        told.indexer,
        told.experts,
        told.routed,
        told.window,
    )
    assert ours.parameters == pytest.approx(told.parameters, rel=0.01) and ours.passed == pytest.approx(
        told.passed, rel=0.06
    )
    assert (told.inner, told.vocab) in ((0, 0), (ours.inner, ours.vocab)) or told.experts


def test_windows_keep_the_cache_small(shapes):
    sliding, plain = shapes["gemma-3-4b-it"], shapes["Mistral-7B-v0.1"]
    assert sequence_bytes(sliding, 1024) == 1024 * KV["gemma-3-4b-it"]
    assert sequence_bytes(sliding, 32_768) == pytest.approx((5 * 32_768 + 29 * 1024) / 34 * KV["gemma-3-4b-it"])
    assert sequence_bytes(plain, 32_768) == sequence_bytes(plain, 4096)


def test_published_engines():
    engine = engine_of(MODELS["Qwen3-235B-A22B"], HARDWARE["H200"], 8, dtype_bytes=1)
    assert engine.tokens == pytest.approx(1.90e6, rel=0.03) and engine.sequences(32_768) == 58
    assert engine.load(1178, 5_591 + 6_352, 24) < 1, "not bound by the cache"
    replica = engine_of(MODELS["Qwen3-235B-A22B"], HARDWARE["GB300"], 4, activations=8e9)
    assert replica.sequences(131_072, 6) == pytest.approx(119, rel=0.05) and replica.sequences(
        40_000, 6
    ) == pytest.approx(390, rel=0.05)
    assert replica.load(960, 16_000, 6) < 1 < replica.load(960, 17_000, 6)


def test_ranks_store_the_same_keys():
    assert [kv_replication(MODELS["Qwen3-235B-A22B"], n) for n in (1, 4, 8, 16)] == [1, 1, 2, 4]
    assert kv_replication(MODELS["GLM-5"], 8) == 8 and kv_replication(MODELS["GLM-5"], 8, by_sequence=True) == 1


def test_a_model_that_does_not_fit_is_refused_in_words():
    with pytest.raises(
        ValueError,
        match=r"gpus: 8 x H200 hold 967\.2 GB .* the weights take 1,488\.0 GB .*memory binds.* take at least 13 of "
        r"them, or FP8 weights",
    ):
        engine_of(MODELS["GLM-5"], HARDWARE["H200"], 8)
    assert engine_of(MODELS["GLM-5"], HARDWARE["H200"], 13).cache > 0
    with pytest.raises(ValueError, match="used: 1.5; give a share"):
        engine_of(MODELS["GLM-5"], HARDWARE["H200"], 8, used=1.5)


@pytest.mark.parametrize(
    "section,name,near",
    [
        ("gpu", "H20", "H200"),
        ("model", "Qwen3-8b", "Qwen3-8B"),
        ("transport", "brodcast", "broadcast"),
        ("sandbox", "Dayton", "Daytona"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(section, name, near):
    with pytest.raises(ValueError, match=rf"{section}: unknown name '{name}'; did you mean '{near}'\? \(known: "):
        find_row(section, name)


def test_pools_and_transports():
    glm, gpu, way = MODELS["GLM-5"], HARDWARE["H200"], TABLES.transport["broadcast"]
    few, many = (pools_of(glm, gpu, n, 32, 6000, 12_000, 512, way, dtype_bytes=1) for n in (1, 32))
    assert few.reads < many.reads and few.writes == many.writes and many.bound == "decode" and many.rate == many.writes
    assert few.transfer == many.transfer == way.before + sequence_bytes(glm, 6000) / way.rate
    assert (
        publish_seconds(glm, way, 1) < publish_seconds(glm, way, 2) < publish_seconds(glm, TABLES.transport["file"], 2)
    )
