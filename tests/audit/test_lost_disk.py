"""One round of `make crash-disk`: the disk of a server that ships its log is lost, restored, audited and repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.crash.disk import LostDisks


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_lost_disk_is_restored_audited_and_repaired(spark: Any, tmp_path: Path) -> None:
    disks = LostDisks(spark, tmp_path, seed=1, say=print)
    with disks.at_work():
        disks.round(1)
    assert disks.complaints == []
