"""Credentials are exchanged under load: no request fails, and no message is lost or comes twice."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Message, TransactionProducer, create_tables, use_explicit_begin
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.http import call
from tests.support.servers import GuardedInMemory

ROTATIONS = 4
MEANWHILE = 40
"""Messages between two exchanges."""
PUBLISHERS = 3


@pytest.fixture(scope="module")
def guarded() -> Iterator[GuardedInMemory]:
    with GuardedInMemory() as server:
        yield server


def replace(file: Path, token: str) -> None:
    """Replace the file as the security guide says: write another file, and rename it to this one."""
    beside = file.with_suffix(".new")
    beside.write_text(token + "\n")
    os.replace(beside, file)


def revoke(guarded: GuardedInMemory, token: str) -> None:
    call(guarded.url, "POST", f"/v1/admin/credentials/{token.split('_')[1]}/revoke", {"reason": "r"}, guarded.admin)


@pytest.mark.long
@pytest.mark.parametrize("way", ["file", "function"])
def test_tokens_are_exchanged_under_load(
    guarded: GuardedInMemory, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Promise: while clients send and receive, a new token is made and given to them, and the old one is revoked."""
    rights = (f"publish:{unique}", f"check:{unique}", f"consume:{unique}")
    held = [guarded.make(*rights)]
    file = tmp_path / "token"
    replace(file, held[-1])
    shown: Any = None
    if way == "file":
        monkeypatch.setenv("NOTIFY_TOKEN_FILE", str(file))
    else:
        shown = lambda: held[-1]  # noqa: E731
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    use_explicit_begin(engine)
    create_tables(engine)
    got: Counter[str] = Counter()
    sent: list[str] = []
    is_over = threading.Event()
    consumer = Consumer(guarded.url, group=unique, token=shown)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: Any) -> None:
        got[message.text] += 1

    with TransactionProducer(guarded.url, group=unique, engine=engine, token=shown) as producer:

        def keep(send: Callable[[str], None], name: str) -> None:
            number = 0
            while not is_over.is_set():
                send(f"{name}-{number}")
                sent.append(f"{name}-{number}")
                number += 1

        def publish(text: str) -> None:
            producer.publish(Message(unique, text))

        def commit(text: str) -> None:
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, text))

        with ThreadPoolExecutor() as threads:
            consuming = threads.submit(consumer.run, signals=False)
            sending = [threads.submit(keep, publish, f"p{n}") for n in range(PUBLISHERS)]
            sending.append(threads.submit(keep, commit, "t"))
            try:
                for _ in range(ROTATIONS):
                    before = len(sent)
                    eventually(lambda: len(sent) >= before + MEANWHILE or any(s.done() for s in sending))  # noqa: B023
                    made = guarded.make(*rights)
                    replace(file, made)
                    held.append(made)
                    revoke(guarded, held[-2])  # at once: a client that still shows it is refused, and reads the new one
                before = len(sent)
                eventually(lambda: len(sent) >= before + MEANWHILE or any(s.done() for s in sending))
            finally:
                is_over.set()
                for task in sending:
                    task.result(PATIENCE_SECONDS)  # raises the error of a refused request
                try:
                    eventually(lambda: len(got) >= len(sent) or consuming.done(), f"{len(sent)} messages")
                finally:
                    consumer.stop()
                    consuming.result(PATIENCE_SECONDS)
    engine.dispose()
    assert set(got) == set(sent) and set(got.values()) == {1}


def test_a_waiting_request_ends_when_its_token_is_revoked(guarded: GuardedInMemory, unique: str) -> None:
    """The request gets a 401, not a 403: the SDK sends it again with another token."""
    token = guarded.make(f"publish:{unique}", f"consume:{unique}")
    parts = urlsplit(guarded.url)
    body = b'{"items":[{"receipt":"0.0","action":"ack"}]}'
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_SECONDS) as s:
        head = (
            f"POST /v1/groups/{unique}/settle HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {token}\r\n"
            f"content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        s.sendall(head.encode())
        assert b" 100 " in s.recv(4096)  # the request is let in, and the server waits for its body
        revoke(guarded, token)
        s.sendall(body)
        assert b" 401 " in s.recv(4096).split(b"\r\n")[0]
