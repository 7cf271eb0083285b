"""The triplet regulariser: rows of one author are pushed apart, rows of different ones together.

After Mireshghallah et al., "Privacy Regularization" (2021), section 2.2: its prose and Eq. 3;
the sign printed in its Eq. 4 is the other way round. Shapes: B rows, P pairs, H hidden units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from tightlip.core.errors import UsageError
from tightlip.core.progress import log
from tightlip.core.settings import setting
from tightlip.training.batches import filled
from tightlip.training.config import MitigationConfig
from tightlip.training.mitigations import RunContext
from tightlip.training.mitigations.regulariser import Drawn, Regulariser, RegulariserConfig

_PARTNERS = 0x7269  # tells the draw of partners from that of the order
LOOKED_AT_EVERY = 50  # steps; on a GPU each look waits for it


@dataclass(frozen=True, kw_only=True)
class TripletConfig(RegulariserConfig):
    """Which pairs are compared, and how far apart rows of one author are to go."""

    name: ClassVar[str] = "triplet"

    # Distances are not bounded as the adversary's nats are: at 1 the term drowns the loss.
    privacy_weight: float = setting(0.03, "The paper's λ.", at_least=0)
    triplet_pairs: str = setting(
        "auxiliary", "With rows of a second batch, or inside it.", choices=("auxiliary", "inside")
    )
    triplet_margin: float | None = setting(
        None, "Squared distance at which one author's rows stop moving apart.", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.triplet_pairs == "inside" and self.batching == "user":
            raise UsageError(
                "triplet_pairs='inside' takes its pairs from one batch, and with batching='user' all its rows have one "
                "author: no pair differs. Add --batching uniform, or use --triplet-pairs auxiliary."
            )


class TripletMitigation(Regulariser):
    """The squared distance of two last states counts against the loss where authors are the
    same, towards it where they differ.

    Pairs are a row and its partner in an auxiliary batch, which runs without the output layer,
    or any two rows inside the batch. Half of the weight goes to either kind of pair: with most
    of it on shared authors, the term would fall without end as all states spread out.
    """

    config_kind: type[MitigationConfig] = TripletConfig
    tallied = ("num_same", "same", "num_different", "different", "num_terms", "term")

    def prepare(self, context: RunContext) -> None:
        super().prepare(context)
        self.partners = Partners(self.authors)
        self.warned = False
        self.latest = torch.zeros((), device=context.device)
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.settings = cast(TripletConfig, context.config.mitigation)
        if self.settings.triplet_pairs == "inside":
            self._check_batches()
        elif self.partners.counts.max() < 2:
            raise UsageError(
                f"mitigation='triplet' needs rows that share an author, and each of the {self.num_authors} users has one "
                f"row. Use a corpus with more text of each, or mitigation='adversarial'."
            )

    def _check_batches(self) -> None:
        """Refuse batches that hold no pair of one of the kinds; the first epoch stands for all."""
        authors = [self.authors[chosen] for chosen in self._order(0)]
        batch_size = self.context.config.batch_size
        share = any(len(np.unique(own)) < len(own) for own in authors)
        if not share or not any(len(np.unique(own)) > 1 for own in authors):
            kind, number = ("different authors", "any") if share else ("one author", "two")
            raise UsageError(
                f"triplet_pairs='inside' needs rows of {kind} in one batch, and of {len(authors)} batches of "
                f"batch_size={batch_size} none has {number}. Use a larger batch_size, or --triplet-pairs auxiliary."
            )

    def drawn(self, number: int, chosen: np.ndarray, size: int) -> Drawn:
        config, num_real = self.context.config, len(chosen)
        if self.settings.triplet_pairs == "inside":
            first, second = np.triu_indices(size, k=1)
            real_P = second < num_real
            authors = filled(self.authors[chosen], size, 0)
            partners, same_P = np.empty(0, np.int64), authors[first] == authors[second]
        else:
            drawn = self.partners.drawn(chosen, [config.seed, number, _PARTNERS])
            partners, real_P = filled(drawn, size, -1), np.arange(size) < num_real
            same_P = filled(self.authors[chosen] == self.authors[drawn], size, False)
        weights_P = np.zeros(len(real_P), np.float32)
        weights_P[real_P] = pair_weights(same_P[real_P], self.settings.triplet_pairs)
        return partners, (weights_P, (same_P & real_P).astype(np.float32))

    def term(self, last_XH: Tensor, *arrays: Tensor) -> Tensor:
        weights_P, same_P = arrays
        if self.settings.triplet_pairs == "inside":
            one_PH, other_PH = (last_XH[places_P] for places_P in self._inside(len(last_XH)))
        else:
            one_PH, other_PH = last_XH.chunk(2)
        distances_P = (one_PH - other_PH).square().sum(dim=1)
        term = triplet_term(distances_P, weights_P, self.settings.triplet_margin)
        different_P = (weights_P > 0).float()
        self.tally(
            num_same=same_P.sum(),
            same=(distances_P * same_P).sum(),
            num_different=different_P.sum(),
            different=(distances_P * different_P).sum(),
            num_terms=torch.ones_like(term),
            term=term,
        )
        self.latest.copy_(term.detach())
        return term

    def _inside(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Both rows of every pair, where the model is; made once for each size of batch."""
        if num_rows not in self._pairs:
            first, second = map(torch.from_numpy, np.triu_indices(num_rows, k=1))
            self._pairs[num_rows] = first.to(self.latest.device), second.to(self.latest.device)
        return self._pairs[num_rows]

    def look(self, number: int) -> None:
        weight = self.weight(number)
        if weight and number % LOOKED_AT_EVERY == 0:
            self._warn_if_diverging(number, weight, self.latest.item())

    def own_state(self) -> list[Tensor]:
        return [*super().own_state(), self.latest]

    def _warn_if_diverging(self, number: int, weight: float, term: float) -> None:
        """Say once when the term gives more than the language model's loss ever could: from
        even odds to certainty is log V nats a token."""
        most = math.log(self.context.model.config.vocab_size)
        if self.warned or weight * term > -most:
            return
        self.warned = True
        log.warning(
            "The triplet term diverges: at step %d it is %.4g (times privacy_weight %.4g), and the language model's loss "
            "could gain %.3g nats at most. Use a smaller privacy_weight, or set a triplet_margin.",
            *(number + 1, term, weight, most),
        )

    def tell(self, epoch: int, sums: dict[str, float]) -> None:
        if not sums["num_terms"]:
            return
        term = sums["term"] / sums["num_terms"]
        log.info(
            "Epoch %d: squared distance %.4g within users (%d pairs), %.4g between users (%d pairs); triplet term %.4g.",
            *(epoch, sums["same"] / max(1, sums["num_same"]), sums["num_same"]),
            *(sums["different"] / max(1, sums["num_different"]), sums["num_different"], term),
        )
        last = min(epoch * self.context.steps_per_epoch, self.context.num_steps) - 1
        self._warn_if_diverging(last, self.weight(last), term)


class Partners:
    """Draws each row's partner in an auxiliary batch, of the same author or of another.

    Holds:
        both: of two rows or more that could have either, half share the author (rounded).
        never_itself: no row is its own partner.
        fair: all rows of the chosen kind are equally likely.
    """

    def __init__(self, authors: np.ndarray) -> None:
        self.authors = authors
        self.by_author = np.argsort(authors, kind="stable")
        self.counts = np.bincount(authors)
        self.starts = np.cumsum(self.counts) - self.counts
        self.places = np.empty(len(authors), np.int64)  # of each row, among its author's
        self.places[self.by_author] = np.arange(len(authors)) - np.repeat(self.starts, self.counts)

    def drawn(self, chosen: np.ndarray, seed: Sequence[int]) -> np.ndarray:
        """The partner of each chosen row; an author's only row has one of another author."""
        draw = np.random.default_rng(seed)
        author = self.authors[chosen]
        start, count = self.starts[author], self.counts[author]
        share = (draw.permutation(len(chosen)) + draw.integers(2)) % 2 == 0
        steps_on = 1 + draw.integers(np.maximum(count - 1, 1))
        own = start + (self.places[chosen] + steps_on) % count
        other = draw.integers(len(self.authors) - count)
        other += np.where(other >= start, count, 0)  # step over the author's own rows
        return self.by_author[np.where(share & (count > 1), own, other)]


def pair_weights(same_P: np.ndarray, pairs: str) -> np.ndarray:
    """What each pair's distance counts: below 0 for a shared author, above for others.

    A drawn auxiliary batch is even already; inside a batch most pairs differ, so either kind
    shares out a half.
    """
    if pairs == "auxiliary":
        return np.where(same_P, -1.0, 1.0) / len(same_P)
    num_same = same_P.sum()
    half_same, half_other = 0.5 / max(1, num_same), 0.5 / max(1, len(same_P) - num_same)
    return np.where(same_P, -half_same, half_other)


def triplet_term(distances_P: Tensor, weights_P: Tensor, margin: float | None) -> Tensor:
    """Σ w‖h_x − h_a‖²; a distance of weight below 0 earns nothing beyond the margin.

    Holds:
        bounded: with a margin, the term is at least margin times the sum of weights below 0.
    """
    if margin is not None:
        distances_P = torch.where(weights_P < 0, distances_P.clamp(max=margin), distances_P)
    return (weights_P * distances_P).sum()
