"""The adversarial regulariser: the model learns to leave a discriminator guessing who wrote.

After Mireshghallah et al., "Privacy Regularization" (2021), section 2.1. Shapes: B rows,
H hidden units, M authors.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tightlip.core.progress import log
from tightlip.core.run_folder import load_optimizer_tensors, optimizer_tensors, part_of, prefixed
from tightlip.core.settings import LARGEST_SIZE, setting
from tightlip.training.batches import filled
from tightlip.training.config import MitigationConfig
from tightlip.training.mitigations import RunContext
from tightlip.training.mitigations.regulariser import Drawn, Regulariser, RegulariserConfig

MOST_ASKED = 1024  # rows by which the discriminator is judged
EPOCHS_TO_LEARN = 2  # before it is called no adversary
_ASKED = 0x6173  # tells their draw from that of the order


@dataclass(frozen=True, kw_only=True)
class AdversarialConfig(RegulariserConfig):
    """How the discriminator is made and how it learns."""

    name: ClassVar[str] = "adversarial"

    discriminator_size: int = setting(1000, "Its hidden units.", at_least=1, at_most=LARGEST_SIZE)
    discriminator_steps: int = setting(1, "Its steps for each of the model's.", at_least=1)
    discriminator_learning_rate: float = setting(1e-3, "Of its Adam.", above=0)


class AdversarialMitigation(Regulariser):
    """A discriminator learns to name the author of a last state; the model learns to make its
    answer uniform.

    Each step the discriminator moves first, and the model answers to it as it then is. It
    learns from the first step on, whatever λ: with λ = 0 its accuracy is what the states of a
    plain model give away.

    Holds:
        apart: neither receives a gradient from the other's loss.
    """

    config_kind: type[MitigationConfig] = AdversarialConfig
    tallied = ("regularised", "nats")
    discriminator: nn.Sequential

    def prepare(self, context: RunContext) -> None:
        super().prepare(context)
        self.settings = cast(AdversarialConfig, context.config.mitigation)
        self.warned = False
        self.most_frequent = float(np.bincount(self.authors).max()) / len(self.authors)
        with torch.random.fork_rng([]):
            torch.manual_seed(context.config.seed)
            self.discriminator = new_discriminator(
                context.model.config.hidden_size, self.settings.discriminator_size, self.num_authors
            ).to(context.device)
        self.optimizer = torch.optim.Adam(
            self.discriminator.parameters(),
            lr=self.settings.discriminator_learning_rate,
            fused=True,
            capturable=context.device.type == "cuda",
        )
        begin_adam(self.optimizer)

    def drawn(self, number: int, chosen: np.ndarray, size: int) -> Drawn:
        authors_B = filled(self.authors[chosen], size, 0)
        real_B = filled(np.ones(len(chosen), np.float32), size, 0)
        return np.empty(0, np.int64), (authors_B, real_B)

    def teach(self, last_XH: Tensor, *arrays: Tensor) -> None:
        """Move the discriminator towards −log Pr(y | h_x)."""
        authors_B, real_B = arrays
        parameters = list(self.discriminator.parameters())
        for _ in range(self.settings.discriminator_steps):
            nats_B = cross_entropy(self.discriminator(last_XH), authors_B, reduction="none")
            gradients = torch.autograd.grad((nats_B * real_B).sum() / real_B.sum(), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()

    def term(self, last_XH: Tensor, *arrays: Tensor) -> Tensor:
        _, real_B = arrays
        nats_B = nats_to_uniform(self.discriminator, last_XH) * real_B
        self.tally(regularised=real_B.sum(), nats=nats_B.sum())
        return nats_B.sum() / real_B.sum()

    def own_state(self) -> list[Tensor]:
        adam = [part for state in self.optimizer.state.values() for part in state.values()]
        return [*super().own_state(), *self.discriminator.parameters(), *adam]

    def tell(self, epoch: int, sums: dict[str, float]) -> None:
        named, num_rows = self.named_share()
        words = (
            f"Epoch {epoch}: the discriminator names the author of {named:.1%} of {num_rows:,} rows (always the most "
            f"frequent of {self.num_authors:,}: {self.most_frequent:.1%})"
        )
        if sums["regularised"]:
            words += (
                f"; privacy term {sums['nats'] / sums['regularised']:.3f} nats (a uniform answer: "
                f"{np.log(self.num_authors):.3f})"
            )
        log.info("%s.", words)
        if epoch >= EPOCHS_TO_LEARN and named <= self.most_frequent and not self.warned:
            self.warned = True
            log.warning(
                "The discriminator names no more authors (%.1f%%) than always naming the most frequent would. Either the "
                "states hide them or it was too weak to be an adversary at all; --privacy-weight 0 tells which.",
                100 * named,
            )

    @torch.no_grad()
    def named_share(self) -> tuple[float, int]:
        """How often the discriminator, as it is now, names the author of a row, and of how many.

        Asked of rows of all users, not of the batch at hand: where a batch is one user's, the
        discriminator has just left the user before, and would always seem to know nobody.
        """
        context = self.context
        draw = np.random.default_rng([context.config.seed, _ASKED])
        rows = draw.permutation(len(context.rows))[:MOST_ASKED]
        model = context.model
        model.eval()
        right = 0
        for chosen in np.array_split(rows, -(-len(rows) // context.config.batch_size)):
            answer = self.discriminator(context.forward.last(context.batch(chosen))).argmax(dim=1)
            right += int((answer.cpu().numpy() == self.authors[chosen]).sum())
        model.train()
        return right / len(rows), len(rows)

    def state_dict(self) -> dict[str, Tensor]:
        return {
            **super().state_dict(),
            **prefixed("weights", self.discriminator.state_dict()),
            **prefixed("adam", optimizer_tensors(self.optimizer)),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.discriminator.load_state_dict(part_of(state, "weights"))
        load_optimizer_tensors(self.optimizer, part_of(state, "adam"))


def new_discriminator(hidden_size: int, size: int, num_authors: int) -> nn.Sequential:
    """Two fully connected layers, from a last state to the logits of authors."""
    return nn.Sequential(nn.Linear(hidden_size, size), nn.ReLU(), nn.Linear(size, num_authors))


def begin_adam(optimizer: torch.optim.Adam) -> None:
    """Make Adam's tensors now: inside a CUDA graph they would be made anew at every replay."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def nats_to_uniform(discriminator: nn.Module, last_BH: Tensor) -> Tensor:
    """−(1/M) Σ_c log Pr(c | h_x) of each row (the paper's Eq. 2), the discriminator held still.

    Holds:
        lowest: log M, where the answer is uniform.
    """
    still = {name: part.detach() for name, part in discriminator.named_parameters()}
    logits_BM = functional_call(discriminator, still, (last_BH,))
    return -logits_BM.log_softmax(dim=1).mean(dim=1)
