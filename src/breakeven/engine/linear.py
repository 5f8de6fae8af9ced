"""Matrix products with fixed weights, in the fastest form that the device has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _can_pack(weight: Tensor) -> bool:
    """oneDNN's blocked weights read faster than plain rows do; they exist for bfloat16 on CPUs that have it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear:
    """y = x W^T + b. weight [out, in], bias [out] or None; x [rows, in]."""

    __slots__ = ("_packed", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.weight = weight
        self._packed: Tensor | None = None
        if _can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """y + residual [rows, out]."""
        return self(x).add_(residual)
