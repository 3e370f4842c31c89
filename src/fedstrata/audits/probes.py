"""Readers of hidden states: nothing trained, a ridge regression or a small network, learned on public text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

ROWS = 1024
"""Hidden states that are compared with the vocabulary at a time."""
RIDGE = 1e-2
"""Of the mean diagonal of X'X: the ridge."""
BATCH = 256
STEPS = 240
"""Steps of the small network's training."""

Reader = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states ``[N, H]`` -> token ids ``[N]``."""


def nearest(vectors: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """For each vector the row of a table ``[V, H]`` with the largest cosine, both taken from the table's mean."""
    center = table.mean(0)
    rows = functional.normalize(table - center, dim=1)
    found = [
        (functional.normalize(chunk - center, dim=1) @ rows.T).argmax(1) for chunk in torch.split(vectors, ROWS)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.long)


class Nearest:
    """The nearest token of each vector, among the vectors that tokens have at its place.

    Args:
        vectors: ``[N, H]``.
        places: where each stands, ``[N]``.
        center: what is taken from vectors and candidates before their cosine, for each place, ``[P, H]``.
    """

    def __init__(self, vectors: torch.Tensor, places: torch.Tensor, center: torch.Tensor) -> None:
        self.center = center
        self.at = [(places == place).nonzero()[:, 0] for place in range(len(center))]
        self.vectors = functional.normalize(vectors - center[places], dim=1)
        self.best = torch.zeros(len(vectors), dtype=torch.long)
        self.score = torch.full((len(vectors),), -2.0)
        self.seen = 0

    def take(self, candidates: torch.Tensor) -> None:
        """Compare with the next tokens' vectors, ``[c, P, H]``."""
        rows = functional.normalize(candidates - self.center, dim=2)
        for place, here in enumerate(self.at):
            if len(here):
                score, token = (self.vectors[here] @ rows[:, place].T).max(1)
                better = score > self.score[here]
                self.best[here[better]], self.score[here[better]] = token[better] + self.seen, score[better]
        self.seen += len(candidates)


def ridge_reader(states: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor) -> Reader:
    """Maps a state linearly to its token's embedding, and takes the nearest one.

    Args:
        states: hidden states of public text, ``[N, H]``.
        tokens: their token ids, ``[N]``.
        table: token embeddings, ``[V, E]``.
    """
    weight = _ridge(_with_one(states), table[tokens] - table.mean(0))
    return lambda found: nearest(_with_one(found) @ weight + table.mean(0), table)


def words_reader(states: torch.Tensor, words: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Maps the one vector of a text to a score for each token, ``[N, H]`` -> ``[N, V]``.

    Args:
        states: vectors of public texts, ``[N, H]``.
        words: 1 for tokens that stand in the text, ``[N, V]``.
    """
    weight = _ridge(_with_one(states), words)
    return lambda found: _with_one(found) @ weight


def network_reader(states: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor) -> Reader:
    """A network of one hidden layer, trained to name the token: an inverter.

    Its logits are products with the token embeddings, so that it can name tokens that the public text lacks.
    """
    rows = functional.normalize(table - table.mean(0), dim=1)
    center, spread = states.mean(0), states.std(0).clamp_min(1e-6)
    width = states.shape[1]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, rows.shape[1]))
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 - step / STEPS)
            chosen = torch.randint(len(states), (min(BATCH, len(states)),))
            guess = functional.normalize(network((states[chosen] - center) / spread), dim=1)
            loss = functional.cross_entropy(20 * guess @ rows.T, tokens[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def read(found: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = functional.normalize(network((found - center) / spread), dim=1)
        return torch.cat([(chunk @ rows.T).argmax(1) for chunk in torch.split(made, ROWS)])

    return read


def _with_one(states: torch.Tensor) -> torch.Tensor:
    return torch.cat([states, torch.ones(len(states), 1)], 1)


def _ridge(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """The linear map of least squares with a ridge; one example less than the input is wide has a solution too."""
    square = inputs.double().T @ inputs.double()
    square += RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    solved: torch.Tensor = torch.linalg.solve(square, (inputs.T @ outputs).double())
    return solved.float()
