"""Strategies by name, and paths of third parties."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation
from disagg_kv.errors import ConfigurationError, UnknownNameError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import GroupId, RoomId
from disagg_kv.planning import Groups, LayerRun
from disagg_kv.rendezvous import Source
from disagg_kv.strategies import AUTO, Incremental, LayerPipelined, Strategy, paths, register, registry, strategy
from disagg_kv.strategies.paths import StagedPlanner
from disagg_kv.strategies.schedules import PerChunk
from disagg_kv.strategies.selections import Full
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(4, 4, 8, "float16")


class Courier(StagedPlanner):
    """Somebody else's path."""

    name = "courier"


@dataclass
class Blocks(StagedPlanner):
    """Another, of a kind that has no hash."""

    name: str = "blocks"
    block: int = 4


class PairsOfLayers:
    """Somebody else's schedule."""

    def __init__(self, name: str = "pairs") -> None:
        self.name = name

    def groups(self, run: LayerRun) -> Groups:
        """Two layers at a time."""
        return Groups(run.layers, min(2, run.layers), "pairs")


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """What a test says is installed is gone afterwards."""
    registry._installed.cache_clear()
    yield
    registry._installed.cache_clear()


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("auto", Strategy()),
        ("staged", Strategy("staged")),
        ("full+slice", Strategy("slice")),
        (" direct + per-chunk + full ", Strategy("direct", PerChunk(), Full())),
        ("staged+incremental", Strategy("staged", PerChunk(), Incremental())),
        ("layer-pipelined", Strategy(AUTO, LayerPipelined())),
        ("staged+layer_pipelined+incremental", Strategy("staged", LayerPipelined(), Incremental())),
    ],
)
def test_names(name: str, want: Strategy) -> None:
    """Axes come in any order; a missing one takes its default."""
    assert strategy(name) == want
    assert strategy(str(want)) == want


def test_names_that_cannot_be() -> None:
    """What is unknown, planned, empty or said twice is refused, with the known names."""
    with pytest.raises(
        UnknownNameError,
        match="direct, full, incremental, layer_pipelined, mapped, per_chunk, slice, staged",
    ):
        strategy("stagged")
    with pytest.raises(UnknownNameError):
        strategy("")
    with pytest.raises(ConfigurationError, match="both a schedule"):
        strategy("staged+layer-pipelined+per_chunk")
    with pytest.raises(ConfigurationError, match="both a path"):
        strategy(f"staged+{AUTO}")


def test_registering_a_schedule() -> None:
    """A schedule is known by its name, apart from paths; a name belongs to one part of one kind."""
    mine = PairsOfLayers()
    register(mine)
    register(mine)
    assert "pairs" not in paths()
    assert strategy("staged+pairs") == Strategy("staged", mine)
    assert strategy("pairs").schedule is mine
    with pytest.raises(ConfigurationError, match="a schedule cannot be called 'pairs'"):
        register(PairsOfLayers())
    with pytest.raises(ConfigurationError, match="a schedule cannot be called 'staged'"):
        register(PairsOfLayers("staged"))


class AtLeast:
    """Leaves out what decode holds only where that is many rows."""

    name = "at_least"

    def __init__(self, least: int) -> None:
        self.least = least

    def start(self, held: Mapping[GroupId, int], page_rows: int) -> int:
        """All of it, or none."""
        rows = min(held.values(), default=0)
        return rows // page_rows * page_rows if rows >= self.least else 0

    def accepts(self, start: int) -> bool:
        """Whatever it would say itself."""
        return start == 0 or start >= self.least


class Wrong(AtLeast):
    """Leaves out rows that decode does not hold, or half a page."""

    name = "wrong"

    def start(self, held: Mapping[GroupId, int], page_rows: int) -> int:
        """So many."""
        return self.least


def test_a_selection_of_one_s_own_carries_a_transfer() -> None:
    """Fewer held rows than it asks for cross again; both sides have it, or the room fails."""
    mine = AtLeast(8)
    register(mine)
    assert strategy("at_least").selection is mine
    with pytest.raises(ConfigurationError, match="a selection cannot be called 'full'"):
        register(_named(AtLeast(1), "full"))
    rig = Rig(CacheSpec.kv(2, 4, 8, "float16"))
    prefills = rig.prefill(tp_shards(rig.spec, 1), strategy="staged+at_least")
    decodes = rig.decode(tp_shards(rig.spec, 1), strategy="staged+at_least")
    for held, start in ((4, 0), (8, 8)):
        request = rig.request(f"{held}", prefills, decodes, 12).open_decode()
        (handle,) = request.receives
        rows = handle.expect(Expectation(12, decodes[0].pages(decodes[0].take(12)), held={GroupId("kv"): held}))
        assert rows == {GroupId("kv"): start}
        handle.abort("seen")
    other = rig.decode(tp_shards(rig.spec, 1), "E", strategy="staged+incremental")
    request = rig.request("other", prefills, other, 12).open_prefill().open_decode()
    request.receives[0].expect(Expectation(12, other[0].pages(other[0].take(12)), held={GroupId("kv"): 4}))
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the end")
    assert "prefill's selection 'at_least' sends them" in str(request.sends[0].error)


@pytest.mark.parametrize(("start", "problem"), [(6, "a multiple of 4"), (12, "at most 8"), (-4, "-4"), ("x", "'x'")])
def test_a_selection_that_leaves_out_what_is_not_held_is_refused(start: int, problem: str) -> None:
    """No row is left out that decode does not have, and no part of a page."""
    register(_named(Wrong(start), f"wrong_{abs(hash(start))}"))
    rig = Rig(CacheSpec.kv(2, 4, 8, "float16"))
    decodes = rig.decode(tp_shards(rig.spec, 1), strategy=f"staged+wrong_{abs(hash(start))}")
    handle = decodes[0].endpoint.open(RoomId(b"room"), Source("P"))
    with pytest.raises(ConfigurationError, match=problem):
        handle.expect(Expectation(12, decodes[0].pages(decodes[0].take(12)), held={GroupId("kv"): 8}))


def _named(part: AtLeast, name: str) -> AtLeast:
    part.name = name
    return part


def test_registering_a_path() -> None:
    """A path of one's own has a name; again is harmless, another under the same name is not."""
    courier = Courier()
    register(courier)
    register(courier)
    assert strategy("courier") == Strategy("courier")
    assert paths()["courier"] is courier
    with pytest.raises(ConfigurationError, match="'courier'"):
        register(Courier())
    for name in ("auto", "full", "staged", "incremental", "two words", ""):
        other = Courier()
        other.name = name
        with pytest.raises(ConfigurationError, match="new plain word"):
            register(other)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("courier", f"{__name__}:Courier", None),
        ("staged", "nowhere:at_all", None),
        ("broken", "nowhere:at_all", "cannot be loaded"),
        ("other", "disagg_kv.strategies.paths:StagedPlanner", "calls itself 'staged'"),
    ],
)
def test_installed_packages(monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str | None) -> None:
    """Packages name their paths in an entry-point group; what cannot be loaded is an error that names it."""

    def entry_points(group: str) -> EntryPoints:
        return EntryPoints([EntryPoint(name, value, group)])

    monkeypatch.setattr(registry, "entry_points", entry_points)
    if value.startswith(__name__):
        monkeypatch.setattr(EntryPoint, "load", lambda self: Courier)
    if problem is None:
        assert name in paths()
    else:
        with pytest.raises(ConfigurationError, match=problem):
            paths()


class Slow:
    """A package's callable, called while another thread asks for strategies, too."""

    def __init__(self) -> None:
        self.answers: list[object] = []

    def __call__(self) -> Courier:
        mine = Courier()
        if not self.answers:
            self.answers.append("asked")
            other = threading.Thread(target=self.ask)
            other.start()
            other.join()
        return mine

    def ask(self) -> None:
        try:
            self.answers.append(paths()["courier"])
        except ConfigurationError as error:
            self.answers.append(error)


def test_threads_that_ask_at_once_share_what_a_package_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have made one; all of them get the first."""
    slow = Slow()
    monkeypatch.setattr(
        registry, "entry_points", lambda group: EntryPoints([EntryPoint("courier", f"{__name__}:Courier", group)])
    )
    monkeypatch.setattr(EntryPoint, "load", lambda self: slow)
    found = paths()["courier"]
    assert slow.answers == ["asked", found]


def test_a_path_need_not_have_a_hash() -> None:
    """Choices are remembered by which paths there are, not by what they are made of."""
    register(Blocks())
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="blocks")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="blocks")
    rig.request("room", prefills, decodes, 23).start(23).landed()
