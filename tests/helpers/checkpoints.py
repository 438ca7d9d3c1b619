"""Small random checkpoints of several families, in the Hub's format."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlbench.models.model import load_policy, quiet_library

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}x{{ message['content'] }}y{% else %}{{ "
    "message['content'] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}z{% endif %}"
)
SHAPE = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.3,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)


@dataclass(frozen=True)
class Family:
    "A configuration, and how its files are written."

    kind: type
    more: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard: str = "50GB"
    template: bool = True


FAMILIES = {
    "qwen3": Family(Qwen3Config, dict(tie_word_embeddings=True)),
    "llama": Family(LlamaConfig, dict(tie_word_embeddings=False), torch.bfloat16, "20KB"),
    "gemma2": Family(Gemma2Config, dict(final_logit_softcapping=5.0, sliding_window=8), template=False),
    "gemma3": Family(
        Gemma3TextConfig,
        dict(tie_word_embeddings=True, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        shard="30KB",
    ),
    "mistral": Family(MistralConfig, dict(tie_word_embeddings=False, sliding_window=8)),
    "qwen3_moe": Family(
        Qwen3MoeConfig,
        dict(tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        torch.bfloat16,
        "40KB",
    ),
    "mixtral": Family(MixtralConfig, dict(tie_word_embeddings=False, num_local_experts=4, sliding_window=None)),
}


def checkpoint(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a random checkpoint of a family, as the Hub has them:
    configuration, safetensors (sharded where the family says so), tokenizer with chat template."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    with quiet_library():
        model = AutoModelForCausalLM.from_config(family.kind(**{**SHAPE, **family.more})).to(family.dtype)
        model.save_pretrained(folder, max_shard_size=family.shard)
        tokenizer = load_policy("tiny").tokenizer
        tokenizer.chat_template = TEMPLATE if family.template else None
        tokenizer.save_pretrained(folder)
    return folder
