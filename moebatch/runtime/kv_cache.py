"""Keys and values in fixed blocks of tokens, with a table of blocks per sequence.

A block holds KV_BLOCK_TOKENS tokens of one sequence in every layer; blocks are taken as a sequence
grows and given back when it ends. A block's bytes are contiguous per head, so that a gather of
blocks gives [rows, heads, context, head_dim] at once.
Layers with a sliding window keep only their window: a sequence has a ring of blocks there, in which
the token at position p lies at slot p modulo the ring's size.
Shapes: T tokens, R rows, C context tokens, G key/value heads, d head_dim, B blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moebatch.native.kernels import Context
from moebatch.plan.memory import ring_blocks
from moebatch.plan.policy import KV_BLOCK_TOKENS
from moebatch.runtime.host import give_back

Empty = Callable[[int, tuple[int, ...], torch.dtype], Tensor]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks, in the order of its tokens, and its ring in the layers with a window."""

    full: list[int] = field(default_factory=list)
    ring: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.full)


Span = tuple[BlockTable, int, int]  # tokens [start, end) of a sequence


class KVCache:
    """The block pools of all layers and their free lists."""

    def __init__(self, *, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int,
                 dtype: str, value_dim: int | None = None, windows: Sequence[int | None] = (),
                 max_sequences: int | None = None, draft_tokens: int = 0,
                 empty: Empty | None = None) -> None:  # fmt: skip
        """Reserve address space for the pools; memory is touched only when a block is written.

        Zeros, because masked positions are still multiplied: they must be finite.
        `value_dim`: a value is so much of its key (latents), and is not held again.
        `windows`: of each layer, none given: no layer has one. At most `max_sequences` hold blocks at
        once, which bounds the rings; these have room for `draft_tokens` behind the token that decodes,
        so that `shrink` can take drafts back. `empty` gives a layer's memory where that is not host
        memory; such a cache's indices must lie there too.
        """
        self._ring_blocks = ring_blocks(windows, draft_tokens)
        ring = min(num_blocks, self._ring_blocks * (max_sequences or num_blocks))
        self._windowed = [bool(windows) and windows[i] is not None for i in range(num_layers)]
        pools = 2 if value_dim is None else 1
        make = empty or (lambda layer, shape, dtype: torch.zeros(shape, dtype=dtype))
        self._layers = [
            make(
                i,
                (
                    pools,
                    (ring if windowed else num_blocks) * num_kv_heads,
                    KV_BLOCK_TOKENS,
                    head_dim,
                ),
                _DTYPES[dtype],
            )
            for i, windowed in enumerate(self._windowed)
        ]
        self._num_kv_heads, self._value_dim = num_kv_heads, value_dim
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_ring = list(range(ring - 1, -1, -1))
        self.num_blocks = num_blocks
        self.block_tokens = KV_BLOCK_TOKENS
        self.gather_bytes_per_block = pools * num_kv_heads * KV_BLOCK_TOKENS * head_dim * 4
        self.dtype, self._dtype_name = _DTYPES[dtype], dtype
        # Caches elsewhere that hold layers of the same sequences.
        self.followers: list[KVCache] = []

    @property
    def ring_tokens(self) -> int:
        """Tokens that a ring holds: no fewer than the widest window; 0 where no layer has one."""
        return self._ring_blocks * KV_BLOCK_TOKENS

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Add blocks to a sequence's table until it holds `num_tokens` tokens."""
        need = blocks_for(num_tokens)
        _take(self._free, table.full, need)
        _take(self._free_ring, table.ring, min(need, self._ring_blocks))

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Give the blocks back that lie behind a sequence's first `num_tokens` tokens."""
        need = blocks_for(num_tokens)
        _give(self._free, table.full, need)
        _give(self._free_ring, table.ring, min(need, self._ring_blocks))

    def release(self, table: BlockTable) -> None:
        """Give all blocks of a sequence back; the table is empty afterwards."""
        self.shrink(table, 0)

    def scrub(self, table: BlockTable) -> None:
        """Zero a sequence's blocks: after non-finite values, before another sequence gets them."""
        full, ring = (self._rows([blocks]).flatten() for blocks in (table.full, table.ring))
        for cache in (self, *self.followers):
            for pools, windowed in zip(cache._layers, cache._windowed, strict=True):
                if pools.numel():
                    rows = ring if windowed else full
                    pools.index_fill_(1, rows.to(pools.device), 0.0)

    def scrub_tokens(self, table: BlockTable, start: int, end: int) -> None:
        """Zero tokens [start, end) of a sequence, of which a ring holds no later ones."""
        full = self.slots(table, start, end).flatten()
        ring = self.ring_slots(table, start, end).flatten() if self.ring_tokens else full
        for cache in (self, *self.followers):
            for pools, windowed in zip(cache._layers, cache._windowed, strict=True):
                if pools.numel():
                    rows = (ring if windowed else full).to(pools.device)
                    pools.view(pools.shape[0], -1, pools.shape[-1]).index_fill_(1, rows, 0.0)

    def give_back(self, count: int) -> int:
        """Return the memory of so many free blocks for good; bytes that were given back.

        Layers with a window keep theirs: a ring is small.
        """
        assert count <= len(self._free), (count, len(self._free))
        self._free.sort()
        gone = [self._free.pop() for _ in range(count)]
        self._free.reverse()
        given = 0
        for pools, windowed in zip(self._layers, self._windowed, strict=True):
            if windowed or pools.device.type != "cpu":
                continue
            block = pools[0].nbytes // self.num_blocks
            for first, last in _runs(gone):
                for pool in pools:
                    given += give_back(pool.data_ptr() + first * block, (last - first) * block)
        return given

    def slots(self, table: BlockTable, start: int, end: int) -> Tensor:
        """Where tokens [start, end) of a sequence are written: row numbers of the pool, [T, G]."""
        return self._slots(table.full, torch.arange(start, end))

    def ring_slots(self, table: BlockTable, start: int, end: int) -> Tensor:
        """The same in a layer with a window; at most `ring_tokens` tokens."""
        assert end - start <= self.ring_tokens, (start, end)
        return self._slots(table.ring, torch.arange(start, end) % max(1, self.ring_tokens))

    def _slots(self, blocks: list[int], position: Tensor) -> Tensor:
        block = torch.tensor(blocks, dtype=torch.int64)[position // KV_BLOCK_TOKENS]
        row = block[:, None] * self._num_kv_heads + torch.arange(self._num_kv_heads)
        return row * KV_BLOCK_TOKENS + (position % KV_BLOCK_TOKENS)[:, None]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, G, d] at the slots [T, G]."""
        head_dim = k.shape[-1]
        flat = slots.flatten()
        held = (k, v) if self._value_dim is None else (k,)
        for pool, values in zip(self._layers[layer], held, strict=True):
            rows = values.reshape(-1, head_dim).to(self.dtype)
            pool.view(-1, head_dim).index_copy_(0, flat, rows)

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as they lie: [blocks * G, KV_BLOCK_TOKENS, d] each."""
        keys, values = self._layers[layer]
        return keys, values

    def rounded(self, values: Tensor) -> Tensor:
        """What comes back of values that are written: attention sees the same either way."""
        return values.to(self.dtype).float()

    def context(self, spans: Sequence[Span], *, ring: bool = False) -> Context:
        """What the native kernels take: one row for each token of the spans, which sees up to itself.

        `ring`: in a layer with a window, where the blocks of a ring come round and round.
        """
        counts = torch.tensor([end - start for _, start, end in spans])
        longest = max(blocks_for(end) for _, _, end in spans)
        tables = torch.zeros(len(spans), longest, dtype=torch.int32)
        for row, (table, _, end) in zip(tables, spans, strict=True):
            blocks = torch.tensor(table.ring if ring else table.full, dtype=torch.int32)
            used = torch.arange(blocks_for(end))
            row[: used.numel()] = blocks[used % max(1, self._ring_blocks)] if ring else blocks[used]
        return Context(
            sequences=torch.repeat_interleave(counts),
            lengths=torch.cat([torch.arange(start + 1, end + 1) for _, start, end in spans]),
            tables=tables,
            num_kv_heads=self._num_kv_heads,
        )

    def scratch(self, lengths: Sequence[int]) -> "tuple[KVCache, list[BlockTable]]":
        """A cache of one layer of the same shape, with room for sequences of these lengths."""
        cache = KVCache(num_layers=1, num_blocks=sum(blocks_for(n) for n in lengths),
                        num_kv_heads=self._num_kv_heads, head_dim=self._layers[0].shape[3],
                        dtype=self._dtype_name)  # fmt: skip
        tables = [BlockTable() for _ in lengths]
        for table, length in zip(tables, lengths, strict=True):
            cache.extend(table, length)
        return cache, tables

    def block_rows(self, tables: Sequence[BlockTable]) -> Tensor:
        """What `gather` takes for these rows: their blocks head by head, padded to the longest."""
        return self._rows([table.full for table in tables])

    def ring_rows(self, tables: Sequence[BlockTable]) -> Tensor:
        """The same of their rings, for layers with a window."""
        return self._rows([table.ring for table in tables])

    def _rows(self, tables: Sequence[list[int]]) -> Tensor:
        longest = max(len(blocks) for blocks in tables)
        padded = torch.zeros(len(tables), longest, dtype=torch.int64)
        for row, blocks in zip(padded, tables, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
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
        numbers = pools.shape[0] * block_rows.numel() * KV_BLOCK_TOKENS * pools.shape[3]
        return numbers * self.dtype.itemsize

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

    def gather_tokens(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, G, d] float32 of the tokens at the slots [T, G]."""
        found = [
            pool.view(-1, pool.shape[-1]).index_select(0, slots.flatten()).view(*slots.shape, -1)
            for pool in self._layers[layer]
        ]
        return found[0].float(), found[-1][..., : self._value_dim].float()


def _take(free: list[int], blocks: list[int], need: int) -> None:
    missing = need - len(blocks)
    assert missing <= len(free), (missing, len(free))
    for _ in range(missing):
        blocks.append(free.pop())


def _give(free: list[int], blocks: list[int], need: int) -> None:
    free.extend(reversed(blocks[need:]))
    del blocks[need:]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [first, last) of neighbours."""
    ordered, found = sorted(numbers), list[tuple[int, int]]()
    for number in ordered:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def blocks_for(num_tokens: int) -> int:
    """Blocks that a sequence of this many tokens takes."""
    return -(-num_tokens // KV_BLOCK_TOKENS)
