"""A receiver of a watch's alarms."""

from __future__ import annotations

import json
from typing import Any

from tests.support.answering import Answering, Request, body_of, reply


class Receiver:
    """Takes alarms, or answers with `status`."""

    def __init__(self) -> None:
        self.status = 204
        self.refuses = ""
        """An alarm with this in its key is answered with 400."""
        self.location = ""
        """Where a redirect sends to."""
        self.swallows = False
        """Alarms are taken, and the connection ends without an answer."""
        self.swallowed = 0
        self.taken: list[dict[str, Any]] = []
        self.names: list[str] = []
        """The idempotency key of each that was taken."""
        self._server = Answering(self._answer)
        self.url = f"{self._server.url}/"

    def _answer(self, request: Request) -> None:
        if request.command == "GET":  # as a redirect of a POST is followed
            reply(request)
            return
        body = json.loads(body_of(request))
        status = 400 if self.refuses and self.refuses in body["key"] else self.status
        if status < 300:
            self.taken.append(body)
            self.names.append(request.headers["idempotency-key"])
            if self.swallows:
                self.swallowed += 1
                request.close_connection = True
                return
        reply(request, b"", status, **({"location": self.location} if self.location else {}))

    def alarm_keys(self) -> list[str]:
        return [body["key"] for body in self.taken]

    def close(self) -> None:
        self._server.close()
