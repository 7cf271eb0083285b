"""Each unit's squared gradient norm, parameter by parameter, from the uses alone.

‖Σ_t left_t ⊗ right_t‖² = Σ_s Σ_t (left_s·left_t)(right_s·right_t): two Gram matrices instead
of a gradient per unit (Goodfellow 2015; Li et al. 2022). Uses of one parameter add up before
the norm is taken, so a tied embedding brings a cross term. What rounding may add on the way into
the sum comes with the norm: see `rounding`.
Shapes: U units, S tokens of a unit, P and D the parameter's.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from tightlip.privacy import rounding
from tightlip.privacy.layers import Layout, Lookup, Outer, Use, Whole, fp32_product, wide

# Numbers held at once beyond this are computed some units at a time.
MOST_NUMBERS = 1 << 27
# Of fewer tokens a GPU's kernel for many weights would leave most of its room empty.
LEAST_TOKENS = 128


class Measured(NamedTuple):
    """Each unit's squared norm, and the most that rounding adds to its gradient, if anything."""

    squares_U: Tensor
    rounded_U: Tensor | None = None


class Norms:
    """Squared norms under one layout. Gram matrices are kept, since a recurrent layer's four
    parameters share one. `how` says how the sum will be taken."""

    def __init__(self, layout: Layout, how: rounding.Products = rounding.Products()) -> None:
        self.layout, self.how = layout, how
        self._grams: dict[int, tuple[Tensor, Tensor]] = {}
        # What is known already of a product of both sides, by its use, and of a left side by itself.
        self._products: dict[int, Measured] = {}
        self._sums: dict[int, Measured] = {}

    def of_all(
        self, uses: Mapping[str, list[Use]], parameters: Mapping[str, Tensor]
    ) -> dict[str, Measured]:
        """Of every parameter that is used; on a GPU weights of one shape together."""
        used = {name: own for name, own in uses.items() if own}
        products = [use for own in used.values() for use in own if _is_product(use)]
        shared = Counter(id(use.left_BTP) for use in products)
        together: dict[tuple[torch.Size, ...], list[Outer]] = {}
        for name, own in used.items():
            use = own[0]
            if len(own) == 1 and _is_product(use) and shared[id(use.left_BTP)] == 1:
                shape = self._shape_for_many(use, parameters[name].shape)
                if shape is not None:
                    together.setdefault(shape, []).append(use)
        for alike in together.values():
            self._take_together(alike)
        return {name: self.measured(own, parameters[name].shape) for name, own in used.items()}

    def measured(self, uses: list[Use], shape: torch.Size) -> Measured:
        """Of one parameter, for every unit, with what rounding may add.

        Holds:
            exact: `squares_U` are the squared norms of the units' gradients by plain autograd.
            bounded: times a factor, a unit's share of the sum is no longer than norm and rounding.
        """
        outers = [use for use in uses if isinstance(use, Outer)]
        lookups = [use for use in uses if isinstance(use, Lookup)]
        are_sums = [use.right_BTD is None for use in outers]
        if len(outers) == len(uses) and all(are_sums):
            return self._of_sums(outers)
        if len(outers) + len(lookups) < len(uses) or any(are_sums):
            return self._written_out(uses, shape)
        parts = [self._of_products(outers, shape)] if outers else []
        if lookups:
            parts.append(self._of_lookups(lookups))
        squares = [part.squares_U for part in parts]
        squares += [2 * self._cross(outer, lookup) for outer in outers for lookup in lookups]
        rounded = [part.rounded_U for part in parts if part.rounded_U is not None]
        return Measured(sum(squares[1:], squares[0]), sum(rounded[1:], rounded[0]))

    def _of_sums(self, uses: list[Outer]) -> Measured:
        left_BTP = uses[0].left_BTP
        if len(uses) == 1 and id(left_BTP) in self._sums:
            return self._sums[id(left_BTP)]
        if len(uses) == 1 and id(left_BTP) in self._grams:
            return _of_pairs(self.gram(left_BTP), rounds=self._rounds(left_BTP))
        lefts = [self.layout.by_unit(use.left_BTP) for use in uses]
        sums_UP = added_up([left_USP.sum(1, dtype=wide(left_USP)) for left_USP in lefts])
        rounded_U = added_up(
            [rounding.summed_in_float32(rounding.lengths(left_USP)) for left_USP in lefts]
        )
        return Measured(rounding.summed_rows(sums_UP.square()), rounded_U)

    def _of_products(self, uses: list[Outer], shape: torch.Size) -> Measured:
        if id(uses[0]) in self._products:
            return self._products[id(uses[0])]
        num_tokens = self._num_tokens(uses)
        if _is_small(shape, num_tokens):
            return self._written_out(list(uses), shape)
        rounds = self._product_rounds(uses)
        if len(uses) == 1:
            (use,) = uses
            assert use.right_BTD is not None
            if self.layout.num_units * num_tokens**2 <= MOST_NUMBERS:
                return _of_pairs(self.gram(use.left_BTP), self.gram(use.right_BTD), rounds)
        left = torch.cat([self.layout.by_unit(use.left_BTP) for use in uses], 1)
        right = torch.cat([self.layout.by_unit(use.right_BTD) for use in uses], 1)  # type: ignore[arg-type]
        return self._in_parts(
            lambda part: _of_pairs(rounding.gram(left[part]), rounding.gram(right[part]), rounds),
            num_tokens**2,
        )

    def _num_tokens(self, uses: list[Outer]) -> int:
        return sum(use.left_BTP.shape[1] for use in uses) * self.layout.rows_per_unit

    def _product_rounds(self, uses: list[Outer]) -> rounding.Roundings:
        both = {rounding.roundings(use, self.how) for use in uses}
        sides = [side for use in uses for side in (use.left_BTP, use.right_BTD) if side is not None]
        return self._rounds(*sides[:2], num_tokens=self._num_tokens(uses))._replace(
            left=max(left for left, _ in both), right=max(right for _, right in both)
        )

    def _shape_for_many(self, use: Outer, shape: torch.Size) -> tuple[torch.Size, ...] | None:
        """The shape of its sides if the kernel for many weights at once can take them."""
        left_BTP, right_BTD = use.left_BTP, use.right_BTD
        assert right_BTD is not None
        num_tokens = self._num_tokens([use])
        fits = (
            left_BTP.device.type == "cuda"
            and left_BTP.dtype == right_BTD.dtype == torch.bfloat16
            and num_tokens >= LEAST_TOKENS
            and max(left_BTP.shape[2], right_BTD.shape[2]) <= rounding.AT_ONCE
            and not _is_small(shape, num_tokens)
        )
        return (left_BTP.shape, right_BTD.shape) if fits else None

    def _take_together(self, uses: list[Outer]) -> None:
        """Of products of one shape."""
        from tightlip.privacy import pair_kernels

        by_unit = self.layout.by_unit
        lefts = [by_unit(use.left_BTP) for use in uses]
        rights = [by_unit(use.right_BTD) for use in uses]  # type: ignore[arg-type]
        # A thread adds up more pairs at a time than where Gram matrices are read.
        more = rounding.of_pairs(4096, lefts[0])
        rounds, alone = self._product_rounds(uses[:1]), self._rounds(uses[0].left_BTP)
        found = pair_kernels.outer_norms(
            lefts,
            rights,
            rounds._replace(per_square=rounds.per_square + more),
            alone._replace(per_square=alone.per_square + more),
        )
        for use, of_both, of_left in zip(uses, *found, strict=True):
            self._products[id(use)] = Measured(*of_both)
            self._sums[id(use.left_BTP)] = Measured(*of_left)

    def _rounds(self, *sides: Tensor, num_tokens: int | None = None) -> rounding.Roundings:
        """What sums and norms of tokens with these sides lose where nothing else rounds them."""
        like, size = sides[0], num_tokens or self.layout.rows_per_unit * sides[0].shape[1]
        off = sum(rounding.of_dot(side.shape[2], side) for side in sides) + rounding.of_pairs(
            size, like
        )
        return rounding.Roundings(per_length=rounding.per_length(size, like), per_square=off)

    def _of_lookups(self, uses: list[Lookup]) -> Measured:
        ids_US = torch.cat([self.layout.by_unit(use.ids_BT) for use in uses], 1)
        lefts = [self.layout.by_unit(use.left_BTD) for use in uses]
        left_USD = lefts[0] if len(lefts) == 1 else torch.cat(lefts, 1)

        def squares(part: slice) -> Measured:
            same_USS = ids_US[part][:, :, None] == ids_US[part][:, None, :]
            return _of_pairs(torch.where(same_USS, rounding.gram(left_USD[part]), 0), rounds=rounds)

        rounds = self._rounds(uses[0].left_BTD, num_tokens=ids_US.shape[1])
        return self._in_parts(squares, ids_US.shape[1] ** 2)

    def _cross(self, outer: Outer, lookup: Lookup) -> Tensor:
        """<Σ_s left_s ⊗ right_s, Σ_t e(id_t) ⊗ g_t> = Σ_s Σ_t left_s[id_t] (right_s·g_t)."""
        assert outer.right_BTD is not None
        by_unit = self.layout.by_unit
        left_USV, right_USD = by_unit(outer.left_BTP), by_unit(outer.right_BTD)
        ids_UT, g_UTD = by_unit(lookup.ids_BT), by_unit(lookup.left_BTD)
        right_USD = right_USD[..., : g_UTD.shape[2]]  # the rest are zeros
        num_pairs = left_USV.shape[1] * ids_UT.shape[1]

        # Rounded to the coarser of both, it would miss by more than `_of_pairs` allows for.
        kind = torch.promote_types(right_USD.dtype, g_UTD.dtype)

        def products(part: slice) -> Measured:
            where = ids_UT[part][:, None, :].expand(-1, left_USV.shape[1], -1)
            taken_UST = left_USV[part].gather(2, where)
            along_UST = fp32_product(right_USD[part].to(kind), g_UTD[part].transpose(1, 2).to(kind))
            return Measured((taken_UST * along_UST).sum((1, 2), dtype=torch.float64).to(along_UST))

        off = rounding.of_dot(g_UTD.shape[2], g_UTD) + 2 * torch.finfo(wide(g_UTD)).eps
        along_U = (rounding.lengths(left_USV) * rounding.lengths(right_USD)).sum(
            1
        ) * rounding.lengths(g_UTD).sum(1)
        return self._in_parts(products, num_pairs).squares_U + off * along_U

    def _written_out(self, uses: list[Use], shape: torch.Size) -> Measured:
        """Where units' gradients are small, or uses of unlike kinds meet, write them out."""

        def squares(part: slice) -> Measured:
            whole = sum(gradients(use, self.layout, part, shape) for use in uses)
            assert isinstance(whole, Tensor)
            apart = [rounding.rounded_apart(use, self.layout, part, self.how) for use in uses]
            return Measured(rounding.summed_rows(whole.flatten(1).square()), added_up(apart))

        return self._in_parts(squares, shape.numel())

    def gram(self, values_BTX: Tensor) -> Tensor:
        known = self._grams.get(id(values_BTX))
        if known is None:
            known = (values_BTX, rounding.gram(self.layout.by_unit(values_BTX)))
            self._grams[id(values_BTX)] = known
        return known[1]

    def _in_parts(self, squares: Callable[[slice], Measured], numbers_per_unit: int) -> Measured:
        together = max(1, MOST_NUMBERS // max(1, numbers_per_unit))
        if together >= self.layout.num_units:
            return squares(slice(None))
        starts = range(0, self.layout.num_units, together)
        parts = [squares(slice(start, start + together)) for start in starts]
        rounded = [part.rounded_U for part in parts if part.rounded_U is not None]
        squares_U = torch.cat([part.squares_U for part in parts])
        return Measured(squares_U, torch.cat(rounded) if rounded else None)


def _is_product(use: Use) -> TypeGuard[Outer]:
    return isinstance(use, Outer) and use.right_BTD is not None


def _is_small(shape: torch.Size, num_tokens: int) -> bool:
    """Whether a unit's gradient takes less room than its tokens: then it is written out."""
    size_P, size_D = shape
    return size_P * size_D < num_tokens * (size_P + size_D)


def gradients(use: Use, layout: Layout, part: slice, shape: torch.Size) -> Tensor:
    """The gradients of some units, written out: [U, *shape]."""
    if isinstance(use, Whole):
        return layout.sum_by_unit(use.gradient_BX.to(wide(use.gradient_BX)))[part]
    if isinstance(use, Outer):
        left_USP = layout.by_unit(use.left_BTP)[part]
        if use.right_BTD is None:
            return left_USP.sum(1, dtype=wide(left_USP))[:, : shape[0]]
        right_USD = layout.by_unit(use.right_BTD)[part]
        return fp32_product(left_USP.transpose(1, 2), right_USD)[:, : shape[0], : shape[1]]
    ids_US, left_USD = layout.by_unit(use.ids_BT)[part], layout.by_unit(use.left_BTD)[part]
    whole = left_USD.new_zeros(len(ids_US), *shape, dtype=wide(left_USD))
    where = ids_US[..., None].expand(-1, -1, shape[1])
    return whole.scatter_add(1, where, left_USD.to(whole.dtype))


def added_up(parts: list[Tensor]) -> Tensor:
    """Their sum, in two operations however many they are: each is a launch on a GPU.

    Along the first dimension a CPU would add the last few entries in another order than the rest.
    """
    return parts[0] if len(parts) == 1 else rounding.summed_rows(torch.stack(parts, -1))


def _of_pairs(
    first_USS: Tensor,
    second_USS: Tensor | None = None,
    rounds: rounding.Roundings = rounding.Roundings(),
) -> Measured:
    """The sum over pairs of tokens of first · second, and as much as rounding may have taken from it;
    with it what rounding on the way into the sum may add.

    Tokens that cancel leave a norm far smaller than what was summed, and with what rounding took it
    would be far too small: a unit of such tokens once moved the sum by 12 times the bound. Their
    lengths bound the rounding, at its worst.
    """
    if first_USS.device.type == "cuda" and first_USS.dtype == torch.float32:
        from tightlip.privacy import pair_kernels

        return Measured(*pair_kernels.pair_sums(first_USS, second_USS, rounds))
    products_USS = first_USS if second_USS is None else first_USS * second_USS
    lengths_U = products_USS.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(1)
    squares_U = products_USS.sum((1, 2), dtype=torch.float64).to(lengths_U)
    squares_U = squares_U + rounds.per_square * lengths_U.square()
    if second_USS is None:
        return Measured(squares_U, rounds.per_length * lengths_U)
    return Measured(squares_U, rounding.rounded_share(first_USS, second_USS, rounds, lengths_U))
