"""A receiver of the server's signed webhooks."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable
from typing import Any

from tests.support.answering import Answering, Request, body_of, reply

SECRET = "a secret of the tests"


class Receiver:
    """Receives webhooks at `url`, whose host and port are `place`."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.unsigned = 0
        self.status = 200
        self.status_of: Callable[[dict[str, Any]], int] = lambda asked: self.status
        """The status of the answer to such a body."""
        self.location = ""
        """Where a redirect sends to."""
        self.answer: Callable[[dict[str, Any]], Any] = lambda asked: {}
        """Makes the body of the answer from that of the request."""
        self._server = Answering(self._answer)
        self.place = f"127.0.0.1:{self._server.port}"
        self.url = f"http://{self.place}/notify"

    def _answer(self, request: Request) -> None:
        body = body_of(request)
        fields = dict(part.split("=") for part in request.headers["notify-signature"].split(","))
        proof = hmac.new(SECRET.encode(), f"{fields['t']}.".encode() + body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(proof, fields["v1"]) or abs(time.time() - int(fields["t"])) > 3600:
            self.unsigned += 1
        asked = json.loads(body)
        self.received.append(asked)
        answer = json.dumps(self.answer(asked)).encode()
        reply(request, answer, self.status_of(asked), **({"location": self.location} if self.location else {}))

    def close(self) -> None:
        """Take no connections any more."""
        self._server.close()

    def reopen(self) -> None:
        """Listen on the same port again."""
        self._server = Answering(self._answer, self._server.port)
