"""The only door, for people and CI alike: ``python3 -m nox -s demo``, then ``python3 -m nox -s tests``.

Sessions that need torch share one environment, ``.nox/cpu``: torch is installed once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CPU = ROOT / ".nox" / "cpu"
CONSTRAINED = ("-c", str(ROOT / "constraints.txt"))

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "docs", "demo", "tests"]


def enter_cpu(session: nox.Session) -> None:
    """Make the shared environment, install this checkout's wheel in it, and put it first on the PATH."""
    if not (CPU / "bin" / "python").exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(CPU), external=True)
    # Compiling all of torch beforehand takes longer than compiling what is imported.
    cpu(session, "python", "-m", "pip", "install", "--quiet", "--no-compile", *CONSTRAINED, f"{ROOT}[dev,hf]")
    session.env["PATH"] = f"{CPU / 'bin'}{os.pathsep}{os.environ['PATH']}"
    session.env["VIRTUAL_ENV"] = str(CPU)


def cpu(session: nox.Session, program: str, *args: str) -> None:
    """Run a program of the shared environment."""
    session.run(str(CPU / "bin" / program), *args, external=True)


def pytest(session: nox.Session, *default: str) -> None:
    """Run pytest over what was asked for on the command line, or over ``default``; two processes unless ``-n`` says."""
    given = session.posargs or default
    cpu(session, "python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *given)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """A model's cache from 4 prefill ranks to 2 decode ranks, then to 1; or with the options given after ``--``."""
    enter_cpu(session)
    if session.posargs:
        cpu(session, "disagg-kv", "demo", *session.posargs)
        return
    for decode_tp in ("2", "1"):
        cpu(session, "disagg-kv", "demo", "--prefill-tp", "4", "--decode-tp", decode_tp)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The whole CPU suite with branch coverage, child processes included."""
    enter_cpu(session)
    pytest(session, "--cov", "--cov-report=term-missing:skip-covered", "--ignore=tests/gpu", "tests")


@nox.session(venv_backend="none")
def unit(session: nox.Session) -> None:
    """The unit tests."""
    enter_cpu(session)
    pytest(session, "tests/unit")


@nox.session(venv_backend="none")
def properties(session: nox.Session) -> None:
    """The hypothesis properties; HYPOTHESIS_PROFILE=nightly searches longer."""
    enter_cpu(session)
    pytest(session, "tests/properties")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, over everything that is Python."""
    enter_cpu(session)
    cpu(session, "mypy", *(session.posargs or ("src", "tests", "benchmarks", "noxfile.py")))


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, its formatter and the import contracts; needs no torch."""
    session.install("--quiet", *CONSTRAINED, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": "src"})


@nox.session
def docs(session: nox.Session) -> None:
    """The site, warnings as errors; ``-- serve`` shows it while you write."""
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.install("--quiet", *CONSTRAINED, "mkdocs", "mkdocs-material", "mkdocstrings-python")
    if session.posargs:
        session.run("mkdocs", *session.posargs)
    else:
        session.run("mkdocs", "build", "--strict")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """``disagg-kv bench`` with the options given after ``--``."""
    enter_cpu(session)
    cpu(session, "disagg-kv", "bench", *(session.posargs or ("transfer",)))


@nox.session
def gpu(session: nox.Session) -> None:
    """The GPU suite; with ``--no-venv`` on the host's own Python, which needs torch and pytest."""
    if session.venv_backend == "none":
        session.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    else:
        session.install("--quiet", *CONSTRAINED, f"{ROOT}[dev,triton]")
    session.env["DISAGG_KV_NEEDS_GPU"] = "1"
    session.run("python", "-m", "pytest", *(session.posargs or ("tests/gpu",)), external=True)
