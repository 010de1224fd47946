"""The console in a real browser: every page, every write, signing in, phones, keyboard, and pages of other sites."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from notify.admin_api.writes import FORMS
from notify.server.database import open_database
from notify.server.jobs.records import JobRecords
from notify.testing.process import ServerProcess
from tests.browser.window import CUT_HEADINGS
from tests.support.answering import answering, reply
from tests.support.databases import empty_database
from tests.support.http import ask, call
from tests.support.servers import Guarded, three_servers, until_all
from tests.support.transactions import half_request, new_id

WHY = {"reason": "set up"}


class Shop:
    """A server with data for every page."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.url = server.url
        for topic in ("order.placed", "order.paid", "old"):
            self.call("PUT", f"/v1/admin/topics/{topic}", WHY)
        for group in ("points", "mail"):
            self.call("PUT", f"/v1/admin/groups/{group}/subscriptions/order.placed", WHY | {"max_attempts": 1})
        body = json.dumps({"order": 7, "item": "<script>alert(1)</script>"})
        messages = [{"topic": "order.placed", "key": str(n), "tag": "vip", "body": body} for n in range(30)]
        self.message = self.call("POST", "/v1/messages", {"messages": messages})["items"][0]["id"]
        self.transactions = [self.half() for _ in range(4)]
        self.kill(6)
        got = self.receive("mail", 1)
        self.call("POST", "/v1/groups/mail/settle", {"items": [{"receipt": got[0]["receipt"], "action": "ack"}]})
        self.hold("a", "b", "c")
        self.schedule = "daily-report"
        daily = {"topic": "order.paid", "body": body, "cron": "0 7 * * 1-5", "zone": "Europe/Berlin"}
        self.call("PUT", f"/v1/admin/schedules/{self.schedule}", WHY | daily)
        self.call("POST", "/v1/admin/audits", WHY | {
            "verdict": "FINDINGS", "counts": {"LOST": 2, "GHOST": 0}, "since": "2026-11-01T00:00:00Z",
            "report": "<h1>a report</h1><script>window.ran = 1</script>"})  # fmt: skip

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return call(self.url, method, path, body)

    def half(self) -> str:
        name = new_id()
        self.call("POST", "/v1/transactions", half_request("orders", name, topic="order.paid", body="1"))
        return name

    def receive(self, group: str, count: int) -> list[dict[str, Any]]:
        asked = {"instance": group + "-1", "topics": ["order.placed"], "wait": 2, "max": count, "lease": 60}
        messages: list[dict[str, Any]] = self.call("POST", f"/v1/groups/{group}/receive", asked)["messages"]
        return messages

    def kill(self, count: int) -> None:
        items = [
            {"receipt": m["receipt"], "action": "dead_letter", "reason": "no such customer"}
            for m in self.receive("points", count)
        ]
        self.call("POST", "/v1/groups/points/settle", {"items": items})

    def hold(self, *keys: str) -> None:
        """Have the group ledger hold these keys."""
        hold = WHY | {"mode": "ordered", "start": "earliest", "max_attempts": 1, "on_exhausted": "hold"}
        self.call("PUT", "/v1/admin/groups/ledger/subscriptions/booking", hold)
        messages = [{"topic": "booking", "body": "1", "key": key} for key in keys]
        self.call("POST", "/v1/messages", {"messages": messages})
        asked = {"instance": "ledger-1", "topics": ["booking"], "wait": 2, "max": 10, "lease": 60}
        received = self.call("POST", "/v1/groups/ledger/receive", asked)["messages"]
        items = [{"receipt": m["receipt"], "action": "retry", "reason": "no such account"} for m in received]
        self.call("POST", "/v1/groups/ledger/settle", {"items": items})

    def held(self) -> list[str]:
        """The keys that the group ledger holds."""
        return sorted(row["key"] for row in self.call("GET", "/v1/admin/groups/ledger/held-keys")["held"])

    def dead(self) -> list[str]:
        messages = self.call("GET", "/v1/admin/groups/points/dead-letters")["messages"]
        return [m["id"] for m in messages if not (m["redriven"] or m["dropped"])]

    def unended_job(self) -> int:
        """Record a job that the server shows as running and that does not end by itself."""
        database = open_database(str(self.server.data_dir))
        try:
            return JobRecords(database).add_job("redrive", "points", {"from": 0, "until": 0}, 0, 0)
        finally:
            database.dispose()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    process = ServerProcess(
        tmp_path_factory.mktemp("console") / "data",
        environment={"NOTIFY_WEBHOOK_HOSTS": "127.0.0.1:9", "NOTIFY_WEBHOOK_SECRET": "a secret of the tests"},
    ).start()
    yield Shop(process)
    process.stop()


def pages(shop: Shop) -> list[str]:
    return [
        "/", "/transactions", f"/transactions/{shop.transactions[0]}", "/messages", "/messages?key=7",
        "/messages?topic=order.placed", f"/messages/{shop.message}", "/topics", "/topics?sort=kept",
        "/topics/order.placed", "/?sort=lag", "/groups", "/groups?sort=pain",
        "/groups/points", "/groups/points/dead-letters", "/groups/ledger/held-keys", "/dead-letters",
        "/schedules", f"/schedules/{shop.schedule}", "/nodes", "/audits",
        "/jobs", "/settings", "/access", "/actions", "/login",
        *[f"/do/{n}" for n in FORMS if n != "settings.put"],
    ]  # fmt: skip


PHONE = {"width": 390, "height": 860}
DESK = {"width": 1280, "height": 860}
WALL = {"width": 1920, "height": 1080}


OUT_OF_CELL = """() => innerWidth > 768 ? [] :
  [...document.querySelectorAll("table.cards tbody td:not([data-l='']) > *")]
    .filter((e) => e.checkVisibility())
    .filter((e) => e.getBoundingClientRect().right > e.parentElement.getBoundingClientRect().right + 1)
    .map((e) => e.parentElement.dataset.l + ": " + e.textContent.trim())"""
"""Content that is wider than its cell, on a phone."""


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)], ids=["some", "each"])
def test_every_page_stands_alone_and_fits(shop: Shop, window: Any, step: int) -> None:
    """Each page loads without errors or other sites, and fits the window of a desk, of a wall and of a phone."""
    w = window(shop.url)
    sizes = [(DESK, "light"), (WALL, "light"), (PHONE, "dark")]
    for path in pages(shop)[::step]:
        answer = w.go(path)
        assert answer.status == 200, path
        assert w.page.locator("h1").count() == 1 and w.page.title().endswith("– Notify"), path
        unlabelled = "[...document.querySelectorAll('input:not([type=hidden]),select,textarea')]"
        unlabelled += ".filter(e => !e.labels.length && !e.ariaLabel).length"
        assert w.page.evaluate(unlabelled) == 0, f"{path} has a field without a label"
        sizes.reverse()
        for size, scheme in sizes:
            w.page.set_viewport_size(size)
            w.page.emulate_media(color_scheme=scheme)
            assert not w.page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"), f"{path} is too wide"
            assert w.page.evaluate(OUT_OF_CELL) == [] and w.page.evaluate(CUT_HEADINGS) == [], path
    assert w.wrong == []
    assert all(address.startswith((shop.url, "data:")) for address in w.asked), w.asked
    assert w.page.evaluate("window.ran") is None and "alert(1)" not in w.page.content().replace("&lt;", "")


@pytest.mark.long
def test_a_chart_that_was_not_told_of_a_smaller_window_widens_no_page(shop: Shop, window: Any) -> None:
    """A chart gets a window's new size a frame after the layout: until then it widens no page."""
    w = window(shop.url)
    w.page.add_init_script("window.ResizeObserver = class { observe() {} };")
    w.page.add_init_script("window.addEventListener('resize', e => e.stopImmediatePropagation(), true);")
    w.go("/")
    w.page.wait_for_selector("#chart canvas")
    w.page.set_viewport_size(PHONE)
    assert not w.page.evaluate("document.documentElement.scrollWidth > innerWidth + 1")


def test_each_page_shows_its_rows(shop: Shop, window: Any) -> None:
    w = window(shop.url)
    w.go(f"/messages/{shop.message}")
    text = w.text()
    assert "<script>alert(1)</script>" in text  # shown as text
    for event in ("in queue order.placed/0@0", "points moved to the dead letters", "mail acknowledged"):
        assert event in text
    w.go(f"/transactions/{shop.transactions[0]}")
    assert "offline" in w.text() and "polls for checks now" in w.text()
    w.go("/groups/points/dead-letters?contains=customer")
    assert w.page.locator("tbody tr").count() >= 1
    w.go("/groups/points/dead-letters?contains=nothing+like+it")
    assert "No dead letter matches" in w.text()
    assert w.go("/groups/nobody").status == 404 and "there is no group" in w.text()
    assert w.go("/no/such/page").status == 404
    w.go("/audits")
    assert "FINDINGS" in w.text() and "LOST 2" in w.text()
    w.press("td a:has-text('report')")
    assert w.page.inner_text("h1") == "a report" and w.page.evaluate("window.ran") is None


@pytest.mark.long
def test_the_overview_keeps_up(shop: Shop, window: Any) -> None:
    w = window(shop.url)
    w.go("/")
    before = w.page.inner_text("#live")
    for _ in range(3):
        shop.half()
    w.page.wait_for_function("before => document.getElementById('live').innerText !== before", arg=before)
    w.page.wait_for_selector("#chart canvas")
    assert w.wrong == []


def fill(w: Any, fields: dict[str, str]) -> None:
    for name, value in fields.items():
        element = w.page.locator(f"main [name={name}]:not([type=hidden])")
        kind = element.evaluate("e => e.tagName + (e.type === 'checkbox' ? 'box' : '')")
        if kind == "SELECT":
            element.select_option(value)
        elif kind == "INPUTbox":
            element.set_checked(bool(value))
        else:
            element.fill(value)


def change(w: Any, name: str, query: str, fields: dict[str, str]) -> str:
    """Fill in a form, preview it, and carry it out; return the page's text."""
    w.go(f"/do/{name}{query}")
    fill(w, fields | {"reason": f"test of {name}"})
    w.press("button:has-text('Preview')")
    assert "Preview of the result" in w.text(), w.text()
    w.press("button:has-text('Do it')")
    assert "Done, and recorded" in w.text(), w.text()
    return w.text()


class Writes:
    """Writes of the console in one window, and which of them were done."""

    def __init__(self, shop: Shop, w: Any) -> None:
        self.shop = shop
        self.w = w
        self.done: list[str] = []

    def do(self, name: str, query: str = "", /, **fields: str) -> str:
        """Do a write from its form; the page's text."""
        self.done.append(name)
        return change(self.w, name, query, fields)

    def finish(self, name: str, /, **fields: str) -> str:
        """Do a write whose form another page led to; the text of its preview."""
        self.done.append(name)
        fill(self.w, fields | {"reason": f"test of {name}"})
        self.w.press("button:has-text('Preview')")
        preview = str(self.w.page.inner_text("#preview"))
        self.w.press("button:has-text('Do it')")
        return preview

    def states(self, names: Sequence[str]) -> list[str]:
        """The states of transactions."""
        return [self.shop.call("GET", f"/v1/admin/transactions/{name}")["state"] for name in names]


# Some 200 pages: the tests below fill in forms, too, and tests/integration/test_console_forms.py posts them.
@pytest.mark.long
def test_every_write_is_previewed_done_and_recorded(shop: Shop, window: Any) -> None:
    writes = Writes(shop, window(shop.url))
    parts = (
        decide_transactions,
        change_queues,
        mend_dead_letters,
        decide_held_keys,
        keep_schedules,
        withdraw_messages,
        change_the_server,
    )
    for write in parts:
        write(writes)
    assert sorted(writes.done) == sorted(FORMS), "a write of the console has no test"
    actions = shop.call("GET", "/v1/admin/actions?max=1000")["actions"]
    assert {f"test of {name}" for name in FORMS} <= {action["reason"] for action in actions}
    assert not any("nt_" in json.dumps(action) for action in actions)
    assert writes.w.wrong == []


def decide_transactions(writes: Writes) -> None:
    shop, w = writes.shop, writes.w
    t = shop.transactions
    writes.do("transaction.check", f"?transaction={t[0]}")
    writes.do("transaction.resume", f"?transaction={t[0]}")
    writes.do("transaction.commit", f"?transaction={t[1]}")
    writes.do("transaction.rollback", f"?transaction={t[2]}")
    assert writes.states(t[:3]) == ["PREPARED", "COMMITTED", "ROLLED_BACK"]
    names = [shop.half() for _ in range(3)]
    w.go("/transactions?state=PREPARED")
    for name in names[:2]:
        w.page.check(f"input[value='{name}']")
    w.press("button:has-text('Commit the selected')")
    preview = writes.finish("transactions.commit")
    assert "2 transactions of producer group orders, in doubt for" in preview
    assert "2 transactions are COMMITTED." in w.text()
    writes.do("transactions.check", f"?ids={names[2]}")
    w.go("/transactions?producer_group=orders")
    w.press("a:has-text('Roll back all that match')")
    assert w.page.is_checked("#f-all") and w.page.input_value("#f-stored_before") != ""
    writes.finish("transactions.rollback")
    w.press("a:has-text('Continue')")
    w.page.wait_for_selector("dd.good:has-text('done')")
    assert writes.states(names) == ["COMMITTED", "COMMITTED", "ROLLED_BACK"]
    assert "roll back transactions: orders" in w.text() and "ROLLED_BACK" in w.text()
    w.go("/transactions")
    assert "In doubt 0" in w.page.inner_text("#states") and "No transaction is without an outcome" in w.text()


def change_queues(writes: Writes) -> None:
    """Change topics, subscriptions and groups."""
    shop, w, do = writes.shop, writes.w, writes.do
    do("topic.put", topic="new.topic", queues="3", ttl="60")
    assert len(shop.call("GET", "/v1/admin/topics/new.topic")["queues"]) == 3
    do("subscription.put", "?group=stock&topic=new.topic", mode="ordered", max_attempts="5", tags="a, b")
    subscription = shop.call("GET", "/v1/admin/groups/stock")["subscriptions"][0]
    assert (subscription["mode"], subscription["max_attempts"], subscription["tags"]) == ("ordered", 5, ["a", "b"])
    do("group.pause", "?group=stock")
    assert shop.call("GET", "/v1/admin/groups/stock")["paused"] is True
    do("group.resume", "?group=stock")
    do("push.put", "?group=stock", url="http://127.0.0.1:9/notify", batch="5")
    w.go("/groups/stock")
    assert "posted to http://127.0.0.1:9/notify, at most 5 per call" in w.text()
    do("push.delete", "?group=stock")
    do("objective.put", "?group=stock", within="5", share="0.95")
    w.go("/groups/stock")
    assert "within 5.0 s in 5 min; 95 % wanted" in w.text()
    do("objective.delete", "?group=stock")
    do("priorities.put", "?group=stock", class_1="one", weight_1="2")
    assert shop.call("GET", "/v1/admin/groups/stock/priorities")["classes"][0]["weight"] == 2
    assert "does not get" in do("group.reset", "?group=mail", topic="order.placed", to="latest")
    do("subscription.delete", "?group=stock&topic=new.topic")
    do("topic.delete", "?topic=old")
    assert ask(shop.url, "GET", "/v1/admin/topics/old")[0] == 404


def decide_held_keys(writes: Writes) -> None:
    """Retry, skip and release what a group holds."""
    shop, w, do = writes.shop, writes.w, writes.do
    assert shop.held() == ["a", "b", "c"]
    w.go("/groups/ledger")
    assert "Held keys 3" in " ".join(w.text().split())
    w.go("/groups/ledger/held-keys")
    assert "no such account" in w.text()
    w.page.check("input[aria-label='Select a']")
    w.press("button:has-text('Retry the selected keys')")
    assert "1 key: one more attempt" in writes.finish("held-keys.retry")
    assert shop.held() == ["b", "c"]
    do("held-keys.skip", "?group=ledger", key="b")
    do("held-keys.release", "?group=ledger", all="1")
    assert shop.held() == []


def keep_schedules(writes: Writes) -> None:
    """Make a schedule, change it in the form that its page fills in, pause, resume and delete it."""
    shop, w, do = writes.shop, writes.w, writes.do
    rhythm = {"cron": "30 3 * * *", "zone": "Europe/Berlin"}
    preview = do("schedule.put", schedule="nightly", topic="cleanup", body="all", **rhythm)
    assert "at 30 3 * * * in Europe/Berlin" in preview
    w.go("/schedules")
    assert "nightly" in w.text() and "waiting" in w.text()
    w.go("/schedules/nightly")
    w.press("a:has-text('Change')")
    assert w.page.input_value("#f-cron") == "30 3 * * *" and w.page.input_value("#f-body") == "all"
    fill(w, {"tag": "vip", "reason": "a tag"})
    w.press("button:has-text('Preview')")
    w.press("button:has-text('Do it')")
    assert shop.call("GET", "/v1/admin/schedules/nightly")["tag"] == "vip"
    do("schedule.pause", "?schedule=nightly")
    assert shop.call("GET", "/v1/admin/schedules/nightly")["state"] == "paused"
    do("schedule.resume", "?schedule=nightly")
    do("schedule.delete", "?schedule=nightly")
    assert [row["name"] for row in shop.call("GET", "/v1/admin/schedules")["schedules"]] == [shop.schedule]


def mend_dead_letters(writes: Writes) -> None:
    """Send letters from the list by their boxes, then the rest as a job; correct, drop and purge others."""
    shop, w, do = writes.shop, writes.w, writes.do
    before = shop.dead()
    w.go("/groups/points/dead-letters")
    w.page.check(f"input[value='{before[0]}']")
    w.page.check(f"input[value='{before[1]}']")
    w.press("button:has-text('Send the selected dead letters again')")
    writes.finish("dead-letters.redrive")
    assert shop.dead() == before[2:]
    do("dead-letters.redrive-all", "?group=points", contains="no such")
    w.press("a:has-text('Continue')")
    w.page.wait_for_selector("dd.good:has-text('done')")
    assert shop.dead() == []
    shop.kill(3)
    letter = shop.dead()[0]
    w.go(f"/do/dead-letters.edit?group=points&id={letter}")
    assert '"order": 7' in w.page.input_value("#f-body")
    assert "1 message sent again" in do("dead-letters.edit", f"?group=points&id={letter}", body="{}")
    assert letter not in shop.dead()
    assert "these groups receive it: mail, points" in do(
        "message.send", "?topic=order.placed", body="{}", headers="a=b"
    )
    do("dead-letters.drop", "?group=points", ids=shop.dead()[0])
    assert len(shop.dead()) == 1
    do("dead-letters.purge", "?group=points", before="latest")
    assert shop.dead() == []
    assert "Nothing is deleted" in do("topic.purge", "?topic=new.topic", before="latest")


def withdraw_messages(writes: Writes) -> None:
    """Cancel a delayed message, and replace another."""
    delayed = [{"topic": "order.placed", "body": "x", "delay": 3600}] * 2
    sent = writes.shop.call("POST", "/v1/messages", {"messages": delayed})["items"]
    cancelled, replaced = (item["id"] for item in sent)
    done = writes.do("message.cancel", f"?topic=order.placed&message={cancelled}")
    assert "The message is cancelled: it is never delivered" in done
    assert "The message is replaced" in writes.do(
        "message.replace", f"?topic=order.placed&message={replaced}", body="y"
    )


def change_the_server(writes: Writes) -> None:
    """Stop a job, silence an alarm, redeliver, and change rates, settings and credentials."""
    shop, w, do = writes.shop, writes.w, writes.do
    job = shop.unended_job()
    w.go(f"/jobs/{job}")
    w.press("a:has-text('Cancel the job')")
    assert f"job={job}" in w.page.url
    do("job.cancel", f"?job={job}")
    w.press("a:has-text('Continue')")
    assert "cancelled" in w.text()
    do("alarm.silence", "?name=disk", seconds="2")
    do("alarm.unsilence", "?name=disk")
    do("messages.redeliver", "?group=mail", ids=shop.message)
    do("limits.put", topics="order.placed=1000\norder.paid=50.5")
    assert shop.call("GET", "/v1/admin/limits")["topics"] == {"order.placed": 1000.0, "order.paid": 50.5}
    w.go("/settings")
    w.press("a:has-text('check_attempts')")
    writes.finish("settings.put", check_attempts="9")
    rows = {s["name"]: s["value"] for s in shop.call("GET", "/v1/admin/settings")["settings"]}
    assert rows["check_attempts"] == 9
    do("settings.rollback", "?to=0")
    assert "nt_" in do("credential.add", name="mailer", rights="consume:mail, view")
    credential = shop.call("GET", "/v1/admin/credentials")["credentials"][0]
    assert (credential["name"], credential["rights"]) == ("mailer", ["consume:mail", "view"])
    do("credential.revoke", f"?credential={credential['id']}")


@pytest.mark.long
def test_a_refused_form_shows_the_reason(shop: Shop, window: Any) -> None:
    w = window(shop.url)
    for name, query, fields, words in (
        ("group.reset", "?group=points", {"topic": "no.such", "to": "latest"}, "has no subscription"),
        ("group.reset", "?group=points", {"topic": "order.placed", "to": "whenever"}, "whenever"),
        ("topic.put", "", {"topic": "a b"}, "is not a name"),
        ("topic.put", "", {"topic": "a", "queues": "many"}, "is not valid"),
        ("credential.add", "", {"name": "x", "rights": "fly"}, "is not a right"),
        ("transactions.rollback", "?all=1", {"ids": shop.transactions[0]}, "not both"),
        ("transactions.rollback", "", {}, "Choose either single transactions or all that match"),
    ):
        w.go(f"/do/{name}{query}")
        fill(w, fields | {"reason": "r"})
        w.press("button:has-text('Preview')")
        assert words in w.page.inner_text("[role=alert]"), name
        assert w.page.input_value("#f-reason") == "r"  # the form keeps the input
    half = shop.half()
    shop.call("POST", f"/v1/admin/transactions/{half}/rollback", WHY)
    before = len(shop.call("GET", "/v1/admin/actions?max=1000")["actions"])
    w.go(f"/do/transaction.commit?transaction={half}")
    fill(w, {"reason": "against what is recorded"})
    w.press("button:has-text('Preview')")
    assert "outcome_conflict" in w.text()
    assert len(shop.call("GET", "/v1/admin/actions?max=1000")["actions"]) == before


def test_a_transaction_is_reached_by_keyboard_alone(shop: Shop, window: Any) -> None:
    shop.half()
    w = window(shop.url)
    w.go("/transactions")
    w.page.keyboard.press("Tab")
    assert w.page.evaluate("document.activeElement.className") == "skip"
    w.page.keyboard.press("Enter")
    for _ in range(20):
        w.page.keyboard.press("Tab")
        assert w.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", "the focus is seen"
        if w.page.evaluate("document.activeElement.className") == "id":
            break
    w.page.keyboard.press("Enter")
    w.page.wait_for_selector("text=Ask now")
    assert w.page.evaluate("getComputedStyle(document.querySelector('.button')).display") != "none"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path / "data")
    yield made
    made.server.stop()


@pytest.mark.long  # tests/integration/test_rights.py asks every route with the right `view`
def test_who_may_only_view_is_told_which_right_a_write_takes(guarded: Guarded, window: Any) -> None:
    viewer = guarded.make("view", name="viewer")
    v = window(guarded.url)
    v.go("/login")
    v.page.fill("#token", viewer)
    v.press("button:has-text('Sign in')")
    v.go("/do/topic.put")
    fill(v, {"topic": "mine", "reason": "r"})
    v.press("button:has-text('Preview')")
    assert "lacks the right admin:mine" in v.page.inner_text("[role=alert]")


def test_signing_in_and_out(guarded: Guarded, window: Any) -> None:
    w = window(guarded.url)
    w.go("/topics")
    assert w.page.url.endswith("/login?next=%2Ftopics")
    w.page.fill("#token", "nt_wrong")
    w.press("button:has-text('Sign in')")
    assert "mistyped" in w.text()
    w.page.fill("#token", guarded.admin)
    w.press("button:has-text('Sign in')")
    assert w.page.inner_text("h1") == "Topics" and "Signed in as admin" in w.page.content()
    assert w.page.evaluate("document.cookie") == ""  # the cookie is hidden from scripts
    cookie = w.page.context.cookies()[0]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    change(w, "topic.put", "", {"topic": "made"})
    _, actions = ask(guarded.url, "GET", "/v1/admin/actions", token=guarded.admin)
    assert actions["actions"][0]["who"] == "admin"
    w.press("button:has-text('Sign out')")
    w.go("/topics")
    assert "/login" in w.page.url
    # Signing in redirects to no other site.
    w.go("/login?next=//evil.example/")
    assert w.page.input_value("input[name=next]") == "/"


def test_a_page_of_another_site_changes_nothing(shop: Shop, window: Any) -> None:
    """A real page of another origin cannot post a form, fetch from the console, or frame it."""
    target = f"{shop.url}/do/group.pause"
    page = f"""<!doctype html><iframe id=f src="{shop.url}/"></iframe>
    <form id=a method=post action="{target}"><input name=group value=points><input name=reason value=x>
    <input name=step value=do></form>
    <script>
    Promise.allSettled([
      fetch("{shop.url}/v1/admin/groups/points/pause", {{method: "POST", mode: "no-cors", body: '{{"reason": "x"}}'}}),
      fetch("{shop.url}/v1/messages", {{method: "POST", mode: "no-cors",
        headers: {{"content-type": "application/x-www-form-urlencoded"}},
        body: '{{"messages": [{{"topic": "evil", "body": "x"}}]}}'}}),
    ]).then(() => window.tried = true);
    </script>""".encode()

    with answering(lambda request: reply(request, page, content_type="text/html")) as evil:
        w = window(f"http://localhost:{evil.port}")
        # The browser refuses to frame the console.
        with w.page.expect_console_message(lambda message: "frame" in message.text):
            w.go("/")
        w.page.wait_for_function("() => window.tried")
        with w.page.expect_navigation():
            w.page.evaluate("document.getElementById('a').submit()")
        assert "another site" in w.page.inner_text("body") or "not its server" in w.page.inner_text("body")
        assert shop.call("GET", "/v1/admin/groups/points")["paused"] is False
        assert ask(shop.url, "GET", "/v1/admin/topics/evil")[0] == 404


@pytest.mark.long
def test_a_setting_changed_here_reaches_three_servers(
    window: Any, database_urls: dict[str, str], tmp_path: Path
) -> None:
    """The console of a server without queues names the queue server."""
    with empty_database("postgresql", database_urls, tmp_path) as url, three_servers(url, tmp_path) as servers:
        w = window(servers[0].url)
        change(w, "settings.put", "?setting=check_attempts", {"check_attempts": "8"})
        until_all(servers, "check_attempts", 8)
        w.go("/nodes")
        assert w.page.locator("tbody tr").count() == 3
        assert w.go("/topics").status == 421 and "notify node list" in w.text()
        assert w.go("/").status == 200 and "Parked" in w.text()
