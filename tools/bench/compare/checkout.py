"""A tree of this project with the environment that runs it: the working tree, or a commit's own in `.compare`.

A commit is checked out as a git worktree and installed as `make install` does, with the commit's own constraints. Both
are kept for the next time; a file that is written last marks them as complete.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOM = ROOT / ".compare"
GIT_SECONDS = 120.0
INSTALL_SECONDS = 1800.0


class NotComparable(Exception):
    """The comparison is impossible; `str()` is one line that says why."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A tree, the interpreter that runs it, and its commit."""

    tree: Path
    python: Path
    commit: str

    def check(self) -> None:
        """Raises NotComparable unless the interpreter runs the code of this tree."""
        words = [str(self.python), "-c", "import notify; print(notify.__file__)"]
        printed = _call(words, self.tree, GIT_SECONDS, environment(self.tree))
        if printed.strip() != str(self.tree / "notify" / "__init__.py"):
            raise NotComparable(f"{self.python} runs {printed.strip()}, not {self.tree}: make clean, and again")

    def bench(self, words: str) -> list[str]:
        """The command that runs a bench, by its words. In older trees the benches are commands of the package."""
        program = ["tools.bench"] if (self.tree / "tools" / "bench").is_dir() else ["notify.cli.main", "bench"]
        return [str(self.python), "-m", *program, *shlex.split(words), "--json"]

    def sources(self) -> set[tuple[str, int]]:
        """The source files of a run, and when each was last written, in nanoseconds."""
        paths = [path for package in ("notify", "storage", "tools") for path in (self.tree / package).rglob("*.py")]
        return {(str(path.relative_to(self.tree)), path.stat().st_mtime_ns) for path in paths}


def environment(tree: Path | None = None) -> dict[str, str]:
    """The environment of a call, without variables that lead Python to another tree. `tree`: run this one's code, its
    tools too, also where the interpreter's environment is another checkout's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": str(tree)} if tree is not None else {})


def commit_of(revision: str) -> str:
    """The commit that a revision names. Raises NotComparable."""
    words = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}"]
    try:
        return _call(words, ROOT, GIT_SECONDS).split()[-1]
    except NotComparable:
        raise NotComparable(f"BASE={revision} is not a revision of this repository") from None


def working_tree() -> Checkout:
    """The working tree, with changes that are not committed."""
    changed = _call(["git", "status", "--porcelain"], ROOT, GIT_SECONDS)
    return Checkout(ROOT, Path(sys.executable), commit_of("HEAD") + ("-dirty" if changed else ""))


def committed(commit: str, tell: Callable[[str], None]) -> Checkout:
    """A commit's tree and environment, made if they are missing or incomplete. Raises NotComparable."""
    room = ROOM / commit[:12]
    checkout = Checkout(room / "tree", room / "venv" / "bin" / "python", commit)
    stamp = room / "whole"
    if stamp.exists() and _is_clean(checkout):
        return checkout
    tell(f"installing {commit[:12]} in {room.relative_to(ROOT)}")
    shutil.rmtree(room, ignore_errors=True)
    _call(["git", "worktree", "prune"], ROOT, GIT_SECONDS)  # otherwise git refuses to make it a second time
    _call(["git", "worktree", "add", "--quiet", "--detach", str(checkout.tree), commit], ROOT, GIT_SECONDS)
    _call([sys.executable, "-m", "venv", str(room / "venv")], checkout.tree, GIT_SECONDS)
    install = "-m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]"
    _call([str(checkout.python), *install.split()], checkout.tree, INSTALL_SECONDS)
    stamp.touch()
    return checkout


def _is_clean(checkout: Checkout) -> bool:
    """Whether a tree is its commit, unchanged. Without a `.git` of its own git would report on the enclosing tree."""
    if not (checkout.tree / ".git").is_file() or not checkout.python.exists():
        return False
    try:
        at = _call(["git", "rev-parse", "HEAD"], checkout.tree, GIT_SECONDS).strip()
        return at == checkout.commit and not _call(["git", "status", "--porcelain"], checkout.tree, GIT_SECONDS)
    except NotComparable:
        return False


def _call(words: Sequence[str], directory: Path, seconds: float, variables: Mapping[str, str] | None = None) -> str:
    """A command's output. Raises NotComparable with its last line if it fails."""
    name = " ".join(words)
    try:
        done = subprocess.run(
            words,
            cwd=directory,
            env=variables or environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except OSError as error:
        raise NotComparable(f"{name}: {error}") from None
    except subprocess.TimeoutExpired:
        raise NotComparable(f"{name} was not done after {seconds:g} s") from None
    if done.returncode:
        lines = done.stderr.split("\n") if done.stderr.strip() else ["no word"]
        last = next((line for line in reversed(lines) if line.strip()), "")
        raise NotComparable(f"{name} failed with exit code {done.returncode}: {last}")
    return done.stdout
