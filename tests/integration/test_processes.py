"""Server processes for tests, started by command or by fork, are killed, restarted and stopped alike."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notify import __version__
from notify.errors import Unavailable
from notify.testing import forked, process
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import publish
from tests.support.http import ask, is_ready

BOTH = pytest.mark.parametrize("launch", [process.launch, forked.launch], ids=["command", "forked"], indirect=True)
BOTH_IN_LONG = pytest.mark.parametrize(
    "launch",
    [pytest.param(process.launch, marks=pytest.mark.long), forked.launch],
    ids=["command", "forked"],
    indirect=True,
)
"""The command is a process as any other: that it is started and ended is enough for each run."""


@pytest.fixture
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(ServerProcess, "launch", staticmethod(request.param))
    return request.param  # type: ignore[no-any-return]


@pytest.mark.long
@BOTH
def test_it_is_started_killed_and_stopped(launch: Any, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_CREATE_TOPICS": "1"}).start()
    publish(server.url, "t", ["kept"])
    url = server.url
    server.kill()
    assert server.process is not None and server.process.returncode == -signal.SIGKILL
    server.start()
    assert server.url == url
    assert [m["body"] for m in ask(url, "GET", "/v1/topics/t/queues/0/messages")[1]["messages"]] == ["kept"]
    assert server.stop() == -signal.SIGTERM
    assert "ready" in "".join(server.output)


@BOTH_IN_LONG
def test_its_environment_is_its_own(launch: Any, tmp_path: Path) -> None:
    """A crash point in a server's environment kills that server; the next server has none."""
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_CRASH_AT": "half.before_sync"}).start()
    with pytest.raises(OSError):
        publish(server.url, "t", ["dies with it"])
    child = server.process
    assert child is not None
    eventually(lambda: child.poll() == -signal.SIGKILL, "the crash point to kill it")
    server.stop()
    other = ServerProcess(tmp_path / "other").start()
    publish(other.url, "t", ["lives"])
    other.stop()


@BOTH_IN_LONG
def test_one_that_cannot_start_says_why(launch: Any, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="check_attempts"):
        ServerProcess(tmp_path / "data", environment={"NOTIFY_CHECK_ATTEMPTS": "no number"}).start()


@pytest.mark.long
def test_a_suite_that_is_killed_leaves_no_server_behind(tmp_path: Path) -> None:
    script = tmp_path / "suite.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from notify.testing import ServerProcess, forked\n"
        "if __name__ == '__main__':\n"
        "    ServerProcess.launch = staticmethod(forked.launch)\n"
        "    print(ServerProcess(Path(sys.argv[1])).start().url, flush=True)\n"
        "    time.sleep(600)  # until it is killed\n"
    )
    suite = subprocess.Popen([sys.executable, str(script), str(tmp_path / "data")], stdout=subprocess.PIPE, text=True)
    assert suite.stdout is not None
    url = suite.stdout.readline().strip()
    assert is_ready(url)
    suite.kill()
    suite.wait()
    suite.stdout.close()
    eventually(lambda: not is_ready(url), "the server to die with its suite")


def test_a_suite_whose_own_output_is_a_file_forks_commands(tmp_path: Path) -> None:
    """Its fork server has that file as output, too, and each child a pipe in its place."""
    program = (
        "import os\n"
        "from notify.testing import forked\n"
        "forked.PRELOADED = ()\n"
        "child = forked.launch(['--version'], os.environ)\n"
        "print(child.stdout.read(), child.wait())\n"
    )
    with open(tmp_path / "output", "w+") as output:
        ended = subprocess.run([sys.executable, "-c", program], stdout=output, stderr=output, timeout=PATIENCE_SECONDS)
        output.seek(0)
        said = output.read()
    assert ended.returncode == 0 and said.split() == [__version__, "0"], said


HANGS = """
import asyncio, sys
from notify.server import app, serve
from notify.server.settings import Settings

serve.STOP_SECONDS = 0.1
app.App.stop = lambda self: asyncio.sleep(3600)
ready = lambda address, topics: print("ready", flush=True)
sys.exit(serve.serve(Settings(port=0, data_dir=sys.argv[1]), ready))
"""


@pytest.mark.long
def test_a_server_that_cannot_stop_says_where_it_hangs_and_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, str(tmp_path / "data")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        assert "ready\n" in server.stdout
        server.terminate()
        assert server.wait(PATIENCE_SECONDS) == 1
        assert "serve.py" in server.stderr.read()
