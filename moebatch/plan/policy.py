"""The policy: what the planner decides and the engine obeys. Readable JSON in and out.

The first six fields are the paper's tuple (N, mu, A_g, F_g, r_w, r_c), the others ours.
Source: MoE-Lightning (arXiv 2411.11217), section 3.3.
"""

import json
from dataclasses import asdict, dataclass, fields

from moebatch.errors import UsageError
from moebatch.plan.model_spec import DTYPE_BYTES
from moebatch.plan.pipeline import STYLES
from moebatch.plan.schedule import Processor

KV_BLOCK_TOKENS = 16
_CHOICES: dict[str, tuple[str, ...]] = {
    "attention": ("cpu", "gpu"),
    "ffn": ("cpu", "gpu"),
    "kv_dtype": tuple(DTYPE_BYTES),
    "schedule": ("zigzag", *STYLES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a job runs; it never changes what the job answers.

    `batch_size` counts requests in flight, `micro_batch_size` those that one attention call carries.
    `weights_resident` is the share of the streamable pages (0..1) that stays in memory, realised in
    whole pages; `page_slots` is how many pages the buffer for streamed ones holds.
    `prefill_tokens` bounds the prompt tokens of one pass, `kv_blocks` is the size of the KV cache.
    """

    batch_size: int
    micro_batch_size: int
    attention: Processor = "cpu"
    ffn: Processor = "cpu"
    weights_resident: float = 1.0
    kv_resident: float = 1.0
    prefill_tokens: int = 4096
    page_slots: int = 2
    kv_blocks: int = 1
    kv_dtype: str = "float32"
    schedule: str = "zigzag"

    def __post_init__(self) -> None:
        """Raises: UsageError for a value outside its range."""
        for name in ("batch_size", "micro_batch_size", "prefill_tokens", "page_slots", "kv_blocks"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"policy: {name} is {value!r}, must be a whole number from 1 on")
        for name in ("weights_resident", "kv_resident"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0.0 <= value <= 1.0:
                raise UsageError(f"policy: {name} is {value!r}, must be 0 to 1")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"policy: {name} is {getattr(self, name)!r}",
                                 hint="known are: " + ", ".join(allowed))  # fmt: skip

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one full batch (the paper's n_ub)."""
        return -(-self.batch_size // self.micro_batch_size)

    def to_json(self) -> str:
        """The policy as an indented JSON object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """The inverse of `to_json`.

        Raises: UsageError when the text is no policy.
        """
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise UsageError("not a policy: no JSON object")
            unknown = set(values) - {field.name for field in fields(cls)}
            if unknown:
                raise UsageError(f"policy: unknown field {sorted(unknown)[0]!r}")
            return cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"not a policy: {error}") from None
