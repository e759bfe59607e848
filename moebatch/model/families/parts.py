"""What the engine reads of a checkpoint: parts, where their bytes lie, and the tables of names.

A family says how its tensors are called and laid out; which of them a model has follows from its
spec. Shapes are (rows, columns): a projection's rows are its outputs.
"""

from dataclasses import dataclass
from typing import Literal

from moebatch.plan.model_spec import ModelSpec

# How the numbers of a stored matrix become ours. "columns": stored transposed. "pairs": gate and up
# rows alternate. Formats that store rows whatever the name says (mxfp4) ignore the transposition.
Layout = Literal["rows", "columns", "row_pairs", "column_pairs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor, or slice `index` of its `of` equal slices along the first dimension."""

    name: str
    index: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One matrix or vector that the engine uses: the rows of `sources`, stacked in this order."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    layout: Layout = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class FFNNames:
    """An FFN's tensors; `{expert}` stands for an expert's number.

    `gate_up` names what is stacked to the gate rows and the up rows, one tensor or two. `stacked`:
    one tensor holds this matrix of all experts.
    """

    gate_up: tuple[str, ...]
    down: str
    stacked: bool = False
    gate_up_layout: Layout = "rows"
    down_layout: Layout = "rows"
    gate_up_bias: tuple[str, ...] = ()
    down_bias: str = ""


def ffn_names(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj",
              ) -> FFNNames:  # fmt: skip
    """The commonest case: three matrices, with biases beside them where the model has any."""
    return FFNNames(
        gate_up=(f"{prefix}{gate}.weight", f"{prefix}{up}.weight"),
        down=f"{prefix}{down}.weight",
        gate_up_bias=(f"{prefix}{gate}.bias", f"{prefix}{up}.bias"),
        down_bias=f"{prefix}{down}.bias",
    )


_EXPERTS = ffn_names("mlp.experts.{expert}.")
_SHARED = ffn_names("mlp.shared_experts.")
_DENSE = ffn_names("mlp.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A family's tensor names. Within a layer they follow `layer`; `.weight` or `.bias` is added to
    those that have both."""

    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    experts: FFNNames = _EXPERTS
    shared: FFNNames = _SHARED
    shared_gate: str = "mlp.shared_expert_gate"
    dense: FFNNames = _DENSE
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm"
    head: str = "lm_head"


def attention_parts(spec: ModelSpec, names: Names, layer: int) -> tuple[Part, ...]:
    """All of a layer but its experts: norms, attention, and the router or the dense FFN."""
    prefix = names.layer.format(layer=layer)
    parts = _norm_parts(spec, "input_norm", prefix + names.input_norm)
    parts += _norm_parts(spec, "post_norm", prefix + names.post_norm)
    parts += _latent_parts(spec, names, prefix) if spec.latent else _qkv_parts(spec, names, prefix)
    output = prefix + names.output
    parts.append(_whole("output", (spec.hidden_size, spec.attended_size), output + ".weight"))
    if spec.output_bias:
        parts.append(_whole("output_bias", (spec.hidden_size,), output + ".bias"))
    if spec.sinks:
        parts.append(_whole("sinks", (spec.num_q_heads,), prefix + names.sinks))
    if layer in spec.dense_layers:
        return (*parts, *_base_ffn_parts(spec, names.dense, prefix, spec.dense_size))
    if spec.has_router:
        parts += _router_parts(spec, names, prefix)
    if spec.shared_size:
        parts += _base_ffn_parts(spec, names.shared, prefix, spec.shared_size)
    if spec.shared_gate:
        gate = prefix + names.shared_gate + ".weight"
        parts.append(_whole("shared_gate", (1, spec.hidden_size), gate))
    return tuple(parts)


def expert_parts(spec: ModelSpec, names: Names, layer: int, expert: int) -> tuple[Part, ...]:
    """One expert: gate and up stacked into one matrix, and down."""
    prefix = names.layer.format(layer=layer)
    return _ffn_parts(
        spec, names.experts, prefix, size=spec.expert_size, bias=spec.expert_bias, expert=expert
    )


def vocabulary_parts(spec: ModelSpec, names: Names) -> tuple[Part, ...]:
    """Embedding, final norm and LM head; a tied head is read from the embedding."""
    table = (spec.vocab_size, spec.hidden_size)
    head = names.embedding if spec.tie_embeddings else names.head + ".weight"
    parts = [_whole("embedding", table, names.embedding), _whole("head", table, head)]
    parts += _norm_parts(spec, "final_norm", names.final_norm)
    if spec.head_bias:
        parts.append(_whole("head_bias", (spec.vocab_size,), names.head + ".bias"))
    return tuple(parts)


def _whole(name: str, shape: tuple[int, ...], *tensors: str) -> Part:
    return Part(name=name, shape=shape, sources=tuple(Source(name=tensor) for tensor in tensors))


def _norm_parts(spec: ModelSpec, name: str, tensor: str) -> list[Part]:
    parts = [_whole(name, (spec.hidden_size,), tensor + ".weight")]
    if spec.norm_bias:
        parts.append(_whole(name + "_bias", (spec.hidden_size,), tensor + ".bias"))
    return parts


def _qkv_parts(spec: ModelSpec, names: Names, prefix: str) -> list[Part]:
    """q, k and v stacked into one matrix."""
    tensors = [prefix + name for name in names.qkv]
    weights = [tensor + ".weight" for tensor in tensors]
    parts = [_whole("qkv", (spec.qkv_rows, spec.hidden_size), *weights)]
    if spec.qkv_bias:
        parts.append(_whole("qkv_bias", (spec.qkv_rows,), *(t + ".bias" for t in tensors)))
    if spec.qk_norm:
        whole = spec.qk_norm_span == "projection"
        for name, tensor, width in (
            ("q_norm", names.q_norm, spec.q_size),
            ("k_norm", names.k_norm, spec.kv_size),
        ):
            shape = (width if whole else spec.head_dim,)
            parts.append(_whole(name, shape, prefix + tensor + ".weight"))
    return parts


def _latent_parts(spec: ModelSpec, names: Names, prefix: str) -> list[Part]:
    """Queries (or their latents) and key/value latents stacked, and what expands them."""
    latent = spec.latent
    assert latent is not None
    first = names.qkv[0] if latent.q_rank is None else names.q_a
    expanded = spec.num_q_heads * (latent.nope_dim + latent.value_dim)
    parts = [
        _whole(
            "qkv",
            (spec.qkv_rows, spec.hidden_size),
            f"{prefix}{first}.weight",
            f"{prefix}{names.kv_a}.weight",
        ),
        _whole("kv_a_norm", (latent.kv_rank,), f"{prefix}{names.kv_a_norm}.weight"),
        _whole("kv_b", (expanded, latent.kv_rank), f"{prefix}{names.kv_b}.weight"),
    ]
    if latent.q_rank is not None:
        parts += [
            _whole("q_a_norm", (latent.q_rank,), f"{prefix}{names.q_a_norm}.weight"),
            _whole("q_b", (spec.q_size, latent.q_rank), f"{prefix}{names.q_b}.weight"),
        ]
    return parts


def _router_parts(spec: ModelSpec, names: Names, prefix: str) -> list[Part]:
    experts, router = spec.num_experts, prefix + names.router
    parts = [_whole("router", (experts, spec.hidden_size), router + ".weight")]
    if spec.router.has_bias:
        parts.append(_whole("router_bias", (experts,), router + ".bias"))
    if spec.router.has_selection_bias:
        parts.append(_whole("selection_bias", (experts,), prefix + names.selection_bias))
    return parts


def _base_ffn_parts(spec: ModelSpec, names: FFNNames, prefix: str, size: int) -> list[Part]:
    return [
        Part(name="base_" + part.name, shape=part.shape, sources=part.sources, layout=part.layout)
        for part in _ffn_parts(spec, names, prefix, size=size, bias=spec.ffn_bias)
    ]


def _ffn_parts(spec: ModelSpec, names: FFNNames, prefix: str, *, size: int, bias: bool,
               expert: int = 0) -> tuple[Part, ...]:  # fmt: skip
    """gate_up [2F, D] and down [D, F], with their biases."""

    def part(name: str, shape: tuple[int, ...], layout: Layout, *tensors: str) -> Part:
        index, of = (expert, spec.num_experts) if names.stacked else (0, 1)
        sources = tuple(
            Source(name=prefix + tensor.format(expert=expert), index=index, of=of)
            for tensor in tensors
        )
        return Part(name=name, shape=shape, sources=sources, layout=layout)

    hidden = spec.hidden_size
    parts = [
        part("gate_up", (2 * size, hidden), names.gate_up_layout, *names.gate_up),
        part("down", (hidden, size), names.down_layout, names.down),
    ]
    if bias:
        pairs: Layout = "row_pairs" if names.gate_up_layout.endswith("pairs") else "rows"
        parts += [
            part("gate_up_bias", (2 * size,), pairs, *names.gate_up_bias),
            part("down_bias", (hidden,), "rows", names.down_bias),
        ]
    return tuple(parts)
