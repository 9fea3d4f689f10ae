"""Where decode finds a prefill instance: SGLang's requests name the host and port of prefill's bootstrap server.

Rank 0 of the prefill instance puts the instance's name and the addresses of all its ranks there, once. A decode rank
gets them once for each bootstrap address, and keeps them until the instance is lost. Nothing else passes through it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import define

from ...errors import ConfigurationError, PeerLostError, RemoteProtocolError
from ...rendezvous import Source

log = logging.getLogger("disagg_kv.sglang")

PLACE = "/instance"
MOST_BYTES = 1 << 20
"""Of a description; 1024 addresses of 1024 characters."""
ANSWER_S = 5.0
AGAIN_S = 1.0
MOST_ASKED = 128
"""Questions that are open at once. Requests name the addresses."""
MOST_PLACES = 2 * MOST_ASKED
"""Addresses that are kept; for another one the oldest goes, one without an instance first."""


class BootstrapServer:
    """Keeps the description of one prefill instance; runs on threads of its own.

    Args:
        host: address to listen at.
        port: port to listen at.

    Raises:
        ConfigurationError: nothing can listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        kept: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            timeout = ANSWER_S

            def do_GET(self) -> None:
                """The description, once there is one."""
                if self.path == "/health":
                    self._answer(200, b"")
                elif self.path == PLACE and kept:
                    self._answer(200, kept[0])
                else:
                    self._answer(404, b"")

            def do_PUT(self) -> None:
                """Keep a description; only rank 0 may give it, which runs on this host."""
                own = self.connection.getsockname()[0]
                length = self.headers.get("Content-Length", "")
                if self.client_address[0] != own or self.path != PLACE:
                    self._answer(403, b"")
                elif not length.isdecimal() or int(length) > MOST_BYTES:
                    self._answer(413, b"")
                else:
                    kept[:] = [self.rfile.read(int(length))]
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


def _ask(address: str, method: str, body: bytes | None = None) -> bytes:
    """The answer of a bootstrap server.

    Raises:
        PeerLostError: it does not answer, or has no instance.
    """
    host, _, port = address.rpartition(":")
    try:
        with closing(HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_S)) as connection:
            connection.request(method, PLACE, body)
            response = connection.getresponse()
            content = response.read(MOST_BYTES)
    except (OSError, HTTPException, ValueError, OverflowError) as exc:
        raise PeerLostError(f"bootstrap server {address} does not answer: {exc}") from exc
    if response.status == 404:
        raise PeerLostError(f"bootstrap server {address}: no prefill instance of disagg_kv has registered")
    if response.status >= 300:
        raise PeerLostError(f"bootstrap server {address}: status {response.status}")
    return content


def register(address: str, source: Source, stopped: threading.Event) -> threading.Thread:
    """Describe this instance to its bootstrap server, on a thread that tries until the server answers."""
    body = json.dumps({"instance": source.instance, "addresses": list(source.addresses)}).encode()

    def attempt() -> None:
        told = False
        while not stopped.is_set():
            try:
                _ask(address, "PUT", body)
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

    source: Source | None = None
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

    def get(self, address: str) -> Source | None:
        """The instance; None: it is not known yet."""
        return self._places.get(address, _Place()).source

    def problem(self, address: str) -> str | None:
        """Why the last question had no answer; None: there was none, or it had."""
        return self._places.get(address, _Place()).problem

    def ensure(self, address: str) -> bool:
        """Ask, if the instance is not known; False: there is no answer yet, so call again later."""
        place = self._places.get(address, _Place())
        if place.source is not None:
            return True
        asked = sum(one.asked for one in self._places.values())
        if not place.asked and asked < MOST_ASKED and time.monotonic() >= place.after:
            if address not in self._places and len(self._places) == MOST_PLACES:
                idle = (one for one, kept in self._places.items() if not kept.asked)
                del self._places[min(idle, key=lambda one: self._places[one].source is not None)]
            self._places[address], place.asked = place, True
            threading.Thread(target=_find, args=(address, place), name="disagg_kv bootstrap", daemon=True).start()
        return False

    def forget(self, instance: str) -> None:
        """The instance is lost: ask again for where it was."""
        for place in self._places.values():
            if place.source is not None and place.source.instance == instance:
                place.source = None


def _find(address: str, place: _Place) -> None:
    began = time.monotonic()
    try:
        place.source, place.problem = _source(address, _ask(address, "GET")), None
    except (PeerLostError, RemoteProtocolError) as exc:
        now = time.monotonic()
        place.problem, place.after = str(exc), 2 * now - began
    place.asked = False


def _source(address: str, content: bytes) -> Source:
    try:
        given = json.loads(content)
        return Source(given["instance"], given["addresses"])
    except (ConfigurationError, ValueError, TypeError, KeyError, RecursionError) as exc:
        raise RemoteProtocolError(f"bootstrap server {address}: {content[:200]!r} describes no instance") from exc
