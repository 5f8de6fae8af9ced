"""The kernels as functions of tensors: addresses and shapes are packed here, and checked where they could be wrong."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breakeven.engine.batch import StepPlan
from breakeven.engine.cpu import paged, products, rows, team

_PRODUCT, _ROWS = ctypes.c_int64 * 13, ctypes.c_int64 * 12
_product, _norm, _rotate, _attend = (
    kernel.address for kernel in (products.product, rows.rms_norm, rows.rotate_and_store, paged.attend)
)
_fork = team.fork()


def _bits(value: float) -> int:
    """A float64's bits as an integer, as which the kernels receive it."""
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return int(bits)


class PackedProduct:
    """x W^T in the tiles' order, with what follows it. Weights are copied: bfloat16 [out, in], biases [out] or None."""

    __slots__ = ("_bias", "_blocks", "_groups", "_mode", "_outputs", "_packed", "_steps")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        padding = -outputs % 32
        if padding:
            weight = torch.cat((weight, weight.new_zeros(padding, inputs)))
            bias = None if bias is None else torch.cat((bias, bias.new_zeros(padding)))
        self._mode = products.PLAIN
        self._outputs, self._blocks = outputs, outputs // 16
        self._groups, self._steps = weight.shape[0] // 32, inputs // 32
        order = weight.view(self._groups, 2, 16, self._steps, 16, 2).permute(0, 3, 1, 4, 2, 5)
        self._packed = order.contiguous()
        self._bias = None if bias is None else bias.contiguous()

    @classmethod
    def gated(cls, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> PackedProduct:
        """silu(x G^T) * (x U^T): blocks of both lie side by side, so one pass has what the product needs."""
        width, inputs = gate.shape
        paired = torch.stack((gate.view(-1, 16, inputs), up.view(-1, 16, inputs)), dim=1).reshape(2 * width, inputs)
        biases = None
        if gate_bias is not None or up_bias is not None:
            parts = [gate.new_zeros(width) if bias is None else bias for bias in (gate_bias, up_bias)]
            biases = torch.stack([part.view(-1, 16) for part in parts], dim=1).reshape(2 * width)
        product = cls(paired, biases)
        product._mode, product._outputs = products.GATED, width
        return product

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether the kernel has this shape and type."""
        outputs, inputs = weight.shape
        return weight.dtype == torch.bfloat16 and inputs % 32 == 0 and outputs % 16 == 0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[rows, out] of x [rows, in], plus the residual [rows, out]."""
        if x.stride(1) != 1 or x.dtype != torch.bfloat16:
            x = x.to(torch.bfloat16).contiguous()
        count = x.shape[0]
        if x.shape[1] != self._steps * 32:
            raise ValueError(f"the inputs are {x.shape[1]} wide, the weights {self._steps * 32}")
        out = torch.empty((count, self._outputs), dtype=torch.bfloat16)
        mode = self._mode
        if residual is not None:
            residual, mode = residual.contiguous(), products.ADD
            if residual.shape != out.shape or residual.dtype != torch.bfloat16:
                raise ValueError(f"the residual is {residual.dtype} {tuple(residual.shape)}, not {tuple(out.shape)}")
        data = _PRODUCT(
            0,
            x.data_ptr(),
            x.stride(0) * 2,
            self._packed.data_ptr(),
            self._steps,
            self._groups,
            count,
            mode,
            out.data_ptr(),
            self._outputs * 2,
            0 if residual is None else residual.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            self._blocks,
        )
        _fork(_product, data, torch.get_num_threads(), 0)
        return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight, bfloat16 [rows, width]; a multiple of 16 wide."""
    count, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((count, width), dtype=torch.bfloat16)
    data = _ROWS(0, x.data_ptr(), x.stride(0) * 2, weight.data_ptr(), out.data_ptr(), count, width, _bits(epsilon))
    _fork(_norm, data, torch.get_num_threads(), 0)
    return out


def rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotate q in place; rotate k and store it, and v, in the cache. Returns q [rows, heads, dim], a view.

    qkv dense [rows, heads + 2 kv_heads, dim]; cos, sin [positions, dim], halves equal; positions, slots int64 [rows];
    keys and values one layer's [pages, page, kv_heads, dim].
    """
    count, all_heads, dim = qkv.shape
    kv_heads = keys.shape[2]
    heads = all_heads - 2 * kv_heads
    data = _ROWS(
        0,
        qkv.data_ptr(),
        heads,
        kv_heads,
        dim,
        count,
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
    )
    _fork(_rotate, data, torch.get_num_threads(), 0)
    return qkv[:, :heads]


@dataclass(frozen=True, slots=True)
class Units:
    """The work of one step's attention, the same for all layers: int64 [units, 8], and the tables that it points to."""

    table: NDArray[np.int64]
    tables: tuple[NDArray[np.int64] | NDArray[np.uint64], ...]


def plan_units(plan: StepPlan, kv_heads: int, fold: int) -> Units:
    """Cut a step's rows into units of sixteen queries; see `paged`."""
    units: list[tuple[int, ...]] = []
    tables: list[NDArray[np.int64] | NDArray[np.uint64]] = []
    first = 0
    for sequence in plan.sequences:
        count, prefix = len(sequence), sequence.prefix
        pages = np.array(sequence.pages, np.int64)
        tables.append(pages)
        visible = 0
        if sequence.visible is not None:
            bits = np.array(sequence.visible, np.uint64)
            tables.append(bits)
            visible = bits.ctypes.data
        where = (first, count, prefix, pages.ctypes.data, visible)
        for query in range(0, count * fold, paged.PAGE):
            seen = count if visible else min(count, (query + 15) // fold + 1)
            units += [(*where, kv_head, query, prefix + seen) for kv_head in range(kv_heads)]
        first += count
    return Units(np.array(units, np.int64), tuple(tables))


def attend(query: Tensor, units: Units, keys: Tensor, values: Tensor) -> Tensor:
    """Attention output, dense [rows, heads, dim], of q [rows, heads, dim], whose heads lie side by side."""
    count, heads, dim = query.shape
    kv_heads = keys.shape[2]
    out = torch.empty((count, heads, dim), dtype=torch.bfloat16)
    data = _ROWS(
        0,
        query.data_ptr(),
        query.stride(0) * 2,
        out.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        kv_heads,
        heads // kv_heads,
        dim,
        units.table.ctypes.data,
        len(units.table),
        _bits(dim**-0.5),
    )
    _fork(_attend, data, torch.get_num_threads(), 0)
    return out
