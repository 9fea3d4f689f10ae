"""Packs vLLM and NIXL into one small archive, for a GPU host that has PyTorch and no package index.

    python -m benchmarks.engines_gpu.pack_vllm OUT.tar.xz
    mkdir site && tar xJf OUT.tar.xz -C site && export PYTHONPATH=$PWD/site    # on the GPU host

The GPU host has Python 3.12, CUDA 13, torch 2.11 or newer, Triton and transformers. vLLM's own wheel is for another
torch, but its extensions use the stable ABI of libtorch. Packed are that wheel, what ``vllm.v1`` imports and the host
lacks, and of NIXL what its UCX backend loads. Left out is what a Llama in bfloat16 on compute capability 9.0 does not
load; ``slim_fatbin`` blanks the GPU code of other architectures. Needs pip, readelf (binutils), tar and xz.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

from .slim_fatbin import slim

ARCH = 90
VLLM = "0.32.0"
NIXL = "nixl-cu13==1.5.1"
WHOLE = (
    "annotated-types", "apache-tvm-ffi==0.1.11", "astor", "attrs", "blake3", "cachetools", "cbor2",
    "compressed-tensors==0.17.0", "depyf", "dill", "distro", "fastapi==0.136.0", "httpcore2", "httpx2", "ijson",
    "jiter", "jsonschema", "jsonschema-specifications", "lark==1.2.2", "llguidance", "loguru", "msgspec", "nixl==1.5.1",
    "openai", "oss-harmony", "partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64", "pydantic==2.12.5",
    "pydantic-core==2.41.5", "python-json-logger", "python-multipart", "pyzmq", "referencing", "rpds-py",
    "setproctitle", "sniffio", "starlette", "truststore", "typing-inspection", "uvicorn", "xgrammar==0.2.8",
    "dnspython", "email-validator", "jmespath", "model-hosting-container-standards", "pydantic-extra-types",
    "supervisor", "watchfiles",
)  # fmt: skip
"""What vLLM imports when an engine starts, and on the last two lines what its HTTP server does."""

DROPPED = re.compile(
    r"^vllm/(vllm-rs$|third_party/(deep_gemm|fmha_sm100|tml_fa4)/|_qutlass_C|_flashkda_C|_deepselect_C|_flashmla"
    r"|_moe_C_stable|vllm_flash_attn/_vllm_fa2_C|entrypoints/serve/instrumentator/static/)"
    r"|^nixl_ep/|^openai/.*/\.|\.(jpg|png|hpp|cuh|h)$|^xgrammar/.*\.(a|cc)$|/(include|src|benchmarks|tests)/.*\.(h|cc|cu)$"
)
"""Files of wheels that nothing here loads."""

NIXL_ROOTS = re.compile(
    r"(^|/)nixl_cu13/[^/]*(\.so[^/]*|\.pyi?)$|(^|/)libplugin_UCX\.so$"
    r"|/ucx/lib(uct_cuda|ucm_cuda|uct_cma|uct_ib|uct_ib_mlx5)\.so[^/]*$"
    r"|(^|/)lib(curl|numa|ibverbs|mlx5|nl-3|nl-route-3)-[^/]*$"
)
"""Files of NIXL that are loaded by name; the libraries that those need follow."""

PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)),
             "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")  # fmt: skip


def download(requirement: str, into: Path) -> Path:
    """Its wheel."""
    into.mkdir(parents=True)
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    target = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *target, "-d", str(into), requirement]
    subprocess.run(pip, check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


def unpack(wheel: Path, into: Path, dropped: re.Pattern[str] = DROPPED) -> None:
    """All files but ``dropped``."""
    with zipfile.ZipFile(wheel) as whole:
        whole.extractall(into, [name for name in whole.namelist() if not dropped.search(name)])


def loaded(root: Path, roots: re.Pattern[str] = NIXL_ROOTS) -> set[Path]:
    """Of a package's files those that are loaded by name, and what they need."""
    by_name: dict[str, list[Path]] = defaultdict(list)
    for path in root.rglob("*"):
        if path.is_file():
            by_name[path.name].append(path)
    todo = [path for paths in by_name.values() for path in paths if roots.search(path.relative_to(root).as_posix())]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            said = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=False).stdout
            todo += [other for name in re.findall(r"NEEDED.*\[(.*)\]", said) for other in by_name[name]]
    return seen


def unpack_loaded(requirement: str, roots: re.Pattern[str], into: Path, scratch: Path) -> None:
    """Of a package only what is loaded."""
    with zipfile.ZipFile(download(requirement, scratch / "wheel")) as whole:
        whole.extractall(scratch / "files")
    for path in loaded(scratch / "files", roots):
        target = into / path.relative_to(scratch / "files")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def write(root: Path, out: Path) -> None:
    """Blank the code of other GPUs, and write the archive."""
    for path in root.rglob("*.so"):
        library = bytearray(path.read_bytes())
        if blanked := slim(library, ARCH):
            path.write_bytes(library)
            print(f"{path.relative_to(root)}: {blanked / 1e6:.0f} of {len(library) / 1e6:.0f} MB are blank")
    shutil.rmtree(root / "bin", ignore_errors=True)
    with (
        out.open("wb") as file,
        subprocess.Popen(["tar", "c", "-C", str(root), "."], stdout=subprocess.PIPE) as tar,
    ):
        subprocess.run(["xz", "-T2", "-9e"], stdin=tar.stdout, stdout=file, check=True)
    if tar.returncode:
        raise SystemExit(f"tar ended with {tar.returncode}")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def pack(out: Path, wheels: Path | None, version: str) -> None:
    """Write the archive."""
    vllm = f"vllm=={version}"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "site")
        for number, requirement in enumerate((vllm, *WHOLE)):
            there = list(wheels.glob("vllm-*.whl")) if wheels and requirement == vllm else []
            unpack(there[0] if there else download(requirement, Path(folder, str(number))), root)
        unpack_loaded(NIXL, NIXL_ROOTS, root, Path(folder, "nixl"))
        write(root, out)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="vLLM and NIXL for a GPU host without a package index")
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, help="a folder in which the wheel of vLLM lies already")
    parser.add_argument("--vllm", default=VLLM, help="its version")
    given = parser.parse_args()
    pack(given.out, given.wheels, given.vllm)


if __name__ == "__main__":
    main()
