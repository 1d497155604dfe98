"""Who may talk to an engine: CurveZMQ keys, of each engine's own or made from a shared secret.

With either, both sides prove who they are and everything between them is encrypted and cannot be
replayed; ZeroMQ does all of that. A shared secret is one key pair that every engine derives for
itself, so knowing the secret is having the key.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.utils.z85
from zmq.auth import load_certificate

from kvbridge.config import Config
from kvbridge.errors import AuthenticationError, ConfigError

SECRET_MIN_BYTES = 16
SECRET_MAX_BYTES = 1 << 20
SECRET_ENVIRONMENT = "KVBRIDGE_SECRET"  # noqa: S105 - the name of a variable


class SecurityConfig(Config, frozen=True):
    """How the control channel is protected; without anything, it serves this machine alone.

    Attributes:
        secret_file: File with a secret that all engines share.
        secret_env: Variable with that secret; looked at if no file is given.
        key_file: Own CurveZMQ certificate with the secret key, as ``zmq.auth`` writes them.
        peers_folder: Folder with the public certificates of the engines that may talk to this
            one. Who dials looks there for ``<engine id>.key``, ``<host>.key``, or the only one.
    """

    secret_file: str | None = None
    secret_env: str = SECRET_ENVIRONMENT
    key_file: str | None = None
    peers_folder: str | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """An engine's key pair and those that it believes.

    Attributes:
        public: Own public key, in Z85.
        secret: Own secret key, in Z85.
        peers: Public key of every engine that may talk to this one, by the name of its file; a
            shared secret has one, under the empty name.
    """

    public: bytes
    secret: bytes
    peers: dict[str, bytes]

    def __repr__(self) -> str:
        """Show what may be seen."""
        return f"Keys(public={self.public!r}, peers={sorted(self.peers)})"

    def of(self, *names: str) -> bytes:
        """Return the key that a peer of one of these names must have.

        Raises:
            AuthenticationError: None of them has a key, and there are several to choose from.
        """
        for name in names:
            if name in self.peers:
                return self.peers[name]
        if len(self.peers) == 1:
            return next(iter(self.peers.values()))
        raise AuthenticationError(
            f"none of {sorted(self.peers)} is the public key of {' or '.join(map(repr, names))}; "
            f"put it into the folder of peers as {names[0]}.key"
        )


def load_keys(config: SecurityConfig) -> Keys | None:
    """Return the keys that a configuration names; None if it names nothing.

    Raises:
        ConfigError: A file cannot be read, holds no key, or a secret is too short.
    """
    if config.key_file is not None or config.peers_folder is not None:
        return _certificates(config.key_file, config.peers_folder)
    if config.secret_file is not None:
        secret = _small_file(Path(config.secret_file), "secret_file")
        return keys_of_secret(secret.strip(), f"secret_file {config.secret_file}")
    if config.secret_env in os.environ:
        return keys_of_secret(
            os.fsencode(os.environ[config.secret_env]).strip(), f"variable {config.secret_env}"
        )
    if config.secret_env != SECRET_ENVIRONMENT:
        raise ConfigError(
            f"secret_env names variable {config.secret_env!r}, which is not set; set it, or leave "
            "secret_env out"
        )
    return None


def _small_file(file: Path, what: str) -> bytes:
    """Read a file of a few bytes, and nothing that never ends.

    Raises:
        ConfigError: It is none, or cannot be read.
    """
    try:
        if not file.is_file():
            why = "it is no regular file" if file.exists() else "No such file or directory"
            raise ConfigError(f"{what} {str(file)!r} cannot be read: {why}")
        with file.open("rb") as opened:
            data = opened.read(SECRET_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{what} {str(file)!r} cannot be read: {why}") from error
    if len(data) > SECRET_MAX_BYTES:
        raise ConfigError(f"{what} {str(file)!r} is larger than {SECRET_MAX_BYTES} bytes")
    return data


def keys_of_secret(secret: bytes, where: str = "the secret") -> Keys:
    """Return the key pair that belongs to a shared secret.

    Making it takes a tenth of a second, so that guessing does as well.

    Args:
        secret: At least 16 bytes that nobody can guess.
        where: What it was read from, for messages.

    Raises:
        ConfigError: It is too short.
    """
    if len(secret) < SECRET_MIN_BYTES:
        raise ConfigError(
            f"{where} holds {len(secret)} bytes; a secret needs at least {SECRET_MIN_BYTES}, such "
            "as the output of: openssl rand -hex 32"
        )
    derived = hashlib.scrypt(secret, salt=b"kvbridge handshake", n=1 << 14, r=8, p=1, dklen=32)
    private = zmq.utils.z85.encode(derived)
    public = zmq.curve_public(private)
    return Keys(public, private, {"": public})


def _certificates(key_file: str | None, peers_folder: str | None) -> Keys:
    if key_file is None or peers_folder is None:
        raise ConfigError(
            f"key_file is {key_file!r} and peers_folder {peers_folder!r}; keys need both: one's "
            "own key, and the folder of those that may talk to it"
        )
    public, private = _certificate(Path(key_file))
    if private is None:
        raise ConfigError(f"key_file {key_file} holds no secret key; name the .key_secret file")
    folder = Path(peers_folder)
    if not folder.is_dir():
        raise ConfigError(f"peers_folder {peers_folder} is no folder that can be read")
    files = sorted(folder.glob("*.key"))
    peers = {file.stem: _certificate(file)[0] for file in files}
    if not peers:
        raise ConfigError(
            f"peers_folder {peers_folder} holds no public key; put each peer's there, as NAME.key"
        )
    return Keys(public, private, peers)


def _certificate(file: Path) -> tuple[bytes, bytes | None]:
    _small_file(file, "key file")
    try:
        return load_certificate(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no CurveZMQ certificate: {error}") from error
