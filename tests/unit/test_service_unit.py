"""The unit for systemd: its sections have only keys that systemd reads there, and it names flags that exist."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.clock import PATIENCE_SECONDS
from tests.support.commands import cli

UNIT = Path(__file__).parents[2] / "docs" / "notify.service"


def test_restarts_are_bounded_where_systemd_reads_it() -> None:
    """The bound was in [Service], where systemd ignores it: a server without a disk was started again for ever."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    assert (unit["Unit"]["StartLimitIntervalSec"], unit["Unit"]["StartLimitBurst"]) == ("300", "10")
    assert int(unit["Service"]["RestartSec"]) * 10 < 300
    assert not [key for key in unit["Service"] if key.startswith("StartLimit")]
    assert "serve --config" in unit["Service"]["ExecStart"]


def test_systemd_knows_every_key() -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (it is in Debian's package systemd)")
    done = subprocess.run(
        [analyze, "verify", str(UNIT)], capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False
    )
    assert "Unknown" not in done.stderr and "Failed to parse" not in done.stderr, done.stderr


def test_an_empty_file_of_settings_is_one(tmp_path: Path) -> None:
    (tmp_path / "notify.toml").touch()
    code, told = cli("serve", "--config", str(tmp_path / "notify.toml"), "--port", "99999")
    assert code == 2 and "port" in str(told)
