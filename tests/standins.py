"""Models whose every answer is known: what audits are tested against."""

from types import SimpleNamespace

import torch
from torch import nn

from tightlip.scan.store import PLAIN, ScanStore


class BigramTable(nn.Module):
    """Logits looked up by the last two tokens: integers, so that ties are frequent and exact."""

    def __init__(self, vocab_size: int, seed: int, *, levels: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(0, levels, (97, vocab_size), generator=generator)
        self.register_buffer("table", table.float())

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        before = torch.roll(input_ids, 1, dims=1)
        before[:, 0] = 0
        return SimpleNamespace(logits=self.table[(input_ids * 31 + before * 7) % 97])


class Parrot(nn.Module):
    """Memorised its documents whole: certain of the next token after any prefix of one."""

    def __init__(
        self, vocab_size: int, documents: list[list[int]], *, certainty: float = 8.0
    ) -> None:
        super().__init__()
        self.vocab_size, self.certainty = vocab_size, certainty
        self.next = {}
        for document in documents:
            for end in range(1, len(document)):
                self.next.setdefault(tuple(document[:end]), document[end])

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        for row, ids in enumerate(input_ids.tolist()):
            for end in range(1, len(ids) + 1):
                expected = self.next.get(tuple(ids[:end]))
                if expected is not None:
                    logits[row, end - 1, expected] = self.certainty
        return SimpleNamespace(logits=logits)


class Stranger(nn.Module):
    """Never saw the corpus: always bets on one and the same token, which no document holds."""

    def __init__(self, vocab_size: int, favourite: int) -> None:
        super().__init__()
        self.vocab_size, self.favourite = vocab_size, favourite

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        logits[..., self.favourite] = 5.0
        return SimpleNamespace(logits=logits)


def scanned(scan, corpus, folder, scorer=PLAIN):
    """What `scan` makes of every token of the corpus, as audits read it."""
    return ScanStore(folder).scan(
        corpus, key={}, open_scan=lambda: scan, description="", scorer=scorer
    )
