"""What a run computes with: type, native kernels or PyTorch, threads."""

from collections.abc import Sequence
from dataclasses import dataclass

from moebatch.errors import UsageError
from moebatch.model.linear import ComputeType, Quantization
from moebatch.native.extension import extension
from moebatch.native.kernels import Kernels, load_kernels
from moebatch.runtime.engine import compute_type, quantization_type, use_threads

_NO_KERNELS = (
    "installed without native kernels, PyTorch computes at a fraction of the speed: "
    "install a C++ compiler and moebatch once more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How the host computes. Without kernels PyTorch does, as it does all of an accelerator's work."""

    compute: ComputeType
    threads: int
    kernels: Kernels | None
    quantization: Quantization
    warnings: Sequence[str] = ()

    @property
    def variant(self) -> str:
        """Of the kernels, or "pytorch"."""
        return "pytorch" if self.kernels is None else self.kernels.variant


def prepare(*, dtype: str, quantization: str, weight_dtype: str, threads: int,
            accelerator: bool) -> Arithmetic:  # fmt: skip
    """Start the threads and settle what is left to the machine.

    Raises: UsageError for what cannot be had here.
    """
    compute = compute_type(dtype, weight_dtype)
    if accelerator and quantization != "none":
        raise UsageError(
            f"--quantization {quantization} is for runs without an accelerator",
            hint="leave it away, or add --device cpu",
        )
    kernels = None if accelerator else load_kernels(threads)
    use_threads(threads, native=kernels is not None)
    return Arithmetic(
        compute=compute,
        threads=threads,
        kernels=kernels,
        quantization=quantization_type(quantization, kernels),
        warnings=() if accelerator or extension() else (_NO_KERNELS,),
    )
