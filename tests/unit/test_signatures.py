"""A type checker sees every option of the SDK by name, and a coroutine where a call returns one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest

import notify.client
from notify.client import AsyncTransactionProducer, TransactionProducer

USE = """
import asyncio
from collections.abc import Coroutine
from typing import Any

from notify.client import AsyncTransactionProducer, Consumer, TransactionProducer

producer = AsyncTransactionProducer("http://127.0.0.1:7400", group="g", mode="outbox", token="t", half_timeout=1)


@producer.transactional(lambda: None)
async def place(session: Any, item: str) -> int:
    return len(item)


placed: Coroutine[Any, Any, int] = place("book")
number: int = asyncio.run(place("book"))
"""
MISUSE = """
TransactionProducer("http://127.0.0.1:7400", group="g", mode="outbxo")
TransactionProducer("http://127.0.0.1:7400", group="g", tokne="t")
AsyncTransactionProducer("http://127.0.0.1:7400", group="g", mode="outbxo")
Consumer("http://127.0.0.1:7400", group="g").subscribe("t", mode="orderd")
Consumer("http://127.0.0.1:7400", group="g").subscribe("t", batch="many")
asyncio.run(place(5))
"""


@pytest.mark.parametrize("name", [name for name in notify.client.__all__ if name != "DeadLetter"])
def test_options_have_names(name: str) -> None:
    public = getattr(notify.client, name)
    kinds = [parameter.kind for parameter in inspect.signature(public).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize("producer", [TransactionProducer, AsyncTransactionProducer])
def test_a_mode_is_one_of_three_words(producer: type) -> None:
    assert get_args(get_type_hints(producer.__init__)["mode"]) == ("half", "outbox", "auto")  # type: ignore[misc]


def test_a_transactional_coroutine_function_stays_one() -> None:
    decorated = get_args(get_type_hints(AsyncTransactionProducer.transactional)["return"])[1]
    assert get_origin(get_args(decorated)[1]) is Coroutine


@pytest.mark.long
def test_a_strict_checker_takes_the_use_and_catches_the_misuse(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE + MISUSE)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--follow-imports", "silent", "use.py"],
        capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": str(Path(notify.client.__file__).parents[2])},
    )  # fmt: skip
    first = USE.count("\n") + 2
    complaints = [line.split(": error: ")[0] for line in done.stdout.splitlines() if ": error: " in line]
    assert complaints == [f"use.py:{first + n}" for n in range(6)], done.stdout + done.stderr
