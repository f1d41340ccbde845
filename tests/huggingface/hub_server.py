"""A stand-in for the Hugging Face hub: the requests that huggingface_hub makes for a model, answered on 127.0.0.1."""

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/tiny"


class Hub(ThreadingHTTPServer):
    """files: those of MODEL's only commit, which is at `main` and `refs/pr/1`.  answer: what is asked, as `HEAD
    /org/tiny/..`, to the status and the headers of an answer in its place, or None.  cut: how many bytes of a file are
    sent at most.  asked: all requests; authorizations: what they showed."""

    daemon_threads = True

    def __init__(self, directory: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {
            str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
        }
        self.hash_files()
        self.answer: Callable[[str], tuple[int, dict[str, str]] | None] = lambda asked: None
        self.cut = 10**9
        self.asked: list[str] = []
        self.authorizations: set[str | None] = set()

    def hash_files(self) -> None:
        self.hashes = {name: hub_hash(name, content) for name, content in self.files.items()}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def hub_hash(name: str, content: bytes) -> str:
    return (
        hashlib.sha256(content).hexdigest()
        if is_lfs(name)
        else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def reply(self, status: int, headers: dict[str, str], content: bytes = b"", cut: int = 10**9) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
            self.close_connection = cut < len(content)

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        self.server.authorizations.add(self.headers["Authorization"])
        if instead := self.server.answer(self.server.asked[-1]):
            self.reply(*instead)
        elif not f"{path}/".startswith((f"/api/models/{MODEL}/", f"/{MODEL}/resolve/")):
            self.reply(404, {"X-Error-Code": "RepoNotFound"})
        elif path in (f"/api/models/{MODEL}", *(f"/api/models/{MODEL}/revision/{each}" for each in REVISIONS)):
            self.reply(200, {}, json.dumps({"id": MODEL, "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/{MODEL}/tree/{COMMIT}":
            self.reply(200, {}, json.dumps([self.entry(name) for name in self.server.files]).encode())
        elif (name := path.partition(f"/resolve/{COMMIT}/")[2]) in self.server.files:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self.server.hashes[name]}"', "Accept-Ranges": "none"}
            self.reply(200, headers, self.server.files[name], self.server.cut)
        else:
            self.reply(404, {"X-Error-Code": "EntryNotFound" if COMMIT in path else "RevisionNotFound"})

    do_HEAD = do_GET

    def entry(self, name: str) -> dict:
        size, oid = len(self.server.files[name]), self.server.hashes[name]
        lfs = {"lfs": {"oid": oid, "size": size, "pointerSize": 134}} if is_lfs(name) else {}
        return {"type": "file", "path": name, "size": size, "oid": oid[:40], **lfs}


REVISIONS = ("main", "refs/pr/1", COMMIT)


@contextmanager
def serve(directory: Path):
    hub = Hub(directory)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
