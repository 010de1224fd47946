"""A subscription's filter over headers, key and tag: an expression of CEL, the Common Expression Language.

CEL (https://cel.dev) always ends and has no side effects; what it may cost is bounded by its text (see filter_cost.py),
so that it may come from anyone who may subscribe. A message whose evaluation fails, because a header is not there for
example, does not match: `has(headers.region) && headers.region == "eu"` says what is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notify.errors import InvalidRequest
from notify.filter_cost import check_cost
from notify.wire import Payload, decode_payload

LONGEST = 1000
VARIABLES = ("headers", "key", "tag", "topic")
AT_ONCE_US = 30_000.0
"""Messages that could take so long together are evaluated in one go: then others have their turn."""
FAILURES = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)
"""The errors of an expression over a message that does not have what it needs."""


class Filter:
    """A compiled filter. Raises InvalidRequest (`invalid_filter`) where it does not parse or can never be right."""

    __slots__ = ("_program", "at_once", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > LONGEST:
            raise InvalidRequest(f"a filter has at most {LONGEST} characters, not {len(text)}", "invalid_filter")
        cel = _library()
        self.at_once = max(1, round(AT_ONCE_US / check_cost(text)))
        """How many messages may be evaluated in one go."""
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
            return  # a header it needs is not there
        if not isinstance(result, bool):
            raise InvalidRequest(
                f"the filter gives {type(result).__name__}, not true or false; write a comparison", "invalid_filter"
            )

    def matches(self, payload: bytes) -> bool:
        """Whether a message is wanted, by its canonical payload."""
        return self.fits(decode_payload(payload))

    def fits(self, p: Payload) -> bool:
        """Whether a message is wanted."""
        return self.is_true_for(p.headers or {}, p.key, p.tag, p.topic)

    def is_true_for(self, headers: Mapping[str, str], key: str | None, tag: str | None, topic: str) -> bool:
        """Whether a message is wanted, by its parts. A key or tag that it does not have is an empty text."""
        try:
            result = self._program.execute({"headers": headers, "key": key or "", "tag": tag or "", "topic": topic})
        except FAILURES:
            return False
        return result is True


def _library() -> Any:
    """The evaluator of CEL. A server has it; a service installs it where it filters over Kafka."""
    try:
        import cel
    except ImportError:
        raise InvalidRequest(
            "a filter needs the library of CEL: pip install 'notify-tx[filters]'", "invalid_filter"
        ) from None
    return cel


def _is_free(name: str, text: str) -> bool:
    """Whether a name is not one that a macro binds (`headers.exists(h, h == "x")`)."""
    return f"({name}," not in text.replace(" ", "")
