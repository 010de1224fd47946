"""Sends alarms to a URL: each at least once, in order, until the receiver accepts it.

The ledger has them together with what they announce. The header `idempotency-key` is the same for a repetition.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from prometheus_client import Gauge

from notify.errors import InvalidRequest
from notify.runtime.backoff import Backoff
from notify.runtime.timed_call import answer_to
from notify.runtime.urls import has_user, place_of
from notify.spark.watch.ledger import Alarm, Ledger
from notify.storage import crash_point

log = logging.getLogger("notify.audit")

CALL_SECONDS = 5.0
ROUND_SECONDS = 20.0
"""The longest that a round of sending takes before the next window is audited."""
AT_ONCE = 100
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
MOST_REFUSALS = 10
"""An alarm that the receiver has refused this often is dropped."""
WAITING = Gauge("notify_audit_alarms_waiting", "Alarms that their receiver has not taken.")


def post(url: str, alarm: Alarm) -> None:
    """Raises OSError; HTTPError, a subclass, if the receiver refuses."""
    name = hashlib.sha256(alarm.key.encode()).hexdigest()
    headers = {"content-type": "application/json", "idempotency-key": name}
    try:
        request = urllib.request.Request(url, json.dumps(alarm.body).encode(), headers)
    except ValueError as error:
        raise OSError(f"no address of HTTP: {error}") from error
    answer_to(request, CALL_SECONDS, 0, follow=False)


class Alarms:
    """Sends the alarms in the ledger. Without a URL they are only logged."""

    def __init__(
        self, ledger: Ledger, url: str, clock: Callable[[], float], send: Callable[[str, Alarm], None] = post
    ) -> None:
        """Raises InvalidRequest if the URL is not one of http or https."""
        if url and (not url.startswith(("http://", "https://")) or has_user(url)):
            raise InvalidRequest(
                f"--alarm-url {place_of(url)!r} is not an http:// or https:// URL without a user and a password"
            )
        self._ledger = ledger
        self._url = url
        self._clock = clock
        self._send = send
        self._backoff = Backoff(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
        self._again = 0.0
        """When to try again after the receiver was unreachable, by the clock."""

    def add(self, key: str, body: dict[str, object]) -> None:
        """Add alarms. Call it within the ledger's transaction."""
        if self._url:
            self._ledger.add_alarm(key, {**body, "key": key})
            self._ledger.bound_alarms()

    def say(self, body: dict[str, object]) -> None:
        """Log an alarm."""
        log.error("%s %s: %s", body.get("finding", body["kind"]), body.get("message_id", ""), body.get("detail", ""))

    def send(self) -> None:
        """Send the due alarms, for ROUND_SECONDS at most. A receiver that is unreachable is tried again later."""
        if not self._url or self._clock() < self._again:
            return
        try:
            self._send_due(time.monotonic() + ROUND_SECONDS)
            WAITING.set(self._ledger.alarms_waiting())
        except sqlite3.Error as error:  # a full disk: accepted alarms are sent again
            self._again = self._clock() + self._backoff.next()
            log.error("the state of the watch cannot be written: %s", error)

    def _send_due(self, until: float) -> None:
        while due := self._ledger.alarms(int(self._clock() * 1e6), AT_ONCE):
            for alarm in due:
                if not self._sent(alarm) or time.monotonic() >= until:
                    return

    def _sent(self, alarm: Alarm) -> bool:
        """Whether to continue with the next alarm."""
        crash_point.reached("watch.before_alarm")
        try:
            self._send(self._url, alarm)
        except urllib.error.HTTPError as error:
            error.close()
            if 400 <= error.code < 500 and error.code not in (408, 429):
                self._refused(alarm, error.code)
                return True
            return self._away(error)
        except OSError as error:
            return self._away(error)
        crash_point.reached("watch.after_alarm")
        self._ledger.alarm_done(alarm.id)
        crash_point.reached("watch.after_alarm_note")
        self._backoff.reset()
        return True

    def _refused(self, alarm: Alarm, status: int) -> None:
        if alarm.tries + 1 >= MOST_REFUSALS:
            log.error("an alarm is dropped, because %s refuses it with %d: %s", place_of(self._url), status, alarm.key)
            self._ledger.alarm_done(alarm.id)
            return
        wait = min(FIRST_WAIT_SECONDS * 2.0**alarm.tries, LONGEST_WAIT_SECONDS)
        self._ledger.alarm_refused(alarm.id, int((self._clock() + wait) * 1e6))

    def _away(self, error: OSError) -> bool:
        wait = self._backoff.next()
        self._again = self._clock() + wait
        log.warning("alarms do not reach %s, again in %.0f s: %s", place_of(self._url), wait, error)
        return False
