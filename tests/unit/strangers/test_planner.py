"""Planners that another project wrote against the Protocol alone: one logs what it is asked, one cuts its writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from disagg_kv.cli.main import run
from disagg_kv.errors import ConfigurationError, GeometryError
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.planning import PageCopy, PairPlan, StagedLayout, Writes
from disagg_kv.strategies import Job, MoverName, SlicePlanner, TransferPlanner, explain, paths, register
from disagg_kv.strategies.paths import StagedPlanner
from disagg_kv.testing.planner import TransferPlannerSuite
from tests.support.rig import Memory, Rig, tp_shards

SPEC = CacheSpec.kv(3, 4, 8, "float16")
PLAN = ["plan", "--layers", "2", "--kv-heads", "4", "--head-dim", "8", "--tokens", "40", "--prefill-tp", "2", "--json"]


class Logged:
    """Another path under a name of its own; ``asked`` has the questions, in order."""

    version = 3

    def __init__(self, name: str, inner: TransferPlanner) -> None:
        self.name = name
        self.mover = inner.mover
        self.inner = inner
        self.asked: list[str] = []

    def refuse(self, pair: PairPlan) -> str | None:
        self.asked.append("refuse")
        return self.inner.refuse(pair)

    def send(self, job: Job) -> Writes | StagedLayout | PageCopy:
        self.asked.append("send")
        return self.inner.send(job)

    def receive(self, job: Job) -> StagedLayout:
        self.asked.append("receive")
        return self.inner.receive(job)

    def count(self, job: Job) -> int:
        self.asked.append("count")
        return self.inner.count(job)


class Halves:
    """Each write of the library's slices as two: a path that plans writes of its own."""

    name = "halves"
    version = 1
    mover: MoverName = "direct"

    def refuse(self, pair: PairPlan) -> str | None:
        one = [c.name for layer in pair.source.spec.layers.values() for c in layer if c.unit_bytes < 2]
        return f"units of one byte: {one}" if one else None

    def send(self, job: Job) -> Writes:
        whole = SlicePlanner().send(job)
        first = whole.nbytes // 2
        return Writes(
            np.concatenate([whole.local, whole.local]),
            np.concatenate([whole.local_off, whole.local_off + first]),
            np.concatenate([whole.remote, whole.remote]),
            np.concatenate([whole.remote_off, whole.remote_off + first]),
            np.concatenate([first, whole.nbytes - first]),
        )

    def receive(self, job: Job) -> StagedLayout:
        raise AssertionError("pages are exposed")

    def count(self, job: Job) -> int:
        return 2 * SlicePlanner().count(job)


class TestLoggedStaging(TransferPlannerSuite):
    """The suite that the library's paths pass."""

    def planner(self) -> TransferPlanner:
        return Logged("logged", StagedPlanner())


class TestHalves(TransferPlannerSuite):
    """The same for the one with writes of its own."""

    def planner(self) -> TransferPlanner:
        return Halves()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (Logged("logged_slices", SlicePlanner()), {"refuse", "send"}),
        (Logged("logged_staging", StagedPlanner()), {"refuse", "send", "receive"}),
        (Halves(), set()),
    ],
    ids=["logged_slices", "logged_staging", "halves"],
)
def test_a_planner_carries_a_transfer(path: TransferPlanner, asked: set[str]) -> None:
    """Two ranks to one, pages of other sizes; the endpoints ask it, and every byte is there."""
    register(path)
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy=path.name)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(8, 32), strategy=path.name)
    request = rig.request("room", prefills, decodes, 37).start().landed()
    rig.quiet()
    assert {delivery.report.path for delivery in request.sends} == {path.name}
    assert set(getattr(path, "asked", ())) == asked


def carried(prefill: str, decode: str) -> tuple[str, str]:
    """The path that a request took between endpoints of these strategies, and why."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=prefill)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=decode)
    report = rig.request("room", prefills, decodes, 21).start().landed().receives[0].report
    return report.path, report.reason


def test_auto_takes_no_registered_planner() -> None:
    """It is not even asked, though both sides have it."""
    path = Logged("quiet", SlicePlanner())
    register(path)
    chosen, reason = carried("auto", "auto")
    assert chosen != "quiet"
    assert "quiet" not in reason
    assert path.asked == []


@pytest.mark.parametrize("sides", [("asked_for", "auto"), ("auto", "asked_for")])
def test_a_registered_planner_is_taken_where_a_side_asks_for_it(sides: tuple[str, str]) -> None:
    """The other side has to know it."""
    if "asked_for" not in paths():
        register(Logged("asked_for", SlicePlanner()))
    assert carried(*sides) == ("asked_for", "both sides allow only asked_for")


def plan(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    """What the command says, for two ranks and one."""
    assert run(PLAN) == 0
    found: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_plan_explains_registered_planners(capsys: pytest.CaptureFixture[str]) -> None:
    """By their own count or refusal; ``auto`` takes none of them."""
    before = plan(capsys)
    register(Halves())
    register(Logged("logged", StagedPlanner()))
    found = plan(capsys)
    slices = found["paths"]["slice"]
    assert isinstance(slices, dict)
    assert found["paths"] == {
        **before["paths"],
        "halves": {**slices, "descriptors": 2 * slices["descriptors"]},
        "logged": found["paths"]["staged"],
    }
    assert found["auto"] == before["auto"]


def test_plan_says_why_a_registered_planner_cannot() -> None:
    """In its own words; one that raises is refused as an endpoint refuses it, or named."""

    class Refusing(Logged):
        def refuse(self, pair: PairPlan) -> str | None:
            raise GeometryError("not today")

    class Broken(Logged):
        def count(self, job: Job) -> int:
            raise OSError("no count")

    tiny = CacheSpec.kv(1, 2, 1, "int8")
    register(Halves())
    register(Refusing("refusing", SlicePlanner()))
    sides = tiny, [shard(tiny)], [shard(tiny)], 4, (4, 4)
    refused = explain(*sides).refused
    assert refused["halves"] == "prefill rank 0 to decode rank 0: units of one byte: ['k', 'v']"
    assert refused["refusing"] == "prefill rank 0 to decode rank 0: not today"
    register(Broken("broken", SlicePlanner()))
    with pytest.raises(ConfigurationError, match="path 'broken': no count"):
        explain(*sides)


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("version", "1", "part: version"),
        ("mover", 1, "part: mover"),
        ("mover", "copied", "unknown part: mover 'copied'; known: direct, mapped, staged"),
        ("name", 3, "part: name"),
        ("count", None, "count.* is missing"),
    ],
)
def test_what_is_no_planner_is_refused_when_it_is_registered(attribute: str, value: object, says: str) -> None:
    """With the name of the attribute."""
    path = Logged("wrong", SlicePlanner())
    setattr(path, attribute, value)
    with pytest.raises(ConfigurationError, match=says):
        register(path)
    assert "wrong" not in paths()
