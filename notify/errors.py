"""Every error of the product, as one tree.

    NotifyError
    ├── InvalidRequest            the request cannot be carried out as written (422, or 400 if it is malformed)
    │   ├── TooLarge              a body, header, batch or request above its bound (413)
    │   ├── InvalidId             a text is not an id
    │   ├── UnsafeTable           a table of Notify's in a database cannot keep what is promised: its key or its kind
    │   │   └── HiddenRows        rows of it may be there that this role does not see
    │   └── UnknownTopic          the topic does not exist, and `create_topics` is off (404)
    ├── Conflict                  the request contradicts what is recorded (409)
    │   ├── IdInUse               the transaction id belongs to another group or to other content
    │   └── OutcomeConflict       the opposite outcome is recorded
    ├── NotFound                  nothing has that name or id (404)
    ├── Unauthorized              no token, or a token that is not valid (401)
    ├── Forbidden                 the caller lacks the right (403)
    ├── WrongRole                 this server lacks the role for the request: ask another member (421)
    ├── WrongShard                the key, or the transaction, belongs to another shard: send it there (421)
    ├── StaleReceipt              the receipt's lease has ended (410)
    ├── Unavailable               try again: the server is unreachable, starting or overloaded (503)
    │   ├── Backpressure          a rate limit, or a full backlog: try again after `retry_after` s (429)
    │   ├── Closed                this producer or client was closed: make another one (not retryable)
    │   ├── Timeout               no answer in time; the request may have been carried out (504)
    │   ├── ForeignAnswer         something else answered in a server's place: a proxy, a login page (503)
    │   ├── DiskFull              the server's disk is full: reads work, writes are refused (507)
    │   ├── ObjectStoreFailed     an object store is unreachable, refuses, or lost an object (503)
    │   └── InboxUnavailable      the database of an inbox did not answer before the handler was called
    ├── StorageFailed             the disk refused a write or a sync: the server has stopped (500)
    │   └── Corrupt               bytes on the disk differ from what was written
    ├── BodyUnavailable           a received message's body lies in a store that this consumer may not read, or is
    │                             missing or altered there (409)
    ├── BindingRefused            the session or engine cannot carry a transactional message safely
    ├── TransactionRefused        the half was not stored, so the local transaction must not commit
    └── DeadLetter                raised by a handler: move this message to the dead-letter queue; also raised if its
                                  body is not text, not JSON, or does not fit a type

Each has a stable `code`, which is also the `code` of the HTTP problem (RFC 9457), and a message that says what to do
next. `retryable` says whether the same request can succeed later.
"""

from __future__ import annotations


class NotifyError(Exception):
    """Base of every error raised by this package."""

    code = "error"
    status = 500
    retryable = False

    def __init__(self, detail: str = "", code: str | None = None, status: int | None = None) -> None:
        """`code`, `status`: replace those of the class, for errors that differ only in their code."""
        super().__init__(detail)
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class InvalidRequest(NotifyError):
    code = "invalid"
    status = 422


class TooLarge(InvalidRequest):
    code = "too_large"
    status = 413


class InvalidId(InvalidRequest, ValueError):
    code = "invalid_id"


class UnsafeTable(InvalidRequest):
    code = "unsafe_table"


class HiddenRows(UnsafeTable):
    code = "hidden_rows"


class UnknownTopic(InvalidRequest):
    code = "unknown_topic"
    status = 404


class Conflict(NotifyError):
    code = "conflict"
    status = 409


def stale_epoch(detail: str) -> Conflict:
    """The error for a bridge that another bridge has superseded."""
    return Conflict(detail, "stale_epoch")


class IdInUse(Conflict):
    code = "id_in_use"


class OutcomeConflict(Conflict):
    code = "outcome_conflict"


class NotFound(NotifyError):
    code = "not_found"
    status = 404


class Unauthorized(NotifyError):
    code = "unauthorized"
    status = 401


class Forbidden(NotifyError):
    code = "forbidden"
    status = 403


class WrongRole(NotifyError):
    code = "wrong_role"
    status = 421


class WrongShard(NotifyError):
    code = "wrong_shard"
    status = 421

    def __init__(self, detail: str, *, shard: str) -> None:
        super().__init__(detail)
        self.shard = shard


class StaleReceipt(NotifyError):
    code = "stale_receipt"
    status = 410


class Unavailable(NotifyError):
    code = "unavailable"
    status = 503
    retryable = True


class Timeout(Unavailable):
    code = "timeout"
    status = 504


class ForeignAnswer(Unavailable):
    """Something else answered in a server's place, or cut the connection in the middle of a large request.

    `answered`: the status of the answer; 0: there was none.
    """

    code = "foreign_answer"

    def __init__(self, detail: str, *, answered: int) -> None:
        super().__init__(detail)
        self.answered = answered

    @property
    def is_for_size(self) -> bool:
        """Whether the request is too large for what answered, or may be: a smaller one may pass."""
        return self.answered in (0, TooLarge.status)


class Closed(Unavailable):
    """This process has closed the object, so that a retry cannot help."""

    code = "closed"
    retryable = False


class Backpressure(Unavailable):
    """The server takes no more for now. `retry_after`: seconds to wait before the next try."""

    code = "backpressure"
    status = 429

    def __init__(self, detail: str, code: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(detail, code)
        self.retry_after = retry_after


class DiskFull(Unavailable):
    code = "disk_full"
    status = 507


class ObjectStoreFailed(Unavailable):
    code = "object_store_failed"


class InboxUnavailable(Unavailable):
    code = "inbox_unavailable"
    is_of_handler = False
    """Whether a handler raised it, which used another inbox."""


class StorageFailed(NotifyError):
    code = "storage_failed"
    status = 500


class Corrupt(StorageFailed):
    code = "corrupt"


class BodyUnavailable(NotifyError):
    code = "body_unavailable"
    status = 409


class BindingRefused(NotifyError):
    code = "binding_refused"
    status = 422


class TransactionRefused(NotifyError):
    code = "transaction_refused"
    status = 409


class DeadLetter(NotifyError):
    code = "dead_letter"
