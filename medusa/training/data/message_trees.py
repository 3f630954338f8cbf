"""Conversations whose messages have several replies each, such as OASST's: trees of messages.

Every way from the first message to an answer behind which there is no other is a conversation. Answers that
several of them share are trained on in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa.conversations import ROLES, Message, check_keepable, checked_text, read_messages

_WHOLE_CONVERSATIONS = ("messages", "conversations")


@dataclass(eq=False)
class TreeMessage:
    """A message that may have several replies."""

    origin: str
    """Source and row, for messages to the user."""
    role: str
    text: str
    identity: str | int | None = None
    parent: str | int | None = None
    replies: list[TreeMessage] = field(default_factory=list)

    @classmethod
    def read(cls, row: Any, origin: str) -> TreeMessage:
        """The message in ``row``, without its replies.

        Raises:
            ValueError: there is none; the message starts with ``origin``.
        """
        if not (isinstance(row, dict) and "role" in row and "text" in row):
            raise ValueError(
                f"{origin}: a message of a tree must be an object with role and text, got {row!r:.80}"
            )
        check_keepable(row, origin)
        for key in ("message_id", "parent_id"):
            if not isinstance(row.get(key), str | int | None):
                raise ValueError(f"{origin}: {key} must be a text or a whole number, got {row[key]!r:.80}")
        role, text = (checked_text(row[key], key, origin) for key in ("role", "text"))
        return cls(origin, role, text, row.get("message_id"), row.get("parent_id"))

    @property
    def is_answer(self) -> bool:
        return ROLES.get(self.role.lower()) == "assistant"

    def with_replies(self) -> list[TreeMessage]:
        """This and all that follows, each before its replies."""
        messages = [self]
        for message in messages:  # which grows
            messages += message.replies
        return messages


def is_message_of_tree(row: Any) -> bool:
    """Whether ``row`` is one message of a tree; the first of a tree has no parent."""
    named = ("message_id", "role", "text")
    return (
        isinstance(row, dict)
        and all(row.get(key) is not None for key in named)
        and not any(row.get(key) is not None for key in _WHOLE_CONVERSATIONS)
    )


def is_tree(row: Any) -> bool:
    """Whether ``row`` is a whole tree of messages."""
    return isinstance(row, dict) and isinstance(row.get("prompt"), dict) and "text" in row["prompt"]


def tree_in(prompt: Mapping[str, Any], origin: str) -> TreeMessage:
    """The first message of the tree whose first row is ``prompt``; the rows hold their ``replies``.

    Raises:
        ValueError: a message of it cannot be read.
    """
    first = TreeMessage.read(prompt, origin)
    waiting: list[tuple[TreeMessage, Mapping[str, Any]]] = [(first, prompt)]
    for message, row in waiting:  # which grows
        replies = row.get("replies") or []
        if not isinstance(replies, list):
            raise ValueError(f"{origin}: replies must be a list of messages, got {replies!r:.80}")
        message.replies = [TreeMessage.read(each, origin) for each in replies]
        waiting += zip(message.replies, replies, strict=True)
    return first


def joined_trees(messages: Sequence[TreeMessage]) -> list[TreeMessage]:
    """The first messages of the trees that ``messages``, all those of one source in any order, form.

    Raises:
        ValueError: two of them have one id, or one has a parent that is not there.
    """
    by_identity: dict[Any, TreeMessage] = {}
    for message in messages:
        other = by_identity.setdefault(message.identity, message)
        if other is not message:
            raise ValueError(
                f"{message.origin}: message_id must differ between messages, got {message.identity!r:.80} in "
                f"{other.origin} too; leave one of them out"
            )
    for message in messages:
        if message.parent is None:
            continue
        if message.parent not in by_identity:
            raise ValueError(
                f"{message.origin}: parent_id must be the message_id of a row of the same file or data set, "
                f"got {message.parent!r:.80}; put whole trees into one file, or leave this one out"
            )
        by_identity[message.parent].replies.append(message)
    firsts = [message for message in messages if message.parent is None]
    reached = {id(message) for first in firsts for message in first.with_replies()}
    lost = next((message for message in messages if id(message) not in reached), None)
    if lost:
        raise ValueError(
            f"{lost.origin}: parent_id must lead to a first message, which has none, and leads in a circle; "
            "mend it, or leave these messages out"
        )
    return firsts


def conversations_of(first: TreeMessage) -> Iterator[tuple[Message, ...]]:
    """Every way from ``first`` to an answer behind which there is no other.

    Raises:
        ValueError: a message cannot be read.
    """
    messages = first.with_replies()
    before = {reply: message for message in messages for reply in message.replies}
    goes_on = set[TreeMessage]()  # to another answer
    for message in reversed(messages):
        if (message.is_answer or message in goes_on) and message in before:
            goes_on.add(before[message])
    for message in messages:
        if message.is_answer and message not in goes_on:
            way = [message]
            while way[-1] in before:
                way.append(before[way[-1]])
            turns = [{"role": each.role, "content": each.text} for each in reversed(way)]
            yield tuple(read_messages(turns, first.origin))
