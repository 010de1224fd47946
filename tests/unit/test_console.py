"""The console without a browser: what its menu counts, open pages that are made once, and trends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from notify.errors import NotFound
from notify.server.console import open_pages, rendering
from notify.server.console.api import status_of
from notify.server.console.filters import group_of, page_of, together, trend, way
from notify.server.console.forms import form_of
from notify.server.console.open_pages import open_page, own_path
from notify.server.console.rendering import menu_counts, rendered


@pytest.mark.parametrize(
    ("waiting", "count"),
    [
        ({"in_doubt": 1}, (1, "transaction without an outcome", "")),
        ({"in_doubt": 1, "parked": 1}, (2, "transactions without an outcome", "bad")),
    ],
)
def test_counts_have_the_right_number(waiting: dict[str, int], count: tuple[int, str, str]) -> None:
    assert menu_counts({"alarms": [], "waiting": waiting}) == {"/transactions": count}


def test_the_menu_counts_the_groups_that_have_an_alarm() -> None:
    """It counted held keys there: an operator read the number as one of groups, and found no key on the page."""
    alarms = [
        {"name": name, "target": target, "severity": severity}
        for name, target, severity in (
            ("dead_letters", "mail", "warning"),
            ("no_consumers", "mail", "critical"),
            ("unread_topic", "points/order.placed", "warning"),
            ("bridge", "shop", "warning"),
        )
    ]
    counts = menu_counts({"alarms": alarms, "waiting": {"held_keys": 9}})
    assert counts["/groups"] == (2, "groups with alarms", "bad")
    assert menu_counts({"alarms": alarms[:1], "waiting": {}})["/groups"] == (1, "group with an alarm", "warn")


@pytest.mark.parametrize("unknown", [None, {"missing": ["worker-2"]}])
def test_counts_that_are_not_known_are_marked(unknown: dict[str, Any] | None) -> None:
    known = {"name": "", "alarms": [], "waiting": {}}

    def page(status: dict[str, Any] | None) -> str:
        return rendered("error.html", "/x", "", {}, title="x", error=NotFound("x"), status=status)

    assert "data-uncounted" in page(unknown and known | unknown) and "data-uncounted" not in page(known)


def test_a_fault_of_the_counts_takes_no_page_away() -> None:
    class Faulty:
        async def get(self, path: str) -> Any:
            raise RuntimeError("a fault")

    assert asyncio.run(status_of(Faulty())) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "target", "page", "group"),
    [
        ("unread_topic", "points/order.placed", "/groups/points", "points"),
        ("filter", "points/order.placed", "/groups/points", "points"),
        ("dead_letters", "points", "/groups/points/dead-letters", "points"),
        ("kafka", "points", "/nodes", "points"),
        ("schedule", "points", "/schedules", ""),
        ("bridge", "points", "/nodes", ""),
        ("in_doubt", "points", "/transactions?producer_group=points", ""),
        ("disk", "", "", ""),
    ],
)
def test_an_alarm_leads_to_the_page_of_what_it_is_about(name: str, target: str, page: str, group: str) -> None:
    alarm = {"name": name, "target": target}
    assert (page_of(alarm), group_of(alarm)) == (page, group)


def test_alarms_of_a_kind_stand_together() -> None:
    """Their meaning stands once below them; it stood again below each that was raised after another kind."""
    raised = [("no_consumers", "a"), ("dead_letters", "a"), ("bridge", "shop"), ("dead_letters", "b")]
    shown = together([{"name": name, "target": target} for name, target in raised])
    kinds = [[(alarm["name"], alarm["target"]) for alarm in kind] for kind in shown]
    assert kinds == [[raised[0]], [raised[1], raised[3]], [raised[2]]]


# --- open pages of the console are made once, whatever a request carries --------------------------------------------


def test_the_page_to_sign_in_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering took 2 ms for each request, of anyone."""
    open_page("/login", b"", [])
    monkeypatch.setattr(open_pages, "rendered", None)  # it is not called again
    monkeypatch.setattr(rendering, "_templates", None)
    for path in ("/topics", "/messages/1-2_3", "/topics/caf%C3%A9"):
        page = open_page("/login", b"a=b&next=" + path.replace("%", "%25").encode(), [])
        assert f'name="next" value="{path}"'.encode() in page.body and b"content-security-policy" in page.fields


@pytest.mark.parametrize("text", ["", "topics", "//evil.example", "/\\evil", '/"><script>', "/a" * 2000, "/a\n"])
def test_signing_in_leads_to_a_path_of_this_server_only(text: str) -> None:
    assert own_path(text) == "/"


def test_signing_in_leads_back_to_a_search() -> None:
    """The search was gone, and a selection of it."""
    search = "/topics?prefix=order.&sort=lag"
    assert own_path(search) == search
    assert own_path('/topics?prefix="><script>') == own_path("/topics?" + "a" * 2000) == "/topics"
    page = open_page("/login", b"next=%2Ftopics%3Fprefix%3Dorder.%26sort%3Dlag", [(b"x-forwarded-prefix", b"/ops")])
    assert b'value="/topics?prefix=order.&amp;sort=lag"' in page.body and b'action="/ops/login"' in page.body


def test_a_refusal_is_escaped() -> None:
    assert b"&lt;b&gt;" in open_pages.login_page("/", "no <b>") and b"<b>" not in open_pages.login_page("/", "no <b>")


def test_files_are_kept_and_not_sent_twice() -> None:
    page = open_page("/static/console.css", b"", [])
    assert page.kind == "text/css; charset=utf-8" and open_page("/static/console.css", b"", []).body is page.body
    tag = page.fields.split(b"\r\n")[0].removeprefix(b"etag: ")
    assert open_page("/static/console.css", b"", [(b"if-none-match", tag)]).status == 304
    for path in ("/static/", "/static/nothing", "/static/../app.py", "/static/%2e%2e/app.py"):
        with pytest.raises(NotFound):
            open_page(path, b"", [])


def test_a_form_is_read_as_browsers_write_it() -> None:
    assert form_of(b"a=1&b=x+y%26z&a=2&empty=&caf%C3%A9=%ff&=&c") == {"a": "1,2", "b": "x y&z", "café": "\ufffd"}


# --- trends in the console: whether a figure gets better ------------------------------------------------------------


def history(**figures: float | None) -> dict[str, Any]:
    """A group's history with one lag for each age in minutes, the oldest first: `m20=5` is a lag of 5, 20 min ago."""
    now = time.time()
    return {"at": [now - 60 * int(age[1:]) for age in figures], "lag": list(figures.values())}


@pytest.mark.parametrize(
    ("now", "figures", "said"),
    [
        (1736, {"m20": 40, "m15": 1436, "m5": 1700, "m1": 1735}, "15 min ago 1,436: it grows"),
        (3, {"m11": 110, "m1": 4}, "11 min ago 110: it shrinks"),
        (102, {"m11": 100}, "11 min ago 100: it is steady"),
        (0, {"m11": 0}, ""),
        (9, {"m4": 3, "m1": 8}, "4 min ago 3: it grows"),
        (9, {"m20": None, "m5": 3}, "5 min ago 3: it grows"),
        (9, {"m1": 3}, ""),
        (9, {"m20": None}, ""),
        (None, {"m20": 3}, ""),
        (9, {}, ""),
    ],
)
def test_a_figure_says_what_it_was_ten_minutes_ago(
    now: float | None, figures: dict[str, float | None], said: str
) -> None:
    """The newest figure that is ten minutes old is meant; of a new group the oldest, from two minutes on."""
    assert trend(now, history(**figures), "lag") == said


@pytest.mark.parametrize(
    ("lag", "arrived", "settled", "said"),
    [
        (1000, 6.0, 0.0, "grows"),
        (1000, 0.0, 6.0, "shrinks"),
        (1000, 6.0, 5.99, ""),
        (0, 6.0, 0.0, ""),
        (1000, None, 6.0, ""),
        (1000, 6.0, None, ""),
    ],
)
def test_a_row_says_where_its_lag_goes(lag: int, arrived: float | None, settled: float | None, said: str) -> None:
    assert way({"lag": lag, "arrived_per_second": arrived, "settled_per_second": settled}) == said
