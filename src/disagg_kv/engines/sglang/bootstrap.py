"""Where decode finds a prefill instance: SGLang's requests name the host and port of prefill's bootstrap server.

A prefill server is one instance, or one for each of its data-parallel ranks. Rank 0 of an instance puts the instance's
name and the addresses of all its ranks there, once. A decode rank gets all instances once for each bootstrap address,
and keeps them until one of them is lost. Nothing else passes through it.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from attrs import define

from ...errors import ConfigurationError, PeerLostError, RemoteProtocolError
from ...rendezvous import Source

log = logging.getLogger("disagg_kv.sglang")

PLACE = "/instance"
OWN = re.compile(PLACE + r"/(\d{1,4})/(\d{1,4})")
"""Where an instance describes itself: its data-parallel rank, and how many there are."""
MOST_BYTES = 1 << 20
"""Of a description, and of an answer; 1024 addresses of 1024 characters."""
ANSWER_S = 5.0
AGAIN_S = 1.0
MOST_ASKED = 128
"""Questions that are open at once. Requests name the addresses."""
MOST_PLACES = 2 * MOST_ASKED
"""Addresses that are kept; for another one the oldest goes, one without an instance first."""


def _loopback(*addresses: str) -> bool:
    """Whether all are of this host alone: a listener at 127.0.1.1 is reached from 127.0.0.1."""
    return all(ip_address(address).is_loopback for address in addresses)


class BootstrapServer:
    """Keeps the descriptions of a prefill server's instances; runs on threads of its own.

    Args:
        host: address to listen at.
        port: port to listen at.

    Raises:
        ConfigurationError: nothing can listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        kept: dict[int, bytes] = {}
        count = 1

        class Handler(BaseHTTPRequestHandler):
            timeout = ANSWER_S

            def do_GET(self) -> None:
                """The descriptions, once there are all."""
                if self.path == "/health":
                    self._answer(200, b"")
                elif self.path == PLACE and len(kept) == count:
                    every = b",".join(kept[rank] for rank in sorted(kept))
                    self._answer(200, every if count == 1 else b"[%s]" % every)
                else:
                    self._answer(404, b"")

            def do_PUT(self) -> None:
                """Keep a description; only a rank 0 may give it, which runs on this host."""
                nonlocal count
                own, place = self.connection.getsockname()[0], OWN.fullmatch(self.path)
                length = self.headers.get("Content-Length", "")
                near = self.client_address[0] == own or _loopback(self.client_address[0], own)
                if not near or place is None or int(place[1]) >= int(place[2]):
                    self._answer(403, b"")
                elif not length.isdecimal() or int(length) > MOST_BYTES:
                    self._answer(413, b"")
                else:
                    content = self.rfile.read(int(length))
                    count = int(place[2])  # first: else one of several is all that there are, to who asks in between
                    kept[int(place[1])] = content
                    self._answer(204, b"")

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                log.debug("bootstrap server: %s", args)

        class Listener(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Listener((host, port), Handler)
        except OSError as exc:
            raise ConfigurationError(f"no bootstrap server at {host}:{port}: {exc}") from exc
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="disagg_kv bootstrap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _ask(address: str, method: str, place: str = PLACE, body: bytes | None = None) -> bytes:
    """The answer of a bootstrap server.

    Raises:
        PeerLostError: it does not answer, or has no instance.
    """
    host, _, port = address.rpartition(":")
    try:
        with closing(HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_S)) as connection:
            connection.request(method, place, body)
            response = connection.getresponse()
            content = response.read(MOST_BYTES)
    except (OSError, HTTPException, ValueError, OverflowError) as exc:
        raise PeerLostError(f"bootstrap server {address} does not answer: {exc}") from exc
    if response.status == 404:
        raise PeerLostError(f"bootstrap server {address}: no prefill instance of disagg_kv has registered")
    if response.status >= 300:
        raise PeerLostError(f"bootstrap server {address}: status {response.status}")
    return content


def register(address: str, source: Source, stopped: threading.Event, rank: int = 0, count: int = 1) -> threading.Thread:
    """Describe this instance to its bootstrap server, on a thread that tries until the server answers.

    Args:
        address: of the bootstrap server.
        source: this instance.
        stopped: ends the attempts.
        rank: which one of the server's instances it is.
        count: how many there are.
    """
    body = json.dumps({"instance": source.instance, "addresses": list(source.addresses)}).encode()

    def attempt() -> None:
        told = False
        while not stopped.is_set():
            try:
                _ask(address, "PUT", f"{PLACE}/{rank}/{count}", body)
            except PeerLostError as exc:
                (log.debug if told else log.warning)("not registered yet: %s", exc)
                told = True
                stopped.wait(AGAIN_S)
            else:
                return

    thread = threading.Thread(target=attempt, name="disagg_kv register", daemon=True)
    thread.start()
    return thread


@define
class _Place:
    """What is known of a bootstrap address. A thread that asks writes here, ``asked`` last."""

    sources: tuple[Source, ...] = ()
    problem: str | None = None
    after: float = 0.0
    """The next question is asked no sooner."""
    asked: bool = False


class Directory:
    """The prefill instances that a decode rank knows, by bootstrap address; one thread calls, and never waits.

    Each question has a thread of its own, so that hosts that do not answer hold up no other. An address that took some
    time to fail is left alone for as long.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def get(self, address: str) -> tuple[Source, ...]:
        """The instances, by data-parallel rank; empty: they are not known yet."""
        return self._places.get(address, _Place()).sources

    def problem(self, address: str) -> str | None:
        """Why the last question had no answer; None: there was none, or it had."""
        return self._places.get(address, _Place()).problem

    def ensure(self, address: str) -> bool:
        """Ask, if the instances are not known; False: there is no answer yet, so call again later."""
        place = self._places.get(address, _Place())
        if place.sources:
            return True
        asked = sum(one.asked for one in self._places.values())
        if not place.asked and asked < MOST_ASKED and time.monotonic() >= place.after:
            if address not in self._places and len(self._places) == MOST_PLACES:
                idle = (one for one, kept in self._places.items() if not kept.asked)
                del self._places[min(idle, key=lambda one: bool(self._places[one].sources))]
            self._places[address], place.asked = place, True
            threading.Thread(target=_find, args=(address, place), name="disagg_kv bootstrap", daemon=True).start()
        return False

    def forget(self, instance: str) -> None:
        """The instance is lost: ask again for where it was."""
        for place in self._places.values():
            if any(source.instance == instance for source in place.sources):
                place.sources = ()


def _find(address: str, place: _Place) -> None:
    began = time.monotonic()
    try:
        place.sources, place.problem = _sources(address, _ask(address, "GET")), None
    except (PeerLostError, RemoteProtocolError) as exc:
        now = time.monotonic()
        place.problem, place.after = str(exc), 2 * now - began
    place.asked = False


def _sources(address: str, content: bytes) -> tuple[Source, ...]:
    try:
        given = json.loads(content)
        several = [given] if isinstance(given, dict) else given
        first, *others = (Source(one["instance"], one["addresses"]) for one in several)
    except (ConfigurationError, ValueError, TypeError, KeyError, RecursionError) as exc:
        raise RemoteProtocolError(f"bootstrap server {address}: {content[:200]!r} describes no instance") from exc
    return first, *others
