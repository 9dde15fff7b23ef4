"""A trunk with two heads, and two losses over one forward of it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, CLASSES, BATCH = 12, 16, 4, 6


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.classify = nn.Linear(WIDTH, CLASSES)
        self.rebuild = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.trunk(self.norm(self.embed(tokens))))
        return self.classify(x), self.rebuild(x)


def build() -> TwoHeads:
    torch.manual_seed(7)
    return TwoHeads()


def batch(rank: int) -> Tensor:
    """Tokens `[BATCH]` of this rank; others get other ones."""
    return torch.randint(VOCABULARY, (BATCH,), generator=torch.Generator().manual_seed(rank))


def losses(outputs: tuple[Tensor, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    logits, rebuilt = outputs
    return F.cross_entropy(logits, tokens % CLASSES), rebuilt.square().mean()
