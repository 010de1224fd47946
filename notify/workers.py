"""A data directory that workers share: how many there are, and which directory is whose. No server's code is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from notify.errors import InvalidRequest

FILE = "workers.json"
LOGS = "logs"
"""The field of this file that says that each worker has made its log."""
SHARED = "shared"
"""The directory of a worker's backup that has what all workers share: their database of settings and credentials."""
MOST = 64


def worker_names(count: int) -> tuple[str, ...]:
    """The names of so many workers, which are their shards and their directories."""
    return tuple(f"worker-{number}" for number in range(1, count + 1))


def workers_of(directory: Path) -> int:
    """Among how many workers a data directory is divided; 0 where it is not. Raises InvalidRequest."""
    return _remembered(directory)[0]


def _remembered(directory: Path) -> tuple[int, bool]:
    """Among how many workers a directory is divided, and whether each of them has made its log."""
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
    """Raises InvalidRequest where a directory is divided among another number of workers, or is a single server's."""
    divided, has_logs = _remembered(directory)
    if divided == count:
        if has_logs:
            _check_logs(directory, count)
        return
    if divided:
        raise InvalidRequest(
            f"{directory} is divided among {divided} workers, and a key's messages are all in one worker's log: start "
            f"it with --workers {divided}. For another number, consume what is there first, then begin in a new "
            "directory"
        )
    _check_restored(directory, count)
    if count > 1 and (directory / "log").exists():
        raise InvalidRequest(
            f"{directory} has the log of a server without workers: start it without --workers, or give --workers a new "
            "directory and let consumers empty this one first"
        )


def refuse_one_of_several(directory: Path) -> None:
    """Raises InvalidRequest for the directory of a worker, whose keys are only some: it is served with the others."""
    parent = directory.absolute().parent
    count = workers_of(parent) if directory.name in worker_names(MOST) else 0
    if directory.name in worker_names(count):
        raise InvalidRequest(
            f"{directory} has the log of one of {count} workers: start notify serve --workers {count} --data-dir "
            f"{parent}, or copy this log elsewhere to look at it alone"
        )


def _check_restored(directory: Path, count: int) -> None:
    """Raises InvalidRequest where workers' logs were put into a directory, which does not say how many there are, and
    they are not so many."""
    there = [name for name in worker_names(MOST) if (directory / name / "log").exists()]
    if not there or (count == 1 and (directory / "log").exists()):
        return
    if there != list(worker_names(len(there))) or len(there) == 1:
        raise InvalidRequest(
            f"{directory} has the logs of {', '.join(there)} alone: put those of the other workers there first"
        )
    if count != len(there):
        raise InvalidRequest(
            f"{directory} has the logs of {len(there)} workers, and a key's messages are all in one worker's log: "
            f"start it with --workers {len(there)}, or put the logs that are missing there first"
        )


def _check_logs(directory: Path, count: int) -> None:
    """Raises InvalidRequest where a worker has lost its log: it would begin another one, without what it had."""
    for name in worker_names(count):
        if not any((directory / name / "log").glob("*.log")):
            raise InvalidRequest(
                f"{directory / name} has lost its log: mount its disk, or restore it from its backup (notify restore). "
                f"To begin a new log there, without what that one had, write {json.dumps({'workers': count})} into "
                f"{directory / FILE}"
            )


def divide(directory: Path, count: int) -> None:
    """Write down that a directory is divided among so many workers, for good. Raises InvalidRequest, OSError."""
    check_count(directory, count)
    if not workers_of(directory):
        _write(directory, {"workers": count})


def remember_logs(directory: Path) -> None:
    """Write down that each worker has made its log, and cannot start without it. Raises InvalidRequest, OSError."""
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
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def refuse_divided(directory: Path, what: str) -> None:
    """Raises InvalidRequest for a directory of workers; `what` is said once for each, such as "name --log"."""
    count = workers_of(directory)
    if count:
        names = ", ".join(f"{name}={directory / name}" for name in worker_names(count)[:2])
        more = ", …" if count > 2 else ""
        raise InvalidRequest(f"{directory} is divided among {count} workers: {what} for each of them, {names}{more}")
