"""Small random models in the Hugging Face layout, made by `transformers`, which is also the oracle."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
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
}


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
            if "norm" in name:
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


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by the oracle, one token at a time, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
