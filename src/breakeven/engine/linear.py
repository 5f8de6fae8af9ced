"""Matrix products with fixed weights, in the fastest form that the device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven.engine.cpu import available

if TYPE_CHECKING:
    from breakeven.engine.cpu.ops import PackedProduct


def _can_pack(weight: Tensor) -> bool:
    """oneDNN's blocked weights read faster than plain rows do; they exist for bfloat16 on CPUs that have it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _tiled(weight: Tensor) -> bool:
    """Whether our own kernel has this weight: it reads faster than oneDNN's, and a row's result never depends on how
    many rows there are."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not available():
        return False
    from breakeven.engine.cpu.ops import PackedProduct

    return PackedProduct.fits(weight)


def _tile(weight: Tensor, bias: Tensor | None) -> PackedProduct:
    from breakeven.engine.cpu.ops import PackedProduct

    return PackedProduct(weight, bias)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


class Linear:
    """y = x W^T + b. weight [out, in], bias [out] or None; x [rows, in]."""

    __slots__ = ("_packed", "_tiled", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.weight = weight
        self._tiled = _tile(weight, bias) if _tiled(weight) else None
        self._packed = _pack(weight) if self._tiled is None and _can_pack(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._tiled is not None:
            return self._tiled(x)
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """y + residual [rows, out]."""
        if self._tiled is not None:
            return self._tiled(x, residual)
        if self._packed is not None:
            total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
            return total
        return self(x).add_(residual)


class GatedUnit:
    """silu(x G^T) * (x U^T), the input half of a SwiGLU block. gate and up [width, in], biases [width] or None.

    Packed, the two products stay apart and oneDNN applies the activation and the product as it writes each result
    out: less is written, and two matrices of this shape read faster than one of twice the height. Elsewhere they are
    one matrix, to be one launch.
    """

    __slots__ = ("_gate", "_gate_bias", "_joined", "_tiled", "_up", "_up_bias")

    def __init__(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> None:
        self._joined: Linear | None = None
        self._tiled: PackedProduct | None = None
        if _tiled(gate):
            from breakeven.engine.cpu.ops import PackedProduct

            self._tiled = PackedProduct.gated(gate, up, gate_bias, up_bias)
        elif _can_pack(gate):
            self._gate, self._up = _pack(gate), _pack(up)
            self._gate_bias, self._up_bias = gate_bias, up_bias
        else:
            biases = [bias for bias in (gate_bias, up_bias) if bias is not None]
            self._joined = Linear(torch.cat((gate, up)), torch.cat(biases) if biases else None)

    def __call__(self, x: Tensor) -> Tensor:
        if self._tiled is not None:
            return self._tiled(x)
        if self._joined is not None:
            gate, up = self._joined(x).chunk(2, dim=-1)
            return F.silu(gate) * up
        activated = torch.ops.mkldnn._linear_pointwise(x, self._gate, self._gate_bias, "swish", [], "")
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, activated, self._up, self._up_bias, "mul")
        return product
