"""An object store by its URL, through fsspec: a directory (`file:///…`), S3 (`s3://bucket/prefix`), HDFS and others.

Each call has a bound: a store that gives no sign of life for a time is given up, one that fails is tried again a few
times. What was written is read back, since a store may acknowledge what it does not keep. Credentials and addresses
come from where the store's library looks for them (for S3: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from notify.errors import NotifyError, ObjectStoreFailed
from notify.object_store.filesystem import WHOLE_PUTS, discard, opened, rename, said, sync
from notify.object_store.object_file import FillFailed, ObjectFile, no_pace
from notify.runtime.backoff import Backoff

T = TypeVar("T")

CHUNK = 4 << 20
"""Bytes that are read at once."""
BLOCK = 16 << 20
"""Bytes of one request of a large upload; a few of them are in memory at once."""
STALL_SECONDS = 60.0
TRIES = 3
FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 0.2, 5.0
NEXT = ".next"
"""Behind a name: what is about to take its place, in a store that has to rename for it."""
_WRITTEN_AT = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
"""Where file systems of fsspec tell when an object was written."""
_FINAL = (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors that another try does not help."""


class ObjectMissing(ObjectStoreFailed):
    """The store answers, and has no object of that name."""

    code = "object_missing"
    retryable = False


def digest_of(data: bytes) -> tuple[int, str]:
    """(size, SHA-256 in hexadecimal digits)."""
    return len(data), hashlib.sha256(data).hexdigest()


class Entry(NamedTuple):
    """An object as its store lists it."""

    size: int
    written_at: float
    """Seconds since 1970, by the store's clock."""


class Store:
    """The objects below one URL. For any thread; every method raises ObjectStoreFailed where the store does."""

    def __init__(
        self,
        url: str,
        *,
        stall_seconds: float = STALL_SECONDS,
        tries: int = TRIES,
        pace: Callable[[int], None] = no_pace,
    ) -> None:
        """`stall_seconds`: how long a call may give no sign of life. `pace` is called with the size of each piece
        before it is written or read back, and waits as long as it likes within that time.

        Raises InvalidRequest for a URL that names no store, or one whose library is not installed.
        """
        self.url = url.rstrip("/")
        self._stall_seconds = stall_seconds
        self._tries = tries
        self._pace = pace
        self._fs, self._root = opened(self.url)
        self._protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        self._is_local = self._protocol in ("file", "local")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # --- reading ----------------------------------------------------------------------------------------------

    def read(self, name: str, most: int) -> bytes:
        """A whole object of at most `most` bytes. Raises ObjectMissing, also for one that is larger than that."""
        data = self._tried(f"read {name}", lambda _: self._fs.cat_file(self._present(name), start=0, end=most + 1))
        if len(data) > most:
            raise ObjectStoreFailed(f"{self.url}/{name} is larger than {most:,} bytes")
        return bytes(data)

    def read_listed(self, name: str, listed: tuple[int, str], most: int) -> bytes:
        """A whole object as a manifest lists it: (size, SHA-256). Raises ObjectStoreFailed for other bytes."""
        data = self.read(name, min(most, listed[0]))
        if digest_of(data) != listed:
            raise ObjectStoreFailed(f"{self.url}/{name} differs from what the manifest says of it")
        return data

    def _present(self, name: str) -> str:
        """The path of an object. Where a rename was cut short, it is that of what was to take its place."""
        path = self._path(name)
        if self._protocol in WHOLE_PUTS or self._is_local or self._fs.exists(path):
            return path
        return path + NEXT if self._fs.exists(path + NEXT) else path

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Up to `size` bytes of an object from `start` on; fewer where it ends before. Raises ObjectMissing."""
        if size <= 0:
            return b""
        path = self._path(name)
        return bytes(self._tried(f"read {name}", lambda _: self._fs.cat_file(path, start=start, end=start + size)))

    def copy_to(self, name: str, file: IO[bytes], most: int) -> tuple[int, str]:
        """Write an object of at most `most` bytes into a file that can seek, from its current place on; its (size,
        SHA-256).

        Compare them with the manifest's. Raises ObjectMissing; ObjectStoreFailed for a larger object, of which no more
        than `most` bytes are written; and OSError as the file does.
        """
        start = file.tell()

        def copy(alive: Callable[[], None]) -> tuple[int, str]:
            file.seek(start)
            file.truncate()
            return self._each_chunk(name, alive, file.write, most)

        return self._tried(f"read {name}", copy)

    def digest(self, name: str, most: int = 1 << 62) -> tuple[int, str]:
        """(size, SHA-256) of what the store gives for a name. Raises ObjectMissing; ObjectStoreFailed beyond `most`."""
        return self._tried(f"read {name}", lambda alive: self._each_chunk(name, alive, len, most))

    def _each_chunk(
        self, name: str, alive: Callable[[], None], take: Callable[[bytes], object], most: int
    ) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        with self._fs.open(self._path(name), "rb", cache_type="none") as file:
            while chunk := file.read(min(CHUNK, most + 1 - size)):
                size += len(chunk)
                if size > most:  # before it is taken: an object may be far larger than its manifest says
                    raise ObjectStoreFailed(
                        f"{self.url}/{name} has more than {most:,} bytes, which is the size that it was written with: "
                        "something else was put in its place"
                    )
                self._pace(len(chunk))
                alive()
                digest.update(chunk)
                take(chunk)
        return size, digest.hexdigest()

    def size(self, name: str) -> int:
        """How many bytes an object has. Raises ObjectMissing."""
        return int(self._tried(f"look for {name}", lambda _: self._fs.size(self._path(name))))

    def exists(self, name: str) -> bool:
        return bool(self._tried(f"look for {name}", lambda _: self._fs.exists(self._path(name))))

    def names(self, folder: str) -> list[str]:
        """The names of all objects in a folder (`segments`), in order; none where there is no such folder."""

        def find(_: Callable[[], None]) -> list[str]:
            try:
                found = self._fs.find(self._path(folder))
            except FileNotFoundError:
                return []
            root = self._fs._strip_protocol(self._root)
            return sorted(str(path).removeprefix(root).lstrip("/") for path in found)

        return self._tried(f"list {folder}", find)

    def entries(self, folder: str) -> dict[str, Entry]:
        """The objects in a folder by name; none where there is no such folder. Raises ObjectStoreFailed, also for a
        store that does not say when an object was written."""

        def find(_: Callable[[], None]) -> dict[str, Entry]:
            try:
                found = self._fs.find(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
            root = self._fs._strip_protocol(self._root)
            return {
                str(path).removeprefix(root).lstrip("/"): Entry(int(info["size"]), self._written_at(path, info))
                for path, info in found.items()
            }

        return self._tried(f"list {folder}", find)

    def now(self, name: str) -> float:
        """The time by the store's clock, in seconds since 1970: that of an object which is written, and deleted again.
        Raises ObjectStoreFailed."""
        self.replace(name, b"")
        try:
            path = self._path(name)
            return float(self._tried(f"look for {name}", lambda _: self._written_at(path, self._fs.info(path))))
        finally:
            self.delete(name)

    def _written_at(self, path: str, info: dict[str, Any]) -> float:
        for key in _WRITTEN_AT:
            if (at := info.get(key)) is not None:
                break
        else:
            at = self._fs.modified(path)
        if isinstance(at, str):
            at = datetime.fromisoformat(at)
        if isinstance(at, datetime):
            return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
        return float(at)

    # --- writing ----------------------------------------------------------------------------------------------

    def put(self, name: str, fill: Callable[[ObjectFile], object]) -> tuple[int, str]:
        """Write an object of what `fill` writes, and read it back; its (size, SHA-256).

        `fill` is called again where the store fails, so it must write the same each time. An object of that name is
        overwritten: only what no manifest lists may be put again. Raises what `fill` raises.
        """

        def write(alive: Callable[[], None]) -> tuple[int, str]:
            return self._write(self._path(name), fill, alive)

        written = self._tried(f"write {name}", write)
        if self.digest(name, written[0]) != written:
            raise ObjectStoreFailed(f"{self.url} acknowledged {name}, but returns other bytes: it is not listed")
        return written

    def _write(self, path: str, fill: Callable[[ObjectFile], object], alive: Callable[[], None]) -> tuple[int, str]:
        if self._is_local or self._protocol not in WHOLE_PUTS:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        raw = self._fs.open(path, "wb", **({} if self._is_local else {"block_size": BLOCK}))
        file = ObjectFile(raw, self._pace, alive)
        try:
            fill(file)
            alive()
            file.guarded(raw.close)
        except BaseException as error:
            discard(raw)
            if file.failed is None:
                raise FillFailed(error) from error
            raise file.failed from None
        if self._is_local:
            sync(self._fs._strip_protocol(path))
        return file.size, file.digest.hexdigest()

    def replace(self, name: str, data: bytes) -> None:
        """Replace the object of that name: a reader gets one of the two completely."""
        path = self._path(name)
        if self._protocol in WHOLE_PUTS:
            self._tried(f"write {name}", lambda _: self._fs.pipe_file(path, data))
            return

        def put_in_place(alive: Callable[[], None]) -> None:
            self._write(path + NEXT, lambda file: file.write(data), alive)
            if self._is_local:
                local = Path(self._fs._strip_protocol(path))
                rename(local.with_name(local.name + NEXT), local.name)
            else:
                self._fs.mv(path + NEXT, path)

        self._tried(f"replace {name}", put_in_place)

    def replace_checked(self, name: str, data: bytes, most: int) -> None:
        """As `replace`, and read it back; `most`: bytes that such an object may have."""
        self.replace(name, data)
        if self.read(name, most) != data:
            raise ObjectStoreFailed(
                f"{self.url} acknowledged a new {name}, but returns another one: the store loses what it acknowledged, "
                "or another process writes to it"
            )

    def delete(self, name: str) -> None:
        """Remove an object; none of that name is fine."""

        def remove(_: Callable[[], None]) -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                pass

        self._tried(f"delete {name}", remove)

    # --- bounds -----------------------------------------------------------------------------------------------

    def _tried(self, what: str, call: Callable[[Callable[[], None]], T]) -> T:
        """The result of a call, which is given a function to call whenever it got on."""
        waits = Backoff(FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS)
        for left in reversed(range(self._tries)):
            bounded = Bounded(call, self._stall_seconds)
            try:
                result: T = bounded.result()
                return result
            except FillFailed as error:
                raise error.raised from None
            except NotifyError:
                raise
            except FileNotFoundError as error:
                if what.startswith(("write", "replace")):  # a bucket that does not exist
                    raise ObjectStoreFailed(
                        f"{self.url}: cannot {what}: {said(error)}; make the bucket or folder"
                    ) from None
                raise ObjectMissing(f"{self.url}: cannot {what}: there is no such object") from None
            except Exception as error:
                if not left or isinstance(error, _FINAL):
                    raise ObjectStoreFailed(f"{self.url}: cannot {what}: {said(error)}") from error
            time.sleep(waits.next())
        raise AssertionError("unreachable: the last try returns or raises")


class Bounded:
    """A call in a thread of its own, given up when it shows no sign of life for a time: a thread cannot be ended, but
    what it still does fails at its next sign."""

    def __init__(self, call: Callable[[Callable[[], None]], Any], stall_seconds: float) -> None:
        self._call = call
        self._stall_seconds = stall_seconds
        self._alive_at = time.monotonic()
        self._given_up = False
        self._done = threading.Event()
        self._result: Any = None
        self._raised: BaseException | None = None

    def result(self) -> Any:
        """Raises what the call raises, or TimeoutError."""
        threading.Thread(target=self._run, daemon=True, name="store").start()
        while True:
            left = self._alive_at + self._stall_seconds - time.monotonic()
            if self._done.wait(max(left, 0.0)):
                break
            if self._alive_at + self._stall_seconds <= time.monotonic():
                self._given_up = True
                raise TimeoutError(f"no sign of life for {self._stall_seconds:g} s")
        if self._raised is not None:
            raise self._raised
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call(self._alive)
        except BaseException as error:
            self._raised = error
        self._done.set()

    def _alive(self) -> None:
        if self._given_up:
            raise TimeoutError("given up")
        self._alive_at = time.monotonic()
