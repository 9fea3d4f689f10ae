"""Real etcd servers for tests: started, killed, paused, emptied, with certificates and users."""

from __future__ import annotations

import base64
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests

START_S = 30.0

ASK = """
import http.client, sys, time
while True:
    try:
        connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=1.0)
        connection.request("GET", sys.argv[3])
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status == 200:
            break
    except OSError:
        pass
    time.sleep(0.02)
print(text, end="")
"""
"""Asks a server for a page until it answers."""


def ask(launch: Sequence[str], address: str, path: str) -> str:
    """A page of a server in another network.

    Args:
        launch: words before a command that runs there.
        address: of the server, ``HOST:PORT``.
        path: of the page.
    """
    command = [*launch, sys.executable, "-I", "-S", "-c", ASK, *address.split(":"), path]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=START_S).stdout


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class EtcdServer:
    """A server, or a member of a cluster, on this host; it keeps its port and data until it is removed.

    Args:
        folder: for its data and log.
        more: further options of the command line.
        scheme: ``http`` or ``https``.
        port: where it listens; None: a free one.
        address: of its host.
        launch: words before its command, for a server in another network; such a one is only started and killed.
    """

    def __init__(
        self,
        folder: Path,
        *more: str,
        scheme: str = "http",
        port: int | None = None,
        address: str = "127.0.0.1",
        launch: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.url = f"{scheme}://{address}:{port or free_port()}"
        self.more = more
        self.launch = launch
        self.session = requests.Session()
        self.session.trust_env = False
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> EtcdServer:
        """Start it, without waiting until it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        listen = ("--listen-client-urls", self.url, "--advertise-client-urls", self.url)
        peers = () if "--listen-peer-urls" in self.more else ("--listen-peer-urls", "http://127.0.0.1:0")
        data = ("--data-dir", str(self.folder / "data"), "--unsafe-no-fsync")
        command = [*self.launch, "etcd", *data, *listen, *peers, *self.more]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def start(self) -> EtcdServer:
        """Start it; returns when it serves."""
        self.begin()
        self.wait()
        return self

    def wait(self) -> None:
        """Until it serves."""
        if self.launch:
            ask(self.launch, self.url.partition("//")[2], "/health")
            return
        until = time.monotonic() + START_S
        while True:
            with suppress(requests.RequestException):
                self.post("/kv/range", key="a")
                return
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"etcd did not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def send(self, what: signal.Signals) -> None:
        """A signal: SIGKILL, SIGSTOP, SIGCONT."""
        assert self.process is not None
        self.process.send_signal(what)

    def kill(self) -> None:
        """End it at once; its data stay."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wipe(self) -> None:
        """Forget all data, as a server does that is set up anew."""
        shutil.rmtree(self.folder / "data")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """A request, as an operator makes it; ``key``, ``value`` and ``range_end`` are plain text."""
        coded = {
            name: base64.b64encode(value.encode()).decode() if name in ("key", "value", "range_end") else value
            for name, value in body.items()
        }
        answer = self.session.post(f"{self.url}/v3{path}", json=coded, timeout=2.0)
        if answer.status_code not in (200, 400, 401):
            answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def put(self, key: str, value: str, lease: int | None = None) -> None:
        """Write a key."""
        self.post("/kv/put", key=key, value=value, **({} if lease is None else {"lease": lease}))

    def keys(self, prefix: str) -> dict[str, dict[str, Any]]:
        """What is below a prefix, with values as text."""
        found = self.post("/kv/range", key=prefix, range_end=prefix[:-1] + chr(ord(prefix[-1]) + 1)).get("kvs", ())
        return {
            base64.b64decode(one["key"]).decode(): {**one, "value": base64.b64decode(one.get("value", "")).decode()}
            for one in found
        }

    def requests_served(self) -> float:
        """Requests of its API since it began, without this one's; from its own metrics."""
        text = self.session.get(f"{self.url}/metrics", timeout=2.0).text
        lines = (line for line in text.splitlines() if line.startswith("grpc_server_started_total{"))
        return sum(float(line.rpartition(" ")[2]) for line in lines if "Watch" not in line)


def add_user(server: EtcdServer, user: str, password: str, prefix: str) -> None:
    """A user who may use the keys below a prefix; afterwards only root may too (password ``root``)."""
    start, stop = (base64.b64encode(f"{prefix}{end}".encode()).decode() for end in "/0")
    whole = {"permType": "READWRITE", "key": start, "range_end": stop}
    server.post("/auth/user/add", name="root", password="root")
    server.post("/auth/role/add", name="root")
    server.post("/auth/user/grant", user="root", role="root")
    server.post("/auth/user/add", name=user, password=password)
    server.post("/auth/role/add", name="ranks")
    server.post("/auth/role/grant", name="ranks", perm=whole)
    server.post("/auth/user/grant", user=user, role="ranks")
    server.post("/auth/enable")


def certificates(folder: Path) -> dict[str, str]:
    """Files of an authority, and a certificate for 127.0.0.1 that it has signed: ``ca``, ``cert``, ``key``."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {name: str(folder / f"{name}.pem") for name in ("ca", "ca_key", "cert", "key", "request")}
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    sign = ["openssl", "x509", "-req", "-in", names["request"], "-CA", names["ca"], "-CAkey", names["ca_key"]]
    for command in (
        [*new, "-x509", "-subj", "/CN=authority", "-keyout", names["ca_key"], "-out", names["ca"]],
        [*new, "-subj", "/CN=etcd", "-keyout", names["key"], "-out", names["request"]],
        [*sign, "-CAcreateserial", "-extfile", str(folder / "names"), "-out", names["cert"]],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return {name: names[name] for name in ("ca", "cert", "key")}
