"""Ranks meet in a real etcd: what every rendezvous promises, users, TLS, and what others write there."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from disagg_kv.errors import (
    ConfigurationError,
    InstanceClosedError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    StoreUnreachableError,
)
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import EtcdRendezvous, Source
from disagg_kv.testing.rendezvous import Another, RendezvousSuite
from tests.support.etcd import EtcdServer, add_user, certificates
from tests.support.needs import needs_etcd

pytestmark = needs_etcd

Make = Callable[..., EtcdRendezvous]

CHILD = """
import sys, time
from disagg_kv.rendezvous import EtcdRendezvous
url, prefix, rank = sys.argv[1:]
EtcdRendezvous([url], prefix, lease_s=2).publish("prefill", int(rank), 2, f"address of {rank}")
print("published", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server that all tests of this file share, each with a prefix of its own."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


@pytest.fixture
def prefix() -> str:
    return f"tests/{uuid.uuid4().hex}"


@pytest.fixture
def make(server: EtcdServer, prefix: str) -> Iterator[Make]:
    """Makes a rendezvous of this test's deployment, as another process has it."""
    made: list[EtcdRendezvous] = []

    def make(url: str = server.url, of: str = prefix, **more: object) -> EtcdRendezvous:
        made.append(EtcdRendezvous([url], of, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


class TestEtcdRendezvous(RendezvousSuite):
    """One server."""

    @pytest.fixture
    def rendezvous(self, make: Make) -> EtcdRendezvous:
        return make()

    @pytest.fixture
    def another(self, make: Make) -> Another:
        return make


def within(seconds: float, ask: Callable[[], bool]) -> bool:
    """Whether something is so, some time until then."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if ask():
            return True
        time.sleep(0.02)
    return ask()


def test_a_rank_that_was_withdrawn_fails_look_ups_by_name_in_every_process(make: Make) -> None:
    """Also after its process has closed, for those that know no more than what etcd holds."""
    first, reader = make(), make()
    for rank in range(2):
        first.publish("prefill", Rank(rank), 2, f"address {rank}")
    first.withdraw("prefill", Rank(1))
    with pytest.raises(InstanceClosedError, match="instance 'prefill': rank 1 has closed"):
        first.lookup(Source("prefill"))
    first.close()
    with pytest.raises(InstanceClosedError, match=r"instance 'prefill': rank [01] has closed"):
        reader.lookup(Source("prefill"))
    # Another number of ranks may come back under the name.
    make().publish("prefill", Rank(0), 1, "back")
    assert within(5.0, lambda: _known(reader) == ("back",))


def calls(one: EtcdRendezvous) -> list[Callable[[], object]]:
    """Those that need etcd."""
    return [lambda: one.publish("prefill", Rank(0), 1, "address"), lambda: one.lookup(Source("prefill"))]


def _known(one: EtcdRendezvous, instance: str = "prefill") -> tuple[str, ...] | None:
    try:
        return one.lookup(Source(instance))
    except InstanceClosedError:
        return None


@pytest.mark.slow
def test_the_keys_of_a_killed_process_vanish(server: EtcdServer, make: Make, prefix: str) -> None:
    """Two processes; both are killed, and one comes back with another number of ranks."""
    reader = make()
    assert reader.lookup(Source("prefill")) is None
    command = [sys.executable, "-c", CHILD, server.url, prefix]
    children = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == b"published\n"
    assert within(5.0, lambda: reader.lookup(Source("prefill")) == ("address of 0", "address of 1"))
    for child in children:
        child.kill()
        child.communicate()
    assert within(15.0, lambda: reader.lookup(Source("prefill")) is None)
    assert within(15.0, lambda: server.keys(f"{prefix}/") == {})
    make().publish("prefill", Rank(0), 1, "another world")


def test_a_look_up_asks_etcd_for_nothing(server: EtcdServer, make: Make) -> None:
    """The watch brings what changes."""
    writer, reader = make(), make()
    writer.publish("prefill", Rank(0), 2, "zero")
    for one in (writer, reader):
        # Each reads everything once, on a thread of its own.
        assert one.lookup(Source("prefill")) is None
    before = server.requests_served()
    for _ in range(1000):
        assert reader.lookup(Source("prefill")) is None
        assert reader.lookup(Source("unknown")) is None
    assert server.requests_served() == before
    writer.publish("prefill", Rank(1), 2, "one")
    assert within(5.0, lambda: reader.lookup(Source("prefill")) == ("zero", "one"))
    # The transaction of `publish` and its range or put.
    assert server.requests_served() - before <= 2


def test_deployments_do_not_see_each_other(make: Make, prefix: str) -> None:
    """Neither do those of which one's prefix begins with the other's, or looks like its keys."""
    others = [make(of=f"{prefix}{more}") for more in ("", "/b", "/ranks", "2", "/ranks/prefill")]
    for number, one in enumerate(others):
        one.publish("prefill", Rank(0), 1, str(number))
    for number, one in enumerate(others):
        assert one.lookup(Source("prefill")) == (str(number),)
        assert one.lookup(Source("ranks")) is None


def test_two_instances_of_one_name_are_noticed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The younger one counts, the older one learns of it, leaves the key alone, and does not withdraw it."""
    older, younger = make(), make()
    older.publish("prefill", Rank(0), 1, "older")
    younger.publish("prefill", Rank(0), 1, "younger")
    line = "instance 'prefill': rank 0 at older: another process has published it, at younger"
    assert within(5.0, lambda: line in caplog.text)
    older.close()
    assert younger.lookup(Source("prefill")) == ("younger",)


@pytest.mark.parametrize(
    "value",
    ["", "null", "[]", "{", "{}", '{"address": "", "id": "x"}', '{"address": 1, "id": "x"}', "\x00\xff", "[" * 9000,
     '{"address": "' + "a" * 20000 + '", "id": "x"}', '{"address": "' + "a" * 1025 + '", "id": "x"}'],
    ids=range(11),
)  # fmt: skip
def test_garbage_in_the_place_of_a_rank_fails_its_instance_alone(
    server: EtcdServer, make: Make, prefix: str, value: str
) -> None:
    """The error names instance and key. A rank that is published replaces it."""
    one = make()
    lease = server.post("/lease/grant", TTL=60)["ID"]
    server.put(f"{prefix}/ranks/prefill/2/0", value, lease)
    one.publish("other", Rank(0), 1, "there")
    with pytest.raises(RemoteProtocolError, match=f"instance 'prefill'.*{prefix}/ranks/prefill/2/0"):
        one.lookup(Source("prefill"))
    assert one.lookup(Source("other")) == ("there",)
    for rank in range(2):
        one.publish("prefill", Rank(rank), 2, str(rank))
    assert one.lookup(Source("prefill")) == ("0", "1")


def test_foreign_keys_are_ignored(server: EtcdServer, make: Make, prefix: str) -> None:
    """Whatever lies below the prefix that no rank wrote."""
    for path in ("", "ranks", "ranks/", "ranks/x", "ranks/x/1", "ranks/x/1/1", "ranks/x/1/0/2", "ranks/x/01/0",
                 "ranks/x/-1/0", "ranks/x/9999999999/0", "ranks/%7/1/0", "ranks/x/5000/1", "closed", "closed/x/y/z",
                 "ranks/x/1/\u0660"):  # fmt: skip
        server.put(f"{prefix}/{path}", "anything")
    one = make()
    one.publish("prefill", Rank(0), 1, "there")
    assert one.lookup(Source("prefill")) == ("there",)
    assert one.lookup(Source("x")) is None


def test_a_foreign_key_among_the_ranks_of_an_instance_is_named(server: EtcdServer, make: Make, prefix: str) -> None:
    """No rank can be written beside it: the operator learns which key to remove."""
    server.put(f"{prefix}/ranks/prefill/x", "anything")
    with pytest.raises(RemoteProtocolError, match=f"'prefill': rank 0: etcd key '{prefix}/ranks/prefill/x' is among"):
        make().publish("prefill", Rank(0), 1, "address")


def test_a_stale_key_without_a_lease_is_named(server: EtcdServer, make: Make, prefix: str) -> None:
    """As a restored backup may leave it: it would never vanish. A rank that is published replaces it."""
    server.put(f"{prefix}/ranks/prefill/1/0", '{"address": "gone", "id": "x"}')
    one = make()
    with pytest.raises(RemoteProtocolError, match=f"'prefill': etcd key '{prefix}/ranks/prefill/1/0' has no lease"):
        one.lookup(Source("prefill"))
    with pytest.raises(ConfigurationError, match=f"others published 1: etcd key '{prefix}/ranks/prefill/1/0'"):
        one.publish("prefill", Rank(0), 2, "two")
    one.publish("prefill", Rank(0), 1, "there")
    assert one.lookup(Source("prefill")) == ("there",)


def test_ranks_of_two_worlds_are_no_instance(server: EtcdServer, make: Make, prefix: str) -> None:
    """No process of this library wrote both."""
    lease = server.post("/lease/grant", TTL=60)["ID"]
    for world in (1, 2):
        server.put(f"{prefix}/ranks/prefill/{world}/0", '{"address": "a", "id": "x"}', lease)
    with pytest.raises(RemoteProtocolError, match="'prefill': etcd holds ranks of 1 and 2"):
        make().lookup(Source("prefill"))


@pytest.mark.parametrize("what", ["deleted", "garbage"])
def test_a_key_that_others_destroy_is_written_again(server: EtcdServer, make: Make, prefix: str, what: str) -> None:
    """Its lease lives: the rank is there."""
    one, reader = make(), make()
    one.publish("prefill", Rank(0), 1, "there")
    assert within(5.0, lambda: reader.lookup(Source("prefill")) == ("there",))
    path = f"{prefix}/ranks/prefill/1/0"
    value = server.keys(path)[path]["value"]
    if what == "deleted":
        server.post("/kv/deleterange", key=path)
    else:
        server.put(path, "garbage")
    assert within(5.0, lambda: server.keys(path).get(path, {}).get("value") == value)
    assert server.keys(path)[path]["lease"] != "0"
    assert within(5.0, lambda: reader.lookup(Source("prefill")) == ("there",))


def test_many_instances_are_read_in_pages(make: Make, server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and numbers of every kind; none is lost at the end of a page."""
    monkeypatch.setattr("disagg_kv.rendezvous.etcd.watch.PAGE", 3)
    writer = make()
    names = [f"{number}/{'x' * number}" for number in range(10)]
    for name in names:
        writer.publish(name, Rank(0), 1, f"address of {name}")
    reader = make()
    assert [reader.lookup(Source(name)) for name in names] == [(f"address of {name}",) for name in names]


def test_what_is_closed_says_so(make: Make) -> None:
    """Closing twice changes nothing, and a context closes too."""
    with make() as one:
        one.publish("prefill", Rank(0), 1, "there")
    one.close()
    for call in calls(one):
        with pytest.raises(LocalProtocolError, match="is closed"):
            call()


def test_a_forked_child_cannot_use_it(make: Make) -> None:
    """It has neither the threads nor connections of its own."""
    one = make()
    one.publish("prefill", Rank(0), 1, "there")
    child = os.fork()
    if not child:
        try:
            one.lookup(Source("prefill"))
        except LocalProtocolError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert one.lookup(Source("prefill")) == ("there",)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"endpoints": []}, "endpoints: at least one"),
        ({"endpoints": "http://a:1"}, "a list of str is needed"),
        ({"endpoints": ["127.0.0.1:2379"]}, "endpoint '127.0.0.1:2379': not http://HOST:PORT"),
        ({"endpoints": ["http://a"]}, "endpoint 'http://a': not http://HOST:PORT"),
        ({"endpoints": ["http://a:99999"]}, "endpoint 'http://a:99999'"),
        ({"endpoints": ["http://u:p@a:1"]}, "not http://HOST:PORT"),
        ({"prefix": ""}, "prefix ''"),
        ({"prefix": "/"}, "prefix '/'"),
        ({"prefix": "ä"}, "prefix 'ä': printable ASCII"),
        ({"prefix": "a\nb"}, "printable ASCII"),
        ({"user": "u"}, "user and password: both"),
        ({"cert": "/dev/null"}, "cert and key: both"),
        ({"ca": "/nowhere"}, "ca: there is no file '/nowhere'"),
        ({"lease_s": 1}, "lease_s"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_arguments_that_cannot_be_are_refused(more: dict[str, object], message: str) -> None:
    """Before anything is asked."""
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        EtcdRendezvous(**{"endpoints": ["http://127.0.0.1:1"], **more})  # type: ignore[arg-type]


class Other(BaseHTTPRequestHandler):
    """Another server: its answer to everything is a class attribute."""

    answer: ClassVar[bytes] = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"etcdserver": "3.2.32", "etcdcluster": "3.2.0"}', "has version 3.2.32; 3.4 or a newer 3.x is needed"),
        (b'{"etcdserver": "2.3.8", "etcdcluster": "2.3.0"}', "has version 2.3.8"),
        (b'{"etcdserver": "4.0.0", "etcdcluster": "4.0.0"}', "has version 4.0.0"),
        (b'{"etcdserver": "unknown"}', "no etcd answers"),
        (b"<html>It works!</html>", "no etcd answers at .*It works!"),
        (b"[]", "no etcd answers"),
    ],
)
def test_servers_of_other_versions_and_other_servers_are_refused(make: Make, answer: bytes, message: str) -> None:
    """By address, with what they said."""
    with HTTPServer(("127.0.0.1", 0), type("Answers", (Other,), {"answer": answer})) as other:
        thread = Thread(target=other.serve_forever)
        thread.start()
        try:
            one = make(f"http://127.0.0.1:{other.server_port}")
            with pytest.raises(ConfigurationError, match=message):
                one.publish("prefill", Rank(0), 1, "address")
            with pytest.raises(ConfigurationError, match=f"instance 'prefill'.*{message}"):
                one.lookup(Source("prefill"))
            one.close()
        finally:
            other.shutdown()
            thread.join()


class Pretender(Other):
    """Answers to ``/version`` as etcd does, and to anything else with a class attribute."""

    def do_GET(self) -> None:
        self.say(b'{"etcdserver": "3.4.30", "etcdcluster": "3.4.0"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say(self.answer)

    def say(self, text: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"null", b"{}", b'{"header": {}}', b"<html>", b'{"ID": "5"}',
     b'{"ID": "5", "header": {"revision": "x"}, "responses": [7]}', b'{"ID": "5", "header": {"revision": "7"}, '
     b'"responses": [{"response_range": {"kvs": [{}]}}]}'],
    ids=range(9),
)  # fmt: skip
def test_answers_that_are_none_are_refused_by_name(make: Make, answer: bytes) -> None:
    """A server that has etcd's version and nothing else of it: no call leaks another error, and none hangs."""
    with HTTPServer(("127.0.0.1", 0), type("Answers", (Pretender,), {"answer": answer})) as other:
        thread = Thread(target=other.serve_forever)
        thread.start()
        try:
            one = make(f"http://127.0.0.1:{other.server_port}")
            with pytest.raises(RemoteProtocolError):
                one.publish("prefill", Rank(0), 1, "address")
            with pytest.raises((RemoteProtocolError, PeerLostError), match="instance 'prefill'"):
                one.lookup(Source("prefill"))
            one.close()
        finally:
            other.shutdown()
            thread.join()


def test_a_port_that_answers_no_http_is_a_lost_peer(make: Make) -> None:
    """Garbage instead of an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def garbage() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                connection.sendall(b"\x00\x16\x03 no http\r\n\r\n")
                connection.close()

        done = pool.submit(garbage)
        one = make(f"http://127.0.0.1:{listener.getsockname()[1]}")
        for call in calls(one):
            with pytest.raises(StoreUnreachableError, match="cannot be reached"):
                call()
        done.result()


class TestUsers:
    """A server that knows users, with tokens that expire after two seconds."""

    @pytest.fixture(scope="class")
    @classmethod
    def secured(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
        server = EtcdServer(tmp_path_factory.mktemp("users"), "--auth-token-ttl", "2").start()
        add_user(server, "rank", "secret", "prod")
        yield server
        server.kill()

    def test_a_user_publishes_and_looks_up(self, secured: EtcdServer, make: Make) -> None:
        one, two = (make(secured.url, "prod", user="rank", password="secret") for _ in range(2))
        one.publish("prefill", Rank(0), 1, "there")
        assert two.lookup(Source("prefill")) == ("there",)

    @pytest.mark.slow
    def test_a_token_that_expires_is_replaced(self, secured: EtcdServer, make: Make) -> None:
        """Nothing was asked for in between; the watch goes on too."""
        one, two = (make(secured.url, "prod", user="rank", password="secret") for _ in range(2))
        one.publish("expires", Rank(0), 2, "zero")
        assert two.lookup(Source("expires")) is None
        time.sleep(4.0)
        one.publish("expires", Rank(1), 2, "one")
        assert within(5.0, lambda: two.lookup(Source("expires")) == ("zero", "one"))

    def test_a_restarted_server_has_forgotten_its_tokens(self, tmp_path: Path, make: Make) -> None:
        """Both the lease and the watch ask for new ones."""
        server = EtcdServer(tmp_path / "restarted").start()
        try:
            add_user(server, "rank", "secret", "prod")
            one, two = (make(server.url, "prod", user="rank", password="secret") for _ in range(2))
            one.publish("prefill", Rank(0), 2, "zero")
            assert two.lookup(Source("prefill")) is None
            server.kill()
            server.start()
            one.publish("prefill", Rank(1), 2, "one")
            assert within(10.0, lambda: two.lookup(Source("prefill")) == ("zero", "one"))
        finally:
            server.kill()

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"user": "rank", "password": "wrong"}, "authentication failed"),
            ({"user": "other", "password": "secret"}, "authentication failed"),
            ({}, "user name is empty"),
            ({"user": "rank", "password": "secret", "of": "elsewhere"}, "permission denied"),
        ],
    )
    def test_wrong_credentials_are_refused_by_name(
        self, secured: EtcdServer, make: Make, more: dict[str, str], message: str
    ) -> None:
        """Of both calls; the password is in no message."""
        one = make(secured.url, **{"of": "prod", **more})
        for call in calls(one):
            with pytest.raises(ConfigurationError, match=f"{secured.url}.*{message}") as raised:
                call()
            assert "secret" not in str(raised.value)

    def test_a_server_that_knows_no_users_refuses_one(self, make: Make) -> None:
        """The two configurations differ, and this is not hidden."""
        with pytest.raises(ConfigurationError, match="authentication is not enabled"):
            make(user="rank", password="secret").publish("prefill", Rank(0), 1, "there")


class TestTls:
    """A server with a certificate, which asks for ours."""

    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        return certificates(tmp_path_factory.mktemp("certificates"))

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> Iterator[str]:
        more = ("--cert-file", files["cert"], "--key-file", files["key"], "--trusted-ca-file", files["ca"])
        server = EtcdServer(tmp_path_factory.mktemp("tls"), *more, "--client-cert-auth", scheme="https")
        server.session.verify, server.session.cert = files["ca"], (files["cert"], files["key"])
        server.start()
        yield server.url
        server.kill()

    def test_ranks_meet(self, url: str, files: dict[str, str], make: Make) -> None:
        one, two = (make(url, **files) for _ in range(2))
        one.publish("prefill", Rank(0), 2, "zero")
        assert two.lookup(Source("prefill")) is None
        two.publish("prefill", Rank(1), 2, "one")
        assert within(5.0, lambda: one.lookup(Source("prefill")) == ("zero", "one"))

    def test_a_server_of_another_authority_is_refused(self, url: str, files: dict[str, str], make: Make) -> None:
        """The host's authorities have not signed it."""
        more = {name: files[name] for name in ("cert", "key")}
        with pytest.raises(ConfigurationError, match=r"TLS: .*CERTIFICATE_VERIFY_FAILED"):
            make(url, **more).publish("prefill", Rank(0), 1, "there")

    def test_a_server_that_asks_for_our_certificate_refuses_us_without(
        self, url: str, files: dict[str, str], make: Make
    ) -> None:
        """TLS 1.3 reports it with the first answer."""
        with pytest.raises((ConfigurationError, PeerLostError), match=r"certificate|reset|closed|aborted"):
            make(url, ca=files["ca"]).publish("prefill", Rank(0), 1, "there")

    def test_plain_http_is_refused_by_a_server_with_tls(self, url: str, make: Make) -> None:
        """It answers with a line of text."""
        with pytest.raises((ConfigurationError, PeerLostError), match="etcd"):
            make(url.replace("https", "http")).publish("prefill", Rank(0), 1, "there")


def test_names_of_keys_are_read_back(prefix: str) -> None:
    """What is written as a key is parsed as the same rank, and ranges hold all of an instance and nothing else."""
    from disagg_kv.rendezvous.etcd.keys import CLOSED, RANKS, RankKey, after

    names = ["a", "a/0", "ä b", "..", "%61", "a/1/0", "\n", "a0", "a."]
    keys = [RankKey(name, world, rank) for name, world, rank in itertools.product(names, (1, 2, 10, 16, 4096), (0,))]
    for key, kind in itertools.product(keys, (RANKS, CLOSED)):
        assert RankKey.parse(prefix, key.path(prefix, kind)) == (kind, key)
    for name in names:
        start = RankKey(name, 1, 0).path(prefix).rsplit(b"/", 2)[0] + b"/"
        assert {key for key in keys if start <= key.path(prefix) < after(start)} == {
            key for key in keys if key.instance == name
        }
