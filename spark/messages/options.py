"""The options of the source `notify`, checked."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from notify.client.transport.login import Shown
from notify.errors import InvalidRequest
from notify.protocol.limits import check_name, digits

EARLIEST, LATEST = "earliest", "latest"
INFER = "infer"
NAMES = (
    "topics", "servers", "store", "startingOffsets", "endingOffsets", "schema", "columns", "failOnDataLoss",
    "maxRowsPerTrigger", "rowsPerPartition", "inferRows", "timeoutSeconds", "token", "tokenFile", "ca", "certificate",
    "key",
)  # fmt: skip
MOST_ROWS = 1 << 40
MOST_PARTITION_ROWS = 10_000_000


@dataclass(frozen=True)
class Options:
    """A query's topics, and how it reads them. Goes to every worker."""

    topics: tuple[str, ...]
    servers: str
    """Addresses of servers, separated by commas."""
    store: str = ""
    """The URL of a store that the server ships to; "" for none."""
    starting: str = EARLIEST
    ending: str = LATEST
    schema: str = ""
    """The type of JSON bodies, as DDL; "" for bodies without a type."""
    columns: tuple[str, ...] = ()
    fails_on_loss: bool = True
    rows_per_trigger: int = 100_000
    rows_per_partition: int = 50_000
    infer_rows: int = 1000
    timeout_seconds: float = 60.0
    """How long a server or a store that is unreachable is tried again."""
    token: str = ""
    token_file: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str], default_start: str) -> Options:
        """The options that a user gave; their names count without case. Raises InvalidRequest."""
        known = {name.lower(): name for name in NAMES}
        options: dict[str, str] = {}
        for name, text in given.items():
            if name.lower() not in known:
                raise InvalidRequest(f"option {name}: there is none; there are {', '.join(NAMES)}")
            options[known[name.lower()]] = str(text).strip()
        if not options.get("topics"):
            raise InvalidRequest("option topics: name the topics to read, separated by commas")
        if not options.get("servers"):
            raise InvalidRequest("option servers: name a server's address, such as http://127.0.0.1:7400")
        topics = tuple(dict.fromkeys(_listed(options["topics"])))
        for topic in topics:
            check_name("topic", topic)
        if options.get("token") and options.get("tokenFile"):
            raise InvalidRequest("options token and tokenFile: give one of them")
        return cls(
            topics,
            options["servers"],
            options.get("store", ""),
            options.get("startingOffsets") or default_start,
            options.get("endingOffsets") or LATEST,
            options.get("schema", ""),
            tuple(_listed(options.get("columns", ""))),
            _flag(options, "failOnDataLoss", True),
            _number(options, "maxRowsPerTrigger", cls.rows_per_trigger, MOST_ROWS),
            _number(options, "rowsPerPartition", cls.rows_per_partition, MOST_PARTITION_ROWS),
            _number(options, "inferRows", cls.infer_rows, 100_000),
            float(_number(options, "timeoutSeconds", int(cls.timeout_seconds), 86_400)),
            options.get("token", ""),
            options.get("tokenFile", ""),
            options.get("ca", ""),
            options.get("certificate", ""),
            options.get("key", ""),
        )

    def shown(self) -> Shown:
        """The token to show, or what reads it; None: what the worker's environment says."""
        if self.token_file:
            path = Path(self.token_file)
            return lambda: path.read_text().strip()
        return self.token or None

    def tls(self) -> ssl.SSLContext | None:
        """The certificates to believe and to show; None: those of the worker's environment. Raises InvalidRequest."""
        if not (self.ca or self.certificate):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(f"options ca, certificate and key: a file cannot be read: {error}") from None
        return context


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name, "")
    if text.lower() not in ("", "true", "false"):
        raise InvalidRequest(f"option {name}: write true or false, not {text[:40]!r}")
    return text.lower() == "true" if text else default


def _number(options: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = options.get(name, "")
    if not text:
        return default
    number = digits(text)
    if number is None or not 1 <= number <= most:
        raise InvalidRequest(f"option {name}: write a number from 1 to {most}, not {text[:40]!r}")
    return number
