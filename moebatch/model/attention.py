"""Softmax attention with grouped key/value heads: the plain form, one for prompts, one for decode.

Knows no cache: keys and values come as contiguous tensors.
Shapes: Q query tokens, C context tokens, R rows, H query heads, G key/value heads, d head_dim,
e value width (mostly d). Latent attention: k latent, n plain and r rotated dimensions of a key.
Query head h belongs to key/value head h // (H/G).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from moebatch.plan.model_spec import LatentSpec

_MAX_SCORES = 1 << 23  # scores that are in memory at once where no fused kernel applies


def attention_plain(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, *,
                    scale: float | None = None, sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """The reference form, one row: q [Q, H, d], k [C, G, d], v [C, G, e] -> [Q, H, e].

    The queries are the last Q positions of the context; a window hides all but its last tokens.
    `sinks` [H] are scores that take part in the softmax and give nothing.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,chd->hqc", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(
        ~causal_mask(q.shape[0], k.shape[0], window, q.device), float("-inf")
    )
    if sinks is not None:
        column = sinks[:, None, None].expand(-1, q.shape[0], 1)
        probabilities = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probabilities = scores.softmax(dim=-1)
    return torch.einsum("hqc,chd->qhd", probabilities, v)


def causal_mask(num_queries: int, context: int, window: int | None,
                device: torch.device | None = None) -> Tensor:  # fmt: skip
    """[Q, C] True where a query sees a key: not in its future, and within the window."""
    position = torch.arange(context - num_queries, context, device=device)[:, None]
    key = torch.arange(context, device=device)
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, *,
                  scale: float | None = None, sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """One row's prompt tokens: q [Q, H, d], k [C, G, d], v [C, G, e] -> [Q, H, e].

    Same contract as `attention_plain`. Key/value heads are expanded: compute binds here, not memory.
    """
    num_queries, context, repeat = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if sinks is not None:
        return _with_sinks(q, k, v, window, scale=scale, sinks=sinks)
    value_dim = v.shape[-1]
    if value_dim < q.shape[-1]:  # the fused kernel wants equal widths
        v = pad(v, (0, q.shape[-1] - value_dim))
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    whole = num_queries == context and (window is None or window >= context)
    mask = None if whole else causal_mask(num_queries, context, window, q.device)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=whole,
        scale=scale,
    )
    return out[0].transpose(0, 1)[..., :value_dim]


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, window: int | None, *, scale: float | None,
                sinks: Tensor) -> Tensor:  # fmt: skip
    """`attention_plain` over tiles of queries, each with the keys that it can see: bounded memory."""
    num_queries, context = q.shape[0], k.shape[0]
    step = max(16, _MAX_SCORES // (q.shape[1] * context))
    parts = []
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        end = context - num_queries + last
        start = 0 if window is None else max(0, end - (last - first) - window + 1)
        parts.append(
            attention_plain(
                q[first:last], k[start:end], v[start:end], window, scale=scale, sinks=sinks
            )
        )
    return torch.cat(parts)


def attend_decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float | None = None,
                  sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """One token of each of R rows: q [R, H, d], k [R, G, C, d], v [R, G, C, e] -> [R, H, e].

    mask [R, C] says which tokens a row sees.
    The query heads of a group stand as its "queries", so each key and value is read once for all.
    """
    rows, num_heads, head_dim = q.shape
    groups = k.shape[1]
    q = q.view(rows, groups, num_heads // groups, head_dim)
    visible = mask[:, None, None]
    if sinks is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    else:
        scores = q @ k.transpose(2, 3) * (head_dim**-0.5 if scale is None else scale)
        scores = scores.masked_fill(~visible, float("-inf"))
        column = sinks.view(groups, -1, 1).expand(rows, -1, -1, 1)
        out = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1] @ v
    return out.reshape(rows, num_heads, v.shape[-1])


def expand_latents(latents: Tensor, kv_b: Tensor, spec: LatentSpec) -> tuple[Tensor, Tensor]:
    """Keys [C, H, n + r] and values [C, H, e] of cached latents [C, k + r]; kv_b [H (n + e), k].

    Source: DeepSeek-V2 (2405.04434), eq. 9-16.
    """
    to_key, to_value = _by_head(kv_b, spec)
    compressed, rotated = torch.split(latents, [spec.kv_rank, spec.rope_dim], dim=-1)
    keys = torch.einsum("ck,hnk->chn", compressed, to_key)
    turned = rotated[:, None].expand(-1, keys.shape[1], -1)
    return torch.cat((keys, turned), dim=-1), torch.einsum("ck,hek->che", compressed, to_value)


def absorb_queries(q: Tensor, kv_b: Tensor, spec: LatentSpec) -> Tensor:
    """Queries [R, H, n + r] that can be held against latents themselves: [R, H, k + r].

    q W_k c = (q W_k) c: the key matrix goes to the query. Source: DeepSeek-V2, section 2.1.2.
    """
    plain, turned = torch.split(q, [spec.nope_dim, spec.rope_dim], dim=-1)
    absorbed = torch.einsum("rhn,hnk->rhk", plain, _by_head(kv_b, spec)[0])
    return torch.cat((absorbed, turned), dim=-1)


def release_values(attended: Tensor, kv_b: Tensor, spec: LatentSpec) -> Tensor:
    """Attended latents [R, H, k] -> attended values [R, H, e]."""
    return torch.einsum("rhk,hek->rhe", attended, _by_head(kv_b, spec)[1])


def _by_head(kv_b: Tensor, spec: LatentSpec) -> tuple[Tensor, Tensor]:
    """[H, n, k] for keys and [H, e, k] for values."""
    heads = kv_b.view(-1, spec.nope_dim + spec.value_dim, spec.kv_rank)
    return heads[:, : spec.nope_dim], heads[:, spec.nope_dim :]
