"""Object stores on loopback, for tests: moto's server for S3, and a stub of the requests of Google's store."""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET = "checkpoints"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Starts a server with one bucket, tells this process and its children where it is, and yields the bucket's URL."""
    boto3 = pytest.importorskip("boto3", reason="boto3 and moto's server are the S3 of the tests")
    ThreadedMotoServer = pytest.importorskip(
        "moto.server", reason="moto[server] is the S3 of the tests"
    ).ThreadedMotoServer
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    try:
        with environment({**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}):
            boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
            yield f"s3://{BUCKET}"
    finally:
        server.stop()


@contextlib.contextmanager
def gs_server() -> Iterator[str]:
    """Starts the stub, tells this process and its children where it is, and yields the URL of a bucket."""
    server = _Stub(("127.0.0.1", 0), _Requests)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
    }
    try:
        with environment(variables):
            yield f"gs://{BUCKET}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables of the environment within the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Stub(ThreadingHTTPServer):
    """The objects, each with its generation: a number that no earlier write had."""

    daemon_threads = True

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.writes, self.lock = 0, threading.Lock()


class _Requests(BaseHTTPRequestHandler):
    """The requests of the JSON interface that TensorStore makes."""

    protocol_version = "HTTP/1.1"
    server: _Stub

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY: small answers are not held back

    def log_message(self, format: str, *args) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def is_refused(self, query: dict[str, str], name: str) -> bool:
        expected = query.get("ifGenerationMatch")
        return expected is not None and int(expected) != self.server.objects.get(name, (0, b""))[0]

    def parsed(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        return unquote(url.path.rpartition("/o/")[2]) if "/o/" in url.path else query.get("name", ""), query

    def do_GET(self) -> None:
        name, query = self.parsed()
        if not name:
            first, last = query.get("startOffset", ""), query.get("endOffset")
            with self.server.lock:
                found = [(key, self.server.objects[key]) for key in sorted(self.server.objects)]
            items = [_metadata(key, *value) for key, value in found if first <= key and (not last or key < last)]
            return self.answer(200, json.dumps({"items": items}).encode())
        generation, value = self.server.objects.get(name, (0, b""))
        if not generation:
            return self.answer(404)
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self.answer(200, value, x_goog_generation=generation)
        first, last = int(span[1]), min(int(span[2] or len(value)), len(value) - 1)
        where = f"bytes {first}-{last}/{len(value)}"
        self.answer(206, value[first : last + 1], x_goog_generation=generation, Content_Range=where)

    def do_POST(self) -> None:
        (name, query), value = self.parsed(), self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            if self.is_refused(query, name):
                return self.answer(412)
            self.server.writes += 1
            written = self.server.objects[name] = (self.server.writes, value)
        self.answer(200, json.dumps(_metadata(name, *written)).encode())

    def do_DELETE(self) -> None:
        name, query = self.parsed()
        with self.server.lock:
            if self.is_refused(query, name):
                return self.answer(412)
            self.answer(204 if self.server.objects.pop(name, None) else 404)


def _metadata(name: str, generation: int, value: bytes) -> dict[str, str]:
    return {"name": name, "bucket": BUCKET, "generation": str(generation), "size": str(len(value))}
