"""How a matrix lies in a checkpoint: as it is, or quantised into several tensors.

Nothing is read here: names, types and shapes decide. moebatch.model.quant decodes the bytes.
Formats: mxfp4 (OCP Microscaling 1.0), fp8 with a scale per tensor, row or block, GPTQ, AWQ, and
compressed-tensors' "pack-quantized"; 4-bit integers throughout.
Shapes: O outputs (rows), I inputs (columns).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

from moebatch.errors import ModelError
from moebatch.model.families.parts import Layout, Part, Source

Kind = Literal["plain", "mxfp4", "fp8", "gptq", "awq", "packed"]
_FLOATS = ("float32", "bfloat16", "float16")
FORMATS = (
    "bfloat16, float16 and float32 as they are",
    "mxfp4",
    "fp8 with a scale per tensor, row or block",
    "4-bit GPTQ, AWQ and compressed-tensors",
)
_METHODS = ("mxfp4", "fp8", "gptq", "awq", "compressed-tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor, or a slice of it, lies: bytes [offset, offset + num_bytes) of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


class Directory(Protocol):
    """What is asked of a checkpoint here."""

    quantization: "Quantization"

    def entry(self, name: str) -> TensorEntry:
        """The named tensor. Raises: ModelError when there is none."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """What a quantised checkpoint's tensors do not say themselves.

    `block` is the (rows, columns) that share an fp8 scale; `zero_offset` is added to GPTQ's stored
    zero points.
    """

    method: str | None = None
    block: tuple[int, int] = (128, 128)
    zero_offset: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One source: `entries` are its numbers and then, if quantised, scales, zeros and group indices.

    `shape` is that of the decoded matrix.
    """

    kind: Kind
    shape: tuple[int, ...]
    entries: tuple[TensorEntry, ...]
    has_zeros: bool = False
    has_groups: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.num_bytes for entry in self.entries)

    def arrangement(self, layout: Layout) -> Layout:
        """How the decoded matrix becomes ours: what is quantised lies by rows."""
        if self.kind == "plain":
            return layout
        return "row_pairs" if layout.endswith("pairs") else "rows"


def quantization_of(config: Mapping[str, Any]) -> Quantization:
    """The quantisation that a config.json speaks of.

    Raises: ModelError for a method, or a setting of it, that is not implemented.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None:
        return Quantization()
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method not in _METHODS:
        raise _unsupported(f"quantisation {method!r}", "supported are " + ", ".join(_METHODS))
    if method in ("gptq", "awq") and found.get("bits", 4) != 4:
        raise _unsupported(f"{method} with {found.get('bits')!r} bits", "supported are 4 bits")
    version = found.get("version") or found.get("checkpoint_format")
    if method == "awq" and str(version or "gemm").lower() != "gemm":
        raise _unsupported(f"AWQ version {version!r}", "supported is gemm")
    if method == "compressed-tensors":
        _check_compressed(found)
    block = found.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2 or not all(_positive(x) for x in block):
        raise _unsupported(f"weight_block_size {block!r}", "supported are two whole numbers")
    second = found.get("checkpoint_format") == "gptq_v2"
    return Quantization(method=method, block=(block[0], block[1]), zero_offset=0 if second else 1)


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_compressed(found: Mapping[str, Any]) -> None:
    """compressed-tensors: 4-bit integer weights in groups or fp8 weights; activations as they are."""
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _unsupported("compressed-tensors without a scheme for weights", "")
        scheme = (weights.get("type"), weights.get("num_bits"))
        if scheme not in (("int", 4), ("float", 8)):
            raise _unsupported(f"compressed-tensors weights of {scheme[1]!r} bits, {scheme[0]!r}",
                               "supported are 4-bit int and 8-bit float")  # fmt: skip


def _unsupported(what: str, hint: str) -> ModelError:
    return ModelError(f"config.json: {what} is not supported", hint=hint or None)


def locate(checkpoint: Directory, source: Source) -> Stored:
    """Find the tensors of one source.

    Raises: ModelError when they are not there or do not make up a matrix.
    """
    name, base = source.name, source.name.removesuffix(".weight")
    if checkpoint.has(name):
        entry = checkpoint.entry(name)
        if entry.dtype == "float8_e4m3":
            return _fp8(checkpoint, source, entry, base)
        if entry.dtype not in _FLOATS:
            raise ModelError(f"tensor {name} has data type {entry.dtype}, which is not supported here",
                             hint="supported are float32, bfloat16 and float16")  # fmt: skip
        piece = _slice(entry, source)
        return Stored(kind="plain", shape=piece.shape, entries=(piece,))
    if checkpoint.has(name + "_blocks"):
        return _mxfp4(checkpoint, source)
    if checkpoint.has(base + ".qweight"):
        return _gptq_or_awq(checkpoint, base)
    if checkpoint.has(base + ".weight_packed"):
        return _packed(checkpoint, base)
    entry = checkpoint.entry(name)  # says that it is missing
    return Stored(kind="plain", shape=entry.shape, entries=(entry,))


def check_part(checkpoint: Directory, part: Part) -> None:
    """Compare what is stored with what a part needs.

    Raises: ModelError naming a tensor that is missing or has another shape or type.
    """
    found = [locate(checkpoint, source) for source in part.sources]
    rows = 0
    for stored in found:
        shape, entry = _ours(stored, part), stored.entries[0]
        rows += shape[0] if shape else 0
        if shape[1:] != part.shape[1:] or len(shape) != len(part.shape):
            raise _mismatch(entry, part)
        if stored.kind != found[0].kind or entry.dtype != found[0].entries[0].dtype:
            raise ModelError(
                f"tensors {found[0].entries[0].name} and {entry.name} have different data types",
                hint="convert the checkpoint to one data type",
            )
    if rows != part.shape[0]:
        raise _mismatch(found[0].entries[0], part)


def _ours(stored: Stored, part: Part) -> tuple[int, ...]:
    """The shape of a source as it enters its part."""
    shape = stored.shape
    if len(shape) == len(part.shape) + 1 and shape[0] == 1:
        shape = shape[1:]
    return shape[::-1] if stored.arrangement(part.layout).startswith("column") else shape


def _mismatch(entry: TensorEntry, part: Part) -> ModelError:
    return ModelError(
        f"tensor {entry.name} has shape {list(entry.shape)}, which does not make up"
        f" {part.name} of shape {list(part.shape)}",
        hint="config.json and the weights do not belong together",
    )


def _slice(entry: TensorEntry, source: Source) -> TensorEntry:
    """The bytes of a source within a tensor of several; a first dimension of one is dropped."""
    if source.of == 1:
        return entry
    if not entry.shape or entry.shape[0] % source.of or entry.shape[0] == 0:
        raise ModelError(
            f"tensor {entry.name} of shape {list(entry.shape)} does not hold {source.of} experts",
            hint="config.json and the weights do not belong together",
        )
    num_bytes, rows = entry.num_bytes // source.of, entry.shape[0] // source.of
    shape = entry.shape[1:] if rows == 1 else (rows, *entry.shape[1:])
    offset = entry.offset + source.index * num_bytes
    return replace(entry, shape=shape, offset=offset, num_bytes=num_bytes)


def _mxfp4(checkpoint: Directory, source: Source) -> Stored:
    """Blocks [O, I/32, 16] of two numbers a byte and their scales [O, I/32]."""
    blocks = _slice(checkpoint.entry(source.name + "_blocks"), source)
    scales = _slice(checkpoint.entry(source.name + "_scales"), source)
    _need(len(blocks.shape) == 3 and blocks.shape[2] == 16, blocks)
    _need(blocks.dtype == "uint8" and scales.dtype == "uint8", blocks)
    _need(scales.shape == blocks.shape[:2], scales)
    shape = (blocks.shape[0], 32 * blocks.shape[1])
    return Stored(kind="mxfp4", shape=shape, entries=(blocks, scales))


def _fp8(checkpoint: Directory, source: Source, entry: TensorEntry, base: str) -> Stored:
    """Numbers [O, I] and their scales: one, one a row [O, 1], or one a block."""
    names = [base + suffix for suffix in (".weight_scale_inv", ".weight_scale")]
    scales = checkpoint.entry(next((name for name in names if checkpoint.has(name)), names[0]))
    _need(source.of == 1 and len(entry.shape) == 2, entry)
    blocks = tuple(
        -(-n // b) for n, b in zip(entry.shape, checkpoint.quantization.block, strict=True)
    )
    one = prod(scales.shape) == 1
    by_row = scales.shape in ((entry.shape[0], 1), (entry.shape[0],))
    _need(scales.dtype in _FLOATS and (one or by_row or scales.shape == blocks), scales)
    return Stored(kind="fp8", shape=entry.shape, entries=(entry, scales))


def _gptq_or_awq(checkpoint: Directory, base: str) -> Stored:
    """GPTQ: qweight [I/8, O]; AWQ: qweight [I, O/8]; both: scales [groups, O], qzeros [groups, O/8]."""
    weight, scales, zeros = (
        checkpoint.entry(f"{base}.{name}") for name in ("qweight", "scales", "qzeros")
    )
    _need(len(weight.shape) == 2 == len(scales.shape) and weight.dtype == "int32", weight)
    groups, outputs = scales.shape
    _need(zeros.shape == (groups, outputs // 8) and zeros.dtype == "int32", zeros)
    _need(scales.dtype in _FLOATS, scales)
    if checkpoint.quantization.method == "awq":
        _need(weight.shape[1] * 8 == outputs and weight.shape[0] % groups == 0, weight)
        shape = (outputs, weight.shape[0])
        return Stored(kind="awq", shape=shape, entries=(weight, scales, zeros), has_zeros=True)
    inputs, entries = 8 * weight.shape[0], [weight, scales, zeros]
    _need(weight.shape[1] == outputs, weight)
    if checkpoint.has(base + ".g_idx"):
        entries.append(checkpoint.entry(base + ".g_idx"))
        _need(entries[-1].shape == (inputs,) and entries[-1].dtype == "int32", entries[-1])
    else:
        _need(inputs % groups == 0, scales)
    return Stored(kind="gptq", shape=(outputs, inputs), entries=tuple(entries), has_zeros=True,
                  has_groups=len(entries) == 4)  # fmt: skip


def _packed(checkpoint: Directory, base: str) -> Stored:
    """weight_packed [O, I/8], weight_scale [O, groups], weight_zero_point [O/8, groups]."""
    weight, scales = (
        checkpoint.entry(base + ".weight_packed"),
        checkpoint.entry(base + ".weight_scale"),
    )
    _need(len(weight.shape) == 2 == len(scales.shape) and weight.dtype == "int32", weight)
    outputs, groups = scales.shape
    inputs = 8 * weight.shape[1]
    _need(weight.shape[0] == outputs and scales.dtype in _FLOATS, weight)
    entries = [weight, scales]
    has_zeros = checkpoint.has(base + ".weight_zero_point")
    if has_zeros:
        entries.append(checkpoint.entry(base + ".weight_zero_point"))
        _need(entries[-1].shape == (-(-outputs // 8), groups), entries[-1])
    has_groups = checkpoint.has(base + ".weight_g_idx")
    if has_groups:
        entries.append(checkpoint.entry(base + ".weight_g_idx"))
        _need(entries[-1].shape == (inputs,) and entries[-1].dtype == "int32", entries[-1])
    _need(has_groups or inputs % groups == 0, scales)
    return Stored(kind="packed", shape=(outputs, inputs), entries=tuple(entries),
                  has_zeros=has_zeros, has_groups=has_groups)  # fmt: skip


def _need(holds: bool, entry: TensorEntry) -> None:
    if not holds:
        raise ModelError(
            f"tensor {entry.name} has type {entry.dtype} and shape {list(entry.shape)}, which does"
            " not fit its quantisation",
            hint="the checkpoint is damaged, or its quantization_config belongs to another one",
        )
