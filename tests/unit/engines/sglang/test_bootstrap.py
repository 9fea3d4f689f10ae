"""The bootstrap server, and what asks it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from disagg_kv.engines.sglang import bootstrap
from disagg_kv.engines.sglang.bootstrap import MOST_BYTES, BootstrapServer, Directory, register
from disagg_kv.errors import ConfigurationError, PeerLostError
from disagg_kv.rendezvous import Source
from tests.support.processes import wait

if TYPE_CHECKING:
    from _typeshed import TraceFunction

SOURCE = Source("sglang host 1", ("unix:///a", "unix:///b"))


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    one = BootstrapServer("127.0.0.1", 0)
    yield one
    one.close()


@pytest.fixture
def directory() -> Directory:
    return Directory()


def ask(server: BootstrapServer, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(method, path, body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


def problem(directory: Directory, address: str) -> str:
    """Why an address has no instance."""
    wait(lambda: directory.ensure(address) or directory.problem(address) is not None, lambda: address)
    return directory.problem(address) or ""


def test_what_rank_0_registers_is_found(server: BootstrapServer, directory: Directory) -> None:
    address = f"127.0.0.1:{server.port}"
    assert "no prefill instance of disagg_kv has registered" in problem(directory, address)
    register(address, SOURCE, threading.Event()).join(5)
    wait(lambda: directory.ensure(address), lambda: str(directory.problem(address)))
    assert directory.get(address) == (SOURCE,)
    assert directory.problem(address) is None
    assert directory.ensure(address)


def test_the_instances_of_a_server_are_found_once_all_have_registered(
    server: BootstrapServer, directory: Directory
) -> None:
    """One for each data-parallel rank, in their order. If one is lost, all are asked for again."""
    address, other = f"127.0.0.1:{server.port}", Source("sglang host 9", ("unix:///z",))
    register(address, other, threading.Event(), 1, 2).join(5)
    assert "no prefill instance of disagg_kv has registered" in problem(directory, address)
    register(address, SOURCE, threading.Event(), 0, 2).join(5)
    wait(lambda: directory.ensure(address), lambda: str(directory.problem(address)))
    assert directory.get(address) == (SOURCE, other)
    directory.forget(other.instance)
    assert not directory.get(address)


def test_nobody_sees_one_of_several_instances_alone(server: BootstrapServer) -> None:
    """Asked at every instruction with which the server takes the description of one of two."""
    seen: list[int] = []
    answers = threading.Event()

    def trace(frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        if frame.f_code.co_name == "_answer" and frame.f_back is not None and frame.f_back.f_code.co_name == "do_PUT":
            answers.set()
        if frame.f_code.co_name != "do_PUT" or answers.is_set():
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen.append(ask(server, "GET", "/instance"))
        return trace

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        assert ask(server, "PUT", "/instance/1/2", b"{}") == 204
    finally:
        threading.settrace(before)
    assert len(seen) > 50
    assert set(seen) == {404}
    assert ask(server, "PUT", "/instance/0/2", b"{}") == 204
    assert ask(server, "GET", "/instance") == 200


def test_an_instance_that_is_lost_is_asked_for_again(server: BootstrapServer, directory: Directory) -> None:
    address = f"127.0.0.1:{server.port}"
    register(address, SOURCE, threading.Event()).join(5)
    wait(lambda: directory.ensure(address), lambda: "the first")
    again = Source("sglang host 2", ("unix:///c",))
    register(address, again, threading.Event()).join(5)
    assert directory.get(address) == (SOURCE,)
    directory.forget("another")
    assert directory.get(address) == (SOURCE,)
    directory.forget(SOURCE.instance)
    assert not directory.get(address)
    wait(lambda: directory.ensure(address), lambda: "the second")
    assert directory.get(address) == (again,)


def test_registration_waits_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "AGAIN_S", 0.01)
    with BootstrapServerLater() as (port, start):
        thread = register(f"127.0.0.1:{port}", SOURCE, threading.Event())
        start()
        thread.join(5)
        assert not thread.is_alive()


def test_registration_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "AGAIN_S", 0.01)
    stopped = threading.Event()
    thread = register("127.0.0.1:1", SOURCE, stopped)
    stopped.set()
    thread.join(5)
    assert not thread.is_alive()


class BootstrapServerLater:
    """A port at which a server listens later."""

    def __enter__(self) -> tuple[int, Callable[[], None]]:
        first = BootstrapServer("127.0.0.1", 0)
        first.close()
        self.servers: list[BootstrapServer] = []
        return first.port, lambda: self.servers.append(BootstrapServer("127.0.0.1", first.port))

    def __exit__(self, *args: object) -> None:
        for server in self.servers:
            server.close()


def test_a_port_in_use_is_named(server: BootstrapServer) -> None:
    with pytest.raises(ConfigurationError, match=f"no bootstrap server at 127.0.0.1:{server.port}"):
        BootstrapServer("127.0.0.1", server.port)


def test_an_address_of_ip_6(directory: Directory) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as exc:
        pytest.skip(f"this host has no IPv6: {exc}")
    server = BootstrapServer("::1", 0)
    address = f"[::1]:{server.port}"
    register(address, SOURCE, threading.Event()).join(5)
    wait(lambda: directory.ensure(address), lambda: str(directory.problem(address)))
    assert directory.get(address) == (SOURCE,)
    server.close()


def test_requests_that_make_no_sense(server: BootstrapServer) -> None:
    assert ask(server, "GET", "/health") == 200
    assert ask(server, "GET", "/instance") == 404
    assert ask(server, "GET", "/elsewhere") == 404
    for elsewhere in ("/elsewhere", "/instance", "/instance/1/1", "/instance/0/99999", "/instance/a/1"):
        assert ask(server, "PUT", elsewhere, b"{}") == 403
    assert ask(server, "PUT", "/instance/0/1", b"{}", **{"Content-Length": str(MOST_BYTES + 1)}) == 413
    assert ask(server, "PUT", "/instance/0/1", b"{}", **{"Content-Length": "many"}) == 413


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"instance": "", "addresses": []}',
        b'{"instance": "a", "addresses": "unix:///a"}',
        b"[" * 100_000,
    ],
)
def test_an_answer_that_describes_no_instance(server: BootstrapServer, directory: Directory, content: bytes) -> None:
    address = f"127.0.0.1:{server.port}"
    assert ask(server, "PUT", "/instance/0/1", content) == 204
    assert "describes no instance" in problem(directory, address)
    assert not directory.get(address)


def test_another_server_at_that_address(directory: Directory) -> None:
    """Its status is in the message."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        assert "status 501" in problem(directory, address)
        server.shutdown()


NOWHERE = (
    "127.0.0.1:1",
    "127.0.0.1:port",
    "127.0.0.1:",
    "nothing",
    "a b:1",
    "a\x00b:1",
    "127.0.0.1:99999999999",
    "[:1",
    ":1",
)


@pytest.mark.parametrize("address", NOWHERE)
def test_addresses_at_which_nothing_answers(directory: Directory, address: str) -> None:
    assert problem(directory, address)
    assert not directory.get(address)


@contextmanager
def silent(accepts: bool) -> Iterator[int]:
    """A port at which nothing answers, at each address of the loopback; it accepts connections or not."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("0.0.0.0", 0), backlog=512 if accepts else 0))
        port = listener.getsockname()[1]
        while not accepts:  # the kernel accepts until the backlog is full
            one = stack.enter_context(socket.socket())
            one.settimeout(0.1)
            try:
                one.connect(("127.0.0.1", port))
            except TimeoutError:
                break
        yield port


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("count", [1, 50])
def test_silent_hosts_hold_up_neither_the_scheduler_nor_an_instance_that_answers(
    server: BootstrapServer, directory: Directory, monkeypatch: pytest.MonkeyPatch, count: int, accepts: bool
) -> None:
    """No host gives up while the test waits: a thread that asks them one by one would never come to the good one."""
    monkeypatch.setattr(bootstrap, "ANSWER_S", 300.0)
    good = f"127.0.0.1:{server.port}"
    register(good, SOURCE, threading.Event()).join(5)
    with silent(accepts) as port:
        hosts = [f"127.0.1.{number}:{port}" for number in range(1, count + 1)]
        began = time.monotonic()
        assert not any(directory.ensure(host) for host in hosts)
        assert time.monotonic() - began < 5
        wait(lambda: [directory.ensure(host) for host in (*hosts, good)][-1], lambda: str(directory.problem(good)))
        assert directory.get(good) == (SOURCE,)
        assert not any(directory.problem(host) for host in hosts)


class Hosts:
    """Every address has one; they answer once they ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        monkeypatch.setattr(bootstrap, "_ask", self.answer)

    def answer(self, address: str, method: str) -> bytes:
        self.asked.append(address)
        assert self.go.wait(60)
        if address.startswith("none"):
            raise PeerLostError("nothing there")
        return json.dumps({"instance": address, "addresses": []}).encode()


def test_an_address_is_asked_one_question_at_a_time(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    assert not any(directory.ensure("host:1") for _ in range(9))
    directory.forget("host:1")
    assert not directory.ensure("host:1")
    hosts.go.set()
    wait(lambda: directory.ensure("host:1"), lambda: "the answer")
    assert hosts.asked == ["host:1"]


def test_an_address_that_took_long_to_fail_is_left_alone_for_as_long(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, now = Hosts(monkeypatch), [100.0]
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert not directory.ensure("none:1")
    wait(lambda: bool(hosts.asked), lambda: "the question")
    now[0] = 104.0
    hosts.go.set()
    wait(lambda: directory.problem("none:1") is not None, lambda: "the end")
    now[0] = 107.9
    assert not any(directory.ensure("none:1") for _ in range(9))
    assert hosts.asked == ["none:1"]
    now[0] = 108.0
    wait(lambda: directory.ensure("none:1") or len(hosts.asked) == 2, lambda: "the second question")


def test_of_too_many_addresses_those_without_an_instance_go_first(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "MOST_PLACES", 3)
    hosts = Hosts(monkeypatch)
    hosts.go.set()
    assert problem(directory, "none:1")
    for address in ("a:1", "b:1", "c:1"):
        wait(lambda: directory.ensure(address), lambda: "the answer")  # noqa: B023
    assert not directory.problem("none:1")
    wait(lambda: directory.ensure("d:1"), lambda: "the answer")
    assert [bool(directory.get(address)) for address in ("a:1", "b:1", "c:1", "d:1")] == [False, True, True, True]


def test_questions_that_are_open_are_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MOST_ASKED", 2)
    hosts = Hosts(monkeypatch)
    assert not any(directory.ensure(address) for address in ("none:1", "none:2", "a:1"))
    wait(lambda: sorted(hosts.asked) == ["none:1", "none:2"], lambda: str(hosts.asked))
    hosts.go.set()
    wait(lambda: directory.ensure("a:1"), lambda: "the answer")
