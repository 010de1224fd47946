"""Questions of an operator: which group hurts, since when, why, who sends to it, what a button does, and who did what.

Each is answered on the page where it comes up: the tests count the clicks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import admin, ask, post
from tests.support.transactions import half_request, new_id

TOPIC, GROUP = "order.placed", "points"
TRACEBACK = "Traceback (most recent call last):\n  File \"points.py\", line 41, in account_of\nKeyError: 'app'"
REASON = "KeyError: 'app' (at shop.points.account_of:41)"
LETTERS = 4


class Trouble:
    """A group whose handler fails, sent to by two producer groups; another group that somebody has paused."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        for group in (GROUP, "ledger", "ledger-archive"):
            subscribe(self.url, group, TOPIC)
        for producer in ("checkout", "checkout", "shop-api"):
            self._send(producer)
        publish(self.url, TOPIC, ["without a transaction"])
        admin(self.url, "GET", f"groups/{GROUP}/history")  # its figures begin now, without dead letters
        caller = Caller(self.url, GROUP, "points-1")
        while len(self.letters()) < LETTERS:
            caller.settle(caller.receive(TOPIC, wait=1), "dead_letter", reason=REASON, trace=TRACEBACK)
        self._pause("ledger", "the database of the ledger moves", "mara")
        self._pause("ledger-archive", "nobody needs the archive today", "jon")

    def _send(self, producer: str) -> None:
        name = new_id()
        post(self.url, "/v1/transactions", half_request(producer, name, topic=TOPIC, body='{"channel": "app"}'))
        outcome = {"producer_group": producer, "outcomes": [{"id": name, "outcome": "COMMIT"}]}
        post(self.url, "/v1/transactions/outcomes", outcome)

    def _pause(self, group: str, reason: str, who: str) -> None:
        pause = f"/v1/admin/groups/{group}/pause"
        assert ask(self.url, "POST", pause, {"reason": reason}, headers={"x-notify-user": who})[0] == 200

    def letters(self) -> list[Any]:
        messages: list[Any] = admin(self.url, "GET", f"groups/{GROUP}/dead-letters")["messages"]
        return messages


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trouble]:
    environment = {"NOTIFY_ALARM_EVERY_SECONDS": "0.2"}
    process = ServerProcess(tmp_path_factory.mktemp("operator") / "data", environment=environment).start()
    yield Trouble(process)
    process.stop()


def test_a_group_that_fails_is_called_so_and_its_page_says_why_and_since_when(trouble: Trouble, window: Any) -> None:
    eventually(
        lambda: any(row["name"] == "dead_letters" for row in admin(trouble.url, "GET", "alarms")["alarms"]),
        "the alarm",
    )
    w = window(trouble.url)
    w.go("/")
    assert w.page.inner_text("tr[data-key=points] .state-word") == "failing"
    w.press("tr[data-key=points] td:first-child a")
    said = w.text()
    assert "KeyError in shop.points.account_of" in said and REASON in said
    assert w.page.locator("main p:has-text('Reads') a").all_inner_texts() == [TOPIC]
    assert f"Group points has {LETTERS} unresolved dead letters" in said
    assert w.page.locator("#charts h3").all_inner_texts()[3] == "Unresolved dead letters"
    w.press("a:text('KeyError in shop.points.account_of')")
    assert TRACEBACK in w.page.inner_text("pre") and f"{LETTERS} of {LETTERS} dead letters wait" in w.text()
    assert w.wrong == []


def test_a_topic_says_who_sends_to_it(trouble: Trouble, window: Any) -> None:
    w = window(trouble.url)
    w.go(f"/topics/{TOPIC}")
    rows = w.page.locator("h2:text-is('Producers') ~ .scroll").first.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[:2] for row in rows] == [
        ["checkout", "2"],
        ["shop-api", "1"],
        ["none known", "1"],
    ]
    assert w.page.locator("#actions").count() == 0, "nobody has changed it"
    put = f"/v1/admin/topics/{TOPIC}"
    assert ask(trouble.url, "PUT", put, {"reason": "a month of orders"}, headers={"x-notify-user": "mara"})[0] == 200
    w.go(f"/topics/{TOPIC}")
    assert "mara\ttopic.put\ta month of orders" in w.page.locator("#actions + .scroll tbody").inner_text()
    answer = admin(trouble.url, "GET", f"topics/{TOPIC}/senders")
    assert answer["looked_at"] == 4 and [row["is_online"] for row in answer["senders"]] == [False, False, None]
    assert answer["first_at"] <= min(row["newest_at"] for row in answer["senders"])


@pytest.mark.long
def test_a_form_says_what_it_will_do_before_a_reason_is_given(trouble: Trouble, window: Any) -> None:
    w = window(trouble.url)
    w.go(f"/groups/{GROUP}/dead-letters")
    w.press("a:text-is('send all again')")
    effect = w.page.get_by_role("region", name="What this will do")
    assert f"has {LETTERS} messages waiting" in effect.inner_text()
    assert not w.page.locator("button:text-is('Do it')").count()
    w.page.fill("#f-reason", "version 2 knows the channel app")
    w.press("button:text-is('Preview')")
    assert w.page.locator("#preview").is_visible() and w.page.locator("button:text-is('Do it')").is_visible()
    w.go("/do/dead-letters.redrive-all")
    assert "What this will do" not in w.text()  # of no group


@pytest.mark.long
def test_forms_begin_with_what_is_known(trouble: Trouble, window: Any) -> None:
    """Silencing asked for hours before it said anything, and a reset for the only topic of the group."""
    eventually(lambda: admin(trouble.url, "GET", "alarms")["alarms"], "the alarm")
    w = window(trouble.url)
    w.go("/")
    w.press("#alarms a:text-is('silence')")
    assert "is silent until" in w.page.get_by_role("region", name="What this will do").inner_text()
    w.go(f"/groups/{GROUP}")
    w.press("a:text-is('Reset the position')")
    assert w.page.input_value("input[name=topic]") == TOPIC


@pytest.mark.long
def test_a_paused_group_says_who_paused_it_and_why(trouble: Trouble, window: Any) -> None:
    w = window(trouble.url)
    w.go("/groups/ledger")
    note = w.page.inner_text("#live .note")
    assert note.startswith("Paused by mara") and "the database of the ledger moves" in note
    assert w.text().count("aused") == 1 and "archive" not in w.text()
    assert "mara\tgroup.pause" in w.page.locator("#actions + .scroll tbody").inner_text()
    w.press("a:text-is('All in the audit log')")
    assert "archive" in w.text()  # whose name begins like that of the group


@pytest.mark.long
def test_a_message_shows_first_the_group_that_gave_it_up(trouble: Trouble, window: Any) -> None:
    w = window(trouble.url)
    w.go(f"/messages/{trouble.letters()[0]['id']}")
    first = w.page.locator("h2:text-is('State in each group') + .scroll tbody tr").first
    assert first.locator("td").nth(0).inner_text() == GROUP
    assert first.locator("td").nth(2).inner_text() == "1"


@pytest.mark.long
def test_many_alarms_of_a_kind_leave_the_groups_in_sight(tmp_path: Path, window: Any) -> None:
    """An outage of all consumers: its 30 alarms filled the first window, and three on a phone."""
    environment = {"NOTIFY_ALARM_EVERY_SECONDS": "0.2", "NOTIFY_ALARM_NO_CONSUMER_SECONDS": "0.1"}
    server = ServerProcess(tmp_path / "data", environment=environment).start()
    try:
        groups = [f"recommendations-for-customers-{n:02d}" for n in range(30)]
        for group in groups:
            subscribe(server.url, group, TOPIC)
        publish(server.url, TOPIC, ["x"])
        eventually(lambda: len(admin(server.url, "GET", "alarms")["alarms"]) == len(groups), "the alarms")
        for width in (1280, 390):
            w = window(server.url, width=width)
            w.go("/")
            shown = w.page.locator("#alarms dt:visible")
            assert w.page.inner_text("#alarm-count") == "30 alarms" and shown.count() == 3
            assert w.page.locator("h2:text-is('Groups')").bounding_box()["y"] < 860
            w.page.click("summary:text-is('27 more alarms: no consumers')")
            w.page.evaluate("() => window.notifyRefresh()")
            assert shown.count() == len(groups) and w.wrong == []
    finally:
        server.stop()


@pytest.mark.long
def test_an_alarm_that_is_a_warning_is_not_red(trouble: Trouble, window: Any) -> None:
    eventually(lambda: admin(trouble.url, "GET", "alarms")["alarms"], "the alarm")
    w = window(trouble.url)
    w.go(f"/groups/{GROUP}")
    assert w.page.inner_text("#alarms dt span") == "warning"
    colours = "e => [getComputedStyle(e).borderTopColor, getComputedStyle(e.querySelector('b')).color]"
    warning = w.page.locator("#alarms dt span").first.evaluate("e => getComputedStyle(e).color")
    assert w.page.locator("#alarms").evaluate(colours) == [warning, warning]
