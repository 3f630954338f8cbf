"""A chat server for tests, on this machine only."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeEndpoint:
    """An OpenAI-compatible chat server that echoes, after the failures it is told to begin with."""

    def __init__(self, failures=(), body=None, raw=None, headers=None):
        """``raw`` bytes are sent in place of an answer; ``headers`` with every reply."""
        self.requests, self.failures, self.body = [], list(failures), body
        self.keys = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append((self.path, request))
                fake.keys.append(self.headers.get("Authorization"))
                failure = fake.failures.pop(0) if fake.failures else None
                status = failure or (400 if fake.refuses(request) else 200)
                body = {"error": "says no"}
                if status == 200:
                    body = fake.body if fake.body is not None else fake.answer(request)
                payload = json.dumps(body).encode()
                payload = payload if raw is None else raw
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                if failure == 429:
                    self.send_header("Retry-After", "0")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def do_GET(self):
                payload = json.dumps({"data": [{"id": "the-model"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def refuses(self, request):
        return "REFUSE" in request["messages"][-1]["content"]

    def answer(self, request):
        said = request["messages"][-1]["content"]
        choice = {"message": {"role": "assistant", "content": f"you said {said}"}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"completion_tokens": 3}}

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def fake_endpoints() -> Iterator:
    """Yields a function that starts servers; all are stopped at the end."""
    started = []

    def start(**options):
        started.append(FakeEndpoint(**options))
        return started[-1]

    yield start
    for fake in started:
        fake.stop()
