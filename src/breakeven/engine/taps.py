"""What a drafter reads of the target: its residual stream at a few depths, recorded while the target runs."""

from __future__ import annotations

import torch
from torch import Tensor


class FeatureTaps:
    """Records the residual stream at some layer boundaries of one forward.

    Boundary b is the stream after b layers (0: the embedding), un-normed; Hugging Face's `hidden_states[b]`. After the
    forward `features` holds them side by side, [rows, len(boundaries) * hidden_size], for all rows of the step in
    their order. A forward without taps pays one comparison per layer.
    """

    __slots__ = ("_features", "boundaries")

    def __init__(self, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries
        self._features: Tensor | None = None

    @property
    def features(self) -> Tensor:
        """[rows, len(boundaries) * hidden_size] of the forward that these taps were given to."""
        if self._features is None:
            raise RuntimeError("no target forward has recorded its features here yet")
        return self._features

    def record(self, boundary: int, hidden: Tensor) -> None:
        """Called by the target at every boundary, 0 to its number of layers. hidden [rows, hidden_size].

        The state is copied at once, so the target may go on to change it in place.
        """
        if boundary in self.boundaries:
            rows, width = hidden.shape
            if self._features is None:
                self._features = torch.empty(
                    rows, len(self.boundaries) * width, dtype=hidden.dtype, device=hidden.device
                )
            place = self.boundaries.index(boundary)
            self._features[:, place * width : (place + 1) * width] = hidden
