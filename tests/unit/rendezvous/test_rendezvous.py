"""Who is where: what every rendezvous promises, and what each adds."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

# The classes of torch.distributed, which does not export them to type checkers.
from torch._C._distributed_c10d import HashStore, TCPStore

from disagg_kv.errors import (
    ConfigurationError,
    InstanceClosedError,
    LocalProtocolError,
    MissingDependencyError,
    RemoteProtocolError,
    StoreUnreachableError,
)
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import (
    EtcdRendezvous,
    Rendezvous,
    RequestRendezvous,
    Source,
    StaticRendezvous,
    StoreRendezvous,
)
from disagg_kv.testing.rendezvous import Another, RendezvousSuite, supported

CHILD = """
import sys
from torch.distributed import TCPStore
from disagg_kv.rendezvous import StoreRendezvous
port, rank, world = map(int, sys.argv[1:])
store = TCPStore("127.0.0.1", port, is_master=False)
StoreRendezvous(store).publish("prefill", rank, world, f"address of {rank}")
"""


class TestStaticRendezvous(RendezvousSuite):
    """One table for a process."""

    @pytest.fixture
    def rendezvous(self) -> Rendezvous:
        return StaticRendezvous()


class TestStoreRendezvous(RendezvousSuite):
    """A store for several processes."""

    @pytest.fixture
    def store(self) -> HashStore:
        return HashStore()

    @pytest.fixture
    def rendezvous(self, store: HashStore) -> Rendezvous:
        return StoreRendezvous(store)

    @pytest.fixture
    def another(self, store: HashStore) -> Another:
        return lambda: StoreRendezvous(store)


class Carried(RequestRendezvous):
    """With an engine that carries the addresses of its ranks at once, as soon as it has them all."""

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        super().publish(instance, rank, world, address)
        addresses = [self.published(instance, Rank(one)) for one in range(world)]
        if None not in addresses:
            self.learn(instance, [address for address in addresses if address is not None])


class TestRequestRendezvous(RendezvousSuite):
    """Addresses that an engine carries."""

    @pytest.fixture
    def rendezvous(self) -> Rendezvous:
        return Carried()

    def test_a_rank_that_was_withdrawn_is_not_there_until_it_returns(self, rendezvous: Rendezvous) -> None:
        """What an engine has carried here stays until the last rank is withdrawn."""
        withdraw = supported(rendezvous)
        for rank in range(2):
            rendezvous.publish("prefill", Rank(rank), 2, f"address {rank}")
        for rank in range(2):
            assert rendezvous.lookup(Source("prefill")) == ("address 0", "address 1")
            withdraw.withdraw("prefill", Rank(rank))
        assert rendezvous.lookup(Source("prefill")) is None


class TestStatic:
    def test_given_addresses_are_known_at_once(self) -> None:
        static = StaticRendezvous({"prefill": ["zero", "one"], "other": ("x",)})
        assert static.lookup(Source("prefill")) == ("zero", "one")
        assert static.lookup(Source("other")) == ("x",)

    @pytest.mark.parametrize("given", [{"prefill": []}, {"": ["zero"]}, {"prefill": "zero"}])
    def test_an_instance_needs_a_name_and_a_list_of_addresses(self, given: dict[str, list[str]]) -> None:
        with pytest.raises(ConfigurationError, match="needs a name and a list"):
            StaticRendezvous(given)

    def test_two_ranks_at_one_address_are_refused(self) -> None:
        """Bad input: one endpoint is one rank."""
        with pytest.raises(ConfigurationError, match="'prefill': several ranks at x, y"):
            StaticRendezvous({"prefill": ["x", "y", "z", "x", "y"]})

    def test_the_address_of_another_rank_is_refused(self) -> None:
        """Bad input: nothing changes; a rank may say its own address again, and another instance may have it."""
        static = StaticRendezvous({"prefill": ["zero", "one"]})
        with pytest.raises(ConfigurationError, match="'prefill': rank 1 publishes zero, the address of rank 0"):
            static.publish("prefill", Rank(1), 2, "zero")
        static.publish("prefill", Rank(0), 2, "zero")
        static.publish("other", Rank(0), 1, "zero")
        assert static.lookup(Source("prefill")) == ("zero", "one")
        static.publish("prefill", Rank(0), 2, "moved")
        static.publish("prefill", Rank(1), 2, "zero")
        assert static.lookup(Source("prefill")) == ("moved", "zero")


class TestSource:
    def test_addresses_are_a_plain_tuple_that_survives_json(self) -> None:
        source = Source("prefill", ["zero", "one"])
        assert source.addresses == ("zero", "one")
        assert Source(**json.loads(json.dumps({"instance": source.instance, "addresses": source.addresses}))) == source
        assert Source("prefill").addresses == ()

    def test_sources_are_equal_by_instance_and_addresses(self) -> None:
        """Rooms with equal sources share a look-up; an instance that restarted elsewhere is another source."""
        sources = [Source("p", ["a", "b"]), Source("p", ("a", "b")), Source("p", ["b", "a"]), Source("p"), Source("q")]
        assert len(set(sources)) == 4

    @pytest.mark.parametrize(
        ("addresses", "message"),
        [
            ("zero", "a list of str is needed, not a single one"),
            ([b"zero"], "a list of str is needed"),
            ([""], "source: address must"),
            (["x" * 1025], "source: address must"),
            (["x"] * 4097, "source: 4097 addresses; at most 4096 are allowed"),
        ],
    )
    def test_what_is_no_list_of_addresses(self, addresses: list[str], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            Source("prefill", addresses)
        Source("prefill", ["x" * 1024] * 4096)


class TestRequest:
    def test_the_source_has_the_addresses(self) -> None:
        """Whatever was learned of an instance of that name; without both nothing is known."""
        rendezvous = RequestRendezvous()
        assert rendezvous.lookup(Source("prefill", ["zero", "one"])) == ("zero", "one")
        assert rendezvous.lookup(Source("prefill")) is None
        rendezvous.publish("prefill", Rank(1), 2, "one")
        assert rendezvous.lookup(Source("prefill")) is None
        rendezvous.learn("prefill", ["zero", "one"])
        assert rendezvous.lookup(Source("prefill")) == ("zero", "one")
        assert rendezvous.lookup(Source("prefill", ["a"])) == ("a",)

    def test_the_engine_reads_its_own_address(self) -> None:
        rendezvous = RequestRendezvous()
        assert rendezvous.published("prefill", Rank(1)) is None
        rendezvous.publish("prefill", Rank(1), 2, "one")
        rendezvous.publish("prefill", Rank(1), 2, "moved")
        assert rendezvous.published("prefill", Rank(1)) == "moved"
        assert rendezvous.published("prefill", Rank(0)) is None

    def test_what_is_learned_is_checked_against_the_ranks_of_this_process(self) -> None:
        rendezvous = RequestRendezvous()
        with pytest.raises(LocalProtocolError, match="'prefill': no rank of it is published in this process"):
            rendezvous.learn("prefill", ["zero", "one"])
        rendezvous.publish("prefill", Rank(1), 2, "one")
        with pytest.raises(ConfigurationError, match="'prefill': 1 addresses of 2 ranks"):
            rendezvous.learn("prefill", ["one"])
        with pytest.raises(ConfigurationError, match="'prefill': rank 1 is at one, not at zero"):
            rendezvous.learn("prefill", ["one", "zero"])
        assert rendezvous.lookup(Source("prefill")) is None

    def test_a_rank_that_moved_or_closed_makes_what_was_learned_void(self) -> None:
        """And with its last rank an instance leaves nothing behind."""
        rendezvous = RequestRendezvous()
        for rank in range(2):
            rendezvous.publish("prefill", Rank(rank), 2, str(rank))
        rendezvous.learn("prefill", ["0", "1"])
        rendezvous.publish("prefill", Rank(1), 2, "1")
        assert rendezvous.lookup(Source("prefill")) == ("0", "1")
        rendezvous.publish("prefill", Rank(1), 2, "moved")
        assert rendezvous.lookup(Source("prefill")) is None
        rendezvous.learn("prefill", ["0", "moved"])
        for rank in range(2):
            rendezvous.withdraw("prefill", Rank(rank))
            rendezvous.withdraw("prefill", Rank(rank))
        assert rendezvous.lookup(Source("prefill")) is None
        rendezvous.publish("prefill", Rank(0), 1, "another world")

    def test_ranks_that_disagree_about_their_number_are_refused(self) -> None:
        rendezvous = RequestRendezvous()
        rendezvous.publish("prefill", Rank(0), 4, "zero")
        with pytest.raises(ConfigurationError, match="rank 1 publishes 2 ranks, others published 4"):
            rendezvous.publish("prefill", Rank(1), 2, "one")

    def test_threads_may_publish_and_ask_at_once(self) -> None:
        rendezvous = RequestRendezvous()

        def rank(number: int) -> None:
            rendezvous.publish("prefill", Rank(number), 16, str(number))
            rendezvous.learn("prefill", [str(other) for other in range(16)])
            assert rendezvous.lookup(Source("prefill")) == tuple(str(other) for other in range(16))

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [rendezvous.published("prefill", Rank(number)) for number in range(16)] == [str(n) for n in range(16)]


class TestStore:
    def test_ranks_of_other_processes_are_found(self) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        found = StoreRendezvous(store)
        assert found.lookup(Source("prefill")) is None
        arguments = [sys.executable, "-c", CHILD, str(store.port)]
        children = [subprocess.Popen([*arguments, str(rank), "2"]) for rank in range(2)]
        assert [child.wait() for child in children] == [0, 0]
        assert found.lookup(Source("prefill")) == ("address of 0", "address of 1")

    def test_a_rank_that_was_withdrawn_is_told_by_name(self) -> None:
        """Who looks it up need not try its address; it may come back."""
        found = StoreRendezvous(HashStore())
        for rank in range(2):
            found.publish("prefill", Rank(rank), 2, f"address {rank}")
        found.withdraw("prefill", Rank(1))
        found.withdraw("prefill", Rank(1))
        with pytest.raises(InstanceClosedError, match="instance 'prefill': rank 1 has closed"):
            found.lookup(Source("prefill"))
        found.publish("prefill", Rank(1), 2, "address 1")
        assert found.lookup(Source("prefill")) == ("address 0", "address 1")

    def test_a_successor_is_not_withdrawn(self) -> None:
        """Another process has published since, perhaps under the same address."""
        store = HashStore()
        first, second = StoreRendezvous(store), StoreRendezvous(store)
        first.publish("prefill", Rank(0), 1, "address")
        second.publish("prefill", Rank(0), 1, "address")
        first.withdraw("prefill", Rank(0))
        assert second.lookup(Source("prefill")) == ("address",)

    def test_what_was_never_published_is_not_withdrawn(self) -> None:
        found = StoreRendezvous(HashStore())
        found.withdraw("prefill", Rank(0))
        assert found.lookup(Source("prefill")) is None

    def test_two_prefixes_share_a_store(self) -> None:
        store = HashStore()
        left, right = StoreRendezvous(store, "left"), StoreRendezvous(store, "right")
        left.publish("prefill", Rank(0), 1, "address")
        assert right.lookup(Source("prefill")) is None

    def test_a_store_that_went_away_is_named(self) -> None:
        """Every call says so; none waits."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=120))
        found = StoreRendezvous(client)
        found.publish("prefill", Rank(0), 1, "address")
        del store
        with pytest.raises(StoreUnreachableError, match="'prefill'"):
            found.lookup(Source("prefill"))
        with pytest.raises(StoreUnreachableError, match="'prefill'"):
            found.publish("prefill", Rank(0), 1, "address")

    @pytest.mark.parametrize(
        "value",
        [b"\x80\x04N.", b"", b"0", b'"2"', b"4097", b"[", b"1.5", b"true", b"null", b"[" * 4000, b" " * 4097],
        ids=lambda value: value[:8].decode("latin1"),
    )
    def test_a_strange_number_of_ranks_is_refused(self, value: bytes) -> None:
        """Nothing is unpickled, and nothing is believed."""
        store = HashStore()
        store.set('disagg_kv/["prefill"]', value.decode("latin1"))
        with pytest.raises(RemoteProtocolError, match="'prefill'"):
            StoreRendezvous(store).lookup(Source("prefill"))

    @pytest.mark.parametrize("value", ["", "1", "{", "[]"])
    def test_a_strange_address_is_refused(self, value: str) -> None:
        store = HashStore()
        store.set('disagg_kv/["prefill"]', "1")
        store.set('disagg_kv/["prefill", 0]', value)
        with pytest.raises(RemoteProtocolError, match="'prefill'"):
            StoreRendezvous(store).lookup(Source("prefill"))

    def test_what_is_written_is_json(self) -> None:
        store = HashStore()
        StoreRendezvous(store).publish("prefill", Rank(0), 1, "tcp://127.0.0.1:1")
        assert json.loads(store.get('disagg_kv/["prefill", 0]'))[0] == "tcp://127.0.0.1:1"


class TestExtra:
    """What needs another package asks for it by name, and only when it is used."""

    def test_the_client_of_etcd_is_imported_when_it_is_needed(self) -> None:
        program = "import sys, disagg_kv.rendezvous; print({'etcd3gw', 'requests', 'urllib3'} & set(sys.modules))"
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"

    def test_without_the_extra_the_error_has_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "etcd3gw", None)
        monkeypatch.delitem(sys.modules, "disagg_kv.rendezvous.etcd.connection", raising=False)
        with pytest.raises(MissingDependencyError, match=r"rendezvous 'etcd': .*pip install 'disagg_kv\[etcd\]'"):
            EtcdRendezvous(["http://127.0.0.1:1"])
