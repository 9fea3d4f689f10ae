"""Nothing that a peer sends is ever turned into code: no pickle here, and none in what we call with a peer's bytes."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from disagg_kv.channels import Channel, ZmqChannel
from disagg_kv.geometry import CacheSpec
from disagg_kv.rendezvous import StoreRendezvous
from disagg_kv.transports import transport
from tests.support.needs import needs_mooncake, needs_nixl
from tests.support.pages import ROOT
from tests.support.rig import Memory, Rig, tp_shards

MODULES = sorted((ROOT / "src" / "disagg_kv").rglob("*.py"))
IMPORTS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "yaml"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "recv_pyobj", "send_pyobj", "allow_pickle", "deserialize_descs", "get_serialized_descs", "recv_serialized",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "recv_object_list",
    "send_object_list", "rpc_sync", "rpc_async",
}  # fmt: skip
PICKLING_CALLS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")}
OWN_CHILDREN = {"testing", "engines", "cli"}
"""Packages that start processes of their own and talk to them by pipes of ``multiprocessing``, never to a peer."""


def offences(tree: ast.AST) -> Iterator[str]:
    """What unpickles, or runs what it is given."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (a.name for a in names if a.name.partition(".")[0] in IMPORTS | {"multiprocessing"})
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in IMPORTS | {"multiprocessing"}:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield name
            case ast.Attribute(value=ast.Name(id=base), attr=attribute) if (base, attribute) in PICKLING_CALLS:
                yield f"{base}.{attribute}"
            case ast.Attribute(attr=attribute) if attribute in ATTRIBUTES:
                yield attribute
            case ast.keyword(arg="allow_pickle"):
                yield "allow_pickle"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_no_module_unpickles_or_runs_what_it_reads(path: Path) -> None:
    package = path.relative_to(ROOT / "src" / "disagg_kv").parts[0]
    found = set(offences(ast.parse(path.read_text())))
    if package in OWN_CHILDREN:
        found = {name for name in found if not name.startswith("multiprocessing") and name not in ("np.load",)}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "from multiprocessing import connection",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "socket.recv_pyobj()",
        "eval(text)",
        "agent.deserialize_descs(data)",
        "dist.all_gather_object(out, mine)",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert list(offences(ast.parse(source)))


@pytest.fixture
def unpicklings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to unpickle from here on, which also fails."""
    found: list[str] = []

    def refuse(*args: object, **kwargs: object) -> object:
        found.append("unpickled")
        raise AssertionError("something was unpickled")

    for name in ("loads", "load", "Unpickler", "_loads", "_load", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    return found


@pytest.mark.parametrize(
    "name",
    ["inproc", "shm", pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)],
)
def test_nothing_is_unpickled_while_a_cache_crosses(name: str, unpicklings: list[str]) -> None:
    """Through a real store, ZeroMQ, and every transport that runs here."""
    spec = CacheSpec.kv(2, 4, 8, "float16")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rig = Rig(spec, threaded=True)
    rig.rendezvous = StoreRendezvous(store)

    def channel(_: Channel) -> Channel:
        return ZmqChannel()

    memory = Memory(channel=channel, transport=lambda: transport(name))
    with closing(rig):
        prefills = rig.prefill(tp_shards(spec, 2), memory=memory, strategy="staged")
        decodes = rig.decode(tp_shards(spec, 1), memory=memory, strategy="staged")
        rig.request("room", prefills, decodes, 24).start().landed()
    assert not unpicklings
