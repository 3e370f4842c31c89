"""What the server and a site have under way: a conversation, its next message, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from fedstrata.plan.messages import Reply
from fedstrata.sites.messages import Envelope, WelcomeHeader
from fedstrata.wire.tensor_file import TensorFile

Presence = tuple[int, str]
"""A connected site: its number, and since when it has been connected."""


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
