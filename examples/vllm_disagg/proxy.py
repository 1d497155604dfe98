"""The smallest router: a prompt goes to the prefill server, and with what it returns to decode.

Every router that knows vLLM's NixlConnector does the same; the params are passed on unchanged.
"""

import json
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from http.client import HTTPResponse
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


def post(url: str, body: dict[str, Any]) -> HTTPResponse:
    """Send JSON; return what is answered, to be read."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return cast(HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT_S))


def serve(port: int, prefill: str, decode: str) -> ThreadingHTTPServer:
    """Route completions between two servers, from now on, in a thread."""

    class Route(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["request_id"] = str(uuid.uuid4())
            first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": WANTED}
            first.pop("stream_options", None)
            with post(prefill + self.path, first) as answer:
                params = json.load(answer)["kv_transfer_params"]
            with post(decode + self.path, {**body, "kv_transfer_params": params}) as answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()
                for chunk in _chunks(answer):
                    self.wfile.write(chunk)
                    self.wfile.flush()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Route)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _chunks(answer: HTTPResponse) -> Iterator[bytes]:
    while chunk := answer.read1(1 << 16):
        yield chunk
