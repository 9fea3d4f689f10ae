"""Authentication of a ZeroMQ inbox: which keys may connect, and a count of refused connections."""

from __future__ import annotations

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from .keys import Keys

DOMAIN = b"disagg_kv"
HANDSHAKE_MS = 10_000
"""A connection that has not proved its key by then is cut."""

_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_FAILED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


class KeyAuthenticator:
    """Answers ZeroMQ's authentication requests (ZAP, ZeroMQ RFC 27) on the thread that polls; it has no other thread.

    Create it before the inbox is bound. Poll ``sockets``, and call :meth:`work` when one of them is ready.

    Args:
        context: the inbox's context; requests of all its sockets are answered here.
        inbox: the socket to protect.
        keys: None: every connection is accepted, and only broken ones are counted.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], inbox: zmq.Socket[bytes], keys: Keys | None) -> None:
        self._inbox = inbox
        self._keys = keys
        self._monitor = inbox.get_monitor_socket(_FAILED)
        self.sockets = [self._monitor]
        inbox.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if keys is None:
            return
        self._asked = context.socket(zmq.REP)
        self._asked.setsockopt(zmq.LINGER, 0)
        self._asked.bind(_ZAP)
        self.sockets.append(self._asked)
        inbox.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())

    def work(self) -> int:
        """Answer pending requests; returns the number of connections that failed since the last call.

        With keys, a connection that does not even begin like ZeroMQ is not counted: ZeroMQ cuts it without an event.
        """
        if self._keys is not None:
            self._answer(self._keys)
        failed = 0
        while True:
            try:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return failed
            failed += 1

    def _answer(self, keys: Keys) -> None:
        while True:
            try:
                parts = self._asked.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # libzmq asks, not the peer: version, request, domain, address, identity, mechanism, key.
            # By place: another mechanism has other parts after its name, and the peer chooses what is in them.
            request, mechanism, key = parts[1], parts[5], parts[-1]
            known = z85.encode(key).decode() if mechanism == b"CURVE" else ""
            good = keys.allow(known)
            verdict = [b"200", b"OK", known.encode()] if good else [b"400", b"this key is not allowed", b""]
            self._asked.send_multipart([_VERSION, request, *verdict, b""])

    def close(self) -> None:
        """Detach from the inbox, which is still open."""
        self._inbox.disable_monitor()
        for one in self.sockets:
            one.close(0)
