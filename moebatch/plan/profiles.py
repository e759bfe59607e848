"""Accelerators that can be emulated: capacity and link, in bytes and bytes per second.

The -mini profiles stand for the same machine with a model a few thousand times smaller on it: what
matters is the ratio of link, memory and computation, and a small machine computes slowly.
"""

from dataclasses import dataclass

from moebatch.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """What an emulated accelerator keeps to: memory, both directions of its link, time per copy."""

    name: str
    memory_bytes: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    latency_s: float


def _profile(name: str, memory_bytes: float, bytes_per_s: float, latency_s: float) -> LinkProfile:
    return LinkProfile(name=name, memory_bytes=int(memory_bytes), h2d_bytes_per_s=bytes_per_s,
                       d2h_bytes_per_s=bytes_per_s, latency_s=latency_s)  # fmt: skip


# PCIe 3 x16 (T4) and PCIe 4 x8 (L4): about 12 GB/s of 16; PCIe 4 x16 (A100): about 24 GB/s of 32.
PROFILES = {
    profile.name: profile
    for profile in (
        _profile("t4", 15 * 2**30, 12e9, 10e-6),
        _profile("l4", 22 * 2**30, 12e9, 10e-6),
        _profile("a100", 80 * 10**9, 24e9, 10e-6),
        _profile("t4-mini", 64 * 2**20, 200e6, 10e-6),
        _profile("unthrottled", 2**40, 1e15, 0.0),
    )
}


def link_profile(name: str) -> LinkProfile:
    """The named profile.

    Raises: UsageError for a name that is not in the table.
    """
    if name not in PROFILES:
        raise UsageError(f"there is no emulated accelerator {name!r}",
                         hint="one of: " + ", ".join(PROFILES))  # fmt: skip
    return PROFILES[name]
