"""Adversarial training of an extractor (Coavoux et al. 2018): vectors that leave private readers in doubt.

Beside the classifier, one reader per private attribute learns to tell it from the vector, and the
extractor is trained against them. Where the paper pays the extractor for a wrong reading, this
pays for doubt: vectors that are reliably misread tell a new reader everything. Nothing is proved;
a reader trained afterwards may find what these did not.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer


class Readers(nn.Module):
    """One reader per private attribute, each an MLP of one hidden layer."""

    def __init__(self, dimensions: int, num_classes: Sequence[int], *, hidden: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(dimensions, hidden), nn.ReLU(), nn.Linear(hidden, num))
            for num in num_classes
        )

    def logits(self, vectors: Tensor) -> Iterable[Tensor]:
        centred = 2 * vectors - 1  # from [0, 1]
        return (reader(centred) for reader in self.each)

    def learn(
        self, vectors: Tensor, private: Sequence[Tensor], optimizer: Optimizer, num_steps: int
    ) -> None:
        """Let the readers read these vectors a little better; the extractor stays as it is."""
        vectors = vectors.detach()
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            losses = [
                functional.cross_entropy(logits, truth)
                for logits, truth in zip(self.logits(vectors), private, strict=True)
            ]
            torch.stack(losses).sum().backward()
            optimizer.step()

    def certainty(self, vectors: Tensor, frequencies: Sequence[Tensor]) -> Tensor:
        """What the extractor pays: how far the readers are from saying how frequent each class is.

        That is the cross entropy of their reading under the classes' frequencies, without its
        least value, so that it is 0 for readers who learn nothing from the vector.

        Holds:
            doubt: 0 where every reader says the frequencies, more everywhere else.
        """
        losses = [
            -(share * (logits.log_softmax(dim=1) - share.log())).sum(dim=1).mean()
            for logits, share in zip(self.logits(vectors), frequencies, strict=True)
        ]
        return torch.stack(losses).mean()


def frequencies_of(ids: Tensor, num_classes: int) -> Tensor:
    """The share of each class, none of them 0."""
    counts = torch.bincount(ids, minlength=num_classes) + 1.0
    return counts / counts.sum()
