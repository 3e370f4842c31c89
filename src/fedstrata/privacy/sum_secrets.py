"""What a member of a masked sum keeps between the steps."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from fedstrata.privacy.shamir import SECRET_BYTES


@dataclass
class Secrets:
    """What a member keeps between the steps, as plain data.

    Attributes:
        box: private key for what others send it.
        mask: private key of its masks.
        weight: its weight in the mean.
        seeds: group -> the seed of its own mask.
        own_shares: its shares of its own secrets: of the private key, then by group.
        roster: what it was told of the members: name -> entry, in hexadecimal.
        members: who has sent shares, so that there are masks with them.
        sealed: member -> the shares that it sent, in hexadecimal.
        survivors: whose numbers have arrived; what it has signed, and will not sign of others.
        answers: step -> digest of the question, and the answer, in hexadecimal.
    """

    box: str
    mask: str
    weight: int
    seeds: dict[str, str] = field(default_factory=dict)
    own_shares: list[str] = field(default_factory=list)
    roster: dict[str, str] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    sealed: dict[str, str] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        """Them as JSON."""
        return json.dumps(asdict(self))


def new_secrets(weight: int) -> Secrets:
    """Those of one attempt at a sum; they are never used again."""
    return Secrets(secrets.token_bytes(SECRET_BYTES).hex(), secrets.token_bytes(SECRET_BYTES).hex(), weight)


def load_secrets(content: str) -> Secrets:
    """What :meth:`Secrets.dump` wrote."""
    return Secrets(**json.loads(content))
