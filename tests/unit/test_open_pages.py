"""Open pages of the console are made once, whatever a request carries."""

from __future__ import annotations

import pytest

from notify.errors import NotFound
from notify.server.console import open_pages, rendering
from notify.server.console.forms import form_of
from notify.server.console.open_pages import open_page, own_path


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
