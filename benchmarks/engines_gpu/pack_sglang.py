"""Packs SGLang, NIXL and Mooncake into one small archive, for a GPU host that has PyTorch and no package index.

    python -m benchmarks.engines_gpu.pack_sglang OUT.tar.xz

As ``pack_vllm``. SGLang 0.5.23 names ``sglang-kernel`` 0.4.10, which needs torch 2.14; 0.4.5 was built for torch 2.11
and has all that SGLang imports for a Llama. Of it only the part for compute capability 9.0 is packed, without
FlashAttention: the attention backend is ``triton``. The host needs ``SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1``.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from .pack_vllm import NIXL, NIXL_ROOTS, WHOLE, download, unpack, unpack_loaded, write

SGLANG = ("sglang==0.5.23", "sglang-kernel==0.4.5")
MOONCAKE = "mooncake-transfer-engine-cuda13==0.3.14"
MORE = ("decorator", "gguf", "ipython", "orjson", "traitlets", "cffi", "datasets", "multiprocess", "soundfile")
"""The last four are for its HTTP server and its benchmark client."""

DROPPED = re.compile(
    r"^sgl_kernel/(sm100/|.*flash_ops|.*infllm_ops|flashmla_ops|spatial_ops)|^sglang/(multimodal_gen|test)/"
    r"|rust_extensions/_(bench|grpc)|^nixl_ep/|\.(jpg|png)$|^xgrammar/.*\.(a|cc)$"
)
"""Files of wheels that nothing here loads."""

MOONCAKE_ROOTS = re.compile(r"(^|/)(engine|libasio|libetcd_wrapper)\.so$|(^|/)mooncake/__init__\.py$")

STUB = Path("sglang/kernels/ops/gemm/cutedsl_dual_gemm.py")
"""SGLang never runs this kernel on compute capability 9.0, but importing it needs over 60 MB of the CUTLASS DSL."""

STUB_TEXT = """from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 0


class DualGemmQuantMode(IntEnum):
    UNQUANT = 4

    @property
    def is_quantized(self):
        return False


def can_use_dual_gemm(*args, **kwargs):
    return False
"""

PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: disagg_kv\nVersion: 0\n",
    "entry_points.txt": "[sglang.srt.plugins]\ndisagg_kv = disagg_kv.engines.sglang:install\n",
}
"""By which SGLang finds this library's backend in a source tree."""


def pack(out: Path) -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "site")
        for number, requirement in enumerate((*SGLANG, *WHOLE, *MORE)):
            unpack(download(requirement, Path(folder, str(number))), root, DROPPED)
        unpack_loaded(NIXL, NIXL_ROOTS, root, Path(folder, "nixl"))
        unpack_loaded(MOONCAKE, MOONCAKE_ROOTS, root, Path(folder, "mooncake"))
        (root / STUB).write_text(STUB_TEXT)
        info = root / "disagg_kv-0.dist-info"
        info.mkdir()
        for name, text in PLUGIN.items():
            (info / name).write_text(text)
        write(root, out)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="SGLang, NIXL and Mooncake for a GPU host without a package index")
    parser.add_argument("out", type=Path)
    pack(parser.parse_args().out)


if __name__ == "__main__":
    main()
