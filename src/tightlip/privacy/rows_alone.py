"""Whether who shares a pass leaves a unit as it was, bit by bit, in the run's own way and precision.

Weights are perturbed while it is asked: a gate at zero hides what lies behind it, and opens later.
Looked at is all that clipping uses: losses, norms, and what is noted of every parameter, since a
loss may stay the same while a gradient moves. Shapes: U units, M rows of each, B rows, T positions.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.processes import Processes
from tightlip.privacy import per_unit
from tightlip.privacy.asking import Untouched, how_rows_meet
from tightlip.privacy.passes import Passes, Physical, summed
from tightlip.privacy.physical_batches import BESIDE, PhysicalBatches, Shape
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.privacy.shards import check_has_rules, kept_parameters, local
from tightlip.privacy.sources import Source
from tightlip.privacy.watching import NoRule, Watch

log = logging.getLogger("tightlip")
LONGEST_CHECKED = 32  # positions of the two synthetic rows of the self-check
# A weight moves by so much of its size. Deep models without norms may overflow at the first.
SCALES = (1.0, 0.1, 0.01)
DRAWS = 1  # ways to move them, each with its opposite
MOST_WRITTEN_OUT = 1 << 28  # numbers of gradients that a pass may write out row by row: 1 GiB
FEWEST_SHARED = 4  # rows: below that a pass gains nothing from sharing
OF_ZERO = 0.02  # the size of a weight that is zero
_NOT_FINITE = "its loss is not a finite number, so nothing can be said"


def checked_passes(passes: Passes, batches: PhysicalBatches) -> Passes:
    """The passes, in the fastest way that is exact for their model; or a refusal of the model."""
    model, source = passes.model, batches.source
    longest = int(source.lengths.max())
    width = batches.shape(longest, 1).width
    some = torch.zeros((1, width), dtype=torch.long, device=batches.device)
    with Untouched(model)():  # the first that a pass may write into
        _check_alone(model, some, longest)
        _check_alone(model, some.new_zeros((1, batches.usual().width)), longest)
        _check_ids(model, source, width)
        checked = some[:, :1].expand(-1, min(LONGEST_CHECKED, batches.usual().width))
        unruly = per_unit.no_rule_for(model, checked, bf16=passes.bf16, beside=True)
    if passes.way != "slow" and (unruly is not None or passes.way == "mapped"):
        _without_rules(passes, batches, checked, unruly or "a way that was asked for")
    if passes.way == "graph":  # or "eager", once it was tried
        shape = batches.usual()
        num_ids = per_unit.num_ids_of(model, shape.width)
        passes(synthetic_units(shape, num_ids, slice(0), batches.device))
    _settle_on_sharing(passes, batches)
    return passes


def _check_ids(model: nn.Module, source: Source, width: int) -> None:
    find = getattr(model, "get_input_embeddings", lambda: None)
    num_ids = max(per_unit.num_ids_of(model, width), getattr(find(), "num_embeddings", 0))
    for each in (getattr(source, "smallest_id", 0), getattr(source, "largest_id", 0)):
        if not 0 <= each < num_ids:
            raise UsageError(
                f"A text has id {each}, and the model has {num_ids} words. Use the tokenizer that it was made with."
            )


def _check_alone(model: nn.Module, some: Tensor, longest: int) -> None:
    width = some.shape[1]
    try:
        per_unit.check_model(model, per_unit.synthetic_rows(model, some))
    except (IndexError, RuntimeError) as error:
        raise UsageError(
            f"The model fails on rows of {width} positions ({error}), which shorter ones are padded to and which are tried "
            f"before the first step. Give widths that it can take, such as widths=({longest},)."
        ) from error


def _settle_on_sharing(passes: Passes, batches: PhysicalBatches) -> None:
    if passes.way != "slow":
        meet_at: dict[tuple[int, int], str | None] = {}

        def why_apart(shape: Shape) -> str | None:
            # Of one shape only, never of all: somebody's long row would decide on everybody's way.
            with per_unit.without_dropout(passes.model):
                key = shape.width, shape.layout.num_rows
                if key not in meet_at:
                    meet_at[key] = rows_meet(passes, shape)
                return meet_at[key] or _changes(passes, shape, _moves(passes, as_they_are=False))

        batches.share_unless(why_apart)
        batches.shared()
    if passes.way != "slow":
        batches.one_unit_a_pass = batches.asked()[-1] in batches.apart
    if (reason := unsteady(passes, batches)) is not None:
        raise GuaranteeError(
            f"{reason}. The model keeps something of the rows before, or draws random numbers, so one person may move another's "
            "gradient, which the clip norm does not bound. Give a model whose answer follows from its input."
        )


def rows_meet(passes: Passes, shape: Shape) -> str | None:
    """By which operation of the model rows of such passes may meet, if by any. Rows that are mapped
    cannot: each is a batch of its own."""
    if passes.way == "mapped":
        return None
    width = shape.width
    tensors = (*passes.model.parameters(), *passes.model.buffers())
    # Beside the width what shifts and padding make of it.
    sizes = {*range(width - 1, width + 5), *(size for each in tensors for size in each.shape)}
    num_ids = per_unit.num_ids_of(passes.model, width)

    def run(num_rows: int, follow: Callable[[Tensor], None]) -> None:
        device = next(iter(passes.parameters.values())).device
        batch = synthetic_units(Shape(width, 1, num_rows), num_ids, slice(0), device)
        follow(batch.ids_BT)
        _watched(passes, batch)[0].forget()

    try:
        return how_rows_meet(run, sizes, usual=shape.layout.num_rows)
    except _NotSeen as error:
        return str(error)


def _without_rules(passes: Passes, batches: PhysicalBatches, checked: Tensor, unruly: str) -> None:
    """Settle on `vmap` where torch can and memory has room, else on one row after the other."""
    check_has_rules(passes.model, unruly)
    rows = MOST_WRITTEN_OUT // sum(each.numel() for each in passes.parameters.values())
    passes.way = "slow"
    # A copy is tried: what a model keeps of a trial that failed is of no use to it.
    if rows >= FEWEST_SHARED and per_unit.can_be_mapped(
        copy.deepcopy(passes.model), checked, bf16=passes.bf16
    ):
        passes.way = "mapped"
        batches.take_at_most(rows)
    how = {
        "mapped": "every row's gradient is written out, exactly but with more memory and time",
        "slow": "units are clipped one after the other, exactly but slowly",
    }
    log.warning("No fast rule covers %s: %s.", unruly, how[passes.way])


def shared_by_others(passes: Passes, batches: PhysicalBatches, *, moved: bool = True) -> str | None:
    """What of a unit changes with who shares its pass, or went before it; None where nothing does.
    Asked of the weights as they are and, if `moved`, of moved ones."""
    if passes.way != "slow" and not batches.one_unit_a_pass:
        for shape in batches.shared():
            if (reason := _changes(passes, shape, _moves(passes, moved=moved))) is not None:
                return reason
    return unsteady(passes, batches, moved=moved)


def _changes(passes: Passes, shape: Shape, moves: list[tuple[float, int]]) -> str | None:
    num_ids = per_unit.num_ids_of(passes.model, shape.width)
    found = (_change_at(passes, num_ids, *move, shape) for move in moves)
    return next(filter(None, found), None)


def _moves(
    passes: Passes, *, moved: bool = True, as_they_are: bool = True
) -> list[tuple[float, int]]:
    """The weights as they are, and moved one way and the other: a gate may be shut on one side. At the
    start moved ones are enough: what is open already stays so."""
    seeds = [passes.draws.getrandbits(63) for _ in range(DRAWS if moved else 0)]
    own = [(0.0, 0)] if as_they_are else []
    return [*own, *((sign, seed) for seed in seeds for sign in (1.0, -1.0))]


def unsteady(passes: Passes, batches: PhysicalBatches, *, moved: bool = True) -> str | None:
    """What differs of a unit that is run twice, with others in between; None where nothing does.

    Asked where units take a pass each, which is sound only if a pass leaves nothing behind.
    """
    shapes = {*batches.apart}  # of others `first_change` sees it
    if passes.way == "slow" or batches.one_unit_a_pass:
        longest = int(batches.source.lengths.max())
        shapes |= {
            each._replace(num_units=1) for each in (batches.usual(), batches.shape(longest, 1))
        }
    for shape in shapes:
        num_ids = per_unit.num_ids_of(passes.model, shape.width)
        own = synthetic_units(shape, num_ids, slice(None), batches.device)
        two = shape._replace(num_units=2)
        others = synthetic_units(two, num_ids, slice(0), batches.device)
        other = _last(others, shape)
        for sign, seed in _moves(passes, moved=moved):
            kept = kept_parameters(passes.model)
            with per_unit.without_dropout(passes.model), perturbed(kept, 0.1 * sign, seed):
                first = _told(passes, own)
                # Of other rows too, or what is kept while the shape is the same stayed its own.
                passes(others)
                passes(other)
                if _differ(first, _told(passes, own)):
                    return f"Two passes over the same row of {shape.width} positions differ"
    return None


def _told(passes: Passes, batch: Physical) -> list[Tensor]:
    found = passes(batch)
    return [each.clone() for each in (found.losses, found.norms, *found.gradients.values())]


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit by bit; on a GPU, which may add in another order each time, by more than that explains."""
    pairs = zip(one, other, strict=True)
    if one[0].device.type != "cuda":
        return not all(torch.equal(a, b) for a, b in pairs)
    return any(float((a - b).norm()) > 1e-3 * float(a.norm()) for a, b in pairs)


def _last(batch: Physical, shape: Shape) -> Physical:
    """The last unit of a batch, by itself."""
    own = slice(-shape.rows_per_unit, None)
    num_rows_U = torch.full((1,), shape.rows_per_unit, device=batch.ids_BT.device)
    return Physical.of(batch.ids_BT[own], batch.targets_BT[own], num_rows_U, shape.layout)


def _change_at(passes: Passes, num_ids: int, sign: float, seed: int, shape: Shape) -> str | None:
    reason: str | None = None
    for scale in SCALES:
        with perturbed(kept_parameters(passes.model), sign * scale, seed):
            try:
                reason = first_change(passes, shape, num_ids)
            except _NotSeen as error:
                reason = str(error)
            except RuntimeError as error:
                if passes.way != "mapped":
                    raise
                reason = f"they cannot be mapped ({str(error).splitlines()[0]})"
        if reason != _NOT_FINITE:
            break
    return reason


@contextmanager
def perturbed(parameters: dict[str, nn.Parameter], scale: float, seed: int = 0) -> Iterator[None]:
    """Weights moved by random numbers of their own size, and put back to the bit."""
    # Not where the model is: there may be no room for it twice.
    own = {name: local(each) for name, each in parameters.items()}
    kept = {name: each.detach().to("cpu", copy=True) for name, each in own.items()}
    try:
        with torch.no_grad():
            for number, each in enumerate(own.values()):
                draw = torch.Generator(each.device).manual_seed((seed + number) % 2**63)
                noise = torch.randn(each.shape, generator=draw, device=each.device)
                size = float(each.float().square().mean().sqrt()) or OF_ZERO
                each.add_((scale * size * noise).to(each.dtype))
        yield
    finally:
        with torch.no_grad():
            for name, each in own.items():
                each.copy_(kept[name])


class _NotSeen(Exception):
    """A pass of this shape shows nothing that could be compared."""


def first_change(passes: Passes, shape: Shape, num_ids: int) -> str | None:
    """One unit in every place of a pass, then in each third of them among others, and in one: what is
    unlike.

    Thirds are drawn at random. Somebody may hear of one other place only, of the next one or of
    their pair; with halves, all pairs could be whole. Or they may hear only where nobody is like them.
    """
    everywhere = range(shape.num_units)
    order = passes.draws.sample(everywhere, shape.num_units)
    device = next(iter(passes.parameters.values())).device
    # What a model keeps of the first pass of a shape is then of other rows, one unlike the next.
    _seen(passes, synthetic_units(shape, num_ids, slice(0), device))
    copies = _seen(passes, synthetic_units(shape, num_ids, [*everywhere], device))
    if _on_any({name for name, values in copies.items() if not values.isfinite().all()}):
        return _NOT_FINITE
    moved = {name for name, values_UX in copies.items() if not (values_UX == values_UX[:1]).all()}
    first = {name: values_UX[:1].clone() for name, values_UX in copies.items()}
    del copies  # as large as a pass
    mixed = set[str]()
    for own in filter(None, (*(order[number::3] for number in range(3)), order[:1])):
        found = _seen(passes, synthetic_units(shape, num_ids, own, device))
        mixed |= {name for name, values in first.items() if not (found[name][own] == values).all()}
        del found
    moved, mixed = _on_any(moved), _on_any(mixed)
    if not moved and not mixed:
        return None
    again = _seen(passes, synthetic_units(shape, num_ids, [*everywhere], device))
    unsteadily = _on_any({name for name in first if not torch.equal(first[name], again[name][:1])})
    if unsteadily:
        return f"two passes over the same rows differ in {min(unsteadily)}"
    name = next(name for name in first if name in moved | mixed)
    return f"{name} changes with {'its place' if name in moved else BESIDE}"


def _on_any(own: set[str]) -> set[str]:
    """What was noted on any of several processes: with shards, one that went on by itself would wait
    for the others' for ever."""
    return set[str]().union(*Processes.here().all_gathered(own))


def _seen(passes: Passes, batch: Physical) -> dict[str, Tensor]:
    """All that a pass tells of each unit."""
    layout = batch.layout
    if passes.way != "eager":
        found = passes(batch)
        return {"its loss": found.losses.clone(), "its norm": found.norms.clone()}
    watch, losses_B = _watched(passes, batch)
    noted = {
        f"what is noted of {name} ({number}, {side})": values.reshape(layout.num_units, -1)
        for name, uses in watch.uses.items()
        for number, use in enumerate(uses)
        for side, values in vars(use).items()
        if isinstance(values, Tensor) and len(values) == layout.num_rows
    }
    found = summed(watch, passes.parameters, losses_B, layout, passes.clip, batch.tensors[3])
    return {"its loss": found.losses, "its norm": found.norms, **noted}


def _watched(passes: Passes, batch: Physical) -> tuple[Watch, Tensor]:
    try:
        return passes.watched(batch.ids_BT, batch.targets_BT, batch.weights_BT)
    except NoRule as error:
        raise _NotSeen(f"no rule covers {error}") from error


def synthetic_units(
    shape: Shape, num_ids: int, places: slice | list[int], device: torch.device
) -> Physical:
    """Units of all lengths, the first of them empty, the third of one word; but in `places` one unit,
    always the same."""
    others, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(0)
    size = (shape.num_units, shape.rows_per_unit, shape.width)
    ids, targets = torch.randint(num_ids, (2, *size), generator=others)
    lengths = torch.randint(1, shape.width + 1, (*size[:2], 1), generator=others)
    lengths[0], ids[2:3] = 0, ids[2:3, :1, :1]
    targets = torch.where(torch.arange(shape.width) < lengths, targets, NO_LABEL)
    ids[places], targets[places] = torch.randint(num_ids, (2, *size[1:]), generator=own)
    num_rows_U = torch.full(size[:1], shape.rows_per_unit, device=device)
    ids_BT, targets_BT = (each.flatten(0, 1).to(device) for each in (ids, targets))
    return Physical.of(ids_BT, targets_BT, num_rows_U, shape.layout)
