"""Batch: messages that are handled in one call, and in several if that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from notify.client.bodies.reading import ReadMessage
from notify.client.handling.hand import Hand
from notify.client.handling.handlers import NotTried, Partial, ends_process, reason_of
from notify.client.handling.runs import Waiting
from notify.client.handling.typed import Decoded, Read, calling
from notify.protocol.message import ReceivedMessage
from notify.runtime.program_log import program_log
from notify.runtime.visible import one_line

log = program_log("notify.consumer")


class Batch:
    """Messages that are handled in one call, and in several if that fails: each has its own fate.

    A call that fails is made for the two halves of its messages, in their order, and so on down to single messages.
    """

    def __init__(self, hand: Hand, lot: list[Waiting], messages: Sequence[ReadMessage]) -> None:
        """`messages`: those of the lot, each with its body, or the error that reading it raised."""
        handler = lot[0][0].handler
        assert handler is not None
        self._hand = hand
        self._handler = handler
        self._messages = [message for message in messages if not isinstance(message, Exception)]
        self._lot = lot
        if len(self._messages) < len(messages):
            read = list(zip(lot, messages, strict=True))
            self._lot = [waiting for waiting, message in read if not isinstance(message, Exception)]
            for waiting, message in read:
                if isinstance(message, Exception):
                    hand.note([waiting], message)
        self._decoded: list[Decoded] = []
        """The messages with their bodies, if the handler takes decoded ones."""
        self._part = range(0)
        """The places in the lot of the messages of this call."""
        self._began = 0.0
        self._failure: BaseException | None = None
        """The error of the last call whose messages are handled in halves: the handler had all that is not done."""
        if handler.read is not None:
            self._decode(handler.read)
        self._parts = [range(len(self._lot))]

    def _decode(self, read: Read) -> None:
        """Decode the bodies. A body that does not fit is a dead letter, whatever the others are."""
        lot, self._lot = self._lot, []
        for number, (waiting, message) in enumerate(zip(lot, self._messages, strict=True)):
            try:
                self._decoded.append(Decoded(message, read(message)))
            except Exception as error:
                self._hand.note([waiting], error)
            except BaseException as error:
                self._hand.note([waiting], error)
                self._hand.note(self._lot + lot[number + 1 :], NotTried(error))
                self._lot = []
                break
            else:
                self._lot.append(waiting)
        self._messages = [decoded.message for decoded in self._decoded]

    def next(self) -> bool:
        """Go on to the messages of the next call; False if there are none."""
        self._part = self._parts.pop() if self._parts else range(0)
        self._began = self._hand.clock()
        if not self._part:
            self._failure = None  # its frames have this batch
        return len(self._part) > 0

    @property
    def messages(self) -> list[ReceivedMessage]:
        """The messages of this call."""
        return self._messages[_slice(self._part)]

    @property
    def function(self) -> Callable[..., Any]:
        """The handler as a function of messages, which decodes their bodies if it takes decoded ones."""
        handler = self._handler
        if handler.read is None:
            return handler.call
        return calling(handler.call, handler.read, self._decoded[_slice(self._part)])

    def succeeded(self) -> None:
        """This call has returned."""
        self._hand.note(self._lot[_slice(self._part)], began=self._began)

    def failed(self, error: BaseException) -> None:
        """This call has raised an error."""
        part = self._part
        if isinstance(error, NotTried):
            self.cut(self._failure or error)
        elif len(part) == 1 or isinstance(error, Partial):  # the halves of a Partial would count as handled
            self._hand.note(self._lot[_slice(part)], error, self._began)
        elif ends_process(error):
            self._hand.end()  # whichever message caused it
            self.cut(NotTried(error))
        else:
            log.info(
                "the handler of %s failed on %d messages, and gets them in two halves: %s",
                self._handler.topic, len(part), one_line(reason_of(error)),
            )  # fmt: skip
            self._failure = error
            middle = len(part) // 2
            self._parts += [part[middle:], part[:middle]]

    def cut(self, error: BaseException) -> None:
        """Call the handler no more: note the error for all messages that are not done."""
        for part in (self._part, *reversed(self._parts)):
            if part:
                self._hand.note(self._lot[_slice(part)], error)
        self._parts.clear()


def _slice(places: range) -> slice:
    return slice(places.start, places.stop)
