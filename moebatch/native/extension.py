"""The compiled module, if there is one, and which of its variants is to run; loads no torch."""

import os
from importlib import import_module
from types import ModuleType

SIMD_VARIABLE = "MOEBATCH_SIMD"  # the one debug switch: a variant's name, or OFF for PyTorch
OFF = "off"


def extension() -> ModuleType | None:
    """The compiled module, or None where the installation has none."""
    try:
        return import_module("moebatch.native._kernels")
    except ImportError:
        return None


def variants() -> list[str]:
    """Names of the SIMD variants that this processor can run, best first; empty without kernels."""
    module = extension()
    return [] if module is None else list(module.variants())


def default_variant() -> str:
    """The variant that a run takes, as the environment asks: its name, or "pytorch"."""
    wanted, known = os.environ.get(SIMD_VARIABLE, ""), variants()
    if wanted == OFF or not known:
        return "pytorch"
    return wanted or known[0]
