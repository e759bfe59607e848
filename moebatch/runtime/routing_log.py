"""Records the routing of a run: see `moebatch.plan.routing_trace`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from moebatch.errors import UsageError
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.routing_trace import Record, TraceHeader, TraceWriter


class RoutingLog:
    """Writes what tokens chose, layer by layer. Close it after the last pass."""

    def __init__(self, path: Path, spec: ModelSpec, model: str) -> None:
        """Begin a new file.

        Raises: UsageError when it cannot be written.
        """
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise UsageError(f"cannot write the routing trace {path}: {error.strerror}") from None
        header = TraceHeader(model=model, num_layers=spec.num_layers,
                             num_experts=spec.num_experts, top_k=spec.top_k)  # fmt: skip
        self._writer, self._number = TraceWriter(self._file, header), 0

    def routed(self, layer: int, weights: Tensor, experts: Tensor,
               scores: Sequence[float]) -> None:  # fmt: skip
        """A layer of the pass: expert weights and ids [T, K] of its tokens, mean scores [E]."""
        self._writer.add(
            Record(
                number=self._number,
                layer=layer,
                experts=experts.numpy(),
                weights=weights.double().numpy(),
                scores=np.array(scores),
            )
        )

    def end_pass(self) -> None:
        """What comes now is of the next pass."""
        self._number += 1

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
