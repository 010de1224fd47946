"""Bounds a filter's cost by its text alone, because it runs in the server's loop, where nothing can stop it.

CEL always ends, but not always soon: nested macros multiply, `map` can double its input at each step, and a regular
expression is compiled again for each message. A filter that is accepted here costs a few milliseconds in the worst
case, and usually about ten microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from notify.errors import InvalidRequest

MACROS = frozenset({"all", "exists", "exists_one", "existsOne"})
MACRO_RANGE = 32
"""The most entries that a macro iterates over: the most headers of a message."""
FUNCTIONS = MACROS | {
    "contains", "double", "duration", "dyn", "endsWith", "has", "int", "matches", "size", "startsWith",
    "string", "timestamp", "type", "uint", "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear", "getFullYear",
    "getHours", "getMilliseconds", "getMinutes", "getMonth", "getSeconds",
}  # fmt: skip
"""The functions and macros of CEL that a filter may use. `map` and `filter` are missing, because their values can
grow."""
MOST_ADDITIONS = 10
"""The most additions, each of which may copy its operands."""
MOST_PATTERN_POINTS = 450
"""The most points of all patterns of a filter together: one for each character, CLASS_POINTS for each class of Unicode,
and as many again for each repetition."""
CLASS_POINTS = 40
MOST_MICROSECONDS = 5_000.0
"""The most that one evaluation may cost."""

_MESSAGE_US = 100.0
"""The time to pass a message with the most headers to CEL."""
_TOKEN_US = 2.0
_POINT_US = 10.0

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<raw>[rR]"[^"\n]*"|[rR]'[^'\n]*')
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>[0-9][A-Za-z0-9_.]*)
    |(?P<mark>[-+*/%<>=!&|?:.,()\[\]{}])""",
    re.VERBOSE,
)
_COUNTED = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_FLAGS = re.compile(r"\(\?(?!:|i\))")
_CLASS = re.compile(r"\\[wWdDsSpP]")
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str


def check_cost(text: str) -> float:
    """A rough upper bound of one evaluation's microseconds. Raises InvalidRequest if the filter may cost too much."""
    tokens = tokens_of(text)
    pairs = _pairs(tokens)
    if sum([token.text == "+" for token in tokens]) > MOST_ADDITIONS:
        raise _refused(f"it adds more than {MOST_ADDITIONS} times")
    cost, points = _MESSAGE_US + _TOKEN_US * len(tokens), 0
    bodies: list[tuple[int, int]] = []
    for index, token in enumerate(tokens):
        if token.kind != "name" or index + 1 == len(tokens) or tokens[index + 1].text != "(":
            continue
        if token.text not in FUNCTIONS:
            raise _refused(f"there is no function {token.text[:40]}; there are {', '.join(sorted(FUNCTIONS))}")
        begin, end = index + 1, pairs[index + 1]
        is_within = any(first < index < last for first, last in bodies)
        if token.text in MACROS:
            if is_within:
                raise _refused(f"{token.text} stands within another macro")
            _check_range(tokens, pairs, index)
            bodies.append((begin, end))
            cost += MACRO_RANGE * _TOKEN_US * (end - begin)
        elif token.text == "matches":
            if is_within:
                raise _refused("matches stands within a macro, and would be compiled for each header")
            points += _pattern_points(tokens[begin + 1 : end])
    for first, last in bodies:
        for index in range(first, last):
            if tokens[index].text == "headers" and tokens[index + 1].text not in (".", "["):
                raise _refused("a macro looks at all headers for each of them; name one, such as headers[h]")
    if points > MOST_PATTERN_POINTS:
        raise _refused(
            f"its patterns have {points} points, and may have {MOST_PATTERN_POINTS}: one for each character, "
            rf"{CLASS_POINTS} for each \w, \d, \s or \p, and as much again for each repetition; [0-9] costs less"
        )
    cost += _POINT_US * points
    if cost > MOST_MICROSECONDS:
        raise _refused("its macros do too much work per header")
    return cost


def tokens_of(text: str) -> list[Token]:
    """The tokens of a filter. Raises InvalidRequest for what CEL allows and `check_cost` does not understand."""
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _refused(f"there is no {text[position]!r} in a filter outside of texts")
        kind = match.lastgroup or ""
        preceding = text[position - 1] if position else ""
        if kind in ("text", "raw") and (preceding in ("'", '"') or preceding.isalnum()):
            # A text with three quotes, or with a prefix, ends by other rules.
            raise _refused('a text is "…", \'…\', or r"…" for a pattern')
        if kind != "space":
            tokens.append(Token(kind, match[0]))
        position = match.end()
    return tokens


def _pairs(tokens: Sequence[Token]) -> dict[int, int]:
    """For each opening bracket the index of its closing bracket, and the reverse."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.kind != "mark":
            continue
        if token.text in _OPEN:
            opened.append(index)
        elif token.text in _CLOSE:
            if not opened or _OPEN.index(tokens[opened[-1]].text) != _CLOSE.index(token.text):
                raise _refused(f"a {token.text} closes nothing")
            pairs[opened[-1]], pairs[index] = index, opened[-1]
            opened.pop()
    if opened:
        raise _refused(f"a {tokens[opened[-1]].text} is not closed")
    return pairs


def _check_range(tokens: Sequence[Token], pairs: dict[int, int], index: int) -> None:
    """Raises InvalidRequest unless the macro at this index iterates over `headers`, or over a short literal list."""
    if index >= 2 and tokens[index - 1].text == ".":
        operand = tokens[index - 2]
        if operand.text == "headers" and (index == 2 or tokens[index - 3].text != "."):
            return
        if operand.text == "]":
            begin = pairs[index - 2]
            is_list = begin == 0 or (tokens[begin - 1].kind == "mark" and tokens[begin - 1].text not in _CLOSE)
            commas = sum([token.text == "," for token in tokens[begin : index - 2]])
            if is_list and commas < MACRO_RANGE:
                return
    raise _refused(f"{tokens[index].text} goes over headers, or over a list […] of {MACRO_RANGE} at most")


def _pattern_points(argument: Sequence[Token]) -> int:
    """The points of a `matches` pattern."""
    if len(argument) != 1 or argument[0].kind not in ("text", "raw"):
        raise _refused("matches takes one pattern, written out as a text")
    pattern = argument[0].text
    if argument[0].kind == "raw":
        pattern = pattern[2:-1]
    else:
        pattern = pattern[1:-1]
        if re.search(r"\\[^\\'\"nrt]", pattern.replace(r"\\", "")):
            raise _refused(r"write a pattern without \x, \u and octal characters, or as r\"…\"")
        pattern = pattern.replace(r"\\", "\\")
    if _FLAGS.search(pattern):
        raise _refused("of groups that begin with (? a pattern takes (?:…) and (?i)")
    classes = len(_CLASS.findall(pattern))
    points = len(pattern) + CLASS_POINTS * classes
    for counted in _COUNTED.finditer(pattern):
        if counted.start() and pattern[counted.start() - 1] in ")}":
            raise _refused("a pattern repeats a group too often; repeat single characters")
        times = max(int(number[:6] or "0") for number in (counted[1], counted[2] or ""))
        points += times * (CLASS_POINTS if classes else 4)
    return points


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"the filter may cost too much: {why}", "invalid_filter")
