"""A stand-in of the Hugging Face hub for tests, on this machine only: repositories, tokens, commits.

It answers the requests that huggingface_hub makes for models, with the hub's own statuses and headers.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlparse

import huggingface_hub.hf_api
import pytest
import transformers.utils.hub
from huggingface_hub import constants

LARGE = (".safetensors", ".bin", ".pt")
"""Names of files that the hub keeps as large files."""


class FakeHub:
    """Users by token, and repositories as lists of commits, each a dict of files."""

    def __init__(self) -> None:
        self.users = {"hf_ada": "ada", "hf_bob": "bob"}
        self.read_only = {"hf_ada_reads"}
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.tags: dict[str, dict[str, int]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fails_at: str | None = None
        """A regular expression: requests that match it are answered with ``failure``."""
        self.failure: int | None = 500
        """None cuts the connection."""
        hub = self

        class Handler(_Handler):
            def setup(self) -> None:
                super().setup()
                self.hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def put(self, name: str, directory: Path | dict[str, bytes]) -> str:
        """Add a commit with exactly these files to the repository ``name``; its id."""
        files = directory
        if isinstance(files, Path):
            files = {
                str(path.relative_to(directory)): path.read_bytes()
                for path in files.rglob("*")
                if path.is_file()
            }
        self.repositories.setdefault(name, []).append(dict(files))
        return self.commit_id(name, len(self.repositories[name]) - 1)

    def files(self, name: str) -> dict[str, bytes]:
        """The files of the last commit."""
        return self.repositories[name][-1]

    def commit_id(self, name: str, number: int) -> str:
        return hashlib.sha1(f"{name}/{number}".encode()).hexdigest()

    def commit_number(self, name: str, revision: str) -> int | None:
        ids = {self.commit_id(name, i): i for i in range(len(self.repositories[name]))}
        named = {"main": len(self.repositories[name]) - 1, **self.tags.get(name, {})}
        return {**ids, **named}.get(revision)

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(size)
        path = unquote(urlparse(self.path).path)
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        if self.hub.fails_at is not None and re.search(self.hub.fails_at, request):
            if self.hub.failure is None:
                self.close_connection = True
                self.connection.close()
                return
            return self._send(self.hub.failure, b'{"error": "says no"}', {})
        try:
            for pattern, answer in ROUTES:
                if (found := re.fullmatch(pattern, request)) is not None:
                    status, payload, headers = answer(self, body, *found.groups())
                    return self._send(status, payload, headers)
            self._send(404, request.encode(), {})
        except _Refused as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            payload = json.dumps({"error": error.message}).encode()
            self._send(error.status, payload, {key: value for key, value in headers.items() if value})

    do_HEAD = do_POST = do_PUT = do_GET

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _send(self, status: int, payload: Any, headers: dict[str, str]) -> None:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def user(self) -> str | None:
        """Whose token came with the request; None where none did."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if not token:
            return None
        if token in self.hub.read_only:
            return "reader"
        if token not in self.hub.users:
            raise _Refused(401, message="Invalid credentials in Authorization header")
        return self.hub.users[token]

    def writer_of(self, name: str) -> None:
        """Refuse whoever may not write to ``name``."""
        user = self.user()
        if user is None:
            raise _Refused(401, message="Invalid username or password.")
        if user != name.partition("/")[0]:
            raise _Refused(403, message=f"You don't have the rights to write to {name}")

    def reader_of(self, name: str, revision: str = "main") -> int:
        """The number of the commit that the request may read."""
        user = self.user()
        is_hidden = name in self.hub.private and user != name.partition("/")[0]
        if name not in self.hub.repositories or is_hidden:
            raise _Refused(404 if user else 401, "RepoNotFound", "Repository not found")
        if name in self.hub.gated and user is None:
            raise _Refused(401, "GatedRepo", f"Access to model {name} is restricted")
        number = self.hub.commit_number(name, revision)
        if number is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return number


Answer = tuple[int, Any, dict[str, str]]


def _whoami(request: _Handler, body: bytes) -> Answer:
    user = request.user()
    if user is None:
        raise _Refused(401, message="Invalid username or password.")
    return 200, {"type": "user", "name": user, "orgs": [], "auth": {}}, {}


def _create(request: _Handler, body: bytes) -> Answer:
    asked, hub = json.loads(body), request.hub
    name = f"{asked['organization']}/{asked['name']}"
    request.writer_of(name)
    if name in hub.repositories:
        raise _Refused(409, message="You already created this model repo")
    hub.put(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
    if asked.get("visibility") == "private" or asked.get("private"):
        hub.private.add(name)
    return 200, {"url": f"{hub.url}/{name}", "name": name}, {}


def _info(request: _Handler, body: bytes, name: str, revision: str | None) -> Answer:
    number = request.reader_of(name, revision or "main")
    files = request.hub.repositories[name][number]
    info = {"id": name, "modelId": name, "sha": request.hub.commit_id(name, number), "tags": []}
    return 200, {**info, "siblings": [{"rfilename": file} for file in files]}, {}


def _tree(request: _Handler, body: bytes, name: str, revision: str) -> Answer:
    number = request.reader_of(name, revision)
    entries = [
        {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": _git_oid(content),
            **({"lfs": _pointer(content)} if path.endswith(LARGE) else {}),
        }
        for path, content in request.hub.repositories[name][number].items()
    ]
    return 200, entries, {}


def _resolve(request: _Handler, body: bytes, name: str, revision: str, path: str) -> Answer:
    number = request.reader_of(name, revision)
    content = request.hub.repositories[name][number].get(path)
    if content is None:
        raise _Refused(404, "EntryNotFound", "Entry not found")
    etag = hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else _git_oid(content)
    return 200, content, {"X-Repo-Commit": request.hub.commit_id(name, number), "ETag": f'"{etag}"'}


def _preupload(request: _Handler, body: bytes, name: str, revision: str) -> Answer:
    request.writer_of(name)
    present = request.hub.repositories[name][request.reader_of(name, revision)]
    files = [
        {
            "path": (path := each["path"]),
            "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
            "shouldIgnore": False,
            "oid": _oid(path, present[path]) if path in present else None,
        }
        for each in json.loads(body)["files"]
    ]
    return 200, {"files": files}, {}


def _lfs_batch(request: _Handler, body: bytes, name: str) -> Answer:
    request.writer_of(name)
    objects = [
        {
            **each,
            "actions": {
                "upload": {"href": f"{request.hub.url}/large/{each['oid']}"},
                "verify": {"href": f"{request.hub.url}/verify"},
            },
        }
        for each in json.loads(body)["objects"]
    ]
    return 200, {"transfer": "basic", "objects": objects}, {}


def _store(request: _Handler, body: bytes, oid: str) -> Answer:
    assert hashlib.sha256(body).hexdigest() == oid
    request.hub.large[oid] = body
    return 200, {}, {}


def _verify(request: _Handler, body: bytes) -> Answer:
    asked = json.loads(body)
    return (200 if len(request.hub.large[asked["oid"]]) == asked["size"] else 422), {}, {}


def _commit(request: _Handler, body: bytes, name: str, revision: str) -> Answer:
    request.writer_of(name)
    files = dict(request.hub.repositories[name][request.reader_of(name, revision)])
    for line in body.splitlines():
        operation = json.loads(line)
        value = operation["value"]
        if operation["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif operation["key"] == "lfsFile":
            files[value["path"]] = request.hub.large[value["oid"]]
        elif operation["key"] == "deletedFile":
            del files[value["path"]]
        else:
            assert operation["key"] == "header", operation["key"]
    commit = request.hub.put(name, files)
    return 200, {"commitUrl": f"{request.hub.url}/{name}/commit/{commit}", "commitOid": commit}, {}


REPOSITORY = r"([\w.-]+/[\w.-]+)"
ROUTES: tuple[tuple[str, Callable[..., Answer]], ...] = (
    (r"GET /api/whoami-v2", _whoami),
    (r"POST /api/repos/create", _create),
    (r"POST /api/validate-yaml", lambda request, body: (200, {"errors": [], "warnings": []}, {})),
    (rf"GET /api/models/{REPOSITORY}(?:/revision/(.+))?", _info),
    (rf"GET /api/models/{REPOSITORY}/tree/([^/]+)", _tree),
    (rf"POST /api/models/{REPOSITORY}/preupload/([^/]+)", _preupload),
    (rf"POST /api/models/{REPOSITORY}/commit/([^/]+)", _commit),
    (rf"POST /{REPOSITORY}\.git/info/lfs/objects/batch", _lfs_batch),
    (r"PUT /large/(\w+)", _store),
    (r"POST /verify", _verify),
    (rf"(?:GET|HEAD) /{REPOSITORY}/resolve/([^/]+)/(.+)", _resolve),
)


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _pointer(content: bytes) -> dict[str, Any]:
    return {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}


def _oid(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else _git_oid(content)


@contextmanager
def fake_hub(cache: Path) -> Iterator[FakeHub]:
    """The hub of huggingface_hub and transformers while the block runs; their cache is ``cache``, nobody is
    logged in."""
    hub = FakeHub()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # large files go the older way, over HTTP alone
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        patch.setattr(constants, "HF_STORED_TOKENS_PATH", str(cache / "tokens"))
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)  # clients that keep their endpoint
        patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.delenv("HF_TOKEN", raising=False)
        at_once = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})  # between two attempts
        patch.setattr("huggingface_hub.utils._http.time", at_once)
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache / "modules"))
        huggingface_hub.close_session()
        try:
            yield hub
        finally:
            hub.stop()
            huggingface_hub.close_session()
