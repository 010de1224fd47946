"""Finds MySQL's programs: those installed, or unpacked once from Debian's packages into the virtual environment.

Debian 12 has no MySQL, but the suite sid has. Its server and all libraries that it needs are unpacked into one folder
and run with their own loader, so that nothing is installed and the system's libraries stay as they are.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from notify.testing.reachable import NotAvailable

TESTED_VERSION = "9.7.4"
"""The version that the tests were written against. Debian's sid has only the newest one, which is reported."""
_PACKAGE = "mysql-server-core"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_WITHOUT = ("perl", "libperl", "gcc-")
"""Beginnings of the names of packages that only the client programs need."""
_FETCH_SECONDS = 300.0
"""How long a step of the download, about 50 MB, may take."""


@dataclass(frozen=True, slots=True)
class MySqlPrograms:
    """`mysqld`: the server's command with what it needs to find its files. `version`: as it says, such as 9.7.4.

    `data`: a data directory that is made already, to be copied; None if each server makes its own.
    """

    mysqld: tuple[str, ...]
    version: str
    data: Path | None = None


@cache
def mysql_programs() -> MySqlPrograms:
    """The installed MySQL, else the unpacked one, which is fetched first if need be. Raises NotAvailable."""
    return _installed() or _unpacked()


def _version(mysqld: tuple[str, ...]) -> str:
    """The version of a server's program; empty if it is a MariaDB, or does not run."""
    said = subprocess.run([*mysqld, "--version"], capture_output=True, text=True, check=False).stdout
    _, _, version = said.partition("Ver ")
    return "" if "MariaDB" in said or not version else version.split()[0].partition("-")[0]


def _installed() -> MySqlPrograms | None:
    program = shutil.which("mysqld") or shutil.which("mysqld", path="/usr/sbin")
    if program is None:
        return None
    version = _version((program,))  # Debian's MariaDB installs a link of this name
    return MySqlPrograms((program, "--no-defaults"), version) if version else None


def _unpacked() -> MySqlPrograms:
    """MySQL in a folder of the virtual environment. One process unpacks it, others wait until it is complete."""
    given = os.environ.get("NOTIFY_MYSQL_HOME")
    home = Path(given) if given else Path(sys.prefix) / "mysql"
    if not (home / "data").is_dir():
        _check_possible(given)
        home.parent.mkdir(parents=True, exist_ok=True)
        with home.with_name("mysql.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (home / "data").is_dir():
                made = home.with_name("mysql.new")
                shutil.rmtree(made, ignore_errors=True)
                _fetch(made)
                made.rename(home)
    command = _command(home)
    return MySqlPrograms(command, _version(command), home / "data")


def _command(home: Path) -> tuple[str, ...]:
    libraries = home / "usr/lib/x86_64-linux-gnu"
    return (
        str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(home / "usr/sbin/mysqld"),
        "--no-defaults", f"--basedir={home}/usr", f"--lc-messages-dir={home}/usr/share/mysql",
        f"--plugin-dir={home}/usr/lib/mysql/plugin",
    )  # fmt: skip


def _check_possible(given: str | None) -> None:
    """Raises NotAvailable where Debian's packages cannot be unpacked, or should not."""
    missing = "no MySQL: neither NOTIFY_TEST_MYSQL, nor Docker, nor an installed mysqld, and "
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NotAvailable(f"{missing}it is unpacked on Linux on x86_64 only")
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None or not Path(_KEYRING).exists():
        raise NotAvailable(f"{missing}it is unpacked from Debian's packages on Debian only")
    if not given and sys.prefix == sys.base_prefix:
        raise NotAvailable(
            f"{missing}Python does not run in a virtual environment: name a folder with NOTIFY_MYSQL_HOME"
        )


def _fetch(home: Path) -> None:
    """Unpack the server and its libraries into `home`, and make a data directory. Raises NotAvailable."""
    parts = home / "packages"
    for folder in (parts / "lists/partial", parts / "cache/archives/partial"):
        folder.mkdir(parents=True)
    # The mirror is the one that apt is configured with.
    origins = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]).split()
    mirror = next((origin for origin in origins if "security" not in origin), None)
    if mirror is None:
        raise NotAvailable("no MySQL: apt knows no mirror that has it; run apt-get update")
    (parts / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {mirror} sid main\n")
    options = [
        *("-o", f"Dir::Etc::sourcelist={parts}/sources.list", "-o", "Dir::Etc::sourceparts=-"),
        *("-o", f"Dir::State::Lists={parts}/lists", "-o", f"Dir::Cache={parts}/cache"),
        *("-o", "APT::Sandbox::User=", "-o", "Acquire::Retries=2"),
    ]
    _run(["apt-get", *options, "update", "-qq"])
    left_out = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    needed = _run(
        ["apt-cache", *options, "-o", "Dir::State::status=/dev/null", "depends", "--recurse", *left_out, _PACKAGE]
    )
    names = {line for line in needed.splitlines() if line[:1].islower() and not line.startswith(_WITHOUT)}
    _run(["apt-get", *options, "download", "-qq", *sorted(names)], parts)
    for package in parts.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(home)])
    shutil.rmtree(parts)
    _run(
        [*_command(home), "--initialize-insecure", "--innodb-redo-log-capacity=8M", f"--datadir={home}/new-data"]
        + (["--user=root"] if os.getuid() == 0 else [])
    )
    (home / "new-data" / "auto.cnf").unlink()  # each server makes its own identity
    (home / "new-data").rename(home / "data")


def _run(command: list[str], directory: Path | None = None) -> str:
    """The output of a command. Raises NotAvailable if it fails or takes too long."""
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"no MySQL: {' '.join(command[:2])} … takes more than {_FETCH_SECONDS:g} s") from None
    if done.returncode:
        raise NotAvailable(f"no MySQL: {command[0]} ended with {done.returncode}: {done.stderr[-300:].strip()}")
    return done.stdout


if __name__ == "__main__":
    try:
        found = mysql_programs()
        print(f"MySQL {found.version}" + ("" if found.version == TESTED_VERSION else f" (tested: {TESTED_VERSION})"))
    except NotAvailable as reason:
        print(reason)
