"""The campaign `make audit-watch` accuses a watch of what it does wrong, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.audit.faulty_shop import Fault
from tests.audit.watch_of_small_files import KEPT_FILES
from tests.audit.watching import WINDOW_SECONDS, Campaign, Sample

WINDOWS = 30


def finding(key: str) -> dict[str, Any]:
    return {"kind": "finding", "key": key, "window_us": 0}


class Seen:
    """Everything that a campaign of a sound watch has seen."""

    def __init__(self) -> None:
        keys = [f"LOST:m{n}.0:" for n in range(WINDOWS)]
        self.written = [finding(key) for key in keys]
        self.taken = [finding(key) for key in keys]
        detail = "database bank: half_message is gone"
        self.taken += [{"kind": "inconclusive", "key": f"INCONCLUSIVE:{n}", "detail": detail} for n in range(2)]
        windows = range(0, WINDOWS * WINDOW_SECONDS * 1_000_000, WINDOW_SECONDS * 1_000_000)
        self.printed = [{"kind": "window", "window_us": at_us} for at_us in windows]
        self.samples = [Sample(100.0, 900.0, {"state": 10_000, "copies": 1, "Spark": 1}) for _ in range(20)]
        self.planted = [Fault("LOST", f"m{n}.0") for n in range(WINDOWS)]
        self.renamed = KEPT_FILES + 1

    def complaints(self) -> list[str]:
        receiver: Any = SimpleNamespace(
            taken=self.taken, names=[f"name of {body['key']}" for body in self.taken], swallowed=0,
            alarm_keys=lambda: [body["key"] for body in self.taken],
        )  # fmt: skip
        watch: Any = SimpleNamespace(all_lines=lambda: self.written, lines=self.printed, renamed=self.renamed)
        shop: Any = SimpleNamespace(planted=self.planted)
        unused: Any = None
        run = Campaign(watch, shop, unused, unused, receiver, samples=self.samples, episodes=2)
        run.judge()
        return run.complaints


def test_a_sound_watch_is_accused_of_nothing() -> None:
    assert Seen().complaints() == []


def repeat_a_line(seen: Seen) -> None:
    seen.written.append(seen.written[0])


def repeat_an_alarm(seen: Seen) -> None:
    seen.taken.append(seen.taken[0])


def change_a_repeated_alarm(seen: Seen) -> None:
    seen.taken.append(seen.taken[0] | {"window_us": 1})


def lose_an_alarm(seen: Seen) -> None:
    del seen.taken[3]


def lose_a_line(seen: Seen) -> None:
    del seen.written[3]


def make_one_up(seen: Seen) -> None:
    seen.written.append(finding("GHOST:x.0:"))
    seen.taken.append(finding("GHOST:x.0:"))


def miss_an_episode(seen: Seen) -> None:
    seen.taken.pop()


def name_another_reason(seen: Seen) -> None:
    seen.taken[-1]["detail"] = "a segment is missing"


def leave_out_windows(seen: Seen) -> None:
    del seen.printed[5:8]


def grow(seen: Seen) -> None:
    seen.samples[-10:] = [Sample(100.0, 2000.0, {"state": 10_000, "copies": 1, "Spark": 1}) for _ in range(10)]


def fill_the_disk(seen: Seen) -> None:
    seen.samples[-10:] = [Sample(100.0, 900.0, {"state": 10_000, "copies": 1, "Spark": 1 << 30}) for _ in range(10)]


def rename_nothing(seen: Seen) -> None:
    seen.renamed = 0


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (repeat_a_line, "said again"),
        (repeat_an_alarm, "alarms were repeated"),
        (change_a_repeated_alarm, "with another body"),
        (lose_an_alarm, "not alarmed"),
        (lose_a_line, "said and alarmed differ"),
        (make_one_up, "findings that nobody planted"),
        (miss_an_episode, "tables were unreachable"),
        (name_another_reason, "reasons"),
        (leave_out_windows, "windows were left out"),
        (grow, "whole_mb has grown"),
        (fill_the_disk, "Spark on disk has grown"),
        (rename_nothing, "files of lines were renamed"),
    ],
)
def test_the_campaign_reports_planted_faults_of_a_watch(harm: Callable[[Seen], None], complaint: str) -> None:
    seen = Seen()
    harm(seen)
    assert any(complaint in text for text in seen.complaints())
