"""The Hierarchical Roofline Model: roofs, attainable performance, turning points, balance point.

Level i is where a computation runs (the accelerator), level j where its data lies (the host).
Source: MoE-Lightning (arXiv 2411.11217), section 3.2, equations 4 to 11.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from moebatch.plan.machine import MachineSpec, Processor

Amount = Any  # float or an array of float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level: peak FLOP/s and bandwidth of its own memory."""

    name: str
    peak: float
    bandwidth: float

    def local(self, intensity: Amount) -> Amount:
        """Attainable FLOP/s on data that is already here (eq. 8): the lower of eq. 4 and eq. 5."""
        return np.minimum(self.peak, self.bandwidth * intensity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """An upper level i, a lower level j, and the bandwidth B_peak^{j,i} between them."""

    upper: Level
    lower: Level
    link: float

    def attainable(self, upper_intensity: Amount, lower_intensity: Amount) -> Amount:
        """FLOP/s at level i with data that comes from level j (eq. 7)."""
        return np.minimum(self.upper.local(upper_intensity), self.link * lower_intensity)

    def turning_point_1(self, lower_intensity: float) -> float:
        """P1 (eq. 9): below this intensity, computing at level j beats moving the data to level i.

        `lower_intensity` is I_x^j; where the lower level is bound by its compute peak it matters not.
        """
        return float(self.lower.local(lower_intensity)) / self.link

    def turning_point_2(self, upper_intensity: float) -> float:
        """P2 (eq. 10): below this intensity I_x^j, a computation at level i is bound by the link."""
        return float(self.upper.local(upper_intensity)) / self.link

    def balance_point(self, upper_intensity: float) -> float:
        """I_x^j at which memory roof and link roof meet (eq. 11): past it a larger N helps no more."""
        return self.upper.bandwidth * upper_intensity / self.link

    def best_place(self, upper_intensity: float, lower_intensity: float) -> str:
        """Which level finishes a computation first whose data lies at the lower one."""
        moved = self.attainable(upper_intensity, lower_intensity)
        return self.upper.name if moved > self.lower.local(lower_intensity) else self.lower.name


def level(processor: Processor, dtype: str) -> Level:
    """A processor's level for a data type."""
    return Level(name=processor.name, peak=processor.peak(dtype), bandwidth=processor.bandwidth)


def hierarchy(machine: MachineSpec, dtype: str) -> Hierarchy:
    """Accelerator over host; on a machine without one, host memory over the disk.

    The disk has no processor: nothing can be computed there.
    """
    host = level(machine.host, dtype)
    if machine.accelerator is None:
        disk = Level(name="disk", peak=0.0, bandwidth=machine.disk_bandwidth)
        return Hierarchy(upper=host, lower=disk, link=machine.disk_bandwidth)
    return Hierarchy(upper=level(machine.accelerator, dtype), lower=host, link=machine.link)
