"""Key pairs of channels: who somebody is, and who talks to whom."""

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


@frozen
class Keys:
    """An endpoint's own key pair, and whom else it talks to, for encrypted channels (CurveZMQ, ZeroMQ RFC 26).

    The ranks of an instance may share a pair: who has the same pair is always allowed.

    Args:
        secret: our secret key, 40 characters of Z85.
        allowed: public keys of the others that we talk to and that may talk to us.

    Raises:
        ConfigurationError: something that is no key.
    """

    secret: str = field(repr=False)
    allowed: frozenset[str] = frozenset()
    public: str = field(init=False)
    """The key by which others know us."""

    def __attrs_post_init__(self) -> None:
        bad = [key for key in self.allowed if not re.fullmatch(_KEY, key)]
        if bad:
            raise ConfigurationError(f"public keys have 40 characters of Z85; these are none: {bad}")
        try:
            public = zmq.curve_public(self.secret.encode()).decode()
        except (ValueError, zmq.ZMQError) as exc:
            raise ConfigurationError("a secret key has 40 characters of Z85; this is none") from exc
        object.__setattr__(self, "public", public)

    @classmethod
    def new(cls, allowed: Iterable[str] = ()) -> Keys:
        """A pair that nobody had before."""
        return cls(zmq.curve_keypair()[1].decode(), frozenset(allowed))

    @classmethod
    def load(cls, secret: str | os.PathLike[str], allowed: str | os.PathLike[str]) -> Keys:
        """From ZeroMQ's certificate files, which :func:`write_keys` makes too.

        Args:
            secret: our ``NAME.key_secret``, which nobody but its owner may read.
            allowed: a folder whose ``*.key`` files hold the public keys of everyone we talk to.

        Raises:
            ConfigurationError: a file that is missing, holds no key or can be read by others; nobody is allowed.
        """
        try:
            mode = Path(secret).stat().st_mode
            own = zmq.auth.load_certificate(secret)[1]
            public = zmq.auth.load_certificates(allowed)
        except (OSError, ValueError) as exc:
            raise ConfigurationError(f"keys of {secret}, allowed {allowed}: {exc}") from exc
        if mode & 0o077:
            raise ConfigurationError(f"secret key {secret}: others may read it; remedy: chmod 600 {secret}")
        if own is None:
            raise ConfigurationError(f"secret key {secret}: the file has only a public key")
        if not public:
            raise ConfigurationError(f"allowed keys {allowed}: there is no *.key file")
        return cls(own.decode("ascii", "replace"), frozenset(key.decode("ascii", "replace") for key in public))

    def allow(self, key: str) -> bool:
        """Whether we talk to whoever has proved that this public key is its own."""
        return key == self.public or key in self.allowed


def write_keys(folder: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
    """Make a pair: ``NAME.key`` for everyone's folder of allowed keys, ``NAME.key_secret`` for its owner alone.

    Raises:
        ConfigurationError: one of the files is there already, or cannot be written.
    """
    with tempfile.TemporaryDirectory() as private:
        try:
            made = [Path(file) for file in zmq.auth.create_certificates(private, name)]
            made[1].chmod(0o600)
            into = [Path(folder) / file.name for file in made]
            for file, mode, path in zip(made, (0o644, 0o600), into, strict=True):
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                    out.write(file.read_bytes())
        except OSError as exc:
            raise ConfigurationError(f"keys {name!r} in {folder}: {exc}") from exc
    return into[0], into[1]


def with_key(address: str, key: str) -> str:
    """The address at which somebody with this public key listens."""
    return f"{address}#{key}"


def key_of(address: str) -> str:
    """The public key of whoever listens at an address; empty: it names none."""
    return split_key(address)[1]


def split_key(address: str) -> tuple[str, str]:
    """What ZeroMQ knows of an address, and the public key that stands in it (empty: none)."""
    found = re.fullmatch(rf"(.+)#({_KEY})", address)
    return (found[1], found[2]) if found else (address, "")
