"""A server of buckets on 127.0.0.1, for s3:// and gs://, whose faults a test switches on and off.

moto answers Amazon's requests, and Google's XML API once its headers are renamed.  moto lacks what is added here:

- It looks whether an object exists and then writes, without a lock: of concurrent creates two can win.  Here requests
  are answered one at a time, and what a killed client sent half is not written.
- Generations: each object written has a new one, in x-goog-generation.  With x-goog-if-generation-match, a request is
  answered 412 unless the object has that generation, or for 0, unless there is none.
- Google answers 404 to a DELETE of what is absent.

moto keeps objects for a whole process, so only one server at a time."""

import itertools
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.test import run_wsgi_app

HOST = "127.0.0.1"
REGION = "us-east-1"
CODES = {
    403: "InvalidAccessKeyId", 404: "NoSuchKey", 409: "ConditionalRequestConflict", 412: "PreconditionFailed",
    429: "TooManyRequests", 500: "InternalError", 503: "SlowDown",
}  # fmt: skip


@dataclass(eq=False)
class Fault:
    """What goes wrong with the requests of which `where(method, path)` is true; the path has its query, decoded."""

    status: int | None = None
    """The answer's."""
    delay: float = 0
    """Seconds before the answer, or until the fault ends."""
    down: bool = False
    """The connection is closed without an answer.  Where all are, until the fault ends, they are refused."""
    after: bool = False
    """The request is carried out before the fault, so that only its answer is lost."""
    times: int | None = None
    """Requests after which the fault ends."""
    where: Callable[[str, str], bool] | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def refuses(self) -> bool:
        return self.down and not self.after and self.times is None and self.where is None


class Faults:
    """The faults of now.  A request meets the first that concerns it."""

    def __init__(self, listen: Callable[[bool], None]):
        self.now: list[Fault] = []
        self.listen, self.lock = listen, threading.RLock()

    def add(self, **how: Any) -> Fault:
        with self.lock:
            self.now.append(fault := Fault(**how))
            self.listen(not any(fault.refuses for fault in self.now))
        return fault

    def end(self, *faults: Fault) -> None:
        with self.lock:
            self.now = [fault for fault in self.now if fault not in faults]
            self.listen(not any(fault.refuses for fault in self.now))
        for fault in faults:
            fault.ended.set()

    def clear(self) -> None:
        self.end(*self.now)

    def meet(self, method: str, path: str) -> Fault:
        with self.lock:
            for fault in self.now:
                if fault.times != 0 and (fault.where is None or fault.where(method, path)):
                    fault.times = fault.times and fault.times - 1
                    return fault
        return Fault()


class Handler(MotoRequestHandler):
    def log(self, *_: object) -> None:
        """Says nothing of each request."""


def bound(port: int) -> socket.socket:
    """A socket that refuses connections until it listens, and keeps its port from other processes."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((HOST, port))
    return s


def received(environ: dict[str, Any]) -> bytes:
    if environ.get("wsgi.input_terminated"):  # sent in chunks
        return environ["wsgi.input"].read()
    body = environ["wsgi.input"].read(size := int(environ.get("CONTENT_LENGTH") or 0))
    if len(body) < size:
        raise ConnectionResetError
    return body


def refusal(status: int, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], Iterable[bytes]]:
    """An error in S3's words, which to a 403 add the access key's ID."""
    key = re.search("Credential=([^/]+)", environ.get("HTTP_AUTHORIZATION", "")) if status == 403 else None
    key = f"<AWSAccessKeyId>{key[1]}</AWSAccessKeyId>" if key else ""
    code = CODES.get(status, "Error")
    text = f"<Error><Code>{code}</Code><Message>A test's {status}.</Message>{key}</Error>".encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
    return f"{status} {code}", headers, [text] if environ["REQUEST_METHOD"] != "HEAD" else []


class BucketServer:
    ACCESS_KEY = "planted-access-key-id"
    SECRET = "planted-secret-that-nothing-may-print"

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str]] = []
        """Method, decoded path with query, and host of each."""
        self.faults = Faults(self._listen)
        self._moto, self._s3 = create_backend_app("s3"), s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self._lock, self._generations = threading.Lock(), itertools.count(1_800_000_000_000_001)
        self._socket, self._server = bound(0), None
        self.port = self._socket.getsockname()[1]

    def __enter__(self) -> "BucketServer":
        self._listen(True)
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        self._listen(False)
        self._socket.close()

    def reset(self) -> None:
        """Ends all faults, and forgets all buckets and requests."""
        self.faults.clear()
        with self._lock:
            self._s3.reset()
        self.requests.clear()

    def environment(self, scheme: str) -> dict[str, str]:
        """Variables with which obstore asks this server, and nobody else for credentials."""
        url = f"http://{HOST}:{self.port}"
        around = {"NO_PROXY": HOST, "no_proxy": HOST}
        if scheme == "gs":
            return around | {"GOOGLE_BASE_URL": url, "GOOGLE_BEARER_TOKEN": self.SECRET}
        assert scheme == "s3", scheme
        keys = {"AWS_ACCESS_KEY_ID": self.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": self.SECRET}
        # The second of these is obeyed before the first.
        urls = {"AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url, "AWS_ALLOW_HTTP": "true"}
        return around | keys | urls | {"AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION}

    @contextmanager
    def failing(self, **how: Any) -> Iterator[Fault]:
        """A `Fault` of these fields, for the block's length."""
        fault = self.faults.add(**how)
        try:
            yield fault
        finally:
            self.faults.end(fault)

    def create_bucket(self, name: str) -> None:
        with self._lock:
            self._s3.create_bucket(name, REGION)

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        with self._lock:
            keys = self._s3.buckets[bucket].keys
            return {name: keys[name].value for name in sorted(keys) if name.startswith(prefix)}

    def put(self, bucket: str, key: str, data: bytes) -> None:
        with self._lock:
            self._s3.put_object(bucket, key, data)

    def delete(self, bucket: str, key: str) -> None:
        with self._lock:
            self._s3.delete_object(bucket, key)

    def _listen(self, wanted: bool) -> None:
        if wanted and self._server is None:
            self._socket.listen(128)
            how = {"threaded": True, "request_handler": Handler, "fd": self._socket.fileno()}
            self._server: BaseWSGIServer | None = make_server(HOST, self.port, self._serve, **how)
            self._thread = threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True)
            self._thread.start()
        elif self._server is not None and not wanted:
            self._server.shutdown()
            self._thread.join()
            self._socket.close()
            self._socket, self._server = bound(self.port), None

    def _serve(self, environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        query = environ["QUERY_STRING"]
        path = environ["PATH_INFO"].encode("latin-1").decode()
        asked = environ["REQUEST_METHOD"], path + f"?{query}" * bool(query)
        self.requests.append((*asked, environ.get("HTTP_HOST", "")))
        fault = self.faults.meet(*asked)
        try:
            environ["wsgi.input"] = BytesIO(received(environ))
            fault.ended.wait(fault.delay)
            status, headers, body = refusal(fault.status or 500, environ)
            if fault.after or not (fault.status or fault.down):
                answer = self._answer(path, environ)
                if not (fault.status or fault.down):
                    status, headers, body = answer
            if fault.down:
                raise ConnectionResetError
        except ConnectionResetError:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise  # to werkzeug, which then sends nothing
        start_response(status, headers)
        return body

    def _answer(self, path: str, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], Iterable[bytes]]:
        bucket, _, key = path.removeprefix("/").partition("/")
        method, query = environ["REQUEST_METHOD"], parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        google = environ.get("HTTP_AUTHORIZATION", "").startswith("Bearer")
        wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        for name in [name for name in environ if name.startswith("HTTP_X_GOOG_")]:
            environ[name.replace("X_GOOG", "X_AMZ")] = environ.pop(name)
        with self._lock:
            before = self._generation(bucket, key)
            reads = method in ("GET", "HEAD")
            if wanted is not None and int(wanted) != before and (before or not reads):
                return refusal(412, environ)
            if query.get("generation", [str(before)]) != [str(before)]:
                return refusal(404, environ)
            if google and method == "DELETE" and not before and "uploadId" not in query:
                return refusal(404, environ)
            body, status, headers = run_wsgi_app(self._moto, environ, buffered=True)
            if now := self._generation(bucket, key):
                headers["x-goog-generation"] = str(now)
        return status, headers.to_wsgi_list(), body

    def _generation(self, bucket: str, key: str) -> int:
        """That of the object, given when it is first asked for; 0 where there is none."""
        found = self._s3.buckets[bucket].keys.get(key) if bucket in self._s3.buckets else None
        return 0 if found is None else vars(found).setdefault("generation", next(self._generations))
