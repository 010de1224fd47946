"""The data directory that workers share: the number of workers, and the directory of each. Needs no server code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from notify.errors import InvalidRequest

FILE = "workers.json"
LOGS = "logs"
"""The field of this file that says that each worker has created its log."""
SHARED = "shared"
"""The directory in a worker's backup with the database of settings and credentials that all workers share."""
MOST = 64


def worker_names(count: int) -> tuple[str, ...]:
    """The names of `count` workers, which are also their shards and directories."""
    return tuple(f"worker-{number}" for number in range(1, count + 1))


def workers_of(directory: Path) -> int:
    """The number of workers that divide a data directory; 0 if it is not divided. Raises InvalidRequest."""
    return _remembered(directory)[0]


def _remembered(directory: Path) -> tuple[int, bool]:
    """The number of workers that divide a directory (0: not divided), and whether each has created its log."""
    try:
        text = (directory / FILE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return 0, False
    except OSError as error:
        raise InvalidRequest(f"{directory / FILE} cannot be read: {error.strerror}") from None
    try:
        remembered = json.loads(text)
        count, has_logs = remembered["workers"], bool(remembered.get(LOGS))
    except (ValueError, KeyError, TypeError, AttributeError):
        count, has_logs = None, False
    if type(count) is not int or not 2 <= count <= MOST:
        raise InvalidRequest(f"{directory / FILE} does not say how many workers there are: restore it, such as "
                             '{"workers": 2} where there are worker-1 and worker-2')  # fmt: skip
    return count, has_logs


def check_count(directory: Path, count: int) -> None:
    """Raises InvalidRequest if a directory belongs to another number of workers, or to a single server."""
    remembered_count, has_logs = _remembered(directory)
    if remembered_count == count:
        if has_logs:
            _check_logs(directory, count)
        return
    if remembered_count:
        raise InvalidRequest(
            f"{directory} is divided among {remembered_count} workers, and a key's messages are all in one worker's "
            f"log: start it with --workers {remembered_count}. For another number, let consumers empty this directory "
            "first, then begin in a new one"
        )
    _check_restored(directory, count)
    if count > 1 and (directory / "log").exists():
        raise InvalidRequest(
            f"{directory} has the log of a server without workers: start it without --workers, or give --workers a new "
            "directory and let consumers empty this one first"
        )


def refuse_one_of_several(directory: Path) -> None:
    """Raises InvalidRequest for the directory of one of several workers, which must be served with the others."""
    parent = directory.absolute().parent
    count = workers_of(parent) if directory.name in worker_names(MOST) else 0
    if directory.name in worker_names(count):
        raise InvalidRequest(
            f"{directory} has the log of one of {count} workers: start notify serve --workers {count} --data-dir "
            f"{parent}, or copy this log elsewhere to look at it alone"
        )


def _check_restored(directory: Path, count: int) -> None:
    """Raises InvalidRequest if a directory without a remembered number contains the logs of another number of workers,
    which were probably restored."""
    with_log = [name for name in worker_names(MOST) if (directory / name / "log").exists()]
    if not with_log or (count == 1 and (directory / "log").exists()):
        return
    if with_log != list(worker_names(len(with_log))) or len(with_log) == 1:
        raise InvalidRequest(
            f"{directory} has the logs of {', '.join(with_log)} alone: put those of the other workers there first"
        )
    if count != len(with_log):
        raise InvalidRequest(
            f"{directory} has the logs of {len(with_log)} workers, and a key's messages are all in one worker's log: "
            f"start it with --workers {len(with_log)}, or put the logs that are missing there first"
        )


def _check_logs(directory: Path, count: int) -> None:
    """Raises InvalidRequest if a worker has lost its log: it would begin an empty one."""
    for name in worker_names(count):
        if not any((directory / name / "log").glob("*.log")):
            raise InvalidRequest(
                f"{directory / name} has lost its log: mount its disk, or restore it from its backup (notify restore). "
                f"To begin a new, empty log there, write {json.dumps({'workers': count})} into {directory / FILE}"
            )


def divide(directory: Path, count: int) -> None:
    """Record permanently that `count` workers divide a directory. Raises InvalidRequest, OSError."""
    check_count(directory, count)
    if not workers_of(directory):
        _write(directory, {"workers": count})


def remember_logs(directory: Path) -> None:
    """Record that each worker has created its log, and must not start without it. Raises InvalidRequest, OSError."""
    count, has_logs = _remembered(directory)
    if count and not has_logs:
        _write(directory, {"workers": count, LOGS: True})


def _write(directory: Path, remembered: Mapping[str, object]) -> None:
    temporary = directory / (FILE + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        json.dump(remembered, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / FILE)
    directory_descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory_descriptor)
    finally:
        os.close(directory_descriptor)


def refuse_divided(directory: Path, what: str) -> None:
    """Raises InvalidRequest for a directory of workers; `what`: what the user has to do for each, such as
    "name --log"."""
    count = workers_of(directory)
    if count:
        names = ", ".join(f"{name}={directory / name}" for name in worker_names(count)[:2])
        more = ", …" if count > 2 else ""
        raise InvalidRequest(f"{directory} is divided among {count} workers: {what} for each of them, {names}{more}")
