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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...errors import ConfigurationError, PeerLostError, RemoteProtocolError
from ...rendezvous import Source

log = logging.getLogger("disagg_kv.sglang")

PLACE = "/instance"
MOST_BYTES = 1 << 20
"""Of a description; 1024 addresses of 1024 characters."""
ANSWER_S = 5.0
SOON_S = 0.2
"""The longest time for which a scheduler waits for an answer."""
AGAIN_S = 1.0
FRESH_S = 2 * ANSWER_S
"""An answer that was asked for longer ago than this is asked for again: another instance may be there."""


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


class Directory:
    """The prefill instances that a decode rank knows, by bootstrap address; one thread calls."""

    def __init__(self) -> None:
        self._known: dict[str, Source] = {}
        self._asked: dict[str, tuple[float, Future[bytes]]] = {}
        self._problems: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(4, "disagg_kv bootstrap")

    def get(self, address: str) -> Source | None:
        """The instance; None: it is not known yet."""
        return self._known.get(address)

    def problem(self, address: str) -> str | None:
        """Why the last question had no answer; None: there was none, or it had."""
        return self._problems.get(address)

    def ensure(self, address: str) -> bool:
        """Ask, if the instance is not known; False: there is no answer yet, so call again later."""
        return address in self._known or self.ask(address)

    def ask(self, address: str) -> bool:
        """Ask, whether the instance is known or not; False: there is no answer yet, so call again later."""
        now = time.monotonic()
        since, asked = self._asked.get(address, (now, None))
        if asked is None or now - since > FRESH_S:
            since, asked = self._asked[address] = now, self._threads.submit(_ask, address, "GET")
        if not wait((asked,), SOON_S).done:
            return False
        del self._asked[address]
        try:
            self._known[address] = _source(address, asked.result())
        except (PeerLostError, RemoteProtocolError) as exc:
            self._problems[address] = str(exc)
            return False
        self._problems.pop(address, None)
        return True

    def forget(self, instance: str) -> None:
        """The instance is lost: ask again for where it was. Answers to earlier questions may name it: drop them."""
        self._known = {address: source for address, source in self._known.items() if source.instance != instance}
        self._asked.clear()

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _source(address: str, content: bytes) -> Source:
    try:
        given = json.loads(content)
        return Source(given["instance"], given["addresses"])
    except (ConfigurationError, ValueError, TypeError, KeyError, RecursionError) as exc:
        raise RemoteProtocolError(f"bootstrap server {address}: {content[:200]!r} describes no instance") from exc
