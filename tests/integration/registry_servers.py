"""Real registry servers for tests: started on free loopback ports, stopped, frozen, emptied."""

import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import etcd3gw
import pytest
import redis
import requests

USER, PASSWORD = "kvbridge", "right-one"
START_S = 20.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a certificate for 127.0.0.1, which is its own authority, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return cert, key


class Server(ABC):
    """One server of its own, without data at every start; with TLS it wants certificates too."""

    kind: ClassVar[str]
    binary: ClassVar[str]
    scheme: ClassVar[str]

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        if shutil.which(self.binary) is None:
            pytest.fail(f"{self.binary} is not installed; `make debian-packages` installs it")
        self.folder = folder
        self.port = free_port()
        self.certificate = make_certificate(folder) if tls else None
        self.url = f"{self.scheme}{'s' * tls}://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str | Path]: ...

    @abstractmethod
    def answers(self) -> bool:
        """Ask for a sign of life; also raises what its client raises."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Put an entry behind KVBridge's back."""

    @abstractmethod
    def keys(self) -> int:
        """How many entries there are."""

    @abstractmethod
    def want_password(self) -> None: ...

    def options(self, **changes: Any) -> dict[str, Any]:
        return {"registry": self.kind, "options": {"url": self.url, "timeout_s": 10.0, **changes}}

    def start(self) -> None:
        log = self.folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command(), cwd=self.folder, stdout=output, stderr=output
            )
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                if self.answers():
                    return
            except (redis.RedisError, requests.RequestException) as error:
                last = repr(error)
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"{self.binary} did not start: {last}\n{log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        while not all(
            "State:\tT" in (thread / "status").read_text() for thread in threads.iterdir()
        ):
            time.sleep(0.005)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class RedisServer(Server):
    kind, binary, scheme = "redis", "redis-server", "redis"

    def command(self) -> Sequence[str | Path]:
        plain = ["redis-server", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        if self.certificate is None:
            return [*plain, "--port", str(self.port)]
        cert, key = self.certificate
        return [*plain, "--port", "0", "--tls-port", str(self.port), "--tls-cert-file", cert,
                "--tls-key-file", key, "--tls-ca-cert-file", cert]  # fmt: skip

    def client(self) -> redis.Redis:
        if self.certificate is None:
            return redis.Redis.from_url(self.url, protocol=2, socket_timeout=20)
        cert, key = map(str, self.certificate)
        return redis.Redis.from_url(
            self.url, protocol=2, ssl_ca_certs=cert, ssl_certfile=cert, ssl_keyfile=key
        )

    def answers(self) -> bool:
        with self.client() as client:
            return bool(client.ping())

    def put(self, key: str, value: bytes) -> None:
        index = key.rpartition("/")[0] + "/!engines"
        with self.client() as client:
            client.set(key, value)
            client.zadd(index, {key: 1e12})

    def keys(self) -> int:
        with self.client() as client:
            return int(client.dbsize())

    def want_password(self) -> None:
        with self.client() as client:
            # What docs/how-to/find-engines.md tells an operator to allow.
            client.execute_command(
                "ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~kvbridge/*",
                "+eval", "+get", "+getrange", "+set", "+del", "+time", "+type", "+zadd", "+zrange",
                "+zrem", "+zremrangebyscore",
            )  # fmt: skip
            client.execute_command("ACL", "SETUSER", "default", "off")


class EtcdServer(Server):
    kind, binary, scheme = "etcd", "etcd", "http"

    def command(self) -> Sequence[str | Path]:
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        peers = f"http://127.0.0.1:{free_port()}"
        command: list[str | Path] = [
            "etcd", "--name", "one", "--data-dir", self.folder / "data",
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
            "--initial-cluster", f"one={peers}",
            # The shortest lease is one and a half elections: a second.
            "--heartbeat-interval", "50", "--election-timeout", "500", "--bcrypt-cost", "4",
        ]  # fmt: skip
        if self.certificate is not None:
            cert, key = self.certificate
            command += ["--cert-file", cert, "--key-file", key]
            command += ["--client-cert-auth", "--trusted-ca-file", cert]
        return command

    def client(self) -> etcd3gw.Etcd3Client:
        session = requests.Session()
        session.trust_env = False
        if self.certificate is not None:
            session.verify = str(self.certificate[0])
            session.cert = (str(self.certificate[0]), str(self.certificate[1]))
        protocol = "https" if self.certificate else "http"
        return etcd3gw.Etcd3Client(
            "127.0.0.1", self.port, protocol, timeout=10, api_path="/v3/", session=session
        )

    def answers(self) -> bool:
        session = self.client().session
        with session:
            health = session.get(f"{self.url}/health", timeout=1)
            return bool(health.json()["health"] == "true")

    def put(self, key: str, value: bytes) -> None:
        client = self.client()
        with client.session:
            client.put(key, value)

    def keys(self) -> int:
        client = self.client()
        with client.session:
            return len(client.get_all())

    def want_password(self) -> None:
        client = self.client()
        prefix, end = etcd3gw.utils._encode("kvbridge/"), etcd3gw.utils._encode("kvbridge0")
        permission = {"permType": "READWRITE", "key": prefix, "range_end": end}
        with client.session:
            for path, body in (
                ("role/add", {"name": "root"}),
                ("user/add", {"name": "root", "password": "root"}),
                ("user/grant", {"user": "root", "role": "root"}),
                ("role/add", {"name": "engines"}),
                ("role/grant", {"name": "engines", "perm": permission}),
                ("user/add", {"name": USER, "password": PASSWORD}),
                ("user/grant", {"user": USER, "role": "engines"}),
                ("enable", {}),
            ):
                client.post(client.get_url(f"/auth/{path}"), json=body)

    def forget_logins(self) -> None:
        """End what the users' tokens are good for, as a restart or the time does."""
        client = self.client()
        with client.session:
            root = {"name": "root", "password": "root"}
            token = client.post(client.get_url("/auth/authenticate"), json=root)["token"]
            client.session.headers["Authorization"] = token
            body = {"name": USER, "password": PASSWORD}
            client.post(client.get_url("/auth/user/changepw"), json=body)


SERVERS: dict[str, type[Server]] = {kind.kind: kind for kind in (RedisServer, EtcdServer)}
