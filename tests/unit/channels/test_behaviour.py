"""What every channel promises, over all implementations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from disagg_kv.channels import MAX_FRAME, Arrived, Channel, Closed, Hub, InprocChannel, Opened, UnixChannel, ZmqChannel
from disagg_kv.errors import ConfigurationError
from tests.support.channels import take, wait_for

HIGH_WATER = 100


class Network:
    """Opens channels of one kind, and closes what is left open."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack) -> None:
        hub = Hub(HIGH_WATER)
        self._stack = stack
        kinds: dict[str, tuple[Callable[[str], Channel], Callable[[str], Channel]]] = {
            "inproc": (
                lambda name: InprocChannel(hub, name),
                lambda address: InprocChannel(hub, address.removeprefix("inproc://")),
            ),
            "tcp": (lambda name: ZmqChannel(high_water=HIGH_WATER), ZmqChannel),
            "ipc": (lambda name: ZmqChannel(f"ipc://{folder}/{name}", high_water=HIGH_WATER), ZmqChannel),
            "unix": (lambda name: UnixChannel(f"unix://{folder}/{name}", high_water=HIGH_WATER), UnixChannel),
        }
        self._open, self._again = kinds[kind]

    def open(self, name: str) -> Channel:
        """A new inbox."""
        return self._stack.enter_context(closing(self._open(name)))

    def open_again(self, address: str) -> Channel:
        """A new inbox at an address that was closed."""
        return self._stack.enter_context(closing(self._again(address)))


@pytest.fixture(params=["inproc", "tcp", "ipc", "unix"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Network]:
    with ExitStack() as stack:
        yield Network(request.param, tmp_path, stack)


def connected(network: Network) -> tuple[Channel, Channel]:
    """Two channels, the first connected to the second."""
    left, right = network.open("left"), network.open("right")
    assert left.send(right.address, b"first")
    wait_for(left, Opened(right.address))
    wait_for(right, Arrived(b"first"))
    return left, right


def receive(left: Channel, right: Channel, came: list[object], wanted: int) -> None:
    """Poll both sides until so many things came in on the right."""
    while len(came) < wanted:
        left.poll()
        came.extend(take(right, 0.05))


class TestEveryChannel:
    def test_a_frame_arrives_whole_and_an_answer_comes_back(self, network: Network) -> None:
        left, right = connected(network)
        assert right.send(left.address, b"answer")
        wait_for(left, Arrived(b"answer"))

    @pytest.mark.parametrize("size", [0, 1, MAX_FRAME])
    def test_frames_of_every_allowed_size_arrive(self, network: Network, size: int) -> None:
        left, right = connected(network)
        assert left.send(right.address, b"x" * size)
        came: list[object] = []
        receive(left, right, came, 1)
        assert came == [Arrived(b"x" * size)]

    def test_a_larger_frame_is_refused_with_both_sizes(self, network: Network) -> None:
        left, right = connected(network)
        with pytest.raises(ConfigurationError, match=f"{MAX_FRAME + 1} bytes .* at most {MAX_FRAME}"):
            left.send(right.address, b"x" * (MAX_FRAME + 1))

    def test_ten_thousand_frames_arrive_in_order_and_none_is_lost(self, network: Network) -> None:
        left, right = connected(network)
        frames = [str(i).encode() for i in range(10_000)]
        came: list[object] = []
        for frame in frames:
            while not left.send(right.address, frame):
                came.extend(take(right, 0.01))
                left.poll()
        receive(left, right, came, len(frames))
        assert came == [Arrived(frame) for frame in frames]

    def test_a_sender_is_told_that_a_queue_is_full_and_never_waits(self, network: Network) -> None:
        """A peer that reads nothing costs a bounded queue."""
        left, right = connected(network)
        sent = 0
        while left.send(right.address, b"x" * MAX_FRAME):
            sent += 1
        came: list[object] = []
        receive(left, right, came, sent)
        assert came == [Arrived(b"x" * MAX_FRAME)] * sent

    @pytest.mark.parametrize("address", ["", "nowhere", "tcp://", "tcp://127.0.0.1:99999", "ipc:///" + 200 * "x"])
    def test_a_malformed_address_drops_the_frame(self, network: Network, address: str) -> None:
        assert not network.open("left").send(address, b"lost")

    def test_an_empty_inbox_returns_nothing(self, network: Network) -> None:
        assert not network.open("left").poll()

    def test_a_wait_is_as_long_as_it_should_be(self, network: Network) -> None:
        """Of twenty waits for 20 us, one is shorter than a millisecond; a wait for no time returns."""
        channel, took = network.open("left"), list[float]()
        for _ in range(20):
            channel.poll()
            began = time.perf_counter()
            channel.wait(20e-6)
            took.append(time.perf_counter() - began)
        assert max(took) >= 20e-6
        assert min(took) < 1e-3
        channel.wait(0)
        channel.wait(-1)

    def test_the_end_of_an_inbox_is_reported_and_its_return_too(self, network: Network) -> None:
        """What was sent in between does not reach the new inbox."""
        left, right = connected(network)
        address = right.address
        right.close()
        wait_for(left, Closed(address))
        assert not left.send(address, b"meanwhile")
        again = network.open_again(address)
        wait_for(left, Opened(address))
        assert left.send(address, b"back")
        assert wait_for(again, Arrived(b"back")) == [Arrived(b"back")]

    def test_an_address_where_nobody_listens_is_told_once(self, network: Network) -> None:
        """And its opening, when it comes."""
        left, right = connected(network)
        address = right.address
        right.close()
        wait_for(left, Closed(address))
        fresh = network.open("fresh")
        fresh.send(address, b"hello")
        assert wait_for(fresh, Closed(address)) == [Closed(address)]
        network.open_again(address)
        assert wait_for(fresh, Opened(address)) == [Opened(address)]

    def test_a_forgotten_address_makes_no_news_and_can_be_used_again(self, network: Network) -> None:
        left, right = connected(network)
        other = network.open("other")
        assert left.send(other.address, b"first")
        wait_for(left, Opened(other.address))
        left.forget(right.address)
        left.forget(right.address)
        assert left.send(right.address, b"second")
        assert wait_for(left, Opened(right.address)) == [Opened(right.address)]
        wait_for(right, Arrived(b"second"))
        left.forget(right.address)
        right.close()
        other.close()
        assert wait_for(left, Closed(other.address)) == [Closed(other.address)]

    def test_after_close_nothing_moves_and_nothing_breaks(self, network: Network) -> None:
        left, right = connected(network)
        right.send(left.address, b"unread")
        left.close()
        left.close()
        left.wake()
        left.forget(right.address)
        assert not left.send(right.address, b"late")
        left.wait(1000)
        assert not left.poll()
