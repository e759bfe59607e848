"""Quantised matrices in the formats that people download, made with numpy and nothing of ours.

Each function takes random numbers and gives the tensors of a checkpoint and the matrix [O, I] that
they stand for. Words of eight 4-bit numbers hold the first in their lowest bits.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Made = tuple[dict[str, torch.Tensor], np.ndarray]
GROUP = 8
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def words(numbers: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours along an axis in one int32; nibble k holds neighbour order[k]."""
    moved = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    moved = moved.reshape(*moved.shape[:-1], -1, 8)
    word = np.zeros(moved.shape[:-1], dtype=np.uint32)
    for k, source in enumerate(order):
        word |= moved[..., source] << np.uint32(4 * k)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(word, -1, axis)).view(np.int32).copy())


def numbers_of(rng: np.random.Generator, rows: int, columns: int, *, groups: int):
    """4-bit numbers [O, I], scales [O, N] that fp16 holds, zero points [O, N]."""
    numbers = rng.integers(0, 16, (rows, columns))
    scales = (rng.uniform(0.5, 1.5, (rows, groups)) * 0.25 / columns**0.5).astype(np.float16)
    return numbers, scales, rng.integers(1, 16, (rows, groups))


def gptq(rng: np.random.Generator, rows: int, columns: int, *, shuffled: bool = False) -> Made:
    """GPTQ as its first version writes it: zero points are stored less one."""
    groups = columns // GROUP
    numbers, scales, zeros = numbers_of(rng, rows, columns, groups=groups)
    index = np.arange(columns) // GROUP
    index = rng.permutation(index) if shuffled else index
    tensors = {
        "qweight": words(numbers.T, 0),
        "scales": torch.from_numpy(scales.T.copy()),
        "qzeros": words((zeros - 1).T, 1),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    matrix = (numbers - zeros[:, index]) * scales.astype(np.float64)[:, index]
    return tensors, matrix


def awq(rng: np.random.Generator, rows: int, columns: int) -> Made:
    numbers, scales, zeros = numbers_of(rng, rows, columns, groups=columns // GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(numbers.T, 1, order),
        "scales": torch.from_numpy(scales.T.copy()),
        "qzeros": words(zeros.T, 1, order),
    }
    index = np.arange(columns) // GROUP
    return tensors, (numbers - zeros[:, index]) * scales.astype(np.float64)[:, index]


def packed(rng: np.random.Generator, rows: int, columns: int, *, symmetric: bool = True) -> Made:
    """compressed-tensors: signed numbers, stored with 8 added."""
    numbers, scales, zeros = numbers_of(rng, rows, columns, groups=columns // GROUP)
    tensors = {
        "weight_packed": words(numbers, 1),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if symmetric:
        zeros = np.full_like(zeros, 8)
    else:
        tensors["weight_zero_point"] = words(zeros, 0)
    index = np.arange(columns) // GROUP
    return tensors, (numbers - zeros[:, index]) * scales.astype(np.float64)[:, index]


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Bytes -> numbers: a sign, four bits of exponent with bias 7, three of mantissa; no infinity."""
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def fp8_numbers(rng: np.random.Generator, rows: int, columns: int):
    codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[(codes & 127) == 127] = 0  # not a number
    return codes, torch.from_numpy(codes).view(torch.float8_e4m3fn)


def fp8_blocks(rng: np.random.Generator, rows: int, columns: int, *, block: int = 16) -> Made:
    """DeepSeek-V3: a float32 scale for each block, the last ones cut off."""
    codes, tensor = fp8_numbers(rng, rows, columns)
    shape = (-(-rows // block), -(-columns // block))
    scales = (rng.uniform(0.5, 1.5, shape) * 0.01 / columns**0.5).astype(np.float32)
    row, column = np.arange(rows) // block, np.arange(columns) // block
    matrix = e4m3(codes) * scales.astype(np.float64)[row][:, column]
    return {"weight": tensor, "weight_scale_inv": torch.from_numpy(scales)}, matrix


def fp8_rows(rng: np.random.Generator, rows: int, columns: int) -> Made:
    codes, tensor = fp8_numbers(rng, rows, columns)
    scales = (rng.uniform(0.5, 1.5, (rows, 1)) * 0.01 / columns**0.5).astype(np.float32)
    matrix = e4m3(codes) * scales.astype(np.float64)
    return {"weight": tensor, "weight_scale": torch.from_numpy(scales)}, matrix


def mxfp4(rng: np.random.Generator, rows: int, columns: int) -> Made:
    """Blocks of 32 numbers of four bits, two a byte, low half first; scales are powers of two."""
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    scales = rng.integers(121, 126, (rows, columns // 32)).astype(np.uint8)
    blocks = (codes[:, 0::2] | (codes[:, 1::2] << 4)).reshape(rows, columns // 32, 16)
    table = np.array([*E2M1, *(-x for x in E2M1)])
    matrix = table[codes] * 2.0 ** (np.repeat(scales, 32, axis=1).astype(int) - 127)
    return {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(scales)}, matrix


def write_both(source: Path, quantised: Path, plain: Path, *, make: Callable[..., Made],
               config: dict, wanted: Callable[[str], bool]) -> None:  # fmt: skip
    """A checkpoint with matrices of another format, and one with the same matrices decoded."""
    rng = np.random.default_rng(0)
    tensors = load_file(source / "model.safetensors")
    decoded = dict(tensors)
    for name in [n for n in tensors if wanted(n)]:
        base = name.removesuffix(".weight")
        pieces, matrix = make(rng, *tensors[name].shape)
        decoded[name] = torch.from_numpy(matrix).float()
        del tensors[name]
        tensors |= {f"{base}.{key}": value for key, value in pieces.items()}
    write(source, quantised, tensors, {"quantization_config": config})
    write(source, plain, decoded, {})


def write_mxfp4(source: Path, quantised: Path, plain: Path) -> None:
    """The same for gpt-oss: experts stacked; decoded ones are transposed."""
    rng = np.random.default_rng(0)
    tensors = load_file(source / "model.safetensors")
    decoded = dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        made = [mxfp4(rng, outputs, inputs) for _ in range(experts)]
        for key in ("blocks", "scales"):
            tensors[f"{name}_{key}"] = torch.stack([pieces[key] for pieces, _ in made])
        matrices = torch.stack([torch.from_numpy(matrix.T) for _, matrix in made])
        decoded[name] = matrices.float().contiguous()
    write(source, quantised, tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    write(source, plain, decoded, {})


def write(source: Path, target: Path, tensors: dict[str, torch.Tensor], changes: dict) -> None:
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
