"""Keys and values in fixed blocks of tokens, with a table of blocks per sequence.

A block holds KV_BLOCK_TOKENS tokens of one sequence in every layer; blocks are taken as a sequence
grows and given back when it ends. A block's bytes are contiguous per head, so that a gather of
blocks gives [rows, heads, context, head_dim] at once.
Shapes: T tokens, R rows, C context tokens, G key/value heads, d head_dim, B blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moebatch.native.kernels import Context
from moebatch.plan.policy import KV_BLOCK_TOKENS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache:
    """The block pool of all layers and its free list."""

    def __init__(self, *, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int,
                 dtype: str) -> None:  # fmt: skip
        """Reserve address space for the pool; memory is touched only when a block is written.

        Zeros, because masked positions are still multiplied: they must be finite.
        """
        shape = (2, num_blocks * num_kv_heads, KV_BLOCK_TOKENS, head_dim)
        self._layers = [torch.zeros(shape, dtype=_DTYPES[dtype]) for _ in range(num_layers)]
        self._num_kv_heads = num_kv_heads
        self._free = list(range(num_blocks - 1, -1, -1))
        self.num_blocks = num_blocks
        self.block_tokens = KV_BLOCK_TOKENS
        self.gather_bytes_per_block = 2 * num_kv_heads * KV_BLOCK_TOKENS * head_dim * 4
        self.dtype = _DTYPES[dtype]

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
        for pools in self._layers:
            pools.index_fill_(1, rows, 0.0)

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
        for pool, values in zip(self._layers[layer], (k, v), strict=True):
            rows = values.reshape(-1, head_dim).to(self.dtype)
            pool.view(-1, head_dim).index_copy_(0, flat, rows)

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as they lie: [blocks * G, KV_BLOCK_TOKENS, d] each."""
        keys, values = self._layers[layer]
        return keys, values

    def rounded(self, values: Tensor) -> Tensor:
        """What comes back of values that are written: attention sees the same either way."""
        return values.to(self.dtype).float()

    def context(self, spans: Sequence[tuple[list[int], int, int]]) -> Context:
        """What the native kernels take: per sequence its table and the tokens [start, end) that ask.

        One row for each of those tokens, which sees all tokens up to itself.
        """
        longest = max(len(table) for table, _, _ in spans)
        tables = torch.tensor([table + [0] * (longest - len(table)) for table, _, _ in spans])
        counts = torch.tensor([end - start for _, start, end in spans])
        return Context(
            sequences=torch.repeat_interleave(counts),
            lengths=torch.cat([torch.arange(start + 1, end + 1) for _, start, end in spans]),
            tables=tables.to(torch.int32),
            num_kv_heads=self._num_kv_heads,
        )

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
        k, v = (
            pool.index_select(0, flat).view(rows, heads, blocks * KV_BLOCK_TOKENS, -1).float()
            for pool in self._layers[layer]
        )
        return k, v


def blocks_for(num_tokens: int) -> int:
    """Blocks that a sequence of this many tokens takes."""
    return -(-num_tokens // KV_BLOCK_TOKENS)
