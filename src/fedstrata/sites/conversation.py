"""What the server and a site have under way: a conversation, its next message, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass

from fedstrata.events import Awaited, Event
from fedstrata.plan.messages import Reply
from fedstrata.sites.messages import Envelope, WelcomeHeader
from fedstrata.wire.tensor_file import TensorFile

Presence = tuple[int, str]
"""A connected site: its number, and since when it has been connected."""
AWAITED_SECONDS = 60.0
"""After which it is told again who is waited for."""


@dataclass(frozen=True)
class Outgoing:
    """A message to be sent.

    Attributes:
        make: makes it, and makes it again if it was lost.
        answer_bytes: most bytes of tensors that the answer may hold.
    """

    make: Callable[[], TensorFile]
    answer_bytes: int = 0


Conversation = Generator[Outgoing, Envelope, Reply | WelcomeHeader]
"""A conversation as a generator: yields the next message, receives the answer to it."""


@dataclass
class PendingReply:
    """A conversation that has not ended.

    Attributes:
        conversation: the generator.
        outgoing: the next message.
        until: monotonic time after which nobody waits for the site.
        send_after: monotonic time from which the message may be sent.
        message_id: of the message that was sent; empty while there is none.
        presence: of the site when the message was sent.
        sent_at: monotonic time at which it was sent.
    """

    conversation: Conversation
    outgoing: Outgoing
    until: float
    send_after: float = 0.0
    message_id: str = ""
    presence: Presence | None = None
    sent_at: float = 0.0


class Refusals:
    """Why sites take no part. One that was started again may have other settings, and is asked again."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Presence | None, str]] = {}

    def note(self, name: str, presence: Presence | None, reason: str) -> None:
        """A site has refused for good while it was connected so."""
        self.known[name] = presence, reason

    def now(self, online: Callable[[], Mapping[str, Presence]]) -> dict[str, str]:
        """Site -> why it takes no part; who is connected is asked once, and only where some site has refused."""
        there = online() if self.known else {}
        self.known = {name: said for name, said in self.known.items() if there.get(name, said[0]) == said[0]}
        return {name: reason for name, (_, reason) in self.known.items()}

    def clear(self) -> None:
        """Forget them all."""
        self.known.clear()


class Awaiting:
    """Tells who is waited for: when that changes, and every minute.

    Args:
        round: of the conversations.
        tell: receives events.
    """

    def __init__(self, round: int, tell: Callable[[Event], None]) -> None:
        self.round, self.tell = round, tell
        self.told: tuple[tuple[str, ...], float] = (), 0.0

    def __call__(self, names: Collection[str], until: float) -> None:
        """Tell of these, waited for up to a monotonic time, unless that was told less than a minute ago."""
        now, clients = time.monotonic(), tuple(names)
        before, when = self.told
        if clients and (clients != before or now > when + AWAITED_SECONDS):
            self.told = clients, now
            self.tell(Awaited(self.round, clients, max(0.0, until - now)))


def other_count(found: int, agreed: int) -> str:
    """Why an answer is refused that states another number of examples."""
    return f"says that it has {found} examples, and had {agreed} when it was first greeted"
