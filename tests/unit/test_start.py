"""The record of running parts exists from start to stop; a start that fails half-way leaves nothing open."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from starlette.types import Message, Receive, Scope, Send

from notify.errors import InvalidRequest, NotifyError, Unavailable
from notify.server.access import guard
from notify.server.app import RELOAD_SECONDS, App
from notify.server.data.request import PROBES, Request
from notify.server.serve import _load as load_management
from notify.server.serve import serve
from notify.server.settings import Settings, changed, load, mistyped
from notify.server.workers.supervisor import supervise
from notify.storage.memory import MemoryStore


class Watched:
    """A store in memory that notes whether it is open, and whether it ever was."""

    is_open = was_open = False

    def __init__(self) -> None:
        self._store = MemoryStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def open(self, now_us: int) -> None:
        await self._store.open(now_us)
        self.is_open = self.was_open = True

    async def close(self) -> None:
        self.is_open = False
        await self._store.close()


async def status(app: App, path: str) -> int:
    request = Request("GET", path, b"", [])
    return (await (app.open_answer(request) if path in (*PROBES, "/login") else app.data.answer(request))).status


async def test_the_running_parts_exist_between_start_and_stop(tmp_path: Path) -> None:
    store = Watched()
    app = App(Settings(data_dir=str(tmp_path)), lambda: store)

    async def check_nothing_runs() -> None:
        with pytest.raises(Unavailable, match="starting or stopping"):
            app.running()
        assert app.running_or_none() is None and app.access is None
        assert await status(app, "/v1/members") == 503
        assert [await status(app, path) for path in PROBES] == [200, 503]

    await check_nothing_runs()
    await app.start()
    assert store.is_open and app.running().core.store is store
    assert app.access is app.running().administration.access
    assert [await status(app, path) for path in PROBES] == [200, 200]
    tasks = asyncio.all_tasks()
    assert len(tasks) > 1
    await app.stop()
    await check_nothing_runs()
    assert not store.is_open and asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    "given", [{"registry": "sqlite:///{0}/no-registry.db"}, {"data_dir": "{0}/no-directory"}], ids=["registry", "data"]
)
async def test_a_start_that_fails_half_way_stops_what_had_started(tmp_path: Path, given: dict[str, str]) -> None:
    store = Watched()
    filled = {name: text.format(tmp_path) for name, text in given.items()}
    app = App(Settings(**{"data_dir": str(tmp_path)} | filled), lambda: store)  # type: ignore[arg-type]
    with pytest.raises((NotifyError, OSError)):
        await app.start()
    assert store.was_open and not store.is_open and app.running_or_none() is None
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await app.stop()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"roles": "conductor"}, "'conductor' is neither transactions nor queue"),
        ({"roles": ","}, "'' is neither transactions nor queue"),
        ({"storage": "no-url"}, r"--storage \(not a URL\)"),
        ({"storage": "postgresql://h:port/d"}, "its port is not a number"),
        ({"storage": "a=sqlite:///x a=sqlite:///y"}, "same shard name"),
        ({"registry": "postgresql+none://u:secret@h/d"}, r"--registry postgresql\+none://u:[*]{3}@h/d"),
        ({"kafka": "kafka://"}, "a Kafka URL names brokers"),
        ({"kafka": "kafka://b:9092", "roles": "conductor"}, "'conductor' is neither"),
        ({"url": "queue:7400"}, "setting url: 'queue:7400' is not a server's address"),
        ({"url": "http://user:secret@queue:7400"}, "setting url: 'http://[*]{3}@queue:7400'"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_settings_that_cannot_be_are_refused_before_anything_is_made(
    tmp_path: Path, given: dict[str, str], said: str, workers: int
) -> None:
    """The log said `listening` first, or nothing refused them at all."""
    data = tmp_path / "data"
    settings = Settings(port=0, data_dir=str(data), workers=workers, **given)  # type: ignore[arg-type]
    said = said if workers == 1 or not given.keys() & {"storage", "registry", "kafka"} else "--workers 2 with"
    with structlog.testing.capture_logs() as logged, pytest.raises(InvalidRequest, match=said) as refused:
        (serve if workers == 1 else supervise)(settings)
    assert not logged and not data.exists() and "secret" not in str(refused.value)


def test_a_refused_setting_names_its_bounds_as_they_are() -> None:
    """`1.04858e+06` was refused, too."""
    with pytest.raises(InvalidRequest, match="is 1,048,575; it must be from 1,048,576 to 4,294,967,296"):
        load({"segment_bytes": "1048575"}, environ={})


@pytest.mark.parametrize("name", ["data_dir", "host", "shard"])
def test_a_setting_that_must_say_something_is_not_empty(name: str) -> None:
    """`--data-dir "$UNSET"` served the current directory, and closed it to others."""
    for value in ("", "  "):
        with pytest.raises(InvalidRequest, match=f"setting {name} is empty: leave it out for its default"):
            load({name: value}, environ={})
        with pytest.raises(InvalidRequest, match="is empty"):
            load(environ={f"NOTIFY_{name.upper()}": value})


def test_a_mistyped_setting_is_told_with_the_one_that_was_meant(tmp_path: Path) -> None:
    environ = {"NOTIFY_DATADIR": "/x", "NOTIFY_PROT": "1", "NOTIFY_WORKER": "2", "NOTIFY_PORT": "1", "DATA_DIR": "x"}
    environ |= {"NOTIFY_KEY": "k.pem", "NOTIFY_TOKEN": "t", "NOTIFY_TEST_MARIADB": "m", "NOTIFY_REASON": "r"}
    assert mistyped(environ) == {
        "NOTIFY_DATADIR": "NOTIFY_DATA_DIR",
        "NOTIFY_PROT": "NOTIFY_PORT",
        "NOTIFY_WORKER": "NOTIFY_WORKERS",
    }
    file = tmp_path / "notify.toml"
    lines = {
        "prot = 1": "there is no setting 'prot'; did you mean port?",
        "x = 1": "docs/reference.md have all settings",
        "[notify]\nport = 1": r"the file has no sections: write its settings without \[notify\]",
    }
    for line, said in lines.items():
        file.write_text(line)
        with pytest.raises(InvalidRequest, match=said):
            load(file=file, environ={})
    with pytest.raises(InvalidRequest, match="did you mean check_attempts"):
        changed(Settings(), {"check_attemps": 3})


def test_a_settings_file_may_begin_with_the_mark_of_windows(tmp_path: Path) -> None:
    file = tmp_path / "notify.toml"
    file.write_text("port = 1\r\n", encoding="utf-8-sig")
    assert load(file=file, environ={}).port == 1


def test_a_data_directory_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaced the ~ of a file of settings or of `--data-dir=~/x`: the log was in a directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load({"data_dir": "~/x"}, environ={}).data_dir == load(environ={"NOTIFY_DATA_DIR": "~/x"}).data_dir
    assert load({"data_dir": "~/x"}, environ={}).data_dir == f"{tmp_path}/x"


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_that_outlasts_the_stop_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """It was a fault of the server, 500, although nothing but its stop was to blame."""

    async def admit(*_: Any) -> None:
        """Everybody."""

    monkeypatch.setattr(guard, "admit", admit)
    app = App(Settings(data_dir=str(tmp_path)), MemoryStore)
    said: list[Message] = []

    async def scenario() -> None:
        is_asked = asyncio.Event()

        async def hang(scope: Scope, receive: Receive, send: Send) -> None:
            if has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            is_asked.set()
            await asyncio.Event().wait()

        async def send(message: Message) -> None:
            said.append(message)

        monkeypatch.setattr(await app.management(), "spread", hang)
        scope = {"type": "http", "method": "POST", "path": "/v1/admin/groups/g/pause", "headers": []}
        asked = asyncio.create_task(app(scope, send, send))  # nothing is received
        await is_asked.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(scenario())
    assert [message["status"] for message in said if "status" in message] == [200 if has_begun else 503]
    if not has_begun:
        assert b"may have been carried out" in said[-1]["body"]


async def test_management_is_loaded_once_and_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[App] = []

    def managing(app: App) -> Any:
        tries.append(app)
        if len(tries) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return "management"

    monkeypatch.setattr("notify.server.app._managing", managing)

    now_us = 1_000_000

    async def both(app: App) -> list[Any]:
        return await asyncio.gather(app.management(), app.management(), return_exceptions=True)

    app = App(Settings(data_dir=str(tmp_path)), MemoryStore, lambda: now_us)
    said: list[Message] = []

    async def send(message: Message) -> None:
        said.append(message)

    for _ in range(2):
        assert [type(failed) for failed in await both(app)] == [Unavailable, Unavailable]
        await app({"type": "http", "method": "GET", "path": "/", "headers": []}, send, send)
        assert await status(app, "/login") == 503
    assert [message["status"] for message in said if "status" in message] == [503, 503]
    assert b"could not load" in said[-1]["body"] and len(tries) == 1, "strangers cannot repeat it at any rate"
    now_us += RELOAD_SECONDS * 1_000_000
    assert await both(app) == await both(app) == ["management"] * 2 and len(tries) == 2


def test_a_server_without_the_modules_that_operators_need_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def managing(app: App) -> Any:
        raise ModuleNotFoundError("No module named 'fastapi'")

    monkeypatch.setattr("notify.server.app._managing", managing)
    app, ended = App(Settings(data_dir=str(tmp_path)), MemoryStore), []
    asyncio.run(load_management(app, lambda: ended.append(app.failed)))
    assert ended == [app.failed] and "No module named 'fastapi'; install it again" in str(app.failed)
