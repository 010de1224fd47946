"""The file system of a store's URL, as fsspec gives it, and what this project adds for local directories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from notify.errors import InvalidRequest
from notify.runtime.urls import without_secrets

WHOLE_PUTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""Protocols whose objects appear and are replaced as a whole."""


def check_url(url: str) -> str:
    """The protocol of a store's URL. Connects to nothing, and starts no thread.

    Raises InvalidRequest for a URL that names no store, one with credentials, and one whose library is not installed.
    """
    try:
        import fsspec
    except ImportError as error:
        raise InvalidRequest(f"a store needs the extra store: pip install 'notify-tx[store]' ({error})") from None
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidRequest(f"{without_secrets(url)!r} is not a store: {error}") from None
    if parts.username or parts.password or without_secrets(url) != url:
        raise InvalidRequest("a store's URL must not hold credentials: put them where the store's library reads them")
    if not url or (parts.scheme not in fsspec.available_protocols() if parts.scheme else not url.startswith("/")):
        raise InvalidRequest(f"{url!r} is not a store: name one as file:///directory, s3://bucket/prefix or hdfs://…")
    try:
        fsspec.get_filesystem_class(parts.scheme or "file")
    except ImportError as error:
        raise InvalidRequest(f"{url}: {error}; S3 comes with the extra store, others with their library") from None
    return parts.scheme


def opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there. Raises InvalidRequest as `check_url` does."""
    scheme = check_url(url)
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        # Each request once: this module tries again, and says how often.
        options["config_kwargs"] = {"retries": {"max_attempts": 1}, "connect_timeout": 10, "read_timeout": 30}
    try:
        fs, root = url_to_fs(url, **options)
    except Exception as error:
        raise InvalidRequest(f"{url} is not a store: {said(error)}") from None
    return fs, str(root).rstrip("/")


def said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def discard(file: Any) -> None:
    """Discard an incomplete object, which must not appear in the store."""
    try:
        if hasattr(file, "f"):  # a local file, which has nothing to discard
            file.f.close()
        else:
            file.discard()
            file.closed = True  # or the end of the Python object would complete the upload
    except Exception:
        pass  # the first error is reported; a store deletes unfinished uploads by its own rules


def sync(path: str) -> None:
    """Wait until a local file is on the disk, and its name."""
    _sync(path, os.O_RDONLY)
    _sync(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)


def rename(path: Path, name: str) -> None:
    """Give a local file another name in its directory, durably. Raises OSError."""
    path.rename(path.with_name(name))
    _sync(str(path.parent), os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
