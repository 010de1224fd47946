"""`make release`: distributions that may be published, in dist/, or one sentence for each reason why not.

It uploads nothing. The tree is clean, all tests pass, the site builds, sdist and wheel are well formed, and the wheel
is installed with each extra in an environment of its own, where it is used. Then known vulnerabilities and licences of
what came with it are looked at. A step that was left out makes the verdict INCOMPLETE.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from notify.runtime.signals import exit_on_signal
from tests.release import extras, licences

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"
TOOLS = ROOT / ".venv-release" / "bin"
UNREACHABLE = ("ConnectionError", "connection", "timed out", "Max retries", "resolve", "ServiceError", "403", "404")
"""Words of pip-audit where the service that knows vulnerabilities does not answer."""


class Refused(Exception):
    """This may not be released; `str()` says why."""


class LeftOut(Exception):
    """The step could not be done here; `str()` says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step with what it is called on the command line; it returns what it found, in one line."""

    name: str
    does: Callable[[], str]


def run(words: Sequence[str | Path], minutes: float = 10, within: Path = ROOT) -> str:
    """The output of a command in a directory. Raises Refused with its last lines."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it names the sources
    command = [str(word) for word in words]
    try:
        done = subprocess.run(
            command, cwd=within, env=environment, capture_output=True, text=True, timeout=minutes * 60, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{words[0]} took longer than {minutes:g} minutes") from None
    if done.returncode:
        raise Refused(f"{' '.join(map(str, words[:4]))} failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def tree() -> str:
    """Nothing is changed or unknown to git, and the changelog has something to release."""
    if changed := run(["git", "status", "--porcelain"]):
        raise Refused(f"the tree is not clean: commit or remove {', '.join(changed.split()[1::2][:5])}")
    if "(unreleased)" in (ROOT / "CHANGELOG.md").read_text():
        raise LeftOut("CHANGELOG.md calls the version unreleased: give it its date")
    return run(["git", "rev-parse", "--short", "HEAD"]).strip()


def tested() -> str:
    """All tests and checks pass, here and now."""
    return run(["make", "--no-print-directory", "test"], minutes=60).strip().splitlines()[-1].strip("= ")


def documented() -> str:
    """The site builds, and every link in it leads somewhere."""
    return run(["make", "--no-print-directory", "docs"]).strip().splitlines()[-1]


def built() -> str:
    """A source distribution, and the wheel that comes from it; both pass twine's check."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([TOOLS / "python", "-m", "build", "--outdir", DIST, ROOT])
    made = sorted(DIST.glob("*"))
    if [path.suffix for path in made] != [".whl", ".gz"]:
        raise Refused(f"the build made {', '.join(path.name for path in made) or 'nothing'}")
    run([TOOLS / "python", "-m", "twine", "check", "--strict", *made])
    return ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in made)


def wheel() -> Path:
    """The wheel that was built. Raises Refused."""
    made = list(DIST.glob("*.whl"))
    if len(made) != 1:
        raise Refused("there is no wheel in dist/: do not leave out the step build")
    return made[0]


def installed() -> str:
    """The wheel with each extra in an environment of its own; what the extra is for works there."""
    names = ["", *extras.names(ROOT / "pyproject.toml")]
    for name in names:
        began = time.monotonic()
        python = _environment(name)
        run([python, "-I", "-c", extras.USES[name]], 5, python.parent)
        print(f"     {name or 'the SDK alone'}: {time.monotonic() - began:.0f} s", flush=True)
    server = _environment("server")
    run([server, "-I", "-c", extras.SERVES], 5, server.parent)  # not from here, where `notify` is the sources
    verdict = run([server.with_name("notify"), "demo"], 10, server.parent).strip().splitlines()[-1]
    return f"{len(names)} environments; {verdict}"


def _environment(extra: str) -> Path:
    """The interpreter of an environment with the wheel and this extra, and nothing else."""
    directory = WORK / (extra or "sdk")
    python = directory / "bin" / "python"
    stamp = directory / hashlib.sha256(wheel().read_bytes()).hexdigest()
    if not stamp.exists():
        shutil.rmtree(directory, ignore_errors=True)
        run([sys.executable, "-m", "venv", directory])
        wanted = f"{wheel()}[{extra}]" if extra else str(wheel())
        constraints = ROOT / "constraints.txt"
        pip = ("-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run([python, *pip, "-c", constraints, wanted], minutes=20)
        run([python, "-I", "-m", "pip", "check"])
        stamp.touch()
    return python


def audited() -> str:
    """No known vulnerability in what comes with any extra."""
    paths = list(WORK.glob("*/lib/*/site-packages"))
    if not paths:
        raise Refused("nothing is installed: do not leave out the step install")
    words = [str(TOOLS / "pip-audit"), "--progress-spinner", "off", "--skip-editable"]
    words += [word for path in paths for word in ("--path", str(path))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    said = done.stdout + done.stderr
    if done.returncode and any(word in done.stderr for word in UNREACHABLE) and "Found" not in said:
        raise LeftOut(f"the service that knows vulnerabilities does not answer: {done.stderr.strip().splitlines()[-1]}")
    if done.returncode:
        raise Refused(said[-3000:])
    unknown = {line.split()[0] for line in said.splitlines() if "could not be audited" in line}
    if unknown := unknown - {"notify-tx", "pip", "setuptools"}:
        raise LeftOut(
            f"the service that knows vulnerabilities does not know {len(unknown)} packages: {min(unknown)}, …"
        )
    return said.strip().splitlines()[0]


def licensed() -> str:
    """Everything that comes with any extra has a licence that a service may use; a file lists them."""
    known = licences.of(WORK.glob("*/lib/*/site-packages"))
    if not known:
        raise Refused("nothing is installed: do not leave out the step install")
    if bad := {name: text for name, text in known.items() if not licences.is_allowed(text)}:
        raise Refused("; ".join(f"{name}: {text or 'says no licence'}" for name, text in sorted(bad.items())))
    (WORK / "licences.txt").write_text("".join(f"{name}\t{text}\n" for name, text in sorted(known.items())))
    return f"{len(known)} packages, listed in {(WORK / 'licences.txt').relative_to(ROOT)}"


STEPS = (
    Step("tree", tree),
    Step("test", tested),
    Step("docs", documented),
    Step("build", built),
    Step("install", installed),
    Step("audit", audited),
    Step("licences", licensed),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--leave-out", default="", help="steps, separated by commas: then nothing is released")
    left_out = set(filter(None, parser.parse_args().leave_out.split(",")))
    if unknown := left_out - {step.name for step in STEPS}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in STEPS)}")
    missing = []
    for step in STEPS:
        if step.name in left_out:
            missing.append(f"{step.name} (as asked)")
            continue
        try:
            print(f"ok   {step.name}: {step.does()}", flush=True)
        except LeftOut as why:
            missing.append(f"{step.name} ({why})")
            print(f"--   {step.name}: {why}", flush=True)
        except Refused as why:
            print(f"VERDICT: FAIL {step.name}: {why}")
            return 1
    if missing:
        print(f"VERDICT: INCOMPLETE without {'; '.join(missing)}")
        return 2
    print("VERDICT: PASS dist/ may be published: .venv-release/bin/twine upload dist/*")
    return 0


if __name__ == "__main__":
    with exit_on_signal():
        sys.exit(main())
