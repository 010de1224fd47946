"""`make crash-disk`: the disk of a server that ships its log is lost under load, and the log restored from the store.

In each round the process is killed and its data directory deleted while producers, two groups with inboxes and a reader
with offsets of its own are at work, and while the store is unreachable now and then. The log is restored; everyone goes
on. An audit must name exactly the messages that the restored log lacks, a repair mends them, and a second audit passes.
At the end each group did its work once for each order, and the reader has each message of the queue under its own
offset.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from notify.errors import ObjectStoreFailed
from notify.object_store.store import Store
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge.findings import BAD
from notify.spark.repair.carrying_out import Repair
from notify.spark.repair.planning import plan_of
from notify.spark.result import Inputs, Result
from notify.storage.shipped import manifest
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, wait_until_closed
from tests.crash.lost_disk import GROUPS, Failing, LostDiskShop
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import lag
from tests.support.http import admin
from tests.support.verdict import command_line, concluded, judged

LONGEST_SECONDS = 120.0
"""The longest time of a step, on the slowest machine."""
SHIP_EVERY_SECONDS = 1.0
UNDER_LOAD_SECONDS = (0.2, 1.5)
"""How long the load continues behind the last shipped segment, at least and at most, until the disk is lost."""


def published_again(message_id: str) -> str:
    """The id under which a repair publishes a message again."""
    transaction, number = ids.parse_message_id(message_id)
    return ids.message_id(ids.derived(transaction, ids.republished(number)), 0)


class LostDisks:
    """One shop whose server loses its disk in each round. Use it as a context."""

    def __init__(self, spark: Any, place: Path, seed: int, say: Callable[[str], None]) -> None:
        """`spark`: an audit's session; `place`: an empty directory."""
        self._spark = spark
        self._place = place
        self._chance = Random(seed)
        self._say = say
        self.store = Failing(place, self._chance)
        environment = {"NOTIFY_SHIP_TO": self.store.url, "NOTIFY_SHIP_EVERY": str(SHIP_EVERY_SECONDS)}
        self.server = ServerProcess(place / "data", environment=environment)
        self.complaints: list[str] = []
        self.lost = self.repaired = self.refused = 0

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Have a server and its consumers at work."""
        self.server.start(LONGEST_SECONDS)
        self.shop = LostDiskShop(f"sqlite:///{self._place}/shop.db", self.server.url)
        try:
            with self.store.failing(), self.shop.consuming():
                yield
        finally:
            self.shop.close()
            self.server.stop()

    def round(self, number: int) -> None:
        """Lose the disk once, restore it, audit and repair."""
        shop = self.shop
        with shop.ordering():
            shipped = self._shipped()
            eventually(lambda: self._shipped() >= shipped + 2, "two more segments in the store", LONGEST_SECONDS)
            time.sleep(self._chance.uniform(*UNDER_LOAD_SECONDS))  # at work meanwhile: how much is lost, is chance
            self.server.kill()
            shutil.rmtree(self.server.data_dir)
            told = self._restored()
            self.server.start(LONGEST_SECONDS)
            time.sleep(self._chance.uniform(0.2, 1.0))  # at work
        self._settled()
        queued = shop.queued()
        # A message that an earlier round published again, under another id, may be lost again.
        missing = {name for name in shop.committed() - queued.keys() if published_again(name) not in queued}
        with self._inputs() as inputs:
            first = self._audited(inputs, f"round {number}, first audit", missing)
            mended = self._repair(inputs, number, first)
        self._settled()
        with self._inputs() as inputs:
            second = self._audited(inputs, f"round {number}, second audit", set())
        self.lost += len(missing)
        self.repaired += mended
        queued = shop.queued()
        eventually(lambda: shop.copied_to() >= max(queued.values()), "the reader to catch up", LONGEST_SECONDS)
        wrong = shop.wrong_effects() + shop.wrongly_copied(queued) + shop.complaints
        self.complaints += [f"round {number}: {complaint}" for complaint in wrong[:10]]
        self._say(
            f"round {number}: generation {told['generation']} of {told['segments']} segments, {told['messages']:,} "
            f"messages; {len(missing)} lost, {mended} repaired; {first.verdict}, then {second.verdict}; "
            f"{len(shop.committed()):,} orders, {len(self.complaints)} complaints so far"
        )

    # --- steps ------------------------------------------------------------------------------------------------

    def _shipped(self) -> int:
        """How many segments the store lists; 0 while it is unreachable."""
        with contextlib.suppress(ObjectStoreFailed):
            listed = manifest.load(Store(self.store.url, tries=1))
            return 0 if listed is None else listed.count
        return 0

    def _restored(self) -> dict[str, Any]:
        """Restore, again and again while the store is unreachable."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            code, told = cli(
                "restore", "--from", self.store.url, "--data-dir", str(self.server.data_dir), "--json"
            )  # fmt: skip
            if code == 0:
                if told["damages"] or told["complaints"]:
                    self.complaints.append(f"the restore complained: {told['damages']} {told['complaints']}")
                return told
            self.refused += 1
            assert self.store.url in told["text"] and time.monotonic() < deadline, told

    def _settled(self) -> None:
        """Wait until no transaction is in doubt, and every group has settled everything."""
        url = self.server.url

        def is_decided() -> bool:
            return not any(admin(url, "GET", f"transactions?state={s}")["transactions"] for s in ("PREPARED", "PARKED"))

        eventually(is_decided, "the outcome of every half", LONGEST_SECONDS)
        for group in GROUPS:
            eventually(lambda group=group: lag(url, group) == 0, f"group {group} to settle", LONGEST_SECONDS)  # type: ignore[misc]

    @contextlib.contextmanager
    def _inputs(self) -> Iterator[Inputs]:
        with contextlib.closing(Database(self.shop.url, "shop")) as database:
            yield Inputs([database], [LogInput(self.server.data_dir)])

    def _audited(self, inputs: Inputs, name: str, lost: set[str]) -> Result:
        """Audit; a complaint for whatever is not exactly these lost messages."""
        wait_until_closed(inputs.databases[0], AT_ONCE)
        result = Audit(self._spark, AT_ONCE, inputs, self._place / "scratch").run()
        found = {f.message_id for f in result.found if f.finding == "LOST" and not f.evidence.get("repaired")}
        bad = {finding: result.counts[finding] for finding in BAD if result.counts.get(finding)}
        others = {finding: count for finding, count in bad.items() if finding != "LOST"}
        if found != lost or others or result.reasons:
            wrong = f"{len(found - lost)} wrongly LOST, {len(lost - found)} not found"
            self.complaints.append(f"{name}: {wrong}, {others}, {result.reasons[:3]}")
        return result

    def _repair(self, inputs: Inputs, number: int, result: Result) -> int:
        """Repair what the audit found; how many messages were published again."""
        path = self._place / f"plan-{number}.json"
        plan = plan_of(result, inputs)
        plan.write(path)
        if plan.held_back or plan.doubts:
            self.complaints.append(f"round {number}: held back: {plan.held_back[:3]} {plan.doubts[:3]}")
        repair = Repair(inputs, self.server.url, "the disk was lost", self._place / "scratch")
        rows = asyncio.run(repair.run(plan, path))
        left = [row for row in rows if row["status"] not in (200, 201)]
        if left:
            self.complaints.append(f"round {number}: {len(left)} repairs failed: {left[:2]}")
        return len(rows) - len(left)


def main() -> int:
    said = command_line(__doc__, rounds=20, seed=None)
    logging.getLogger("notify").setLevel(logging.CRITICAL)  # consumers say that the server is unreachable, as it is
    from notify.spark.session import open_session

    spark = open_session(memory="2g", small=True)
    place = Path(tempfile.mkdtemp(prefix="notify-lost-disk-"))
    try:
        disks = LostDisks(spark, place, said.seed, lambda text: print(text, flush=True))
        with disks.at_work():
            for number in range(1, said.rounds + 1):
                disks.round(number)
    finally:
        spark.stop()
        shutil.rmtree(place, ignore_errors=True)
    return concluded(
        disks.complaints,
        f"{said.rounds} disks lost, {disks.lost:,} messages lost, {disks.repaired:,} repaired, the store away "
        f"{disks.store.times} times ({disks.refused} restores repeated), {len(disks.complaints)} unexplained",
    )


if __name__ == "__main__":
    sys.exit(judged(main))
