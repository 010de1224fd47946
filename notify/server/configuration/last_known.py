"""The settings and credentials that this server read last, in a file of its data directory.

A server that starts while its registry's database is unreachable uses them. With access on they must not be too old,
because a credential may have been revoked in the meantime.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from notify.errors import StorageFailed
from notify.protocol.wire import UNDECODABLE
from notify.server.access.credential import Credential
from notify.server.configuration.revisions import Revision
from notify.server.data_directory import put_file

FILE = "registry.json"
CREDENTIALS_SECONDS = 3600.0
"""The greatest age of credentials at a start."""


class Known(msgspec.Struct):
    """The registry's settings and credentials as of `at_us`."""

    at_us: int
    revision: Revision
    credentials: list[Credential]


class LastKnown:
    """Reads and writes the file in one data directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def keep(self, content: Known) -> None:
        """Replace the file's content. Raises OSError."""
        put_file(self._path, msgspec.json.encode(content))

    def read(self, now_us: int, with_access: bool, reason: str) -> Known:
        """The file's content; `reason`: why the database cannot be read, for the error's text.

        Raises StorageFailed if the file is missing, unreadable or too old.
        """
        away = f"the registry's database does not answer ({reason})"
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=Known)
        except FileNotFoundError:
            raise StorageFailed(f"{away}, and this server has not been a member before: start it again later") from None
        except (OSError, *UNDECODABLE) as error:
            raise StorageFailed(f"{away}, and {self._path} cannot be read: {error}") from None
        age = (now_us - content.at_us) / 1e6
        if with_access and age > CREDENTIALS_SECONDS:
            raise StorageFailed(
                f"{away}, and the credentials that this server knows are {age / 3600:.1f} h old: one may have been "
                "revoked in the meantime. Start the server again when the database answers"
            )
        return content
