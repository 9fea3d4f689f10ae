"""The bootstrap server, and what asks it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from disagg_kv.engines.sglang import bootstrap
from disagg_kv.engines.sglang.bootstrap import MOST_BYTES, BootstrapServer, Directory, register
from disagg_kv.errors import ConfigurationError
from disagg_kv.rendezvous import Source
from tests.support.processes import wait

SOURCE = Source("sglang host 1", ("unix:///a", "unix:///b"))


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    one = BootstrapServer("127.0.0.1", 0)
    yield one
    one.close()


@pytest.fixture
def directory() -> Iterator[Directory]:
    one = Directory()
    yield one
    one.close()


def ask(server: BootstrapServer, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(method, path, body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_what_rank_0_registers_is_found(server: BootstrapServer, directory: Directory) -> None:
    address = f"127.0.0.1:{server.port}"
    assert not directory.ensure(address)
    assert "no prefill instance of disagg_kv has registered" in (directory.problem(address) or "")
    register(address, SOURCE, threading.Event()).join(5)
    wait(lambda: directory.ensure(address), lambda: str(directory.problem(address)))
    assert directory.get(address) == SOURCE
    assert directory.problem(address) is None
    assert directory.ensure(address)


def test_an_instance_that_is_lost_is_asked_for_again(server: BootstrapServer, directory: Directory) -> None:
    address = f"127.0.0.1:{server.port}"
    register(address, SOURCE, threading.Event()).join(5)
    wait(lambda: directory.ensure(address), lambda: "the first")
    again = Source("sglang host 2", ("unix:///c",))
    register(address, again, threading.Event()).join(5)
    assert directory.get(address) == SOURCE
    directory.forget("another")
    assert directory.get(address) == SOURCE
    directory.forget(SOURCE.instance)
    assert directory.get(address) is None
    wait(lambda: directory.ensure(address), lambda: "the second")
    assert directory.get(address) == again


def test_an_answer_that_is_out_of_date_is_asked_for_again(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was asked for before the instance was lost, or long ago, may name a server that is gone."""
    names, go = iter("abc"), threading.Event()

    def answer(address: str, method: str) -> bytes:
        name = next(names)
        assert go.wait(5)
        return json.dumps({"instance": name, "addresses": []}).encode()

    monkeypatch.setattr(bootstrap, "_ask", answer)
    monkeypatch.setattr(bootstrap, "SOON_S", 0.01)
    assert not directory.ensure("host:1")
    directory.forget("another")
    assert not directory.ensure("host:1")
    monkeypatch.setattr(bootstrap, "FRESH_S", 0.0)
    assert not directory.ensure("host:1")
    monkeypatch.setattr(bootstrap, "FRESH_S", 60.0)
    go.set()
    wait(lambda: directory.ensure("host:1"), lambda: "the answer")
    assert directory.get("host:1") == Source("c")


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
    assert directory.get(address) == SOURCE
    server.close()


def test_requests_that_make_no_sense(server: BootstrapServer) -> None:
    assert ask(server, "GET", "/health") == 200
    assert ask(server, "GET", "/instance") == 404
    assert ask(server, "GET", "/elsewhere") == 404
    assert ask(server, "PUT", "/elsewhere", b"{}") == 403
    assert ask(server, "PUT", "/instance", b"{}", **{"Content-Length": str(MOST_BYTES + 1)}) == 413
    assert ask(server, "PUT", "/instance", b"{}", **{"Content-Length": "many"}) == 413


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
    assert ask(server, "PUT", "/instance", content) == 204
    assert not directory.ensure(address)
    assert "describes no instance" in (directory.problem(address) or "")
    assert directory.get(address) is None


def test_another_server_at_that_address(directory: Directory) -> None:
    """Its status is in the message."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        assert not directory.ensure(address)
        assert "status 501" in (directory.problem(address) or "")
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
    wait(lambda: directory.ensure(address) or directory.problem(address) is not None, lambda: address)
    assert directory.get(address) is None
    assert directory.problem(address)


def test_a_slow_server_does_not_hold_up_the_scheduler(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    answer = json.dumps({"instance": "a", "addresses": []}).encode()
    monkeypatch.setattr(bootstrap, "_ask", lambda address, method: answer if go.wait(5) else b"")
    monkeypatch.setattr(bootstrap, "SOON_S", 0.01)
    assert not directory.ensure("host:1")
    assert not directory.ensure("host:1")
    assert directory.problem("host:1") is None
    go.set()
    wait(lambda: directory.ensure("host:1"), lambda: "the answer")
    assert directory.get("host:1") == Source("a")
