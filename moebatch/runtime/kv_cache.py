"""Keys and values in fixed blocks of tokens, with a table of blocks per sequence.

A block holds KV_BLOCK_TOKENS tokens of one sequence in every layer; blocks are taken as a sequence
grows and given back when it ends. A block's bytes are contiguous per head, so that a gather of
blocks gives [rows, heads, context, head_dim] at once.
Shapes: T tokens, R rows, C context tokens, G key/value heads, d head_dim, B blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moebatch.plan.policy import KV_BLOCK_TOKENS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache:
    """The block pool of all layers and its free list."""

    def __init__(self, *, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int,
                 dtype: str, value_dim: int | None = None,
                 empty: Callable[[int, tuple[int, ...], torch.dtype], Tensor] | None = None,
                 ) -> None:  # fmt: skip
        """Reserve address space for the pool; memory is touched only when a block is written.

        Zeros, because masked positions are still multiplied: they must be finite.
        `empty` gives a layer's memory where that is not host memory; such a cache's indices must lie
        there too. `value_dim`: a value is so much of its key (latents), and is not held again.
        """
        pools = 2 if value_dim is None else 1
        shape = (pools, num_blocks * num_kv_heads, KV_BLOCK_TOKENS, head_dim)
        make = empty or (lambda layer, shape, dtype: torch.zeros(shape, dtype=dtype))
        self._layers = [make(layer, shape, _DTYPES[dtype]) for layer in range(num_layers)]
        self._num_kv_heads, self._value_dim = num_kv_heads, value_dim
        self._free = list(range(num_blocks - 1, -1, -1))
        self.num_blocks = num_blocks
        self.block_tokens = KV_BLOCK_TOKENS
        self.gather_bytes_per_block = pools * num_kv_heads * KV_BLOCK_TOKENS * head_dim * 4
        self.dtype = _DTYPES[dtype]
        self.followers: list[
            KVCache
        ] = []  # caches elsewhere that hold layers of the same sequences

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def extend(self, table: list[int], num_tokens: int) -> None:
        """Add blocks to a sequence's table until it holds `num_tokens` tokens."""
        missing = blocks_for(num_tokens) - len(table)
        assert missing <= len(self._free), (missing, len(self._free))
        for _ in range(missing):
            table.append(self._free.pop())

    def release(self, table: list[int]) -> None:
        """Give all blocks of a sequence back; the table is empty afterwards."""
        self._free += reversed(table)
        table.clear()

    def scrub(self, table: list[int]) -> None:
        """Zero a sequence's blocks: after non-finite values, before another sequence gets them."""
        rows = self.block_rows([table]).flatten()
        for cache in (self, *self.followers):
            for pools in cache._layers:
                if pools.numel():
                    pools.index_fill_(1, rows.to(pools.device), 0.0)

    def slots(self, table: list[int], start: int, end: int) -> Tensor:
        """Where tokens [start, end) of a sequence are written: row numbers of the pool, [T, G]."""
        position = torch.arange(start, end)
        block = torch.tensor(table)[position // KV_BLOCK_TOKENS]
        heads = torch.arange(self._num_kv_heads)
        row = block[:, None] * self._num_kv_heads + heads
        return row * KV_BLOCK_TOKENS + (position % KV_BLOCK_TOKENS)[:, None]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, G, d] at the slots [T, G]."""
        head_dim = k.shape[-1]
        flat = slots.flatten()
        held = (k, v) if self._value_dim is None else (k,)
        for pool, values in zip(self._layers[layer], held, strict=True):
            rows = values.reshape(-1, head_dim).to(self.dtype)
            pool.view(-1, head_dim).index_copy_(0, flat, rows)

    def rounded(self, values: Tensor) -> Tensor:
        """What comes back of values that are written: attention sees the same either way."""
        return values.to(self.dtype).float()

    def block_rows(self, tables: list[list[int]]) -> Tensor:
        """What `gather` takes for these rows: their blocks head by head, padded to the longest."""
        longest = max(len(table) for table in tables)
        padded = torch.zeros(len(tables), longest, dtype=torch.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = torch.tensor(table)
        heads = torch.arange(self._num_kv_heads)
        return padded[:, None, :] * self._num_kv_heads + heads[:, None]

    def gather(self, layer: int, block_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R, G, C, d] float32 of rows given by `block_rows`; C whole blocks.

        Beyond a row's own tokens the content is arbitrary: mask it.
        """
        rows, heads, blocks = block_rows.shape
        flat = block_rows.flatten()
        found = [
            pool.index_select(0, flat).view(rows, heads, blocks * KV_BLOCK_TOKENS, -1).float()
            for pool in self._layers[layer]
        ]
        return found[0], found[-1][..., : self._value_dim]

    def gather_bytes(self, block_rows: Tensor) -> int:
        """Bytes that `gather_into` fills for these rows."""
        pools = self._layers[0]
        return (
            pools.shape[0]
            * block_rows.numel()
            * KV_BLOCK_TOKENS
            * pools.shape[3]
            * (self.dtype.itemsize)
        )

    def gather_into(self, layer: int, block_rows: Tensor, out: Tensor) -> None:
        """The same blocks as they lie, into bytes [gather_bytes]; `context_of` reads them."""
        pools, flat = self._layers[layer], block_rows.flatten()
        held = out.view(self.dtype).view(pools.shape[0], flat.numel(), KV_BLOCK_TOKENS, -1)
        for pool, target in zip(pools, held, strict=True):
            torch.index_select(pool, 0, flat, out=target)

    def context_of(self, gathered: Tensor, block_rows_shape: tuple[int, ...],
                   ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What `gather` returns, of bytes that `gather_into` filled, wherever they lie now."""
        rows, heads, blocks = block_rows_shape
        pools = self._layers[0].shape[0]
        held = gathered.view(self.dtype).view(pools, rows, heads, blocks * KV_BLOCK_TOKENS, -1)
        return held[0].float(), held[-1][..., : self._value_dim].float()


def blocks_for(num_tokens: int) -> int:
    """Blocks that a sequence of this many tokens takes."""
    return -(-num_tokens // KV_BLOCK_TOKENS)
