"""A subscription's filter over headers, key and tag: an expression of CEL, the Common Expression Language.

CEL (https://cel.dev) always ends and has no side effects. Its cost is bounded by the expression's text (see
filter_cost.py), so that everyone who may subscribe may also filter. A message does not match if the evaluation fails,
for example because it lacks a header; write `has(headers.region) && headers.region == "eu"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol.filter_cost import check_cost, tokens_of
from notify.protocol.wire import Payload, decode_payload

LONGEST = 1000
VARIABLES = ("headers", "key", "tag", "topic")
AT_ONCE_US = 30_000.0
"""The longest evaluation of messages in one go, in microseconds, before other tasks get a turn."""
FAILURES = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)
"""The errors of an evaluation over a message that lacks a value which the expression needs."""
_TEXT = r"(?P<text>headers \. \w+|headers \[ (?:'[^']*'|\"[^\"]*\") \]|key|tag|topic)"
_OTHER = r"(?P<other>(?:- )?\d\S*|true|false|null)"
_NEVER_EQUAL = [
    re.compile(rf"{_TEXT} [=!] = {_OTHER}(?! [.(])").search,
    re.compile(rf"(?<![\w.)] ){_OTHER} [=!] = {_TEXT}(?! [.([])").search,
]
"""Finds, in the tokens of a filter, a text that is compared with something else: to CEL they are just not equal."""
_NAMED = re.compile(r"headers (?:\. (\w+)|\[ (?:'([^']*)'|\"([^\"]*)\") \])").findall


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
        words = " ".join([token.text for token in tokens_of(text)])
        for search in _NEVER_EQUAL:
            if found := search(words):
                raise _of_types(found["text"].replace(" ", ""), found["other"].replace(" ", ""))
        headers = {"a": "1"} | {"".join(name): "1" for name in _NAMED(words)}
        try:
            result = self._program.execute({"headers": headers, "key": "1", "tag": "1", "topic": "1"})
        except TypeError:
            raise _of_types("a text", "a value of another type") from None
        except FAILURES as error:
            if "Undefined" in str(error):
                raise InvalidRequest(f"the filter is not CEL: {error}", "invalid_filter") from None
            return  # the expression needs other values than those of this message
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


def _of_types(text: str, other: str) -> InvalidRequest:
    return InvalidRequest(
        f"the filter compares or combines {text} with {other}, so it would never match as meant: headers, key, tag "
        "and topic are texts. Write headers.x == '5' or int(headers.x) > 5; has(headers.x) is false without the "
        "header, and a missing key or tag is ''",
        "invalid_filter",
    )


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
