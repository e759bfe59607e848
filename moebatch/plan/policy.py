"""The policy: what the planner decides and the engine obeys. Readable JSON in and out.

The first six fields are the paper's tuple (N, mu, A_g, F_g, r_w, r_c), the others ours.
Source: MoE-Lightning (arXiv 2411.11217), section 3.3.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Literal

from moebatch.errors import UsageError
from moebatch.plan.eviction import EVICTIONS, EvictionName
from moebatch.plan.hybrid import MISSES, Misses
from moebatch.plan.model_spec import DTYPE_BYTES
from moebatch.plan.pipeline import STYLES
from moebatch.plan.schedule import Processor
from moebatch.plan.speculation import MAX_DRAFT_TOKENS

KV_BLOCK_TOKENS = 16
Regime = Literal["stream", "cache"]
_CHOICES: dict[str, tuple[str, ...]] = {
    "attention": ("cpu", "gpu"),
    "ffn": ("cpu", "gpu"),
    "kv_dtype": tuple(DTYPE_BYTES),
    "schedule": ("zigzag", *STYLES),
    "regime": ("stream", "cache"),
    "eviction": EVICTIONS,
    "misses": MISSES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a job runs; it never changes what the job answers.

    `batch_size` counts requests in flight, `micro_batch_size` those that one attention call carries.
    `weights_resident` is the share of the streamable pages (0..1) that stays in memory, realised in
    whole pages; `page_slots` is how many pages the buffer for streamed ones holds.
    `prefill_tokens` bounds the prompt tokens of one pass, `kv_blocks` is the size of the KV cache.
    With an accelerator: `prefill_micro_batch_size` requests share a call in prefill,
    `experts_grouped` micro-batches one visit to an expert, and `weights_on_disk` is the share of the
    pages that host memory cannot hold. `weight_dtype` None: as the checkpoint stores them.
    `draft_tokens` is how many drafts a row may bring into a pass, 0 where none are made.
    In the "cache" regime of few rows only experts that have tokens are read: `expert_slots` of them are
    kept, whoever is worth least by `eviction` leaves, and routers of the next `prefetch_layers` layers
    say what to read ahead. In the "stream" regime the job's tail changes over to that cache once no
    more than `tail_rows` rows are left, which may go on for `tail_passes` or longer; 0 rows: it never
    does. With an accelerator `misses` says who computes what is not in its cache; `keep_computed`: what
    the host did is brought for later.
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
    prefill_micro_batch_size: int | None = None
    experts_grouped: int = 1
    weights_on_disk: float = 0.0
    weight_dtype: str | None = None
    draft_tokens: int = 0
    regime: Regime = "stream"
    expert_slots: int = 0
    eviction: EvictionName = "mrs"
    prefetch_layers: int = 3
    tail_rows: int = 0
    tail_passes: int = 0
    misses: Misses = "balanced"
    keep_computed: bool = True

    def __post_init__(self) -> None:
        """Raises: UsageError for a value outside its range."""
        counts = ("batch_size", "micro_batch_size", "prefill_tokens", "page_slots", "kv_blocks",
                  "prefill_micro_batch_size", "experts_grouped")  # fmt: skip
        for name in counts:
            value = getattr(self, name)
            if name == "prefill_micro_batch_size" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise UsageError(f"policy: {name} is {value!r}, must be a whole number from 1 on")
        for name in ("expert_slots", "prefetch_layers", "tail_rows", "tail_passes"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise UsageError(f"policy: {name} is {value!r}, must be a whole number from 0 on")
        for name in ("weights_resident", "kv_resident", "weights_on_disk"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0.0 <= value <= 1.0:
                raise UsageError(f"policy: {name} is {value!r}, must be 0 to 1")
        drafts = self.draft_tokens
        if type(drafts) is not int or not 0 <= drafts <= MAX_DRAFT_TOKENS:
            raise UsageError(f"policy: draft_tokens is {drafts!r}, must be 0 to {MAX_DRAFT_TOKENS}")
        if type(self.keep_computed) is not bool:
            raise UsageError(
                f"policy: keep_computed is {self.keep_computed!r}, must be true or false"
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"policy: {name} is {getattr(self, name)!r}",
                                 hint="known are: " + ", ".join(allowed))  # fmt: skip
        if self.weight_dtype is not None and self.weight_dtype not in DTYPE_BYTES:
            raise UsageError(f"policy: weight_dtype is {self.weight_dtype!r}",
                             hint="known are: " + ", ".join(DTYPE_BYTES))  # fmt: skip

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
            for name in ("batch_size", "micro_batch_size"):
                if name not in values:
                    raise UsageError(f"policy: the field {name!r} is missing")
            return cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"not a policy: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the user fixed; None leaves the choice to the planner."""

    batch_size: int | None = None
    micro_batch_size: int | None = None
    weights_resident: float | None = None
    prefill_tokens: int | None = None
    kv_dtype: str | None = None
    attention: Processor | None = None
    ffn: Processor | None = None
    kv_resident: float | None = None
    draft_tokens: int | None = None
    regime: Regime | None = None
    expert_slots: int | None = None
    eviction: EvictionName | None = None
    prefetch_layers: int | None = None

    def __post_init__(self) -> None:
        """Raises: UsageError for a value outside its range."""
        for name in ("batch_size", "micro_batch_size", "prefill_tokens"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"{name} is {count}, must be at least 1")
        for name in ("weights_resident", "kv_resident"):
            share = getattr(self, name)
            if share is not None and not 0.0 <= share <= 1.0:
                raise UsageError(f"{name} is {share}, must be 0 to 1")
        if self.kv_dtype is not None and self.kv_dtype not in DTYPE_BYTES:
            raise UsageError(f"kv_dtype {self.kv_dtype} is not known")
