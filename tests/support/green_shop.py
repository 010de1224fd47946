"""A shop whose threads gevent or eventlet has replaced, before or after the import of Notify. It places orders from
several greenlets, consumes them, answers a check with a listener, and prints what it saw as JSON.

    python -m tests.support.green_shop gevent before uvloop
"""

from __future__ import annotations

import sys

library, when, loop = sys.argv[1:4]


def patch() -> None:
    if library == "gevent":
        from gevent import monkey

        monkey.patch_all()
    else:
        import eventlet

        eventlet.monkey_patch()


if loop == "asyncio":
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # importing it fails
if when == "before":
    patch()

import asyncio  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

from notify.check.listener import CheckMessageListener, HalfMessage, Outcome  # noqa: E402
from notify.client import Consumer, Message  # noqa: E402

if when == "made":  # the producer, too, is made before the threads are replaced
    from tests.support.imported_shop import place, producer

    patch()
elif when == "after":
    patch()
if when != "made":
    from tests.support.imported_shop import place, producer

PATIENCE_SECONDS = 60.0
seen: dict[str, object] = {"ticks": 0, "handled": [], "loops": []}


def tick() -> None:
    while True:
        time.sleep(0.001)  # lets the other greenlets run, and shows that they do
        seen["ticks"] += 1  # type: ignore[operator]


def look_for_a_loop() -> None:
    """A greenlet must not believe that it runs on an event loop: Django refuses to work there."""
    if asyncio._get_running_loop() is not None:
        seen["loops"].append(threading.current_thread().name)  # type: ignore[attr-defined]


class Listener(CheckMessageListener):
    topics = ("checked",)

    def check(self, half: HalfMessage) -> Outcome:
        look_for_a_loop()
        time.sleep(0.01)  # a query to the service's database
        look_for_a_loop()
        return Outcome.COMMIT


def main() -> None:
    threading.Thread(target=tick, daemon=True).start()
    consumer = Consumer(os.environ["SHOP_SERVER"], group="points", concurrency=4)
    done = threading.Event()

    @consumer.subscribe("order.placed", start="earliest")
    def on_placed(message: Any) -> None:
        look_for_a_loop()
        time.sleep(0.01)  # a query to the service's database
        seen["handled"].append(message.text)  # type: ignore[attr-defined]
        if len(seen["handled"]) == 12:  # type: ignore[arg-type]
            done.set()

    @consumer.subscribe("checked", start="earliest")
    def on_checked(message: Any) -> None:
        seen["checked"] = message.text  # type: ignore[attr-defined]

    consuming = threading.Thread(target=consumer.run, kwargs={"signals": False})
    consuming.start()
    placing = [threading.Thread(target=lambda n=n: [place(f"{n}.{i}") for i in range(3)]) for n in range(4)]  # type: ignore[misc]
    for thread in placing:
        thread.start()
    for thread in placing:
        thread.join(PATIENCE_SECONDS)
    look_for_a_loop()
    producer.add_check_listener(Listener())
    producer.prepare([Message("checked", "undecided")], check_after=1)
    done.wait(PATIENCE_SECONDS)
    end = time.monotonic() + PATIENCE_SECONDS
    while "checked" not in seen and time.monotonic() < end:
        time.sleep(0.01)  # a poll of the event
    seen["left"] = producer.flush(PATIENCE_SECONDS)
    consumer.stop()
    consuming.join(PATIENCE_SECONDS)
    seen["is_consuming"] = consuming.is_alive()
    print(json.dumps(seen), flush=True)


main()
