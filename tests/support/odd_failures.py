"""Failures of handlers whose texts are hard to tell: lone surrogates, NUL, none at all, and too long."""

from __future__ import annotations

from notify.client import DeadLetter


class Mute(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def fail_oddly(name: str) -> None:
    """Fail in a way of its own for each of a, b, c and d; b for good."""
    match name:
        case "a":
            raise ValueError("no file \udcff\0 here")
        case "b":
            raise DeadLetter("never \udcff")
        case "c":
            raise Mute
        case "d":
            raise ValueError("\udcff" * 1000)
