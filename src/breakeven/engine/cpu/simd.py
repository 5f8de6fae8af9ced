"""Vectors and tiles for numba: what the kernels need of AVX-512 and AMX, each one instruction or a few.

Addresses are int64 and count bytes. `Lanes` is sixteen float32 in one register. Tiles are named by a literal 0..7, as
in the instruction set: numba cannot hold one in a variable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_BYTE, _HALF, _WORD, _LONG, _FLOAT = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType())
_F32X16, _I32X16, _I16X16 = (ir.VectorType(kind, 16) for kind in (_FLOAT, _WORD, _HALF))


class _Bfloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


class Lanes(types.Type):  # type: ignore[misc]
    """Sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _F32X16)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType())


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(_pointer(builder, address), typ=kind)
    loaded.align = 1
    return loaded


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _every(builder: Any, scalar: Any, count: int = 16) -> Any:
    """A vector of one value."""
    kind = ir.VectorType(scalar.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(
        first, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_WORD, count), [0] * count)
    )


def _constant(value: float) -> Any:
    return ir.Constant(_F32X16, [value] * 16)


def _words(value: int) -> Any:
    return ir.Constant(_I32X16, [value] * 16)


def _fix_arity(function: Any, count: int) -> None:
    """Let numba see `count` parameters after the typing context, where the function takes any number."""
    names = ["typing_context", *(f"a{index}" for index in range(count))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _define(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function of the builder and its operands one that numba can call, with fixed types."""

    def decorate(build: Callable[..., Any]) -> Any:
        signature = result(*parameters)

        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            value = build(builder, *arguments)
            return context.get_dummy_value() if result is types.void else value

        def function(typing_context: Any, *_: Any) -> Any:
            return signature, generate

        function.__name__, function.__qualname__ = build.__name__, build.__qualname__
        function.__module__, function.__doc__ = build.__module__, build.__doc__
        _fix_arity(function, len(parameters))
        return intrinsic(function)

    return decorate


_at, _real = types.int64, types.float32


@_define(lanes, _at)
def load(builder: Any, address: Any) -> Any:
    """Sixteen float32 from an address."""
    return _load(builder, address, _F32X16)


@_define(types.void, _at, lanes)
def store(builder: Any, address: Any, value: Any) -> Any:
    """Sixteen float32 to an address."""
    builder.store(value, _pointer(builder, address)).align = 1


@_define(lanes, _at)
def load_bf16(builder: Any, address: Any) -> Any:
    """Sixteen bfloat16 from an address, widened: their bits are the upper half of a float32's."""
    wide = builder.zext(_load(builder, address, _I16X16), _I32X16)
    return builder.bitcast(builder.shl(wide, _words(16)), _F32X16)


def _narrowed(builder: Any, value: Any) -> Any:
    rounded = _call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_Bfloat(), 16), [value])
    return builder.bitcast(rounded, _I16X16)


@_define(types.void, _at, lanes)
def store_bf16(builder: Any, address: Any, value: Any) -> Any:
    """Sixteen bfloat16 to an address, each rounded to the nearest, ties to even."""
    builder.store(_narrowed(builder, value), _pointer(builder, address)).align = 1


@_define(types.int64, _at)
def load_long(builder: Any, address: Any) -> Any:
    """Eight bytes from an address."""
    return _load(builder, address, _LONG)


@_define(types.void, _at, _at)
def store_long(builder: Any, address: Any, value: Any) -> Any:
    """Eight bytes to an address."""
    builder.store(value, _pointer(builder, address)).align = 1


@_define(_real, _at)
def load_real(builder: Any, address: Any) -> Any:
    """One float32 from an address."""
    return _load(builder, address, _FLOAT)


@_define(types.void, _at, _real)
def store_real(builder: Any, address: Any, value: Any) -> Any:
    """One float32 to an address."""
    builder.store(value, _pointer(builder, address)).align = 1


@_define(types.void, _at, types.int64)
def store_byte(builder: Any, address: Any, value: Any) -> Any:
    """The lowest byte of a value to an address."""
    builder.store(builder.trunc(value, _BYTE), _pointer(builder, address))


@_define(types.void, _at, _at)
def copy_line(builder: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes."""
    builder.store(_load(builder, source, _I32X16), _pointer(builder, target)).align = 1


@_define(lanes, _real)
def splat(builder: Any, value: Any) -> Any:
    """One float32 in all lanes."""
    return _every(builder, value)


@_define(lanes, lanes, lanes)
def add(builder: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return builder.fadd(a, b)


@_define(lanes, lanes, lanes)
def sub(builder: Any, a: Any, b: Any) -> Any:
    """a - b."""
    return builder.fsub(a, b)


@_define(lanes, lanes, lanes)
def mul(builder: Any, a: Any, b: Any) -> Any:
    """a * b."""
    return builder.fmul(a, b)


@_define(lanes, lanes, lanes)
def div(builder: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return builder.fdiv(a, b)


@_define(lanes, lanes, lanes, lanes)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _call(builder, "llvm.fma.v16f32", _F32X16, [a, b, c])


@_define(lanes, lanes, lanes)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of a and b, lane by lane; b where either is no number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_define(lanes, lanes, types.int64, _real)
def replace_where(builder: Any, value: Any, bits: Any, other: Any) -> Any:
    """`other` in the lanes whose bit is set (bit i: lane i), the value elsewhere."""
    mask = builder.bitcast(builder.trunc(bits, _HALF), ir.VectorType(ir.IntType(1), 16))
    return builder.select(mask, _every(builder, other), value)


def _folded(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined into one, halves first."""
    for width in (8, 4, 2, 1):
        empty = ir.Constant(value.type, ir.Undefined)
        halves = [
            builder.shuffle_vector(value, empty, ir.Constant(ir.VectorType(_WORD, width), list(range(at, at + width))))
            for at in (0, width)
        ]
        value = combine(*halves)
    return builder.extract_element(value, ir.Constant(_WORD, 0))


@_define(_real, lanes)
def total(builder: Any, value: Any) -> Any:
    """The sum of the lanes, in one fixed order."""
    return _folded(builder, value, builder.fadd)


@_define(_real, lanes)
def largest(builder: Any, value: Any) -> Any:
    """The largest lane."""
    return _folded(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@_define(lanes, lanes)
def exp(builder: Any, x: Any) -> Any:
    """e ** x, to about two units in the last place; 0 below -87, and no more than e ** 88."""
    low, high = _constant(-87.0), _constant(88.0)
    vanishes = builder.fcmp_ordered("<", x, low)
    x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    x = builder.select(vanishes, low, x)

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", _F32X16, [a, b, c])

    # e^x = 2^k e^r with |r| <= ln 2 / 2; ln 2 in two parts, and Cephes' polynomial for e^r.
    k = _call(builder, "llvm.floor.v16f32", _F32X16, [multiply_add(x, _constant(1.4426950408889634), _constant(0.5))])
    r = multiply_add(k, _constant(-0.693359375), x)
    r = multiply_add(k, _constant(2.12194440e-4), r)
    p = _constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = multiply_add(p, r, _constant(coefficient))
    p = builder.fadd(multiply_add(builder.fmul(p, r), r, r), _constant(1.0))
    exponent = builder.shl(builder.add(builder.fptosi(k, _I32X16), _words(127)), _words(23))
    value = builder.fmul(p, builder.bitcast(exponent, _F32X16))
    return builder.select(vanishes, _constant(0.0), value)


@_define(types.void, _at, types.int64, _at, types.int64)
def transpose_words(builder: Any, source: Any, stride: Any, target: Any, target_stride: Any) -> Any:
    """Sixteen rows of sixteen 4-byte words, `stride` bytes apart, to their columns, `target_stride` bytes apart."""

    def pick(a: Any, b: Any, order: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(_I32X16, order))

    offsets = [builder.mul(stride, ir.Constant(_LONG, index)) for index in range(16)]
    rows = [_load(builder, builder.add(source, offset), _I32X16) for offset in offsets]
    # Exchange blocks of 1, 2, 4 and 8 across the diagonal: row i with row i + size, columns c + size with c.
    for size in (1, 2, 4, 8):
        upper = [c if c & size == 0 else 16 + c - size for c in range(16)]
        lower = [c + size if c & size == 0 else 16 + c for c in range(16)]
        for index in range(16):
            if index & size == 0:
                a, b = rows[index], rows[index + size]
                rows[index], rows[index + size] = pick(a, b, upper), pick(a, b, lower)
    for index, row in enumerate(rows):
        at = builder.add(target, builder.mul(target_stride, ir.Constant(_LONG, index)))
        builder.store(row, _pointer(builder, at)).align = 1


@_define(types.void, _at, _at, _at)
def interleave(builder: Any, first: Any, second: Any, target: Any) -> Any:
    """Two lines of 32 half-words to 128 bytes at the target: first[0], second[0], first[1], second[1], …"""
    kind = ir.VectorType(_HALF, 32)
    a, b = _load(builder, first, kind), _load(builder, second, kind)
    for half in (0, 1):
        order = [16 * half + index // 2 + 32 * (index % 2) for index in range(32)]
        mixed = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, 32), order))
        at = builder.add(target, ir.Constant(_LONG, 64 * half))
        builder.store(mixed, _pointer(builder, at)).align = 1


@_define(types.void, _at)
def prefetch(builder: Any, address: Any) -> Any:
    """Ask for the line at an address, into the second-level cache."""
    arguments = [_pointer(builder, address), *(ir.Constant(_WORD, value) for value in (0, 2, 1))]
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)


@_define(types.int64, _at)
def take_ticket(builder: Any, address: Any) -> Any:
    """The counter at an address, which grows by one: threads share work by it."""
    return builder.atomic_rmw("add", _pointer(builder, address), ir.Constant(_LONG, 1), "monotonic")


@_define(types.int64, types.voidptr)
def address_of(builder: Any, pointer: Any) -> Any:
    """A pointer as a number."""
    return builder.ptrtoint(pointer, _LONG)


@intrinsic(prefer_literal=True)
def scratch(typing_context: Any, size: Any) -> Any:
    """The address of `size` bytes on the stack, a literal number, aligned to 64."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():  # numba's own helper would fill it with zeros, byte by byte
            space = builder.alloca(ir.ArrayType(_BYTE, count))
        space.align = 64
        return builder.ptrtoint(space, _LONG)

    return types.int64(size), generate


def _tile_operation(name: str, tiles: int, extras: int) -> Any:
    """An AMX instruction on `tiles` literal tile numbers and `extras` int64: an address and a stride, or nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = [ir.Constant(_BYTE, kind.literal_value) for kind in signature.args[:tiles]]
        rest = list(arguments[tiles:])
        if rest:
            rest[0] = _pointer(builder, rest[0])
        _call(builder, f"llvm.x86.{name}", ir.VoidType(), [*numbers, *rest])
        return context.get_dummy_value()

    def signature(*parameters: Any) -> Any:
        if not all(isinstance(kind, types.IntegerLiteral) for kind in parameters[:tiles]):
            return None
        return types.void(*parameters[:tiles], *(types.int64,) * extras), generate

    def function(typing_context: Any, *parameters: Any) -> Any:
        return signature(*parameters)

    function.__name__ = function.__qualname__ = name
    _fix_arity(function, tiles + extras)
    return intrinsic(prefer_literal=True)(function)


tile_load = _tile_operation("tileloadd64", 1, 2)
tile_store = _tile_operation("tilestored64", 1, 2)
tile_zero = _tile_operation("tilezero", 1, 0)
tile_dot = _tile_operation("tdpbf16ps", 3, 0)


@_define(types.void, _at)
def configure_tiles(builder: Any, address: Any) -> Any:
    """Take the tiles' shapes from the 64 bytes at an address; all tiles become zero."""
    _call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [_pointer(builder, address)])


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Give the tiles back, so that a thread switch need not save them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate
