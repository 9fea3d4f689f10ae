"""Files that are the addresses of Unix-domain sockets."""

from __future__ import annotations

import socket
from pathlib import Path

from ..errors import ConfigurationError


def refuse_in_use(bind: str, path: Path) -> None:
    """Raise a :class:`ConfigurationError` if something lives there; a file may outlive who listened."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigurationError(f"channel {bind!r}: the file is there and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise ConfigurationError(f"channel {bind!r}: the address is in use")
