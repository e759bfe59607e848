"""Small random models in the Hugging Face layout, made by `transformers`, which is also the oracle."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda **kw: MixtralConfig(
        **{**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, **kw}
    ),
    "qwen3_moe": lambda **kw: Qwen3MoeConfig(
        **{
            **BASE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **kw,
        }
    ),
    "llama": lambda **kw: LlamaConfig(**{**BASE, **kw}),
    "mistral": lambda **kw: MistralConfig(**{**BASE, "sliding_window": None, **kw}),
    "qwen2": lambda **kw: Qwen2Config(
        **{k: v for k, v in {**BASE, **kw}.items() if k != "head_dim"}
    ),
    "qwen3": lambda **kw: Qwen3Config(**{**BASE, **kw}),
    "qwen2_moe": lambda **kw: Qwen2MoeConfig(
        **{
            **BASE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            **kw,
        }
    ),
    "olmoe": lambda **kw: OlmoeConfig(
        **{**BASE, "num_experts": 7, "num_experts_per_tok": 3, "clip_qkv": 1.1, **kw}
    ),
    "gpt_oss": lambda **kw: GptOssConfig(
        **{
            **BASE,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "head_dim": 12,
            "num_hidden_layers": 4,
            "swiglu_limit": 1.2,
            **kw,
        }
    ),
    "deepseek_v2": lambda **kw: DeepseekV2Config(
        **{
            **BASE,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 6,
            "v_head_dim": 10,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 6,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
                "rope_theta": 1e4,
            },
            **kw,
        }
    ),
    "deepseek_v3": lambda **kw: DeepseekV3Config(
        **{
            **BASE,
            "head_dim": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 28,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_key_value_heads": 6,
            "num_mtp_layers": 0,
            "routed_scaling_factor": 1.5,
            **kw,
        }
    ),
    "glm4_moe": lambda **kw: Glm4MoeConfig(
        **{
            **BASE,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
            "routed_scaling_factor": 1.5,
            **kw,
        }
    ),
    "phimoe": lambda **kw: PhimoeConfig(
        **{
            **BASE,
            "head_dim": 8,
            "num_local_experts": 5,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.6],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
                "short_mscale": 1.1,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 128,
            },
            **kw,
        }
    ),
    "granitemoe": lambda **kw: GraniteMoeConfig(
        **{
            **BASE,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
            **kw,
        }
    ),
    "granitemoeshared": lambda **kw: GraniteMoeSharedConfig(
        **{
            **BASE,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 30,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
            **kw,
        }
    ),
    "ernie4_5_moe": lambda **kw: Ernie4_5_MoeConfig(
        **{
            **BASE,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "use_bias": True,
            **kw,
        }
    ),
    "minimax_m2": lambda **kw: MiniMaxM2Config(
        **{
            **BASE,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
            **kw,
        }
    ),
}


def _dbrx(**kw: Any) -> Any:
    """DBRX calls everything by other names."""
    sizes = {**BASE, **kw}
    return DbrxConfig(
        d_model=sizes["hidden_size"],
        n_heads=sizes["num_attention_heads"],
        n_layers=sizes["num_hidden_layers"],
        max_seq_len=sizes["max_position_embeddings"],
        vocab_size=sizes["vocab_size"],
        attn_config={"clip_qkv": 1.1, "kv_n_heads": 2, "rope_theta": 5e4},
        ffn_config={"ffn_hidden_size": 21, "moe_num_experts": 5, "moe_top_k": 3},
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        eos_token_id=2,
    )


CONFIGS["dbrx"] = _dbrx


def reference_model(kind: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A float32 `transformers` model with random weights large enough for uneven routing."""
    torch.manual_seed(seed)
    config = CONFIGS[kind](**overrides)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped kernel refuses odd sizes
    model = AutoModelForCausalLM.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.split(".")[-2]:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(
                    noise * (0.5 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5)
                )
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def save(model: Any, directory: Path, *, dtype: torch.dtype = torch.float32,
         max_shard_size: str = "5GB") -> Path:  # fmt: skip
    """Write a model as config.json and safetensors, per-expert names as in published ones.

    The model keeps float32, with its weights rounded to what was written.
    """
    with torch.no_grad():
        for parameter in model.parameters():  # not model.to: it would round the rope frequencies
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    config = json.loads((directory / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def num_params(model: Any) -> int:
    """Parameters, with the router's biases, which some models hold as buffers."""
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(tensor.numel() for tensor in (*model.parameters(), *biases))


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether the oracle would have given this answer: each token is its best after those before."""
    with torch.no_grad():
        best = model(torch.tensor([prompt + answer[:-1]])).logits[0].argmax(-1)
    return bool(best[len(prompt) - 1 :].tolist() == answer)


@cache
def reference_logits(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """The oracle's logits [len, V] at every position; computed once for all that are held to them."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by the oracle, one token at a time, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
