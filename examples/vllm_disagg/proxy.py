"""The smallest router: a prompt goes to the prefill server, and with what it returns to decode.

    python examples/vllm_disagg/proxy.py --prefill http://HOST:8100 --decode http://HOST:8200

Every router that knows vLLM's NixlConnector does the same; the params are passed on unchanged.
"""

import argparse
import json
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TIMEOUT_S = 300.0


class RefusedError(Exception):
    """What the client is answered instead of a completion."""

    def __init__(self, status: int, body: bytes) -> None:
        """Take the HTTP status, and what comes with it."""
        super().__init__(status)
        self.status, self.body = status, body

    @classmethod
    def saying(cls, status: int, words: str) -> "RefusedError":
        """Say it as vLLM does."""
        return cls(status, json.dumps({"error": {"message": words, "code": status}}).encode())


def post(url: str, body: dict[str, Any]) -> HTTPResponse:
    """Send JSON; return what is answered, to be read.

    Raises:
        RefusedError: The server refuses it, or does not answer.
    """
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        return cast(HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT_S))
    except urllib.error.HTTPError as error:
        raise RefusedError(error.code, error.read()) from error
    except (OSError, HTTPException) as error:
        raise RefusedError.saying(502, f"{url} does not answer: {error}") from error


def prompt_in(data: bytes) -> dict[str, Any]:
    """Read what a client sends.

    Raises:
        RefusedError: It is no JSON object.
    """
    try:
        body = json.loads(data)
    except ValueError as error:
        raise RefusedError.saying(400, f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError.saying(400, f"the request is a {type(body).__name__}, no JSON object")
    return body


def decoded(path: str, body: dict[str, Any], prefill: str, decode: str) -> HTTPResponse:
    """Have a prompt computed by one server, and completed by the other one.

    Raises:
        RefusedError: One of them refuses it, or does not answer.
    """
    body = {**body, "request_id": str(uuid.uuid4())}
    first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": WANTED}
    first.pop("stream_options", None)
    with post(prefill + path, first) as answer:
        try:
            params = json.load(answer).get("kv_transfer_params")  # none if it could not be kept
        except (AttributeError, ValueError) as error:
            words = f"{prefill}{path} answers something else than a completion: {error}"
            raise RefusedError.saying(502, words) from error
    return post(decode + path, {**body, "kv_transfer_params": params} if params else body)


def server_of(port: int, prefill: str, decode: str) -> ThreadingHTTPServer:
    """Return what routes completions between two servers, once it is told to serve."""

    class Route(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                answer = decoded(self.path, prompt_in(data), prefill, decode)
            except RefusedError as error:
                self.begin(error.status, "application/json")
                self.wfile.write(error.body)
                return
            with answer:
                self.begin(answer.status, answer.headers["Content-Type"])
                for chunk in _chunks(answer):
                    self.wfile.write(chunk)
                    self.wfile.flush()

        def begin(self, status: int, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    return ThreadingHTTPServer(("127.0.0.1", port), Route)


def _chunks(answer: HTTPResponse) -> Iterator[bytes]:
    while chunk := answer.read1(1 << 16):
        yield chunk


def serve(port: int, prefill: str, decode: str) -> ThreadingHTTPServer:
    """Route completions between two servers, from now on, in a thread."""
    server = server_of(port, prefill, decode)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    """Route until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, help="URL of the server that computes prompts")
    parser.add_argument("--decode", required=True, help="URL of the server that answers")
    options = parser.parse_args()
    try:
        server = server_of(options.port, options.prefill.rstrip("/"), options.decode.rstrip("/"))
        print(f"routes completions at http://127.0.0.1:{options.port}")
        server.serve_forever()
    except OSError as error:
        parser.error(f"port {options.port} cannot be had: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
