"""What threads share is complete before any of them uses it: fresh processes whose threads all begin at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg_kv.core import Codec
from disagg_kv.core.wire.frames import Heartbeat
from disagg_kv.ids import Epoch
from disagg_kv.transports import ShmTransport
from tests.support.pages import ROOT

PROCESSES = 3
"""With type information built at the first use some die, four of five on an idle host; the others say that it was."""

CHILD = """
import sys, threading
sys.setswitchinterval(1e-6)
from disagg_kv.core import Codec
from disagg_kv.strategies import strategy
from disagg_kv.transports import InprocTransport, ShmTransport

frame, descriptor = (bytes.fromhex(line) for line in sys.stdin.read().split())
ends = [(ShmTransport(), InprocTransport(), Codec()) for _ in range(8)]
begin, done, looked = threading.Barrier(len(ends)), [], set()

def trace(stack, event, argument):
    "Note where a thread looks at a type for MessagePack."
    if "msgspec" in stack.f_code.co_filename:
        looked.add(stack.f_code.co_name)

def first(shm, inproc, codec):
    begin.wait()
    peer = shm.connect(descriptor, 1.0)
    assert inproc.connect(inproc.local_descriptor(), 1.0)
    assert codec.encode(codec.decode(frame)) == frame
    assert len(shm.local_descriptor()) > 100
    assert strategy("auto").path == "auto"
    done.append(peer)

threading.settrace(trace)
threads = [threading.Thread(target=first, args=end) for end in ends]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done), len(set(done)), *looked)
"""


@pytest.mark.parametrize("number", range(PROCESSES))
def test_threads_that_meet_their_first_peers_at_once_all_succeed(number: int) -> None:
    """A decoder's type information that is half built kills the process; here every thread needs it at once."""
    target = ShmTransport()
    target.register([target.allocate(1 << 16)])
    frame = Codec().encode(Heartbeat(src=Epoch(b"a" * 16), dst=Epoch(b"b" * 16)))
    given = f"{frame.hex()} {target.local_descriptor().hex()}"
    child = subprocess.run([sys.executable, "-c", CHILD], input=given, capture_output=True, text=True)
    assert (child.returncode, child.stdout, child.stderr) == (0, "8 1\n", "")
    target.close(0.0)


MODULES = sorted((ROOT / "src" / "disagg_kv").rglob("*.py"))


def late(tree: ast.AST, inside: bool = False) -> Iterator[str]:
    """Calls that look at a type for MessagePack or JSON, at any time but when their module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            typed = any(keyword.arg == "type" for keyword in node.keywords)
            if (name == "decode" and typed) or name == "convert" or (name in ("Decoder", "Encoder") and inside):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        yield from late(node, inside or isinstance(node, ast.FunctionDef | ast.Lambda))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_types_are_looked_at_when_a_module_is_imported(module: Path) -> None:
    """Only then is one thread alone with a type; later another one may use what is half built."""
    assert list(late(ast.parse(module.read_text()))) == []


def test_the_rule_sees_each_way_to_look_at_a_type_late() -> None:
    """Or it would forbid nothing."""
    allowed = "D = msgspec.json.Decoder(A)\nclass C:\n    D = Decoder(A)\ndef f(x): return D.decode(x)"
    assert list(late(ast.parse(allowed))) == []
    for code in (
        "msgspec.msgpack.decode(x, type=A)",
        "decode(x, type=A)",
        "msgspec.convert(x, A)",
        "def f(): return Decoder(A)",
        "class C:\n    def f(self): self.e = msgspec.json.Encoder()",
        "f = lambda: Decoder(A)",
    ):
        assert len(list(late(ast.parse(code)))) == 1, code
