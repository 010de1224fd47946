"""A partition's window: order per key, waits, and the progress that a commit holds."""

from __future__ import annotations

import random

import pytest

from notify.client.kafka import partitions, retries
from notify.client.kafka.window import Item, Window
from notify.kafka.progress import MOST_BEGUN, MOST_FAILED, MOST_SPAN, Progress
from notify.runtime.clock import SteadyClock

BIG = 1 << 30


def window(
    progress: Progress | None = None, *, in_order: bool = False, most: int = 100, most_bytes: int = BIG
) -> Window:
    return Window(progress or Progress(0, left=True), in_order=in_order, most=most, most_bytes=most_bytes)


def filled(keys: str, *, in_order: bool = False, progress: Progress | None = None) -> Window:
    """A window with a record for each letter, which is its key."""
    w = window(progress, in_order=in_order)
    for offset, key in enumerate(keys):
        w.add(Item(offset, key.encode(), 1, None))
    return w


def take(w: Window) -> Item | None:
    return next(iter(w.take(1)), None)


def taken(w: Window) -> list[Item]:
    items = []
    w.noted(w.note(MOST_BEGUN))
    while (item := take(w)) is not None:
        items.append(item)
    return items


def test_the_position_is_the_first_that_is_not_done() -> None:
    w = filled("abcd")
    a, b, c, _ = taken(w)
    w.finish(b)
    w.finish(c)
    assert w.progress() == Progress(0, frozenset({1, 2}))
    w.finish(a)
    assert w.progress() == Progress(3)


def test_after_a_kill_only_the_slow_one_comes_again() -> None:
    w = filled("abcd")
    items = taken(w)
    for item in items[1:]:
        w.finish(item)
    committed = w.progress()
    again = filled("abcd", progress=Progress.of(committed.offset, committed.metadata()))
    assert [item.offset for item in taken(again)] == [0]


def test_attempts_survive_a_kill() -> None:
    w = filled("ab")
    a, b = taken(w)
    w.finish(a)
    w.fail(b, due_us=5)
    w.wake(5)
    assert [item.attempt for item in taken(w)] == [2]
    w.fail(b, due_us=9)
    committed = w.progress()
    again = filled("ab", progress=Progress.of(committed.offset, committed.metadata()))
    assert [(item.offset, item.attempt) for item in taken(again)] == [(1, 3)]


def test_an_item_that_may_not_leave_fails_alone() -> None:
    w = filled("abc")
    a, b, _ = taken(w)
    w.leave(a)
    w.finish(b)
    assert w.progress() == Progress(0, frozenset({1})) and w.progress([0]) == Progress(2)
    assert w.progress(stays=True) == Progress(0, frozenset({1}), {0: 1})


def test_an_attempt_that_killed_its_process_counts() -> None:
    w = filled("ab", progress=Progress(0))  # whoever had it died
    assert take(w) is None and w.has_to_note
    items = w.note(1)
    assert [item.offset for item in items] == [0] and take(w) is None, "its commit is not made yet"
    committed = w.progress()
    w.noted(items)
    assert take(w) is items[0] and take(w) is None
    again = filled("ab", progress=Progress.of(committed.offset, committed.metadata()))
    assert again.has_orphan_to_note and not again.tries_orphan
    assert [(item.attempt, item.is_orphan) for item in taken(again)] == [(2, True), (1, False)]
    assert again.tries_orphan and again.tries == 2


def test_a_partition_that_is_left_in_peace_has_nothing_to_note() -> None:
    w = filled("ab", progress=Progress(0))
    first = w.note(1)
    w.noted(first)
    item = take(w)
    assert item is not None
    w.stop()
    assert not w.progress().left and w.progress().begun == {0}
    w.finish(item)
    left = w.progress()
    assert left == Progress(1, left=True)
    again = filled("ab", progress=Progress.of(left.offset, left.metadata()))
    assert not again.has_to_note and [item.attempt for item in taken(again)] == [1]


def test_items_that_did_not_begin_count_no_attempt_at_a_stop() -> None:
    w = filled("ab", progress=Progress(0))
    w.noted(w.note(2))
    w.stop()
    assert w.progress() == Progress(0, left=True)


def test_a_failed_one_blocks_its_key_and_no_other() -> None:
    w = filled("aab", in_order=True)
    first, other = taken(w)
    assert (first.offset, other.offset) == (0, 2)
    w.fail(first, due_us=7)
    w.finish(other)
    assert taken(w) == [] and w.next_due_us == 7
    w.wake(6)
    assert taken(w) == []
    w.wake(7)
    assert [item.offset for item in taken(w)] == [0]
    w.finish(first)
    assert [item.offset for item in taken(w)] == [1]


def test_a_key_waits_until_its_dead_letter_has_arrived() -> None:
    w = filled("aa", in_order=True)
    (first,) = taken(w)
    w.leave(first)
    assert w.progress() == Progress(0) and w.progress([0]) == Progress(1) and taken(w) == []
    w.finish(first)
    assert [item.offset for item in taken(w)] == [1]


def test_a_record_that_comes_twice_counts_once() -> None:
    w = filled("a")
    assert not w.add(Item(0, b"a", 1, None))
    assert len(taken(w)) == 1


def test_it_is_full_by_count_bytes_span_and_failures() -> None:
    w = window(most=2)
    w.add(Item(0, None, 1, None))
    assert not w.is_full
    w.add(Item(1, None, 1, None))
    assert w.is_full and not w.has_room
    by_bytes = window(most_bytes=10)
    by_bytes.add(Item(0, None, 10, None))
    assert by_bytes.is_full
    by_span = window()
    by_span.add(Item(0, None, 1, None))
    by_span.add(Item(MOST_SPAN, None, 1, None))
    assert by_span.is_full
    first = take(by_span)
    assert first is not None and take(by_span) is None, "its progress would not fit into a commit"
    by_span.finish(first)
    assert take(by_span) is not None
    by_failures = window(most=1000)
    for offset in range(MOST_FAILED):
        by_failures.add(Item(offset, None, 1, None))
    for item in taken(by_failures):
        by_failures.fail(item, 1)
    assert by_failures.is_full


@pytest.mark.parametrize("is_begun", [False, True])
def test_failures_that_are_not_fetched_yet_do_not_fill_it(is_begun: bool) -> None:
    """Where a process ended while as many records failed as a window may have, its successor fetched nothing, and the
    group stood still for good: the failures of its progress alone had filled the window."""
    count = MOST_BEGUN if is_begun else MOST_FAILED
    offsets = range(10, 10 + 2 * MOST_FAILED, 2)[:count]
    progress = Progress(
        10, failed={} if is_begun else dict.fromkeys(offsets, 1), begun=frozenset(offsets if is_begun else ())
    )
    w = window(Progress.of(progress.offset, progress.metadata()), most=1000)
    assert not w.is_full and w.has_room
    for offset in range(10, 10 + 2 * MOST_FAILED):
        w.add(Item(offset, None, 1, None))
    assert w.is_full is not is_begun, "they have failed, whoever fetched them"
    assert w.progress().failed == dict.fromkeys(offsets, 1)
    while items := taken(w):
        for item in items:
            assert item.attempt == (2 if item.offset in offsets else 1)
            w.finish(item)
    assert not w.is_full and w.has_room and w.progress().offset == 10 + 2 * MOST_FAILED


def test_failures_of_records_that_are_gone_do_not_fill_it() -> None:
    """Retention deleted them before they were tried again: nobody will finish them."""
    w = window(Progress(0, failed=dict.fromkeys(range(MOST_FAILED), 1), left=True))
    w.add(Item(1000, None, 1, None))
    assert not w.is_full
    (item,) = taken(w)
    w.finish(item)
    assert w.has_room and w.progress() == Progress(1001)


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_with_kills(seed: int) -> None:
    """Records of a few keys come, fail, leave, are done; the process is killed between. The model is a list.

    After a kill each attempt is noted by a commit before it begins, and counts if the next kill comes before its end.
    """
    chance = random.Random(seed)
    in_order = bool(seed % 2)
    offsets = sorted(chance.sample(range(400), 120))  # compacted topics and transactions leave gaps
    keys = {offset: chance.choice([b"a", b"b", b"c", None]) for offset in offsets}
    finished: dict[int, int] = {}
    """How often each was finished and committed."""
    attempts: dict[int, int] = {}
    committed = Progress(0)
    w, fetched, now, held, uncommitted = window(in_order=in_order), 0, 0, [], set()  # type: ignore[var-annotated]
    for _ in range(20_000):
        action = chance.choice(
            ("fetch", "take", "take", "finish", "finish", "fail", "leave", "wake", "commit", "kill", "note")
        )
        if action == "fetch" and fetched < len(offsets) and not w.is_full:
            w.add(Item(offsets[fetched], keys[offsets[fetched]], 1, None))
            fetched += 1
        elif action == "take" and (item := take(w)) is not None:
            assert item.offset not in finished, "a record that was committed as done came again"
            assert item.attempt == attempts.get(item.offset, 0) + 1
            if in_order and item.key is not None:
                earlier = [o for o in offsets if o < item.offset and keys[o] == item.key]
                assert all(o in finished or o in uncommitted for o in earlier), "it overtook one of its key"
                assert all(other.key != item.key for other in held)
            held.append(item)
        elif action in ("finish", "fail", "leave") and held:
            item = held.pop(chance.randrange(len(held)))
            if action == "fail" and chance.random() < 0.5:
                w.fail(item, now + chance.randrange(3))
                attempts[item.offset] = item.attempt - 1
            else:
                if action == "leave":
                    w.leave(item)
                w.finish(item)
                uncommitted.add(item.offset)
        elif action == "wake":
            now += 1
            w.wake(now)
        elif action in ("commit", "note") or (action == "kill" and chance.random() < 0.03):
            noted = w.note(chance.randrange(5)) if action == "note" else []
            committed = Progress.of(w.progress().offset, w.progress().metadata())
            for offset in uncommitted:
                finished[offset] = finished.get(offset, 0) + 1
            uncommitted.clear()
            w.noted(noted)
            if action == "kill":
                w, held = window(committed, in_order=in_order), []
                attempts = {o: committed.failed.get(o, 0) + (o in committed.begun) for o in offsets}
                fetched = next((n for n, o in enumerate(offsets) if o >= committed.offset), len(offsets))
        if len(finished) == len(offsets):
            break
    assert finished == dict.fromkeys(offsets, 1)
    for offset in offsets[fetched:]:  # killed in that moment, it knows these as done
        w.add(Item(offset, keys[offset], 1, None))
    assert w.progress() == Progress(offsets[-1] + 1)


def test_a_failed_item_is_retried_after_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key stood still for as long as the clock was behind."""
    wall_us, steady_us = 1_800_000_000_000_000, 0
    clock = SteadyClock(lambda: wall_us, lambda: 1000 * steady_us)
    for module in (partitions, retries):
        monkeypatch.setattr(module, "steady_clock", clock)
    kept = partitions.Partitions(10)
    w = kept.open(("t", 0), Progress(0, left=True), in_order=True)
    kept.add(w, [Item(0, b"a", 1, None)])
    kept.look(w)
    taken = kept.take(1)
    ((_, (item,)),) = taken
    w.fail(item, retries.due_after(10))
    kept.look(w)
    wall_us -= 7_200_000_000
    assert kept.take(1) == []
    wall_us, steady_us = wall_us + 21_000_000, 21_000_000
    assert kept.take(1) == taken


def test_an_attempt_that_was_noted_and_did_not_begin_is_noted_again() -> None:
    """If it were ready, and then killed its process, nothing would say that it had begun."""
    w = filled("a", progress=Progress(0))
    items = w.note(10)
    w.noted(items)
    (item,) = w.take(1)
    w.put_back(item)
    assert not w.take(1) and not w.progress().begun
    assert w.note(10) == [item] and w.progress().begun == {0}


def test_partitions_share_the_room() -> None:
    kept = partitions.Partitions(100)
    windows = [kept.open(("t", n), Progress(0, left=True), in_order=False) for n in range(3)]
    for w in windows:
        for offset in range(10):
            kept.add(w, [Item(offset, None, 1, None)])
        kept.look(w)
    shares = [[(windows.index(w), len(items)) for w, items in kept.take(room)] for room in (12, 14, 30)]
    assert shares == [[(0, 4), (1, 4), (2, 4)], [(0, 5), (1, 5), (2, 4)], [(0, 1), (1, 1), (2, 2)]]
