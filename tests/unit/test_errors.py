"""Errors for programs and for people: codes, attributes, names; and the page that lists them."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator

import pytest

from disagg_kv import errors
from disagg_kv.core import Options, Phase
from disagg_kv.errors import (
    AbortedError,
    ConfigurationError,
    DisaggKVError,
    IncompatiblePeerError,
    MissingDependencyError,
    OversizeError,
    PeerLostError,
    SupersededError,
    TransportError,
    UnknownNameError,
)
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from tests.support.pages import ROOT
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")

SAMPLES: list[DisaggKVError] = [
    DisaggKVError("it failed", room=b"r"),
    UnknownNameError("transport", "shn", ["shm"]),
    MissingDependencyError("transport 'nixl'", "no package", "pip install nixl"),
    IncompatiblePeerError("version", 1, 2).about(instance="decode-1", rank=3),
    OversizeError("staging ring", 9, 8),
    TransportError("a write failed", retryable=True),
    PeerLostError("silent", instance="decode-1", rank=3, epoch=b"e" * 16, address="tcp://10.0.0.1:5", room=b"r"),
    SupersededError("prefill-0", 1, "tcp://10.0.0.1:5"),
]


def classes() -> Iterator[type[DisaggKVError]]:
    """Every class of the module."""
    for name in errors.__all__:
        found = getattr(errors, name)
        assert issubclass(found, DisaggKVError)
        yield found


def over(protocol: int) -> Callable[[DisaggKVError], DisaggKVError]:
    """To another process and back."""

    def send(error: DisaggKVError) -> DisaggKVError:
        found = pickle.loads(pickle.dumps(error, protocol))
        assert isinstance(found, DisaggKVError)
        return found

    return send


AGAIN = {"pickle 2": over(2), "pickle": over(pickle.HIGHEST_PROTOCOL), "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: error.code)
def test_an_error_that_was_pickled_or_copied_keeps_message_attributes_and_cause(
    error: DisaggKVError, again: Callable[[DisaggKVError], DisaggKVError]
) -> None:
    for cause in (None, OSError(5, "no such device")):
        error.__cause__ = cause
        found = again(error)
        assert found is not error
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
        assert repr(found.__cause__) == repr(cause)
        assert found.retryable == error.retryable


def test_a_phase_prints_its_name_and_is_never_falsy() -> None:
    """An engine logs it, and may write ``if handle.phase``."""
    assert [str(phase) for phase in Phase] == [phase.name for phase in Phase]
    assert f"{Phase.FAILED}" == "FAILED"
    assert all(Phase)
    assert pickle.loads(pickle.dumps(Phase.DONE)) is Phase.DONE


def test_an_error_says_what_is_known_and_none_for_the_rest() -> None:
    error = DisaggKVError("it failed")
    names = ("peer", "instance", "rank", "epoch", "address", "room", "retryable")
    assert [getattr(error, name) for name in names] == [None] * len(names)
    assert DisaggKVError("it failed", address="unix:///a").peer == "unix:///a"
    assert DisaggKVError("it failed", instance="decode-1").peer == "decode-1"
    assert DisaggKVError("it failed", instance="decode-1", rank=0, address="unix:///a").peer == "decode-1/0"


def test_what_an_error_lacks_is_added_to_a_copy() -> None:
    """One error may end many rooms."""
    lost = PeerLostError("silent", rank=0)
    one, other = lost.about(room=b"a", rank=1), lost.about("room b", room=b"b", address=None)
    assert (lost.room, one.room, other.room) == (None, b"a", b"b")
    assert (one.rank, str(one), str(other)) == (0, "silent", "room b: silent")
    assert one.about(room=b"c") is one
    with pytest.raises(PeerLostError):
        raise lost
    assert lost.about(room=b"a").__traceback__ is lost.__traceback__


def test_errors_of_others_that_derive_from_ours_need_no_constructor() -> None:
    class OddError(TransportError):
        def __init__(self) -> None:
            pass

        def __str__(self) -> str:
            raise ValueError("no text")

    error = OddError().about("room a", room=b"a")
    assert (error.room, error.code, error.retryable, error.args) == (b"a", "transport", False, ("room a: OddError",))


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [found.code for found in classes()]
    assert len(set(codes)) == len(codes)
    assert [code for code in codes if not re.fullmatch(r"[a-z]+(_[a-z]+)*", code)] == []
    assert [found.__name__ for found in classes() if "code" not in vars(found)] == []


def test_the_module_exports_every_class() -> None:
    text = (ROOT / "src" / "disagg_kv" / "errors.py").read_text()
    assert sorted(errors.__all__) == sorted(re.findall(r"^class (\w+Error)\(", text, re.MULTILINE))


def test_a_room_names_the_peer_that_it_lost() -> None:
    """Instance, rank, epoch and address; and its own id, although one loss ends several rooms."""
    rig = Rig(SPEC, options=Options(silence_s=3.0, total_s=60.0))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    requests = [rig.request(name, prefills, decodes, 8).open_prefill().open_decode().expect() for name in ("a", "b")]
    rig.until(lambda: all(r.sends[0].held is not None for r in requests), "them to meet")
    (peer,) = decodes[0].endpoint.peers()
    prefills[0].crash()
    rig.until(lambda: all(r.receives[0].error is not None for r in requests), "the loss")
    for request in requests:
        error = request.receives[0].error
        assert isinstance(error, PeerLostError)
        assert (error.instance, error.rank, error.epoch, error.address) == ("P", 0, peer.epoch, peer.address)
        assert (error.peer, error.room) == ("P/0", request.room)


def test_the_other_side_reads_which_rank_of_which_instance_is_lost() -> None:
    rig = Rig(SPEC, options=Options(silence_s=3.0, total_s=60.0))
    prefills = rig.prefill(tp_shards(SPEC, 2))
    decodes = rig.decode(tp_shards(SPEC, 1), options=Options(silence_s=50.0, total_s=60.0))
    request = rig.request("a", prefills, decodes, 8).open_prefill().open_decode().expect()
    rig.until(lambda: all(len(m.endpoint.peers()) == 2 for m in prefills), "them to meet")
    prefills[1].frozen = True
    rig.until(lambda: request.receives[0].error is not None, "the end")
    error = request.receives[0].error
    assert isinstance(error, AbortedError)
    assert error.peer == "P/0"
    assert "rank 1 of instance 'P' is lost" in str(error)


def test_an_abort_names_the_rank_that_sent_it() -> None:
    rig = Rig(SPEC)
    request = rig.request("a", rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1)), 8)
    request.open_prefill().open_decode().expect()
    rig.until(lambda: request.sends[0].held is not None, "the request")
    request.sends[0].abort("no memory")
    request.released()
    there = request.receives[0].error
    assert isinstance(there, AbortedError)
    assert (there.peer, there.room) == ("P/0", request.room)
    assert "from instance 'P': prefill rank 0 gave up" in str(there)
    assert "no memory" in str(there)
    back = rig.request("b", rig.prefills, rig.decodes, 8).open_prefill().open_decode().expect()
    rig.until(lambda: back.sends[0].held is not None, "the request")
    back.receives[0].abort("no user")
    back.released()
    here = back.sends[0].error
    assert isinstance(here, AbortedError)
    assert (here.peer, here.address, here.room) == ("D/0", "inproc://D0", back.room)
    assert "room b towards D/0 (epoch " in str(here)


def test_an_instance_that_does_not_answer_is_named_with_its_rank() -> None:
    rig = Rig(SPEC, options=Options(silence_s=10.0, closed_s=1.0, total_s=60.0))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    prefills[1].crash()
    handle = decodes[0].endpoint.open(RoomId(b"a"), rig.request("a", prefills, decodes, 8).source)
    rig.until(lambda: handle.error is not None, "the refusal")
    error = handle.error
    assert isinstance(error, PeerLostError)
    assert (error.peer, error.address, error.room) == ("P/1", "inproc://P1", b"a")
    assert str(error).startswith("rank 1 of instance 'P': ")


def test_an_error_without_a_message_is_said_by_its_type() -> None:
    """That of another library, and ours."""

    class StrangeError(OSError):
        pass

    said = [errors.text_of(error) for error in (StrangeError(), KeyboardInterrupt(), TransportError(), OSError("full"))]
    assert said == ["StrangeError", "KeyboardInterrupt", "TransportError", "full"]
    assert str(TransportError().about("room a")) == "room a: TransportError"


def test_two_sides_that_do_not_fit_name_each_other() -> None:
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    other = Rig(CacheSpec.kv(3, 4, 8, "float16"))
    other.clock, other.hub, other.rendezvous = rig.clock, rig.hub, rig.rendezvous
    decodes = other.decode(tp_shards(other.spec, 1))
    rig.decodes = decodes
    handle = decodes[0].endpoint.open(RoomId(b"a"), rig.request("a", prefills, decodes, 8).source)
    rig.until(lambda: handle.error is not None, "the refusal")
    error = handle.error
    assert isinstance(error, IncompatiblePeerError)
    assert isinstance(error, ConfigurationError)
    assert (error.field, error.peer, error.address) == ("spec.layers", "P/0", "inproc://P0")
