"""What one released vector gives away: the mechanism, its noise, and its guarantee record.

The published ε is per coordinate. Beside it stand what holds for the whole vector: the pure figure
and (ε, δ), each after the amplification by masked words, and each with the texts it holds for.
docs/representation-guarantees.md has the argument.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.registry import unknown
from tightlip.core.settings import takes
from tightlip.vectors import vector_accounting as accounting
from tightlip.vectors.settings import MECHANISMS, GuaranteeSettings
from tightlip.vectors.vector_accounting import GRID_STEP, GRID_STEPS, amplified

BARE = "none"
UNIT = "one text"
ANY_TWO = "any two texts"
ONE_WORD = (
    "two texts of as many words, the same of them marked, that differ in one word not marked; for any "
    "other two see any_two_texts"
)
TOLD_RELEASES = (1, 10, 100)
FIGURES = ("per_coordinate", "pure", "epsilon", "delta")
_IN_ONE_WORD = "for texts that differ in one word not marked"
_BARE_BECAUSE = "The vectors are released without noise; nothing bounds what they give away."
_PUBLISHED_BECAUSE = (
    "The published ε takes the vector's sensitivity to be 1, but each of its coordinates can move by 1: "
    "it holds for one coordinate. pure and epsilon hold for all of them together, for the discrete "
    "noise as it was drawn."
)
_PROVED_BECAUSE = "The noise is calibrated for the whole vector, and ε is that of the discrete noise as it was drawn."
# Of a record as a whole, and of its first three figures. The whole is the weakest of them: a
# reader of one word is told too little and never too much.
_STANDINGS = {
    "laplace-as-published": ("as published", "as published", "proved", "proved"),
    "laplace": ("proved", "proved", "proved", "proved"),
    "gaussian": ("proved", None, None, "proved"),
    BARE: ("measured only", None, None, None),
}
COVERS = ("the vector of one text, released once",)
OUTSIDE = (
    "what the extractor was trained on",
    "further releases of the same text, or of other texts by the same person: they add up",
    "columns carried beside the vectors, how many there are and when they were sent",
    "the last digits of vectors computed in one batch, which the length of a text beside them can "
    "change; a batch size of 1 rules that out",
)


@dataclass(frozen=True, kw_only=True)
class VectorMechanism:
    """How a vector is made private, and what that is worth.

    `epsilon` is per coordinate for laplace-as-published and of the whole vector, after dropout, for
    laplace and gaussian. `delta` is the final one: the composed coordinates are read at
    delta / (1 − dropout). Laplace at `delta` 0 is calibrated for pure differential privacy.

    Holds:
        calibrated: laplace and gaussian spend at most `epsilon` at `delta`, and hardly less.
        kept: a mechanism read from its record is the same and draws the same noise.
        honest: a record that claims less than its noise gives, or says anything else of it than
            this version does, is refused; so is what it says of several releases.
    """

    mechanism: str
    dimensions: int
    epsilon: float | None
    delta: float = GuaranteeSettings.delta
    dropout: float = GuaranteeSettings.dropout
    # The noise's scale in steps of the grid, where a record states it; otherwise worked out.
    units: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.mechanism not in (*MECHANISMS, BARE):
            raise UsageError(unknown("mechanism", self.mechanism, [*MECHANISMS, BARE]))
        if not isinstance(self.dimensions, int) or self.dimensions < 1:
            raise UsageError(
                f"dimensions={self.dimensions} is no length of a vector. Use 1 or more."
            )
        if not 0 <= self.dropout < 1:
            raise UsageError(
                f"dropout={self.dropout} is not a share of words. Use one from 0 up to, not including, 1."
            )
        if self.mechanism == BARE:
            if self.epsilon is not None:
                raise UsageError("Bare vectors have no epsilon. Leave it out, or name a mechanism.")
            return
        self._check_epsilon_and_delta()

    def _check_epsilon_and_delta(self) -> None:
        if self.epsilon is None or not 0 < self.epsilon < math.inf:
            raise UsageError(f"epsilon={self.epsilon} is no budget. Use a number such as 1.0.")
        if not 0 <= self.delta < 1 - self.dropout:
            raise UsageError(
                f"delta={self.delta} is not a probability between 0 and 1 − dropout. Use one such as 1e-5."
            )
        if self.mechanism == "gaussian" and self.delta < 1e-300:
            raise UsageError(
                f"delta={self.delta:g} with Gaussian noise bounds nothing. Use a delta such as 1e-5, or laplace."
            )

    @property
    def normalisation(self) -> str:
        """unit-range: each record's least value 0, its largest 1; unit-ball: length 1."""
        return "unit-ball" if self.mechanism == "gaussian" else "unit-range"

    @property
    def noise_scale(self) -> float:
        """b of Laplace noise or σ of Gaussian noise, on the scale of normalised values; 0 if bare."""
        return self.grid_units * GRID_STEP

    @cached_property
    def grid_units(self) -> int:
        """The scale of the noise in steps of the grid: a whole number, so that nothing is rounded."""
        if self.units is not None:
            return self.units
        if self.epsilon is None:
            return 0
        if self.mechanism == "laplace-as-published":
            units = math.ceil(GRID_STEPS / Fraction(self.epsilon))
            return accounting.allowed_units(units, self.epsilon)
        target = accounting.before_dropout(self.epsilon, self.dropout)
        delta = self._base_delta(self.delta)
        if self.mechanism == "laplace":
            return accounting.laplace_units(self.dimensions, target, delta)
        return accounting.gaussian_units(target, delta)

    def _base_delta(self, delta: float) -> float:
        """What the composed coordinates may use of δ: masking leaves (1 − μ) of it."""
        return math.nextafter(delta / (1 - self.dropout), 0) if self.dropout else delta

    def epsilon_of(self, delta: float, *, dropout: bool = True, num_releases: int = 1) -> float:
        """ε of the whole vector at `delta`; of several releases only for any two texts."""
        assert num_releases == 1 or not dropout, "each release has masks of its own"
        if self.mechanism == BARE:
            return math.inf
        base = self._base_delta(delta) if dropout else delta
        if self.mechanism == "gaussian":
            whole = accounting.gaussian_epsilon(self.grid_units, base, num_releases)
        else:
            num_coordinates = num_releases * self.dimensions
            whole = accounting.laplace_epsilon(self.grid_units, num_coordinates, base)
        return amplified(whole, self.dropout) if dropout else whole

    def figures(self, *, dropout: bool) -> dict[str, float | None]:
        """Per coordinate, pure, and (ε, δ): with the amplification by dropout, or for any two texts."""
        if self.mechanism == BARE:
            return dict.fromkeys(FIGURES)
        share = self.dropout if dropout else 0.0
        per_coordinate = pure = None
        if self.mechanism != "gaussian":
            # As published where it is; the scale, a whole number of steps, spends a hair less.
            target = (self.epsilon or 0.0) if self.mechanism == "laplace-as-published" else 0.0
            one = max(target, accounting.pure_epsilon(self.grid_units, 1))
            per_coordinate = amplified(one, share)
            pure = amplified(accounting.pure_epsilon(self.grid_units, self.dimensions), share)
        epsilon = self.epsilon_of(self.delta, dropout=dropout)
        return dict(zip(FIGURES, (per_coordinate, pure, epsilon, self.delta), strict=True))

    def record(self) -> dict[str, Any]:
        """The guarantee record that every vector file and device carries."""
        bare = self.mechanism == BARE
        standing, *standings = _STANDINGS[self.mechanism]
        because = _PUBLISHED_BECAUSE if self.mechanism == MECHANISMS[0] else _PROVED_BECAUSE
        return {
            "mechanism": self.mechanism,
            "dimensions": self.dimensions,
            "normalisation": self.normalisation,
            "noise_scale": self.noise_scale,
            "grid_step": None if bare else GRID_STEP,
            "dropout": self.dropout,
            "target_epsilon": self.epsilon,
            **self.figures(dropout=True),
            "accountant": self._accountant(),
            "unit": None if bare else UNIT,
            "adjacency": None if bare else ONE_WORD if self.dropout else ANY_TWO,
            "standing": standing,
            "standings": dict(zip(FIGURES, standings, strict=False)),
            "because": _BARE_BECAUSE if bare else because,
            "covers": [] if bare else list(COVERS),
            "outside": [] if bare else list(OUTSIDE),
            "any_two_texts": self.figures(dropout=False),
        }

    def _accountant(self) -> str | None:
        if self.mechanism == BARE:
            return None
        after = ", then amplified by the masked words" if self.dropout else ""
        if self.mechanism == "gaussian":
            return f"zCDP of the discrete Gaussian{after}"
        if not self.delta:
            return f"pure composition of {self.dimensions} discrete Laplaces{after}"
        return f"PLD of {self.dimensions} discrete Laplaces{after}"

    @staticmethod
    def from_record(record: dict[str, Any]) -> "VectorMechanism":
        """The mechanism that a record describes, its noise as stated and all else checked."""
        try:
            mechanism = _described(record)
            _refuse_other_words(record, mechanism.record())
            of_any_two = dict(record["any_two_texts"])
            for told in record.get("releases", []):
                _refuse_other_releases(dict(told), mechanism)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"This is no guarantee record of vectors ({type(error).__name__}: {error}). "
                "Take the one that `represent train` wrote."
            ) from error
        _refuse_less(record, mechanism.figures(dropout=True))
        _refuse_less(of_any_two, mechanism.figures(dropout=False))
        return mechanism


def _changed(what: str) -> UsageError:
    return UsageError(f"{what} It was changed: take the one that `represent train` wrote.")


def _described(record: dict[str, Any]) -> VectorMechanism:
    bare = record["mechanism"] == BARE
    if not bare and record["grid_step"] != GRID_STEP:
        raise UsageError(
            f"The record's grid has steps of {record['grid_step']}, and this version's {GRID_STEP}. "
            "Use the version of tightlip that wrote it."
        )
    units = None if bare else round(record["noise_scale"] / GRID_STEP)
    if units is not None and (units < 1 or units * GRID_STEP != record["noise_scale"]):
        raise UsageError(
            f"noise_scale={record['noise_scale']} lies on no grid of {GRID_STEP}: the record was changed. "
            "Take the one that `represent train` wrote."
        )
    return VectorMechanism(
        mechanism=record["mechanism"],
        dimensions=record["dimensions"],
        epsilon=record["target_epsilon"],
        delta=GuaranteeSettings.delta if bare else record["delta"],
        dropout=record["dropout"],
        units=units,
    )


def _refuse_other_words(claimed: dict[str, Any], real: dict[str, Any]) -> None:
    """Everything but the figures is as this version writes it; figures may be higher."""
    figures = {*FIGURES, "any_two_texts", "releases"}
    for name in sorted((claimed.keys() | real.keys()) - figures):
        if name not in real or name not in claimed or claimed[name] != real[name]:
            raise _changed(
                f"The record says {name}={claimed.get(name)!r}, and of such noise it must be {real.get(name)!r}."
            )
    if more := dict(claimed["any_two_texts"]).keys() - set(FIGURES):
        raise _changed(
            f"The record says {', '.join(sorted(more))} of any two texts, which is no figure."
        )


def _refuse_other_releases(told: dict[str, Any], mechanism: VectorMechanism) -> None:
    number = told["releases"]
    if not isinstance(number, int) or mechanism.mechanism == BARE:
        raise _changed(f"The record claims a cost of {number!r} releases, and there is none.")
    real = cost_record(mechanism, number)
    names = ("epsilon", "any_two_texts")
    _refuse_less(told, {name: real[name] for name in names})
    if {**told, **dict.fromkeys(names)} != {**real, **dict.fromkeys(names)}:
        raise _changed(f"What the record says of {number} releases is not how they compose.")


def _refuse_less(claimed: dict[str, Any], real: dict[str, float | None]) -> None:
    for name, figure in real.items():
        told = claimed.get(name)
        if figure is None and told is None:
            continue
        known = isinstance(told, int | float) and figure is not None
        if not known or not told >= figure * (1 - 1e-9):  # type: ignore[operator]  # nor if it is NaN
            raise _changed(
                f"The record claims {name}={told}, and noise of its scale gives {figure}."
            )


def cost_of_releases(mechanism: VectorMechanism, num_releases: int) -> tuple[float, str]:
    """ε at the mechanism's δ of several vectors of one text, how it was composed, and for which texts.

    The better of two: each release amplified by its own masks, at an equal share of δ, added up,
    which holds for texts that differ in one word; or the noise of all of them composed at once,
    without amplification, which holds for any. Of several texts of one person only the latter
    holds: `cost_of_texts`.

    Holds:
        once: one release costs what the record says.
        growing: another release never costs less.
        either: the result is the smaller of both ways.
    """
    if mechanism.mechanism == BARE and num_releases >= 1:
        return math.inf, _BARE_BECAUSE
    whole = cost_of_texts(mechanism, num_releases)
    added = num_releases * mechanism.epsilon_of(mechanism.delta / num_releases)
    if added >= whole:
        return whole, f"the noise of all composed, for {ANY_TWO}"
    if num_releases == 1:
        return added, f"amplified by its masks, {_IN_ONE_WORD}"
    return added, f"each amplified by its masks, at δ/{num_releases}, and added, {_IN_ONE_WORD}"


def cost_of_texts(mechanism: VectorMechanism, num_texts: int) -> float:
    """ε at the mechanism's δ of so many vectors together, whatever their texts are and might have been."""
    if num_texts < 1:
        raise UsageError(f"{num_texts} releases cost nothing. Use 1 or more.")
    return mechanism.epsilon_of(mechanism.delta, dropout=False, num_releases=num_texts)


def cost_record(mechanism: VectorMechanism, num_releases: int) -> dict[str, Any]:
    """What so many vectors of one text cost, as records and tables have it."""
    epsilon, how = cost_of_releases(mechanism, num_releases)
    return {
        "releases": num_releases,
        "epsilon": epsilon,
        "delta": mechanism.delta,
        "how": how,
        "adjacency": ONE_WORD if how.endswith(_IN_ONE_WORD) else ANY_TWO,
        "any_two_texts": cost_of_texts(mechanism, num_releases),
    }


@takes(GuaranteeSettings)
def represent_guarantee(
    *, releases: Sequence[int] = TOLD_RELEASES, **settings: Any
) -> dict[str, Any]:
    """The guarantee record of a mechanism, and under `releases` what so many of one text cost."""
    made = VectorMechanism(**GuaranteeSettings(**settings).tree())
    return made.record() | {"releases": costs(made, releases)}


def costs(mechanism: VectorMechanism, releases: Sequence[int]) -> list[dict[str, Any]]:
    """ε of several releases of one text, how it was composed and for which texts, at its δ."""
    if mechanism.epsilon is None:
        return []
    return [cost_record(mechanism, number) for number in releases]
