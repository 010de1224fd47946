"""The server's certificate, which can be renewed without a restart."""

from __future__ import annotations

import os
import ssl

import structlog

from notify.errors import InvalidRequest
from notify.runtime.threads import in_thread
from notify.server.settings import Settings
from notify.server.tasks import repeated

log = structlog.get_logger("notify.server")

LOOK_SECONDS = 2.0
"""How often the files are checked for changes."""


class Certificates:
    """A TLS context with the files that the settings name."""

    def __init__(self, settings: Settings) -> None:
        """Raises InvalidRequest if a file is not a certificate, key or authority."""
        self._certificate = settings.tls_certificate
        self._key = settings.tls_key or None
        self._authorities = settings.tls_client_ca
        self._seen = self._versions()
        self.context = self._read()

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        if self._authorities:
            context.verify_mode = ssl.CERT_OPTIONAL  # a client without one needs a token
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        files = f"the certificate {self._certificate} with its key {self._key or ''}".rstrip()
        try:
            context.load_cert_chain(self._certificate, self._key, lambda: "")
            if self._authorities:
                files = f"the authorities {self._authorities}"
                context.load_verify_locations(self._authorities)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise InvalidRequest(f"TLS: {files}: the key does not belong to the certificate") from None
            raise InvalidRequest(f"TLS: {files} cannot be read as PEM: {error}") from None
        except OSError as error:
            raise InvalidRequest(f"TLS: {files} cannot be read: {error.strerror or error}") from None

    def _versions(self) -> list[tuple[int, int, int]]:
        """A value that changes when one of the files is written or replaced."""
        versions = []
        for path in (self._certificate, self._key, self._authorities):
            try:
                status = os.stat(path) if path else None
            except OSError:
                status = None  # the file is being replaced at this moment
            versions.append((0, 0, 0) if status is None else (status.st_ino, status.st_size, status.st_mtime_ns))
        return versions

    def look(self) -> None:
        """Load changed files for new connections. If a file cannot be read, nothing changes.

        An authority that is removed from the file is trusted until the next start: a context cannot forget one.
        """
        if self._can_be_taken():
            self._take()

    def _can_be_taken(self) -> bool:
        """Whether the files have changed, and all of them can be read."""
        versions = self._versions()
        if versions == self._seen:
            return False
        self._seen = versions
        try:
            self._read()
        except InvalidRequest as error:
            log.error("tls_files_not_taken", reason=str(error))
            return False
        return True

    def _take(self) -> None:
        """Load the files into the context that is in use."""
        try:
            self._load(self.context)
        except InvalidRequest as error:
            log.error("tls_files_not_taken", reason=str(error))
        else:
            log.info("tls_files_taken", certificate=self._certificate)

    async def follow(self) -> None:
        """Check the files every LOOK_SECONDS until cancelled."""
        await repeated(self._look_in_thread, lambda: LOOK_SECONDS, "tls_files_not_looked_at")

    async def _look_in_thread(self) -> None:
        if await in_thread(self._can_be_taken):
            # On the loop: a handshake that began between certificate and key would fail.
            self._take()
