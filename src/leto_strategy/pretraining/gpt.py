"""A decoder-only transformer, dense or with a mixture of experts. Plain PyTorch, readable from top to bottom.

Shapes in docstrings: B sequences of a batch, C tokens of a sequence, V vocabulary, W width, H heads, D = W / H width of
a head, T = B · C tokens, E experts, K experts that a token goes to. Every operation has a fixed order of its sums: the
same tokens give the same bits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

INITIAL_STD = 0.02
ROPE_BASE = 10_000.0


class Prediction(NamedTuple):
    """What the network returns.

    Args:
        logits: B × C × V, of the token after each token.
        balance: Scalar, mean load-balancing loss of the layers with experts: 1 where all experts get the same share,
            up to E where one gets everything; 0 for a dense network.
    """

    logits: Tensor
    balance: Tensor


class GPT(nn.Module):
    """Predicts the next token.

    Args:
        vocabulary: Number of different tokens, V.
        context: Longest sequence in tokens, C.
        width: Size of the residual stream, W.
        layers: Number of blocks.
        heads: Attention heads of a block, H.
        positions: "rope" (rotary) or "learned".
        tie_weights: Whether the embedding is also the matrix of the output.
        dropout: Probability, after attention and perceptron.
        experts: Experts of a block's mixture, E; 0: one dense perceptron.
        experts_per_token: Experts that each token goes to, K.
        expansion: Width of the perceptron's hidden layer, as a multiple of `width`.

    Raises:
        ValueError: Sizes that don't fit together.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        width: int,
        layers: int,
        heads: int,
        positions: str = "rope",
        tie_weights: bool = True,
        dropout: float = 0.0,
        experts: int = 0,
        experts_per_token: int = 2,
        expansion: float = 4.0,
    ) -> None:
        super().__init__()
        _check_sizes(width=width, heads=heads, positions=positions, experts=experts, chosen=experts_per_token)
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width) if positions == "learned" else None
        hidden = int(expansion * width)
        self.blocks = nn.ModuleList(
            Block(
                Attention(width, heads, rotary=positions == "rope"),
                MixtureOfExperts(width, hidden, experts, experts_per_token) if experts else Perceptron(width, hidden),
                width=width,
                dropout=dropout,
            )
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie_weights:
            self.head.weight = self.embedding.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Normal weights; what is added to the residual stream is smaller, so that depth does not make it grow."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_the_stream = name.endswith(("merge.weight", "down.weight"))
                nn.init.normal_(parameter, std=INITIAL_STD / math.sqrt(2 * layers) if into_the_stream else INITIAL_STD)

    def forward(self, tokens: Tensor) -> Prediction:
        """Tokens B × C to logits B × C × V.

        Raises:
            ValueError: The sequence is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"A sequence of {length} tokens does not fit in model.context={self.context}.")
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(length, device=tokens.device))
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return Prediction(self.head(self.norm(x)), torch.stack(balances).mean())


def _check_sizes(*, width: int, heads: int, positions: str, experts: int, chosen: int) -> None:
    if width % heads:
        raise ValueError(f"model.width={width} must be a multiple of model.heads={heads}.")
    if positions not in ("rope", "learned"):
        raise ValueError(f"model.positions={positions!r}: use 'rope' or 'learned'.")
    if positions == "rope" and (width // heads) % 2:
        raise ValueError(
            f"model.positions=rope needs an even width of a head; model.width / model.heads = {width // heads}."
        )
    if experts < 0 or (experts and not 1 <= chosen <= experts):
        raise ValueError(f"model.experts_per_token={chosen} must be between 1 and model.experts={experts}.")


class Block(nn.Module):
    """Attention, then perceptron or experts, each behind a norm and beside a residual connection.

    Args:
        attention: Mixes tokens.
        perceptron: Changes each token by itself; returns the change and its load-balancing loss.
        width: W.
        dropout: Probability.
    """

    def __init__(self, attention: nn.Module, perceptron: nn.Module, *, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), attention
        self.perceptron_norm, self.perceptron = nn.RMSNorm(width), perceptron
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """B × C × W to the same, and the load-balancing loss."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        change, balance = self.perceptron(self.perceptron_norm(x))
        return x + self.dropout(change), balance


class Attention(nn.Module):
    """Causal self-attention of H heads.

    Args:
        width: W.
        heads: H.
        rotary: Whether queries and keys are rotated by their positions.
    """

    def __init__(self, width: int, heads: int, *, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """B × C × W to the same."""
        batch, length, width = x.shape
        projected = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)  # each B × H × C × D
        if self.rotary:
            queries, keys = rotate(queries), rotate(keys)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        merged: Tensor = self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return merged


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: turns each pair of features by an angle that grows with the position.

    Args:
        x: … × C × D; features k and k + D/2 are a pair.
    """
    length, width = x.shape[-2:]
    frequencies = ROPE_BASE ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), frequencies)  # C × D/2
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


class Perceptron(nn.Module):
    """One hidden layer with GELU.

    Args:
        width: W.
        hidden: Width of the hidden layer.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """… × W to the same; there is nothing to balance."""
        return self.down(functional.gelu(self.up(x))), x.new_zeros(())


class MixtureOfExperts(nn.Module):
    """Sends each token to the K of E perceptrons that its router prefers, and adds their weighted answers.

    No token is dropped and no expert sees another token's choice, so a later token can't change an earlier one. An
    expert that gets no token takes part with zero rows: its gradient is zero, not missing.

    Args:
        width: W.
        hidden: Width of an expert's hidden layer.
        experts: E.
        chosen: K.
    """

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Perceptron(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """B × C × W to the same, and the load-balancing loss."""
        tokens = x.reshape(-1, x.shape[-1])  # T × W
        probabilities = self.router(tokens).float().softmax(dim=-1)  # T × E
        weights, numbers = probabilities.topk(self.chosen, dim=-1)  # T × K
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)

        # Copies of tokens sorted by expert, each expert on its piece, and back. Both ways are permutations, so that no
        # two rows are ever added to the same place, in whatever order.
        copies = tokens.unsqueeze(1).expand(-1, self.chosen, -1).reshape(-1, x.shape[-1])  # T·K × W
        order = numbers.flatten().argsort(stable=True)
        shares = torch.stack([(numbers == number).sum() for number in range(len(self.experts))])  # E
        pieces = copies[order].split(shares.tolist())
        answers = torch.cat([expert(piece)[0] for expert, piece in zip(self.experts, pieces, strict=True)])
        answers = answers[order.argsort()].view(-1, self.chosen, x.shape[-1])  # T × K × W
        mixed = (answers * weights.unsqueeze(-1)).sum(dim=1)
        return mixed.view_as(x), balance_loss(probabilities, shares)


def balance_loss(probabilities: Tensor, shares: Tensor) -> Tensor:
    """Load-balancing loss: E times the sum over experts of share of tokens times mean probability.

    Args:
        probabilities: T × E, the router's.
        shares: E, how many choices fell on each expert.
    """
    share = shares / shares.sum()
    return probabilities.shape[-1] * (share * probabilities.mean(dim=0)).sum()
