"""Keeps the table of a deployment's addresses up to date: one read, then one watch, on a thread of its own.

A look-up reads this table and costs etcd nothing. After an outage the watch resumes at the revision that the table has
reached, so that a fleet that comes back at once does not read everything. It reads everything where that cannot work:
etcd has forgotten the revision, or is behind it, since it has lost its data.
"""

from __future__ import annotations

import base64
import logging
import random
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import DisaggKVError, RemoteProtocolError, StoreUnreachableError, text_of, without_frames
from .address_table import AddressTable, KeyValue
from .keys import Body, everything

if TYPE_CHECKING:
    from .connection import EtcdConnection, WatchStream

log = logging.getLogger("disagg_kv")

PAGE = 1000
"""Keys per answer when everything is read."""

RETRY_S = (0.25, 8.0)
"""Seconds before the first new attempt, and before the later ones at most; each is drawn around that."""


def pause_s(failures: int) -> float:
    """Seconds to wait after this number of failures in a row: 0.5 to 1.5 times the nominal time, at random."""
    first, last = RETRY_S
    return min(first * 2.0 ** min(failures - 1, 16), last) * random.uniform(0.5, 1.5)


class AddressWatch:
    """The table, and the thread that keeps it.

    Args:
        connection: of the cluster.
        prefix: of the deployment's keys.
        changed: notified when the table has changed, or when its state has; its lock guards both.

    Attributes:
        current: whether the watch is open: the table has every change that etcd sent. With the lock held.
        error: why the watch is not open; None: it is, or is being opened for the first time. With the lock held.
    """

    def __init__(self, connection: EtcdConnection, prefix: str, changed: threading.Condition) -> None:
        self._connection = connection
        self._prefix = prefix
        self._changed = changed
        self.table = AddressTable(prefix)
        self.current = False
        self.error: DisaggKVError | None = None
        self._resume = False
        self._stream: WatchStream | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if not begun. With the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="disagg_kv etcd watch", daemon=True)
            self._thread.start()

    def read_again(self) -> None:
        """Read everything: etcd may have lost its data."""
        with self._changed:
            self._resume = False
            stream = self._stream
        if stream is not None:
            stream.stop()

    def close(self, timeout_s: float) -> None:
        """End the thread; one that waits for a server that does not answer ends with the process."""
        self._closed.set()
        with self._changed:
            stream, thread = self._stream, self._thread
        if stream is not None:
            stream.stop()
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            error: DisaggKVError
            try:
                self._follow()
                error = StoreUnreachableError("the watch of etcd has ended")
            except DisaggKVError as exc:
                error = exc
            except Exception as exc:
                log.exception("the watch of etcd failed")
                error = RemoteProtocolError(f"the watch of etcd failed: {text_of(exc)}")
            without_frames(error)
            with self._changed:
                failures = 1 if self.current else failures + 1
                self.current, self._stream, self.error = False, None, error
                self._changed.notify_all()
            self._closed.wait(pause_s(failures))

    def _follow(self) -> None:
        """Read what is missing, then what changes, until the watch ends."""
        from .connection import CompactedError

        start = self._catch_up()
        create = {**everything(self._prefix), "start_revision": start + 1, "progress_notify": True}
        stream = self._connection.watch({"create_request": create})
        with self._changed:
            self._stream = stream
        if self._closed.is_set():
            stream.stop()
        try:
            for message in stream.messages():
                self._take(message)
        except CompactedError:
            with self._changed:
                self._resume = False
            raise StoreUnreachableError("etcd has forgotten the changes since; everything is read again") from None

    def _catch_up(self) -> int:
        """The revision from which to watch: that of the table, or that of the keys just read."""
        with self._changed:
            reached = self.table.revision if self._resume else 0
        now = self._read({**everything(self._prefix), "count_only": True})
        revision = int(now["header"]["revision"])
        if reached and reached <= revision:
            return reached
        return self._read_all()

    def _read_all(self) -> int:
        found: list[KeyValue] = []
        page = {**everything(self._prefix), "limit": PAGE}
        while True:
            answer = self._read(page)
            revision = page.setdefault("revision", int(answer["header"]["revision"]))
            found += [_key_value(one) for one in answer.get("kvs", ())]
            if not answer.get("more"):
                break
            page["key"] = base64.b64encode(found[-1].path + b"\0").decode()
        with self._changed:
            self.table.replace(found, revision)
            self._resume = True
            self._changed.notify_all()
        return int(revision)

    def _read(self, body: Body) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._connection.call(
            lambda client: client.post(client.get_url("/kv/range"), json=body)
        )
        return answer

    def _take(self, message: Mapping[str, Any]) -> None:
        """Apply what has changed."""
        try:
            revision = int(message["header"]["revision"])
            events = list(_events(message.get("events", ())))
        except (KeyError, TypeError, ValueError) as exc:
            raise RemoteProtocolError(f"etcd sent {str(message)[:64]} in a watch") from exc
        with self._changed:
            for deleted, one in events:
                if deleted:
                    self.table.delete(one.path)
                else:
                    self.table.put(one)
            if message.get("created"):
                self.current, self.error = True, None
            else:
                self.table.reached(revision)
            self._changed.notify_all()


def _events(given: Iterable[Mapping[str, Any]]) -> Iterable[tuple[bool, KeyValue]]:
    for event in given:
        yield event.get("type") == "DELETE", _key_value(event["kv"])


def _key_value(given: Mapping[str, Any]) -> KeyValue:
    path, value = (base64.b64decode(given.get(name, "")) for name in ("key", "value"))
    return KeyValue(path, value, given.get("lease", "0") != "0")
