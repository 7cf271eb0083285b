"""Gaussian noise on a grid, as `core.grid_gaussian` has it, in two kernels for many tensors.

Imported on a GPU only. The words, their layout and the cells are the same as on a CPU, bit for bit.
Of float32 sums the first kernel works in float32 and leaves open whatever its own rounding might
turn, about one pair in a hundred; the second takes those in float64. What it leaves open in turn is
settled on the CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from tightlip.core.errors import GuaranteeError
from tightlip.core.grid_gaussian import (
    DOUBLE_ROUNDS,
    LANES,
    LEAST_RADIUS_WORD,
    MOST_OPEN,
    PROGRAM,
    SCATTERED,
    Cipher,
    Release,
    check_few,
    places_of,
    programs_before,
    released,
)
from tightlip.core.randomness import SECRET

NUM_WARPS = 8
# Pairs that float32 leaves open are noted in so many lists, or all programs would wait for one
# counter; a list has room for one pair in so many, several times what is expected.
LISTS, ONE_IN = 64, 24
_LEAST_LIST, _APART = 512, 32
_LEAST_GRID = 2.0**-64  # float32 has room for it and for its inverse
_KINDS = {torch.float32: tl.float32, torch.float64: tl.float64, torch.int32: tl.int32}


@triton.jit
def _rotated(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def chacha(key, nonce, blocks, DOUBLE_ROUNDS: tl.constexpr):
    """The 16 words of each of `blocks` (64-bit counters) under the key and a 64-bit nonce."""
    zero = tl.zeros_like(blocks).to(tl.uint32)
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4, s5 = zero + tl.load(key).to(tl.uint32), zero + tl.load(key + 1).to(tl.uint32)
    s6, s7 = zero + tl.load(key + 2).to(tl.uint32), zero + tl.load(key + 3).to(tl.uint32)
    s8, s9 = zero + tl.load(key + 4).to(tl.uint32), zero + tl.load(key + 5).to(tl.uint32)
    s10, s11 = zero + tl.load(key + 6).to(tl.uint32), zero + tl.load(key + 7).to(tl.uint32)
    s12, s13 = blocks.to(tl.uint32), (blocks >> 32).to(tl.uint32)
    s14, s15 = zero + tl.load(nonce).to(tl.uint32), zero + tl.load(nonce + 1).to(tl.uint32)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in tl.static_range(DOUBLE_ROUNDS):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3 = x0 + s0, x1 + s1, x2 + s2, x3 + s3
    x4, x5, x6, x7 = x4 + s4, x5 + s5, x6 + s6, x7 + s7
    x8, x9, x10, x11 = x8 + s8, x9 + s9, x10 + s10, x11 + s11
    x12, x13, x14, x15 = x12 + s12, x13 + s13, x14 + s14, x15 + s15
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _word(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _rounded(value, normal, spread, per_cell):
    """The cell of a sum and its noise, and how far from its edge they are."""
    along = value * per_cell + spread * normal
    cell = libdevice.rint(along)
    return cell, 0.5 - tl.abs(along - cell)


@triton.jit
def _fill_pair(
    values, at, size, pair, radius_word, angle_word, scale, per_cell, factor, unit, found,
    still_open, KIND: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """As `grid_gaussian._fill_pair`; how near is too near is worked out in float32, a little more."""
    uniform = radius_word.to(tl.float64) * 5.421010862427522e-20
    radius = tl.sqrt(-2.0 * tl.log(uniform))
    turn = angle_word.to(tl.float64) * 1.0842021724855044e-19
    one = tl.load(values + at, at < size, 0).to(tl.float64) * unit
    two = tl.load(values + at + LANES, at + LANES < size, 0).to(tl.float64) * unit
    spread = scale * per_cell
    cell_one, margin_one = _rounded(one, radius * libdevice.cospi(turn), spread, per_cell)
    cell_two, margin_two = _rounded(two, radius * libdevice.sinpi(turn), spread, per_cell)
    near = (2.17e-19 / uniform.to(tl.float32) + 4.5e-16) / radius.to(tl.float32)
    near = (near + 9.2e-13) * spread.to(tl.float32)
    more = (9.2e-13 * per_cell).to(tl.float32)
    fine_one = margin_one.to(tl.float32) >= near + more * tl.abs(one).to(tl.float32)
    fine_two = margin_two.to(tl.float32) >= near + more * tl.abs(two).to(tl.float32)
    fine_two = fine_two | (at + LANES >= size)
    fine = fine_one & fine_two & (radius_word >= LEAST) & (radius > 0)
    out = values.to(tl.pointer_type(tl.float64 if tl.float64 == KIND else tl.float32))
    tl.store(out + at, cell_one * factor + 0.0, fine & (at < size))
    tl.store(out + at + LANES, cell_two * factor + 0.0, fine & (at + LANES < size))
    left = (fine == 0) & (at < size)
    number = tl.atomic_add(found + tl.zeros_like(at), 1, left)
    tl.store(still_open + number, pair, left & (number < MOST))


@triton.jit
def _quick_cell(value, normal, near):
    """The cell of a sum in cells and of its noise, and whether float32 is sure of it.

    A sum is a float32 over a power of two, so its whole part and the rest of it are exact.
    """
    whole = libdevice.rint(value)
    along = (value - whole) + normal
    cell = libdevice.rint(along)
    return whole.to(tl.float64) + cell.to(tl.float64), 0.5 - tl.abs(along - cell) >= near


@triton.jit
def _fill_pair_quickly(
    values, at, size, pair, radius_word, angle_word, spread, per_cell, factor, count, unsure,
    room, LANES: tl.constexpr,
):  # fmt: skip
    """The pair's cells by the upper halves of its words, where these and float32 can tell.

    How far the normal numbers r·cos and r·sin may be off, u the uniform and r the radius:
    the fast logarithm errs by 2⁻²¹·⁴ or 3 units in the last place, u by 2⁻²⁴ of itself and the 2⁻³²
    that was cut off: 2·(2⁻²¹·⁴ + 2⁻²⁴ + 2⁻³³/u)/r + 3.6e-7 r; root 1.2e-7 r; the angle 4.7e-7, from
    two roundings, cosine and sine 2⁻²¹·² (CUDA's programming guide has the functions' bounds);
    products and sum 2.5e-7 r. Together (8.4e-7 + 2⁻³²/u)/r + 1.7e-6 r, and twice as much is kept.
    """
    uniform = radius_word.to(tl.float32) * 2.3283064365386963e-10
    radius = tl.sqrt(-2.0 * libdevice.fast_logf(uniform))
    angle = angle_word.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09
    near = spread * ((1.7e-6 + 4.7e-10 / uniform) / radius + 3.4e-6 * radius)
    length = spread * radius
    one = tl.load(values + at, at < size, 0) * per_cell
    two = tl.load(values + at + LANES, at + LANES < size, 0) * per_cell
    cell_one, sure_one = _quick_cell(one, length * libdevice.fast_cosf(angle), near)
    cell_two, sure_two = _quick_cell(two, length * libdevice.fast_sinf(angle), near)
    # A word that float32 takes for 1 has radius -0, and by it `near` would be minus infinity.
    sure = (radius > 0) & sure_one & (sure_two | (at + LANES >= size))
    tl.store(values + at, cell_one * factor + 0.0, sure & (at < size))
    tl.store(values + at + LANES, cell_two * factor + 0.0, sure & (at + LANES < size))
    left = (sure == 0) & (at < size)
    number = tl.atomic_add(count + tl.zeros_like(at), 1, left)
    tl.store(unsure + number, pair, left & (number < room))


@triton.jit
def _fill_quickly(
    pointers, sizes, tensor_of, start_of, key, nonce, numbers, counts, unsure, room,
    LANES: tl.constexpr, ROUNDS: tl.constexpr, LISTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    which = tl.load(tensor_of + program)
    values = tl.load(pointers + which).to(tl.pointer_type(tl.float32))
    size = tl.load(sizes + which)
    per_cell, factor = tl.load(numbers + 1).to(tl.float32), tl.load(numbers + 2)
    spread = (tl.load(numbers) * tl.load(numbers + 1)).to(tl.float32)
    lanes = tl.arange(0, LANES)
    blocks = program.to(tl.int64) * LANES + lanes
    (_, w1, _, w3, _, w5, _, w7, _, w9, _, w11, _, w13, _, w15) = chacha(key, nonce, blocks, ROUNDS)
    at = tl.load(start_of + program) + lanes
    pair = blocks * 4
    count = counts + (program % LISTS) * APART
    unsure += (program % LISTS).to(tl.int64) * room
    _fill_pair_quickly(values, at, size, pair, w1, w3, spread, per_cell, factor, count, unsure, room, LANES)  # fmt: skip
    _fill_pair_quickly(values, at + 2 * LANES, size, pair + 1, w5, w7, spread, per_cell, factor, count, unsure, room, LANES)  # fmt: skip
    _fill_pair_quickly(values, at + 4 * LANES, size, pair + 2, w9, w11, spread, per_cell, factor, count, unsure, room, LANES)  # fmt: skip
    _fill_pair_quickly(values, at + 6 * LANES, size, pair + 3, w13, w15, spread, per_cell, factor, count, unsure, room, LANES)  # fmt: skip


@triton.jit
def _one_of(which, first, second, third, fourth):
    return tl.where(which < 2, tl.where(which == 0, first, second), tl.where(which == 2, third, fourth))  # fmt: skip


@triton.jit
def _fill_unsure(
    pointers, sizes, tensor_of, start_of, key, nonce, numbers, found, still_open, counts, unsure,
    room, KIND: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr,
    ROUNDS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The pairs that `_fill_quickly` left, wherever they are; a list that ran over, which only sums that
    are no numbers do, is told as too many that are open."""
    count = tl.load(counts + tl.program_id(1) * APART)
    first = tl.program_id(0) * LANES
    if (count > room) & (first == 0):
        tl.atomic_add(found, MOST + 1)
    if first < count:
        lane = first + tl.arange(0, LANES)
        is_there = (lane < count) & (lane < room)
        pair = tl.load(unsure + tl.program_id(1).to(tl.int64) * room + lane, is_there, 0)
        blocks, which = pair // 4, pair % 4
        program, place = blocks // LANES, blocks % LANES
        tensor = tl.load(tensor_of + program)
        values = tl.load(pointers + tensor).to(tl.pointer_type(KIND))
        size = tl.load(sizes + tensor)
        scale, per_cell = tl.load(numbers), tl.load(numbers + 1)
        factor, unit = tl.load(numbers + 2), tl.load(numbers + 3)
        (w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15) = chacha(
            key, nonce, blocks, ROUNDS
        )
        radius_word = _word(_one_of(which, w0, w4, w8, w12), _one_of(which, w1, w5, w9, w13))
        angle_word = _word(_one_of(which, w2, w6, w10, w14), _one_of(which, w3, w7, w11, w15))
        at = tl.load(start_of + program) + which * (2 * LANES) + place
        at = tl.where(is_there, at, size)
        _fill_pair(values, at, size, pair, radius_word, angle_word, scale, per_cell, factor, unit, found, still_open, KIND, LEAST, MOST, LANES)  # fmt: skip


@triton.jit
def _fill(
    pointers, sizes, tensor_of, start_of, key, nonce, numbers, found, still_open,
    KIND: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    which = tl.load(tensor_of + program)
    values = tl.load(pointers + which).to(tl.pointer_type(KIND))
    size = tl.load(sizes + which)
    scale, per_cell = tl.load(numbers), tl.load(numbers + 1)
    factor, unit = tl.load(numbers + 2), tl.load(numbers + 3)
    lanes = tl.arange(0, LANES)
    blocks = program.to(tl.int64) * LANES + lanes
    (w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15) = chacha(
        key, nonce, blocks, ROUNDS
    )
    at = tl.load(start_of + program) + lanes
    pair = blocks * 4
    _fill_pair(values, at, size, pair, _word(w0, w1), _word(w2, w3), scale, per_cell, factor, unit, found, still_open, KIND, LEAST, MOST, LANES)  # fmt: skip
    _fill_pair(values, at + 2 * LANES, size, pair + 1, _word(w4, w5), _word(w6, w7), scale, per_cell, factor, unit, found, still_open, KIND, LEAST, MOST, LANES)  # fmt: skip
    _fill_pair(values, at + 4 * LANES, size, pair + 2, _word(w8, w9), _word(w10, w11), scale, per_cell, factor, unit, found, still_open, KIND, LEAST, MOST, LANES)  # fmt: skip
    _fill_pair(values, at + 6 * LANES, size, pair + 3, _word(w12, w13), _word(w14, w15), scale, per_cell, factor, unit, found, still_open, KIND, LEAST, MOST, LANES)  # fmt: skip


class GPUNoise:
    """Noise on many tensors in one kernel.

    Holds:
        same: the cells are those that the CPU finds under the same key.
        settled: no entry is left open when `add` returns.
    """

    def __init__(self, device: torch.device, *, insecure_seed: int | None = None) -> None:
        self.cipher = Cipher(insecure_seed)
        signed = [word - (word >> 31 << 32) for word in self.cipher.key]
        self._key = torch.tensor(signed, dtype=torch.int32, device=device)
        self._found = torch.zeros(1, dtype=torch.int32, device=device)
        self._open = torch.zeros(MOST_OPEN, dtype=torch.int64, device=device)
        self.is_open = torch.zeros((), device=device)
        self._told = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._counts = torch.zeros(LISTS * _APART, dtype=torch.int32, device=device)
        self._unsure: Tensor | None = None
        self._tables: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}

    def add(self, tensors: list[Tensor], *, scale: float, share: float, unit: float = 1.0) -> None:
        """Every entry becomes share · g · K; whole numbers, in units of `unit`, become float32 where
        they lie: look at them as such afterwards."""
        self.launch(tensors, scale=scale, share=share, unit=unit)()

    def launch(
        self, tensors: list[Tensor], *, scale: float, share: float, unit: float = 1.0
    ) -> Callable[[], bool]:
        """Begin; what is returned waits for the end and settles what is open: whether anything was.

        Until then `is_open`, on the device, tells: nothing may be applied while it is not 0.
        """
        kind = tensors[0].dtype
        if not all(each.is_contiguous() and each.dtype == kind for each in tensors):
            raise GuaranteeError(SCATTERED)
        release, nonce = Release.of(scale, share, unit), self.cipher.next_nonce()
        pointers, sizes, tensor_of, start_of = self._table(tensors)
        numbers = [scale, 1 / release.grid, release.grid * share, unit]
        device = self._key.device
        self._found.zero_()
        sent = (_sent([nonce, 0], torch.int32, device), _sent(numbers, torch.float64, device))
        given = (pointers, sizes, tensor_of, start_of, self._key, *sent)
        how: dict[str, Any] = {"LANES": LANES, "ROUNDS": DOUBLE_ROUNDS, "num_warps": NUM_WARPS}
        whole = {"KIND": _KINDS[kind], "LEAST": LEAST_RADIUS_WORD, "MOST": MOST_OPEN} | how
        if kind == torch.float32 and unit == 1.0 and _LEAST_GRID < release.grid < 1 / _LEAST_GRID:
            counts, unsure = self._lists(len(tensor_of))
            room = len(unsure) // LISTS
            lists = (counts, unsure, room)
            _fill_quickly[(len(tensor_of),)](*given, *lists, LISTS=LISTS, APART=_APART, **how)
            grid = (triton.cdiv(room, LANES), LISTS)
            _fill_unsure[grid](*given, self._found, self._open, *lists, APART=_APART, **whole)
        else:
            _fill[(len(tensor_of),)](*given, self._found, self._open, **whole)
        self.is_open.copy_(self._found[0] > 0)
        self._told.copy_(self._found, non_blocking=True)
        ended = torch.cuda.Event()
        ended.record()

        def settle() -> bool:
            ended.synchronize()
            if not (found := int(self._told)):
                return False
            check_few(found)
            self._settle(tensors, self._open[:found].tolist(), nonce, release)
            return True

        return settle

    def _lists(self, num_programs: int) -> tuple[Tensor, Tensor]:
        """Room for pairs that float32 leaves open, and how many there are: none yet."""
        room = max(_LEAST_LIST, num_programs * PROGRAM // (2 * ONE_IN * LISTS))
        if self._unsure is None or len(self._unsure) != room * LISTS:
            self._unsure = torch.empty(room * LISTS, dtype=torch.int64, device=self._key.device)
        self._counts.zero_()
        return self._counts, self._unsure

    def _settle(
        self, tensors: list[Tensor], pairs: list[int], nonce: int, release: Release
    ) -> None:
        before = programs_before(tensor.numel() for tensor in tensors)
        for pair in pairs:
            program = pair // (4 * LANES)
            which = max(number for number, first in enumerate(before) if first <= program)
            flat = tensors[which].view(-1)
            places = places_of(pair, before[which], len(flat))
            sums = [float(flat[at]) for at in places]
            cells = self.cipher.settled(pair, nonce, sums, release)
            out = flat.view(torch.float32) if flat.dtype == torch.int32 else flat
            for at, cell in zip(places, cells, strict=True):
                out[at] = released(cell, release)

    def __getstate__(self) -> Any:
        raise GuaranteeError(SECRET)

    def _table(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        key = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
        if key not in self._tables:
            sizes = torch.tensor([tensor.numel() for tensor in tensors])
            programs = -(-sizes // PROGRAM)
            tensor_of = torch.repeat_interleave(torch.arange(len(sizes)), programs)
            first = programs.cumsum(0) - programs
            start_of = (torch.arange(len(tensor_of)) - first[tensor_of]) * PROGRAM
            pointers = torch.tensor([tensor.data_ptr() for tensor in tensors])
            self._tables = {
                key: tuple(
                    part.to(self._key.device) for part in (pointers, sizes, tensor_of, start_of)
                )
            }
        return self._tables[key]


def _sent(numbers: list[Any], kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=kind).pin_memory().to(device, non_blocking=True)
