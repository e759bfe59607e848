"""y = x W^T for weights that stay in 16 bits: the plain form and the fast ones.

Compute type "float32": activations are float32 and so is every product and sum; the forms differ
only by the order of additions. "bfloat16": matrix inputs and outputs are rounded to bf16, sums are
float32; a token's product is then bit for bit the same in any batch, packed or not.

Shapes: T tokens, I inputs (columns), O outputs (rows).
"""

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from moebatch.native.kernels import INT4, INT8, Kernels

ComputeType = Literal["float32", "bfloat16"]
Quantization = Literal["none", "int8", "int4"]
_ROUNDINGS = {"int8": INT8, "int4": INT4}
_FP16_MAX = 65504.0
# Rows are upcast in tiles that stay in the L2 cache (1 MiB of float32 a core, two cores).
_TILE_ELEMENTS = 1 << 19


class Linear(Protocol):
    """A weight that can be applied. `dtype` is the type it computes in: of x, if it is, and of y."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] in `dtype`; x is rounded to it where it is not of that type."""
        ...


def linear_plain(x: Tensor, weight: Tensor) -> Tensor:
    """The reference form: upcast all of the weight, then multiply."""
    return linear(x, weight.float())


class TensorLinear:
    """float32 arithmetic on a weight as it lies in memory; valid as long as its bytes are.

    Half-precision weights are upcast tile by tile into a small buffer: a full upcast would write and
    read four bytes a weight through main memory.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor) -> None:
        """`weight` [O, I]; kept as it is, not copied."""
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] float32 -> [T, O] float32."""
        weight = self._weight
        if weight.dtype == torch.float32:
            return linear(x, weight)
        rows, columns = weight.shape
        step = max(1, _TILE_ELEMENTS // columns)
        if rows <= step:
            return linear_plain(x, weight)
        y = torch.empty(x.shape[0], rows)
        tile = torch.empty(step, columns)
        for start in range(0, rows, step):
            part = tile[: min(step, rows - start)].copy_(weight[start : start + step])
            torch.mm(x, part.t(), out=y[:, start : start + step])
        return y


class PackedLinear:
    """float32 arithmetic on a weight in fbgemm's blocked fp16 layout: the fastest at few tokens.

    Every bf16 or fp16 number of ordinary size is exact in fp16; below 6e-5 the absolute error is
    under 3e-8. Numbers beyond 65504 do not fit: `can_pack` says so.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor) -> None:
        """`weight` [O, I] in any float type is copied; it may be freed afterwards."""
        pack = torch.ops.quantized.linear_prepack_fp16
        self._packed = pack(weight.float().contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] float32 -> [T, O] float32."""
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y

    @staticmethod
    def can_pack(weight: Tensor) -> bool:
        """Whether this machine has the kernels and the weight fits: 16-bit, within fp16's range."""
        if weight.dtype == torch.float32 or not has_fbgemm():
            return False
        # compared as a float: a bf16 tensor would round the bound itself up to 65536
        return float(weight.abs().amax()) <= _FP16_MAX


class Bf16Linear:
    """A bf16 weight times bf16 activations by oneDNN; the weight as it lies in memory."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor) -> None:
        """`weight` [O, I] bf16; kept as it is, not copied."""
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] bf16."""
        return linear(_never_one(x), self._weight)[: x.shape[0]]


class PackedBf16Linear:
    """The same, the weight reordered into oneDNN's blocks once: twice as fast at few tokens."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor) -> None:
        """`weight` [O, I] bf16 is copied; it may be freed afterwards."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] bf16."""
        apply = torch.ops.mkldnn._linear_pointwise
        y: Tensor = apply(_never_one(x), self._packed, None, "none", [], "")
        return y[: x.shape[0]]


def _never_one(x: Tensor) -> Tensor:
    """x in bf16, a single token twice: oneDNN adds up a vector in another order than a matrix."""
    return x.bfloat16().expand(2, -1).contiguous() if x.shape[0] == 1 else x.bfloat16()


class NativeLinear:
    """A weight in the native kernels' panels: float32 sums; a bit-for-bit constant per token.

    With `round_x`, x is rounded to bf16 where the weight is bf16, and to 8 bits where the weight is
    of whole numbers and the processor multiplies such; the result stays float32.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor, kernels: Kernels, *, round_x: bool,
                 how: Literal["copy", "in place", "panels", "int8", "int4"] = "copy",
                 ) -> None:  # fmt: skip
        """`weight` [O, I]; "in place" turns its own memory into panels where its shape allows it,
        "panels": that has been done."""
        if how in _ROUNDINGS:
            packed = kernels.pack_rounded(weight, _ROUNDINGS[how])
        elif how == "panels" and kernels.packs_in_place(*weight.shape):
            packed = kernels.in_panels(weight)
        else:
            packed = (kernels.pack if how == "copy" else kernels.pack_in_place)(weight)
        self.kernels, self.packed, self.round_x = kernels, packed, round_x

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] float32."""
        return self.kernels.matmul(x, self.packed, round_x=self.round_x)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Some rows of the weight itself [T, I]: a head that is tied serves as the embedding."""
        return self.kernels.unpack_rows(self.packed, rows)


def has_fbgemm() -> bool:
    """Whether PyTorch was built with fbgemm (x86 only)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_bf16() -> bool:
    """Whether this processor multiplies bf16 numbers in hardware and oneDNN makes use of it."""
    instructions = (
        getattr(torch.cpu, "_is_avx512_bf16_supported", None),
        getattr(torch.cpu, "_is_amx_tile_supported", None),
    )
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and any(
        supported is not None and supported() for supported in instructions
    )


def pack(weight: Tensor, compute: ComputeType = "float32",
         kernels: Kernels | None = None) -> Linear:  # fmt: skip
    """The fastest form for a weight that stays in memory; copies it."""
    if kernels is not None:
        return NativeLinear(weight, kernels, round_x=compute == "bfloat16")
    if compute == "bfloat16" and weight.dtype == torch.bfloat16:
        return PackedBf16Linear(weight)
    return PackedLinear(weight) if PackedLinear.can_pack(weight) else TensorLinear(weight.clone())


def quantize(weight: Tensor, compute: ComputeType, kernels: Kernels,
             how: Literal["int8", "int4"]) -> Linear:  # fmt: skip
    """The weight rounded to 8 or 4 bits, a few inputs of an output on a scale of their own; a copy.

    Raises: ModelError for weights that are not finite: they have no scale.
    """
    return NativeLinear(weight, kernels, round_x=compute == "bfloat16", how=how)


def in_place(weight: Tensor, compute: ComputeType = "float32", kernels: Kernels | None = None, *,
             panels: bool = False) -> Linear:  # fmt: skip
    """The form for a weight that is used where it lies, as long as its bytes are there.

    The native kernels reorder those bytes: `weight` has no rows any more. With `panels` that has been
    done as it was read, wherever its shape allows it.
    """
    if kernels is not None:
        return NativeLinear(weight, kernels, round_x=compute == "bfloat16",
                            how="panels" if panels else "in place")  # fmt: skip
    if compute == "bfloat16" and weight.dtype == torch.bfloat16:
        return Bf16Linear(weight)
    return TensorLinear(weight)
