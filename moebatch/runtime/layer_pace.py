"""How long the layers of a pass take: when will the next ones begin?"""

import time

_MEMORY = 0.2  # weight of the newest layer


class LayerPace:
    """A running mean of the time from one layer's experts to the next one's."""

    def __init__(self) -> None:
        self._layer_s = 0.0
        self._last: tuple[int, float] | None = None

    def layer(self, layer: int) -> None:
        """The experts of a layer begin now."""
        now = time.perf_counter()
        if self._last is not None and layer > self._last[0]:
            one = (now - self._last[1]) / (layer - self._last[0])
            self._layer_s += (_MEMORY if self._layer_s else 1.0) * (one - self._layer_s)
        self._last = (layer, now)

    def pass_ends(self) -> None:
        """What comes between two passes is not a layer."""
        self._last = None

    def until(self, layer: int, following: int) -> float:
        """Seconds until the experts of a following layer begin; 0 before anything is known."""
        return self._layer_s * (following - layer)
