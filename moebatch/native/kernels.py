"""The native kernels for tensors: packed weights, y = x W^T, the expert FFN.

What a kernel computes for one token does not depend, bit for bit, on the other tokens of the call
nor on the number of threads. Sums are float32 chains in the order of the inputs.
Shapes: T tokens, I inputs (columns), O outputs (rows), F expert size, R routed rows, E experts.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moebatch.errors import ModelError, UsageError
from moebatch.native.extension import OFF, SIMD_VARIABLE, extension, variants
from moebatch.native.rounding import PANEL, Rounding, restored

_HUGE_PAGE = 2 << 20
_ALIGN = 64
CHUNK_TOKENS = 256  # of context, from its start on, that one softmax covers before results merge
MAX_SHARED_QUERIES = 64  # query heads of a key/value head
INT8 = Rounding(bits=8, group=128)
# 4.375 bits a weight; as good as groups of 32 without zero points (4.5 bits), and faster.
INT4 = Rounding(bits=4, group=64, zeros=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A weight [O, I] in the kernels' layout; `buffer` owns the bytes that `matrix` points to.

    `kind` is its type, or how it was rounded.
    """

    buffer: Tensor
    matrix: Any
    kind: torch.dtype | Rounding
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnWeights:
    """One expert's gate and up [F, I] and down [O, F], ready for `Kernels.ffn`.

    `owners` keeps the memory alive that `expert` points to.
    """

    expert: Any
    owners: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The gated activation (up + shift) * gate * sigmoid(alpha * gate); SiLU as it stands.

    With a limit, gate is cut from above and up on both sides.
    """

    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What each query row sees of a paged cache: its sequence's first `lengths` [R] tokens.

    `sequences` [R] are lines of `tables` [S, blocks], which hold block numbers; R rows, all int64
    but the tables, int32. Rows of one sequence side by side share their reads of the cache.
    """

    sequences: Tensor
    lengths: Tensor
    tables: Tensor
    num_kv_heads: int


SILU = Gate()


def load_kernels(threads: int, variant: str | None = None) -> "Kernels | None":
    """The kernels for a number of threads, or None where there are none or they are switched off.

    Raises: UsageError when the environment asks for a variant that does not exist here.
    """
    wanted = variant or os.environ.get(SIMD_VARIABLE, "")
    if wanted == OFF:
        return None
    module = extension()
    if wanted and wanted not in variants():
        raise UsageError(
            f"{SIMD_VARIABLE}={wanted} cannot run here",
            hint="one of: " + ", ".join([*variants(), OFF]),
        )
    return None if module is None else Kernels(module, variant=wanted, threads=threads)


class Kernels:
    """One variant's kernels on a pool of threads that sleeps between calls. One call at a time."""

    def __init__(self, module: ModuleType, *, variant: str, threads: int) -> None:
        """Start the threads; `variant` "" is the best for this processor."""
        self._module = module
        self._runner = module.Runner(variant, threads)
        kinds = module.DType
        self._types = {
            torch.float32: kinds.f32,
            torch.bfloat16: kinds.bf16,
            torch.float16: kinds.f16,
        }
        self._whole = {4: kinds.i4, 8: kinds.i8}

    panel_outputs = PANEL

    @property
    def variant(self) -> str:
        """Name of the SIMD variant."""
        name: str = self._runner.variant
        return name

    @property
    def rounds_x_to_int8(self) -> bool:
        """Whether `round_x` with a weight of whole numbers rounds x to 8 bits too."""
        return self.variant != "portable"

    @property
    def threads(self) -> int:
        """Threads of the pool, the caller's included."""
        count: int = self._runner.threads
        return count

    def _matrix(self, address: int, kind: torch.dtype | Rounding, outputs: int, inputs: int) -> Any:
        if isinstance(kind, Rounding):
            return self._module.Matrix(
                address, self._whole[kind.bits], outputs, inputs, kind.group, kind.zeros
            )
        return self._module.Matrix(address, self._types[kind], outputs, inputs)

    def packed_bytes(self, kind: torch.dtype | Rounding, outputs: int, inputs: int) -> int:
        """Bytes that a weight [O, I] takes once it is packed."""
        size: int = self._matrix(0, kind, outputs, inputs).bytes
        return size

    def pack(self, weight: Tensor) -> Packed:
        """Copy a weight [O, I] of any float type into panels; runs on the caller's thread alone."""
        size = self.packed_bytes(weight.dtype, *weight.shape)
        return self._pack(weight, _huge_buffer(size, self._module))

    def pack_rounded(self, weight: Tensor, rounding: Rounding) -> Packed:
        """Round a weight [O, I] to whole numbers, some rows at a time; runs on the caller's thread.

        With `round_x`, x is rounded to 8 bits as well where the processor gains by it, each row in
        the same groups; elsewhere the whole numbers are widened, and x stays as it is.
        Raises: ModelError for weights that are not finite, or too large for a scale in float16.
        """
        outputs, inputs = weight.shape
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        buffer = _huge_buffer(self.packed_bytes(rounding, outputs, inputs), self._module)
        matrix = self._matrix(buffer.data_ptr(), rounding, outputs, inputs)
        if not self._runner.pack_rounded(
            weights=weight.data_ptr(),
            type=self._types[weight.dtype],
            stride=weight.stride(0),
            to=matrix,
        ):
            raise ModelError(
                "the model has weights that are not finite or beyond 65504, which cannot be rounded",
                hint="leave --quantization away, or repair the checkpoint",
            )
        return Packed(buffer=buffer, matrix=matrix, kind=rounding, outputs=outputs, inputs=inputs)

    def restored(self, packed: Packed) -> Tensor:
        """The weights [O, I] in float32 that a rounded weight stands for."""
        assert isinstance(packed.kind, Rounding)
        panels = packed.buffer.view(torch.uint8).flatten()
        return restored(panels, packed.kind, packed.outputs, packed.inputs)

    def pack_in_place(self, weight: Tensor) -> Packed:
        """The same in the weight's own memory where its shape allows it, which then has no rows."""
        if not weight.is_contiguous() or not self.packs_in_place(*weight.shape):
            return self.pack(weight)
        return self._pack(weight, weight)

    @staticmethod
    def packs_in_place(outputs: int, inputs: int) -> bool:
        """Whether a weight [O, I] takes as much memory in panels as in rows."""
        return outputs % PANEL == 0 and inputs % 2 == 0

    def pack_rows(self, rows: int, panels: int, *, dtype: torch.dtype, outputs: int,
                  inputs: int) -> None:  # fmt: skip
        """Some rows of a weight, as many as whole panels have, at one address to panels at another.

        Both may be the same; rows need not be aligned.
        """
        self._runner.pack(weights=rows, type=self._types[dtype], outputs=outputs, inputs=inputs,
                          stride=inputs, packed=panels)  # fmt: skip

    def in_panels(self, weight: Tensor) -> Packed:
        """A weight [O, I] whose memory holds panels already, in place of rows."""
        outputs, inputs = weight.shape
        matrix = self._matrix(weight.data_ptr(), weight.dtype, outputs, inputs)
        return Packed(buffer=weight, matrix=matrix, kind=weight.dtype, outputs=outputs,
                      inputs=inputs)  # fmt: skip

    def _pack(self, weight: Tensor, buffer: Tensor) -> Packed:
        outputs, inputs = weight.shape
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._runner.pack(
            weights=weight.data_ptr(),
            type=self._types[weight.dtype],
            outputs=outputs,
            inputs=inputs,
            stride=weight.stride(0),
            packed=buffer.data_ptr(),
        )
        matrix = self._matrix(buffer.data_ptr(), weight.dtype, outputs, inputs)
        return Packed(
            buffer=buffer, matrix=matrix, kind=weight.dtype, outputs=outputs, inputs=inputs
        )

    def rows(self, packed: Packed, first: int, last: int) -> Packed:
        """Outputs [first, last) of a packed weight, without a copy; `first` starts a panel."""
        assert first % PANEL == 0, first
        skip = self.packed_bytes(packed.kind, first, packed.inputs)
        address, count = packed.buffer.data_ptr() + skip, last - first
        return Packed(
            buffer=packed.buffer,
            matrix=self._matrix(address, packed.kind, count, packed.inputs),
            kind=packed.kind,
            outputs=count,
            inputs=packed.inputs,
        )

    def unpack_rows(self, packed: Packed, rows: Tensor) -> Tensor:
        """Some rows of a packed weight as they were: rows [T] int64 -> [T, I] in its type."""
        assert isinstance(packed.kind, torch.dtype)
        step = 2 if packed.kind == torch.bfloat16 else 1  # inputs side by side in a panel
        steps = -(-packed.inputs // step)
        panels = packed.buffer.view(torch.uint8).flatten().view(packed.kind)
        panels = panels.view(-1, steps, PANEL, step)
        found = panels[rows // PANEL, :, rows % PANEL]
        return found.reshape(rows.numel(), steps * step)[:, : packed.inputs]

    def matmul(self, x: Tensor, weight: Packed, *, bias: Tensor | None = None,
               round_x: bool = False) -> Tensor:  # fmt: skip
        """x [T, I] float32 or bf16 -> [T, O] float32; `bias` [O] float32.

        `round_x` rounds x to bf16 first where the weight is bf16: much faster where the processor
        multiplies bf16 numbers.
        """
        assert x.shape[1] == weight.inputs, (tuple(x.shape), weight.inputs)
        x = _dense(x)
        out = torch.empty(x.shape[0], weight.outputs)
        self._runner.matmul(
            w=weight.matrix,
            x=x.data_ptr(),
            x_type=self._types[x.dtype],
            x_stride=x.stride(0),
            rows=x.shape[0],
            out=out.data_ptr(),
            out_stride=weight.outputs,
            bias=0 if bias is None else bias.data_ptr(),
            bf16_x=round_x,
        )
        return out

    def ffn_weights(self, gate: Packed, up: Packed, down: Packed, *,
                    biases: tuple[Tensor, Tensor, Tensor] | None = None) -> FfnWeights:  # fmt: skip
        """One expert: gate and up [F, I], down [O, F]; biases of gate, up and down in float32."""
        padded = [] if biases is None else [_whole_panels(bias) for bias in biases]
        expert = self._module.Expert(
            gate.matrix, up.matrix, down.matrix, *(bias.data_ptr() for bias in padded)
        )
        return FfnWeights(expert=expert, owners=(gate.buffer, up.buffer, down.buffer, *padded))

    def add_ffn(self, out: Tensor, x: Tensor, experts: Sequence[FfnWeights], *,
                starts: Sequence[int], tokens: Tensor, weights: Tensor, round_x: bool = False,
                gate: Gate = SILU) -> None:  # fmt: skip
        """out[t] += weight * down(gate(x[t])) for all routed rows, experts in the order given.

        out [T, O] float32, x [T, I]; rows of experts[e] are [starts[e], starts[e + 1]) of tokens [R]
        int64 and weights [R] or [R, 1] float32. A token must not occur twice among one expert's rows.
        """
        assert out.dtype == torch.float32 and out.stride(1) == 1
        assert tokens.dtype == torch.int64 and tokens.is_contiguous()
        assert weights.dtype == torch.float32 and weights.is_contiguous()
        x = _dense(x)
        self._runner.ffn(
            experts=[one.expert for one in experts],
            starts=list(starts),
            tokens=tokens.data_ptr(),
            weights=weights.data_ptr(),
            x=x.data_ptr(),
            x_type=self._types[x.dtype],
            x_stride=x.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            bf16_x=round_x,
            alpha=gate.alpha,
            shift=gate.shift,
            limit=gate.limit or 0.0,
        )

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, context: Context, *,
               window: int | None = None, scale: float | None = None,
               sinks: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None,
               round_x: bool = False) -> Tensor:  # fmt: skip
        """Softmax attention of each row: q [R, H, d] float32 -> [R, H, d].

        `keys` and `values` are the pools of one layer, [blocks * G, 16, d], heads of a block side by
        side; in int8 they have `scales` in float32, [blocks * G, 16] each, by which whole numbers are
        multiplied. A row sees the last `window` tokens of its context, or all; `scale` of the scores is
        1/sqrt(d) unless given; `sinks` [H] are scores of their own that take weight and give nothing.
        With `round_x` queries and softmax weights may be rounded to bf16 where the cache holds bf16
        and the processor multiplies it.
        """
        rows, heads, head_dim = q.shape
        assert keys.is_contiguous() and values.is_contiguous() and keys.dtype == values.dtype
        assert context.tables.dtype == torch.int32 and context.tables.is_contiguous()
        assert (scales is not None) == (keys.dtype == torch.int8)
        assert all(s.dtype == torch.float32 and s.is_contiguous() for s in scales or ())
        groups = context.num_kv_heads
        q = q.float().contiguous()
        out = torch.empty_like(q)
        self._runner.attend(
            type=self._module.DType.i8 if scales else self._types[keys.dtype],
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_scales=scales[0].data_ptr() if scales else 0,
            value_scales=scales[1].data_ptr() if scales else 0,
            heads=heads,
            groups=groups,
            head_dim=head_dim,
            q=q.data_ptr(),
            q_stride=heads * head_dim,
            out=out.data_ptr(),
            out_stride=heads * head_dim,
            rows=rows,
            sequences=context.sequences.data_ptr(),
            lengths=context.lengths.data_ptr(),
            tables=context.tables.data_ptr(),
            table_stride=context.tables.shape[1],
            window=window or 0,
            sinks=0 if sinks is None else sinks.data_ptr(),
            scale=head_dim**-0.5 if scale is None else scale,
            bf16_x=round_x,
        )
        return out

    def peak_flops(self, rounds: int, *, round_x: bool) -> float:
        """Run register-only multiply-adds on all threads; the operations done. For benchmarks."""
        done: float = self._runner.peak_flops(rounds, round_x)
        return done

    def read_all(self, data: Tensor) -> float:
        """Read a tensor's bytes once, with all threads; for benchmarks."""
        total: float = self._runner.read_all(data.data_ptr(), data.numel() * data.element_size())
        return total


def _dense(x: Tensor) -> Tensor:
    """x with its columns side by side, in a type that the kernels read."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _whole_panels(bias: Tensor) -> Tensor:
    padded = torch.zeros(-(-bias.numel() // PANEL) * PANEL)
    padded[: bias.numel()] = bias
    return padded


def _huge_buffer(num_bytes: int, module: ModuleType) -> Tensor:
    """Bytes from an address on that suits SIMD loads; on huge pages where they fill whole ones.

    Weights are read front to back in every pass: with 4 KiB pages, address translation costs time.
    """
    if num_bytes < 2 * _HUGE_PAGE:
        spare = torch.empty(num_bytes + _ALIGN, dtype=torch.uint8)
        start = -spare.data_ptr() % _ALIGN
        return spare[start : start + num_bytes]
    # The part that is skipped is address space only: it is never touched.
    spare = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    start = -spare.data_ptr() % _HUGE_PAGE
    module.advise_huge_pages(spare.data_ptr() + start, num_bytes)
    return spare[start : start + num_bytes]
