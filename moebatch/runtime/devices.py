"""Finds the device that a user names: auto, cpu, cuda, cuda:N or emulated:NAME."""

from moebatch.errors import UsageError
from moebatch.plan.profiles import link_profile
from moebatch.runtime.device import Device


def open_device(name: str, *, memory_bytes: int | None) -> Device | None:
    """The named device, None for the host alone; `memory_bytes` caps what is used of it.

    Raises: UsageError for a device that is not there.
    """
    kind, rest = find_device(name, memory_bytes=memory_bytes)
    if kind == "cpu":
        return None
    if kind == "emulated":
        from moebatch.runtime.emulated import EmulatedDevice

        return EmulatedDevice(link_profile(rest), memory_bytes=memory_bytes)
    from moebatch.runtime.cuda import CudaDevice

    return CudaDevice(int(rest or 0), memory_bytes=memory_bytes)


def find_device(name: str, *, memory_bytes: int | None) -> tuple[str, str]:
    """The kind of a device, "cpu", "cuda" or "emulated", and its number or name. Nothing is opened.

    Raises: UsageError for a device that is not there.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        if memory_bytes is not None:
            raise UsageError("--gpu-memory has no meaning without an accelerator",
                             hint="leave it away, or name one: --device emulated:t4")  # fmt: skip
        return "cpu", ""
    kind, _, rest = name.partition(":")
    if kind == "emulated":
        link_profile(rest)
        return kind, rest
    if kind == "cuda" and (rest == "" or rest.isdecimal()):
        if not torch.cuda.is_available():
            raise UsageError("this machine has no CUDA device that PyTorch can use",
                             hint="use --device cpu, or --device emulated:t4")  # fmt: skip
        if int(rest or 0) >= torch.cuda.device_count():
            raise UsageError(f"there is no device {name}, only {torch.cuda.device_count()}",
                             hint="numbers begin with cuda:0")  # fmt: skip
        return kind, rest
    raise UsageError(f"--device {name} does not exist",
                     hint="one of: auto, cpu, cuda, cuda:N, emulated:NAME")  # fmt: skip
