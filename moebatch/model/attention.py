"""Softmax attention with grouped key/value heads: the plain form, one for prompts, one for decode.

Knows no cache: keys and values come as contiguous tensors.
Shapes: Q query tokens, C context tokens, R rows, H query heads, G key/value heads, d head_dim.
Query head h belongs to key/value head h // (H/G).
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attention_plain(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """The reference form, one row: q [Q, H, d], k and v [C, G, d] -> [Q, H, d].

    The queries are the last Q positions of the context; a window hides all but its last tokens.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,chd->hqc", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~causal_mask(q.shape[0], k.shape[0], window), float("-inf"))
    return torch.einsum("hqc,chd->qhd", scores.softmax(dim=-1), v)


def causal_mask(num_queries: int, context: int, window: int | None) -> Tensor:
    """[Q, C] True where a query sees a key: not in its future, and within the window."""
    position = torch.arange(context - num_queries, context)[:, None]
    key = torch.arange(context)
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """One row's prompt tokens: q [Q, H, d], k and v [C, G, d] -> [Q, H, d].

    Same contract as `attention_plain`. Key/value heads are expanded: compute binds here, not memory.
    """
    num_queries, context, repeat = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    whole = num_queries == context and (window is None or window >= context)
    mask = None if whole else causal_mask(num_queries, context, window)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=whole,
    )
    return out[0].transpose(0, 1)


def attend_decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One token of each of R rows: q [R, H, d], k and v [R, G, C, d], mask [R, C] -> [R, H, d].

    The query heads of a group stand as its "queries", so each key and value is read once for all.
    """
    rows, num_heads, head_dim = q.shape
    groups = k.shape[1]
    out = scaled_dot_product_attention(
        q.view(rows, groups, num_heads // groups, head_dim), k, v, attn_mask=mask[:, None, None]
    )
    return out.reshape(rows, num_heads, head_dim)
