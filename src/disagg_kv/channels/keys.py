"""Key pairs of channels: the identity of an endpoint, and the identities that it accepts."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import zmq
import zmq.auth
from attrs import field, frozen

from ..errors import ConfigurationError

_KEY = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
"""32 bytes in Z85 (ZeroMQ RFC 32)."""

_REMEDY = "remedy: disagg-kv keys FOLDER NAME"


@frozen
class Keys:
    """An endpoint's own key pair and the keys that it accepts, for encrypted channels (CurveZMQ, ZeroMQ RFC 26).

    The ranks of an instance may share a pair. The own public key is always accepted.

    Args:
        secret: our secret key, 40 characters of Z85.
        allowed: public keys of the endpoints that may exchange frames with this one.

    Raises:
        ConfigurationError: a value that is no key.
    """

    secret: str = field(repr=False)
    allowed: frozenset[str] = frozenset()
    public: str = field(init=False)
    """The public key by which others identify this endpoint."""

    def __attrs_post_init__(self) -> None:
        bad = [key for key in self.allowed if not re.fullmatch(_KEY, key)]
        if bad:
            raise ConfigurationError(f"invalid public keys {bad}: a key has 40 characters of Z85")
        try:
            public = zmq.curve_public(self.secret.encode()).decode()
        except (ValueError, zmq.ZMQError) as exc:
            raise ConfigurationError("invalid secret key: a key has 40 characters of Z85") from exc
        object.__setattr__(self, "public", public)

    @classmethod
    def new(cls, allowed: Iterable[str] = ()) -> Keys:
        """A newly generated pair."""
        return cls(zmq.curve_keypair()[1].decode(), frozenset(allowed))

    @classmethod
    def load(cls, secret: str | os.PathLike[str], allowed: str | os.PathLike[str]) -> Keys:
        """Read ZeroMQ's certificate files, which :func:`write_keys` also writes.

        Args:
            secret: our ``NAME.key_secret``; only its owner may have access to it.
            allowed: a folder whose ``*.key`` files hold the public keys to accept.

        Raises:
            ConfigurationError: a file is missing, holds no key, or is readable by other users; or the folder has no
                key.
        """
        try:
            mode = Path(secret).stat().st_mode
            own = zmq.auth.load_certificate(secret)[1]
            public = zmq.auth.load_certificates(allowed)
        except (OSError, ValueError) as exc:
            raise ConfigurationError(f"keys of {secret}, allowed {allowed}: {exc}; {_REMEDY}") from exc
        if mode & 0o077:
            raise ConfigurationError(f"secret key {secret}: others may read it; remedy: chmod 600 {secret}")
        if own is None:
            raise ConfigurationError(f"secret key {secret}: the file has only a public key")
        if not public:
            raise ConfigurationError(f"allowed keys {allowed}: there is no *.key file; {_REMEDY}")
        return cls(own.decode("ascii", "replace"), frozenset(key.decode("ascii", "replace") for key in public))

    def allow(self, key: str) -> bool:
        """Whether an endpoint that has proved this public key is accepted."""
        return key == self.public or key in self.allowed


def write_keys(folder: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
    """Create a pair: ``NAME.key`` for the folders of allowed keys, ``NAME.key_secret`` for its owner alone.

    The folder is created if it does not exist.

    Raises:
        ConfigurationError: one of the files exists, or cannot be written.
    """
    with tempfile.TemporaryDirectory() as private:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            made = [Path(file) for file in zmq.auth.create_certificates(private, name)]
            made[1].chmod(0o600)
            into = [Path(folder) / file.name for file in made]
            for file, mode, path in zip(made, (0o644, 0o600), into, strict=True):
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                    out.write(file.read_bytes())
        except OSError as exc:
            raise ConfigurationError(f"keys {name!r} in {folder}: {exc}") from exc
    return into[0], into[1]


def key_of(address: str) -> str:
    """The public key in an address; empty: the address has none."""
    return split_key(address)[1]


def split_key(address: str) -> tuple[str, str]:
    """Split an address into ZeroMQ's part and the public key (empty: none)."""
    found = re.fullmatch(rf"(.+)#({_KEY})", address)
    return (found[1], found[2]) if found else (address, "")
