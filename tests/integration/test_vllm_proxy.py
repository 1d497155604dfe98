"""The router of the vLLM example, before servers that answer as vLLM does."""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import proxy
import pytest

Answer = tuple[int, Any]
TAKEN = {"do_remote_prefill": True, "remote_engine_id": "p"}
EXAMPLE = Path(proxy.__file__)


class Server:
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self, status: int, answer: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        asked = self.asked

        class Says(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Says)
        self.url = url_of(self.http)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


class Routed:
    """A router between two servers."""

    def __init__(self, prefill: Answer = (200, {"kv_transfer_params": TAKEN})) -> None:
        self.prefill, self.decode = Server(*prefill), Server(200, {"choices": [{"text": "t1"}]})
        self.router = proxy.serve(0, self.prefill.url, self.decode.url)

    def post(self, data: bytes) -> Answer:
        request = urllib.request.Request(f"{url_of(self.router)}/v1/completions", data)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def close(self) -> None:
        self.router.shutdown()
        self.router.server_close()
        for server in (self.prefill, self.decode):
            server.close()


@pytest.fixture
def routed(request: pytest.FixtureRequest) -> Iterator[Routed]:
    made = Routed(*getattr(request, "param", ()))
    yield made
    made.close()


PROMPT = json.dumps({"prompt": "t1", "max_tokens": 16, "stream": True}).encode()


def test_what_prefill_returns_goes_to_decode_unchanged(routed: Routed) -> None:
    assert routed.post(PROMPT) == (200, {"choices": [{"text": "t1"}]})
    [first], [second] = routed.prefill.asked, routed.decode.asked
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_tokens"], second["stream"]) == (16, True)
    assert second["kv_transfer_params"] == TAKEN
    assert first["request_id"] == second["request_id"]


@pytest.mark.parametrize("routed", [((200, {"kv_transfer_params": None}),)], indirect=True)
def test_decode_computes_what_prefill_has_not_kept(routed: Routed) -> None:
    assert routed.post(PROMPT)[0] == 200
    assert "kv_transfer_params" not in routed.decode.asked[0]


@pytest.mark.parametrize("routed", [((400, {"error": "too long"}),)], indirect=True)
def test_what_a_server_refuses_is_passed_on(routed: Routed) -> None:
    assert routed.post(PROMPT) == (400, {"error": "too long"})
    assert not routed.decode.asked


@pytest.mark.parametrize("routed", [((200, ["no completion"]),)], indirect=True)
def test_what_is_no_completion_is_said(routed: Routed) -> None:
    status, answer = routed.post(PROMPT)
    assert status == 502
    assert "something else than a completion" in answer["error"]["message"]
    assert not routed.decode.asked


def test_a_server_that_is_down_is_named(routed: Routed) -> None:
    routed.prefill.close()
    status, answer = routed.post(PROMPT)
    assert status == 502
    assert f"{routed.prefill.url}/v1/completions does not answer" in answer["error"]["message"]


@pytest.mark.parametrize("data", [b"prompt=t1", b"[1]", b"\xff"])
def test_what_is_no_json_object_is_refused(routed: Routed, data: bytes) -> None:
    status, answer = routed.post(data)
    assert status == 400
    assert "the request is" in answer["error"]["message"]
    assert not routed.prefill.asked


@pytest.mark.multi_process
def test_it_can_be_started_alone(routed: Routed) -> None:
    port = str(routed.router.server_address[1])  # which is taken
    servers = ["--prefill", routed.prefill.url, "--decode", routed.decode.url]
    for words, why in ((servers, f"port {port} cannot be had"), ([], "--prefill, --decode")):
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), "--port", port, *words],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == 2
        assert why in done.stderr
        assert "Traceback" not in done.stderr
