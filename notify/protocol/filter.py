"""A subscription's filter over headers, key and tag: an expression of CEL, the Common Expression Language.

CEL (https://cel.dev) always ends and has no side effects. Its cost is bounded by the expression's text (see
filter_cost.py), so that everyone who may subscribe may also filter. A message does not match if the evaluation fails,
for example because it lacks a header; write `has(headers.region) && headers.region == "eu"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol.filter_cost import check_cost
from notify.protocol.wire import Payload, decode_payload

LONGEST = 1000
VARIABLES = ("headers", "key", "tag", "topic")
AT_ONCE_US = 30_000.0
"""The longest evaluation of messages in one go, in microseconds, before other tasks get a turn."""
FAILURES = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)
"""The errors of an evaluation over a message that lacks a value which the expression needs."""


class Filter:
    """A compiled filter. Raises InvalidRequest (`invalid_filter`) if the text does not parse or is not a condition."""

    __slots__ = ("_program", "at_once", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > LONGEST:
            raise InvalidRequest(f"a filter has at most {LONGEST} characters, not {len(text)}", "invalid_filter")
        cel = _library()
        self.at_once = max(1, round(AT_ONCE_US / check_cost(text)))
        """The most messages to evaluate in one go."""
        try:
            self._program = cel.compile(text)
            unknown = [name for name in self._program.variables() if name not in VARIABLES and _is_free(name, text)]
        except ValueError as error:
            reason = str(error).splitlines()[0][:300]
            raise InvalidRequest(f"the filter is not CEL: {reason}", "invalid_filter") from None
        if unknown:
            raise InvalidRequest(
                f"the filter names {', '.join(unknown)}; there are {', '.join(VARIABLES)}", "invalid_filter"
            )
        try:
            result = self._program.execute({"headers": {}, "key": "", "tag": "", "topic": ""})
        except FAILURES:
            return  # the expression needs a header, which this empty message lacks
        if not isinstance(result, bool):
            raise InvalidRequest(
                f"the filter gives {type(result).__name__}, not true or false; write a comparison", "invalid_filter"
            )

    def matches(self, payload: bytes) -> bool:
        """Whether a message, given as its canonical payload, passes the filter."""
        return self.fits(decode_payload(payload))

    def fits(self, payload: Payload) -> bool:
        """Whether a message passes the filter."""
        return self.is_true_for(payload.headers or {}, payload.key, payload.tag, payload.topic)

    def is_true_for(self, headers: Mapping[str, str], key: str | None, tag: str | None, topic: str) -> bool:
        """Whether a message with these parts passes the filter. A missing key or tag counts as an empty text."""
        try:
            result = self._program.execute({"headers": headers, "key": key or "", "tag": tag or "", "topic": topic})
        except FAILURES:
            return False
        return result is True


def _library() -> Any:
    """The library of CEL. A server has it; a service needs it only for filters over Kafka."""
    try:
        import cel
    except ImportError:
        raise InvalidRequest(
            "a filter needs the library of CEL: pip install 'notify-tx[filters]'", "invalid_filter"
        ) from None
    return cel


def _is_free(name: str, text: str) -> bool:
    """Whether a name is free, and not bound by a macro (such as `h` in `headers.exists(h, h == "x")`)."""
    return f"({name}," not in text.replace(" ", "")
