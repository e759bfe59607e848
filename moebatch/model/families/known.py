"""Models with a short name: where they are on the hub, and their shapes, so that a plan needs no
download.

The facts are those of the published config.json files that decide sizes. Settings of the arithmetic
(rotary scaling, multipliers) are not among them: a run reads them from the model itself.
"""

from dataclasses import dataclass, field
from typing import Any

from moebatch.model.families import Family, family_of
from moebatch.plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A short name's hub id and the facts of its config.json."""

    repo: str
    config: dict[str, Any] = field(repr=False)

    @property
    def family(self) -> Family:
        """Its architecture."""
        return family_of(self.config)

    @property
    def spec(self) -> ModelSpec:
        """Its shapes."""
        return self.family.spec(self.config)


def _config(model_type: str, *, layers: int, hidden: int, heads: tuple[int, int], vocab: int,
            context: int, **others: Any) -> dict[str, Any]:  # fmt: skip
    """A config.json; `heads` are those of queries and of keys and values."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **others,
    }


def _mixtral(**sizes: Any) -> dict[str, Any]:
    return _config("mixtral", **sizes, num_local_experts=8, num_experts_per_tok=2)


def _mixtral_8x22b(vocab: int) -> dict[str, Any]:
    return _mixtral(layers=56, hidden=6144, heads=(48, 8), vocab=vocab, context=65536,
                    intermediate_size=16384)  # fmt: skip


def _qwen3_moe(layers: int, hidden: int, heads: int, size: int, dense_size: int) -> dict[str, Any]:
    return _config("qwen3_moe", layers=layers, hidden=hidden, heads=(heads, 4), vocab=151936,
                   context=40960, head_dim=128, num_experts=128, num_experts_per_tok=8,
                   moe_intermediate_size=size, intermediate_size=dense_size,
                   norm_topk_prob=True)  # fmt: skip


def _deepseek(model_type: str, *, layers: int, hidden: int, heads: int, vocab: int, experts: int,
              top_k: int, size: int, shared: int, dense: tuple[int, int], q_rank: int | None,
              **others: Any) -> dict[str, Any]:  # fmt: skip
    """`dense` is the number of dense layers and their width."""
    return _config(
        model_type, layers=layers, hidden=hidden, heads=(heads, heads), vocab=vocab, context=163840,
        n_routed_experts=experts, num_experts_per_tok=top_k, moe_intermediate_size=size,
        n_shared_experts=shared, first_k_dense_replace=dense[0], intermediate_size=dense[1],
        q_lora_rank=q_rank, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, **others)  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _config("gpt_oss", layers=layers, hidden=2880, heads=(64, 8), vocab=201088,
                   context=131072, head_dim=64, intermediate_size=2880, num_local_experts=experts,
                   num_experts_per_tok=4, sliding_window=128,
                   quantization_config={"quant_method": "mxfp4"})  # fmt: skip


def _granite(layers: int, hidden: int, heads: int, experts: int) -> dict[str, Any]:
    return _config("granitemoe", layers=layers, hidden=hidden, heads=(heads, 8), vocab=49155,
                   context=131072, intermediate_size=512, num_local_experts=experts,
                   num_experts_per_tok=8, tie_word_embeddings=True)  # fmt: skip


def _glm(layers: int, hidden: int, experts: int, size: int, dense: tuple[int, int], *,
         qk_norm: bool) -> dict[str, Any]:  # fmt: skip
    return _config("glm4_moe", layers=layers, hidden=hidden, heads=(96, 8), vocab=151552,
                   context=131072, head_dim=128, n_routed_experts=experts, num_experts_per_tok=8,
                   moe_intermediate_size=size, n_shared_experts=1, first_k_dense_replace=dense[0],
                   intermediate_size=dense[1], use_qk_norm=qk_norm,
                   attention_bias=True)  # fmt: skip


_MIXTRAL_8X7B = _mixtral(
    layers=32, hidden=4096, heads=(32, 8), vocab=32000, context=32768, intermediate_size=14336
)
_DEEPSEEK_V3 = _deepseek(
    "deepseek_v3", layers=61, hidden=7168, heads=128, vocab=129280, experts=256, top_k=8, size=2048,
    shared=1, dense=(3, 18432), q_rank=1536, n_group=8, topk_group=4,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)  # fmt: skip
_DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
    "vocab_size": 100352, "torch_dtype": "bfloat16",
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}  # fmt: skip
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-Instruct-v0.1", _MIXTRAL_8X7B),
    "mixtral-8x7b-base": ("mistralai/Mixtral-8x7B-v0.1", _MIXTRAL_8X7B),
    "mixtral-8x22b": (
        "mistralai/Mixtral-8x22B-Instruct-v0.1", _mixtral_8x22b(32768)),
    "mixtral-8x22b-base": (
        "mistralai/Mixtral-8x22B-v0.1", _mixtral_8x22b(32000)),
    "dbrx": ("databricks/dbrx-instruct", _DBRX),
    "phi-3.5-moe": (
        "microsoft/Phi-3.5-MoE-instruct",
        _config("phimoe", layers=32, hidden=4096, heads=(32, 8), vocab=32064, context=131072,
                intermediate_size=6400, num_local_experts=16, num_experts_per_tok=2,
                attention_bias=True, lm_head_bias=True)),
    "deepseek-v2-lite": (
        "deepseek-ai/DeepSeek-V2-Lite-Chat",
        _deepseek("deepseek_v2", layers=27, hidden=2048, heads=16, vocab=102400, experts=64,
                  top_k=6, size=1408, shared=2, dense=(1, 10944), q_rank=None)),
    "deepseek-v2": (
        "deepseek-ai/DeepSeek-V2-Chat",
        _deepseek("deepseek_v2", layers=60, hidden=5120, heads=128, vocab=102400, experts=160,
                  top_k=6, size=1536, shared=2, dense=(1, 12288), q_rank=1536,
                  topk_method="group_limited_greedy", n_group=8, topk_group=3)),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", _DEEPSEEK_V3),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1", _DEEPSEEK_V3),
    "qwen1.5-moe-a2.7b": (
        "Qwen/Qwen1.5-MoE-A2.7B-Chat",
        _config("qwen2_moe", layers=24, hidden=2048, heads=(16, 16), vocab=151936, context=8192,
                intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
                moe_intermediate_size=1408, shared_expert_intermediate_size=5632)),
    "qwen2-57b-a14b": (
        "Qwen/Qwen2-57B-A14B-Instruct",
        _config("qwen2_moe", layers=28, hidden=3584, heads=(28, 4), vocab=151936, context=32768,
                intermediate_size=18944, num_experts=64, num_experts_per_tok=8,
                moe_intermediate_size=2560, shared_expert_intermediate_size=20480)),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", _qwen3_moe(48, 2048, 32, 768, 6144)),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", _qwen3_moe(94, 4096, 64, 1536, 12288)),
    "olmoe-1b-7b": (
        "allenai/OLMoE-1B-7B-0125-Instruct",
        _config("olmoe", layers=16, hidden=2048, heads=(16, 16), vocab=50304, context=4096,
                intermediate_size=1024, num_experts=64, num_experts_per_tok=8)),
    "gpt-oss-20b": ("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    "granite-1b-a400m": (
        "ibm-granite/granite-3.1-1b-a400m-instruct", _granite(24, 1024, 16, 32)),
    "granite-3b-a800m": (
        "ibm-granite/granite-3.1-3b-a800m-instruct", _granite(32, 1536, 24, 40)),
    "glm-4.5": ("zai-org/GLM-4.5", _glm(92, 5120, 160, 1536, (3, 12288), qk_norm=True)),
    "glm-4.5-air": ("zai-org/GLM-4.5-Air", _glm(46, 4096, 128, 1408, (1, 10944), qk_norm=False)),
    "ernie-4.5-21b-a3b": (
        "baidu/ERNIE-4.5-21B-A3B-PT",
        _config("ernie4_5_moe", layers=28, hidden=2560, heads=(20, 4), vocab=103424,
                context=131072, head_dim=128, intermediate_size=12288, moe_num_experts=64, moe_k=6,
                moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1)),
    "minimax-m2": (
        "MiniMaxAI/MiniMax-M2",
        _config("minimax_m2", layers=62, hidden=3072, heads=(48, 8), vocab=200064, context=196608,
                head_dim=128, intermediate_size=1536, num_local_experts=256, num_experts_per_tok=8,
                quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})),
    "mistral-7b": (
        "mistralai/Mistral-7B-Instruct-v0.3",
        _config("mistral", layers=32, hidden=4096, heads=(32, 8), vocab=32768, context=32768,
                intermediate_size=14336)),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        _config("llama", layers=32, hidden=4096, heads=(32, 8), vocab=128256, context=131072,
                intermediate_size=14336)),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B-Instruct",
        _config("qwen2", layers=28, hidden=3584, heads=(28, 4), vocab=152064, context=32768,
                intermediate_size=18944)),
    "qwen3-8b": (
        "Qwen/Qwen3-8B",
        _config("qwen3", layers=36, hidden=4096, heads=(32, 8), vocab=151936, context=40960,
                head_dim=128, intermediate_size=12288)),
}  # fmt: skip

KNOWN: dict[str, KnownModel] = {
    name: KnownModel(repo=repo, config=config) for name, (repo, config) in _CONFIGS.items()
}
