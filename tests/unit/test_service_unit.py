"""The units for systemd: their sections have only keys that systemd reads there, and commands that exist."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from notify.cli.commands import COMMANDS
from notify.runtime import alive
from tests.support.clock import PATIENCE_SECONDS
from tests.support.commands import cli

UNITS = sorted((Path(__file__).parents[2] / "docs" / "systemd").glob("*.service"))
HARDENING = {
    "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "AmbientCapabilities": "", "UMask": "0077",
    "ProtectSystem": "strict", "ProtectHome": "yes", "ProtectProc": "invisible", "ProtectClock": "yes",
    "ProtectHostname": "yes", "ProtectControlGroups": "yes", "ProtectKernelLogs": "yes", "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes", "PrivateUsers": "yes",
    "RemoveIPC": "yes", "LockPersonality": "yes", "RestrictNamespaces": "yes", "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes", "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    "SystemCallArchitectures": "native", "SystemCallFilter": "~@privileged @resources", "DynamicUser": "yes",
}  # fmt: skip
"""The directives that each unit has; `systemd-analyze security` weighs each. A repeated key has its last value."""


def read(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit


def test_there_is_a_unit_for_each_process() -> None:
    assert [path.stem for path in UNITS] == ["notify-bridge", "notify-consumer", "notify-relay", "notify"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_restarts_are_bounded_where_systemd_reads_it(path: Path) -> None:
    """The bound was in [Service], where systemd ignores it: a server without a disk was started again for ever."""
    unit = read(path)
    assert (unit["Unit"]["StartLimitIntervalSec"], unit["Unit"]["StartLimitBurst"]) == ("300", "10")
    assert int(unit["Service"]["RestartSec"]) * 10 < 300
    assert not [key for key in unit["Service"] if key.startswith("StartLimit")]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_gives_its_process_no_more_than_it_needs(path: Path) -> None:
    service = read(path)["Service"]
    assert {key: service.get(key) for key in HARDENING} == HARDENING
    assert not [value for key, value in service.items() if key == "Environment" and "TOKEN=" in value]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_watches_what_gives_signs_of_life(path: Path) -> None:
    """`notify serve`, `bridge` and `relay` say that they are ready and alive; other processes are not asked."""
    service = read(path)["Service"]
    program = service["ExecStart"].split()
    if program[0] == "/opt/notify/bin/notify":
        assert program[1] in COMMANDS
        assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
        assert int(service["WatchdogSec"]) >= 4 * alive.BEAT_SECONDS
    else:
        assert service["Type"] == "exec" and "WatchdogSec" not in service
    assert int(service["TimeoutStopSec"]) >= 60


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_knows_every_key_and_finds_little_exposed(path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (it is in Debian's package systemd)")
    for words in (["verify"], ["security", "--offline=yes", "--threshold=30"]):
        done = subprocess.run(
            [analyze, *words, str(path)], capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False
        )
        assert "Unknown" not in done.stderr and "Failed to parse" not in done.stderr, done.stderr
        assert words[0] == "verify" or done.returncode == 0, done.stdout[-500:]


def test_an_empty_file_of_settings_is_one(tmp_path: Path) -> None:
    (tmp_path / "notify.toml").touch()
    code, told = cli("serve", "--config", str(tmp_path / "notify.toml"), "--port", "99999")
    assert code == 2 and "port" in str(told)
