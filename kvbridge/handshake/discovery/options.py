"""What is configured alike for every registry that is a server."""

import os
import re
from pathlib import Path
from typing import ClassVar
from urllib.parse import SplitResult, urlsplit

from kvbridge.config import Config, check_timeout
from kvbridge.errors import ConfigError

_PREFIX = re.compile(r"[!-~]*/")
_TLS_SCHEMES = ("https", "rediss")


class ServerOptions(Config, frozen=True):
    """Options of a registry that is a server.

    Attributes:
        url: Where the server is. No password goes here: addresses appear in logs.
        prefix: What the names of all entries begin with; it ends with a slash. Fleets that must not
            see each other take different ones.
        timeout_s: How long to wait for each answer of the server.
        username: The user to log in as, if the server wants one.
        password_file: File with the password, read once.
        password_env: Name of the environment variable with the password.
        ca_file: Certificates of the authorities that may have signed the server's (PEM).
        cert_file: Certificate to show to the server (PEM).
        key_file: Key of that certificate (PEM).
    """

    schemes: ClassVar[tuple[str, ...]] = ()
    paths: ClassVar[str] = "/?"
    written: ClassVar[str] = ""

    url: str
    prefix: str = "kvbridge/"
    timeout_s: float = 2.0
    username: str = ""
    password_file: str = ""
    password_env: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def __post_init__(self) -> None:
        """Refuse what could not work, without repeating a url that may hold a password.

        Raises:
            ConfigError: An option is impossible, or contradicts another one.
        """
        check_timeout(self.timeout_s, "timeout_s")
        parts = self._check_url()
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(f"prefix {self.prefix!r} must be ASCII and end with '/'")
        if self.password_file and self.password_env:
            raise ConfigError("password_file and password_env are both given; keep one")
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("cert_file and key_file belong together; give both or none")
        for file in filter(None, (self.ca_file, self.cert_file, self.key_file)):
            if parts.scheme not in _TLS_SCHEMES:
                raise ConfigError(f"{file} is for TLS, but the url begins with {parts.scheme}://")
            if not Path(file).is_file():
                raise ConfigError(f"there is no file {file}")

    def _check_url(self) -> SplitResult:
        if any(sign in self.url for sign in "@?#"):
            raise ConfigError(
                "url must hold neither user nor password nor '?...'; use username and "
                "password_file or password_env"
            )
        try:
            parts = urlsplit(self.url)
            is_unix = parts.scheme == "unix"
            fits = (
                parts.scheme in self.schemes
                and bool(parts.path if is_unix else parts.hostname)
                and (is_unix or re.fullmatch(self.paths, parts.path) is not None)
                and parts.port != 0  # which raises for one that is none
            )
        except ValueError:
            fits = False
        if not fits:
            raise ConfigError(f"url must be {self.written}")
        return parts

    def password(self) -> str | None:
        """Return the password, or None where none is configured.

        Raises:
            ConfigError: It is not where it should be.
        """
        if self.password_file:
            try:
                return Path(self.password_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"password_file {self.password_file} cannot be read: {error}"
                ) from error
        if self.password_env:
            password = os.environ.get(self.password_env)
            if password is None:
                raise ConfigError(f"password_env: the environment has no {self.password_env}")
            return password
        return None
