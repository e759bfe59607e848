"""The computations of a plan on the Hierarchical Roofline Model: their intensities and the points."""

from dataclasses import dataclass

from moebatch.cli.plan_asked import Asked
from moebatch.plan import cost
from moebatch.plan.outlook import Outlook
from moebatch.plan.roofline import Hierarchy, hierarchy


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One computation: its intensity at both levels, FLOPs per byte."""

    name: str
    upper: float
    lower: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """A machine's roofs and a plan's decode operations on them."""

    roofs: Hierarchy
    attention: Operation
    ffn: Operation

    @property
    def p1(self) -> float:
        """P1 of the attention (eq. 9)."""
        return self.roofs.turning_point_1(self.attention.lower)

    @property
    def p2(self) -> float:
        """P2 of the expert FFN (eq. 10)."""
        return self.roofs.turning_point_2(self.ffn.upper)

    @property
    def balance(self) -> float:
        """The balance point of the expert FFN (eq. 11)."""
        return self.roofs.balance_point(self.ffn.upper)

    def lines(self) -> list[tuple[str, str]]:
        """The figures, one a line."""
        return [
            ("attention, I seen from below", f"{self.attention.lower:.1f}"),
            ("P1 of attention", f"{self.p1:.1f}: below it, attention belongs where the cache lies"),
            ("expert FFN, I seen from below", f"{self.ffn.lower:.1f}"),
            ("P2 of the expert FFN", f"{self.p2:.1f}: below it, the link binds"),
            ("balance point", f"{self.balance:.1f}: past it only a larger micro-batch helps"),
        ]


def points(asked: Asked, outlook: Outlook) -> Points:
    """The decode step's attention and expert FFN under the plan's N and mu."""
    spec, policy = asked.spec, outlook.policy
    rows = float(policy.batch_size)
    context = rows * asked.workload.mean_context
    attention = cost.decode_attention(spec, rows, context, policy.kv_dtype)
    whole = cost.experts(spec, rows)
    call = cost.experts(spec, min(rows, float(policy.micro_batch_size * policy.experts_grouped)))
    return Points(
        roofs=hierarchy(asked.machine, spec.weight_dtype),
        attention=Operation(name="attention", upper=float(attention.intensity),
                            lower=float(attention.intensity)),
        ffn=Operation(name="expert FFN", upper=float(call.intensity),
                      lower=float(whole.flops / whole.weight_bytes)),
    )  # fmt: skip
