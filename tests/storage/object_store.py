"""An S3 server on loopback, with the requests that a store of Amazon answers: moto's. For tests."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

BUCKET = "checkpoints"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def s3_server() -> Iterator[Any]:
    """Starts a server with one bucket, tells this process and its children where it is, and yields a client."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    changed = {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        client = boto3.client("s3", region_name=KEYS["AWS_REGION"])
        client.create_bucket(Bucket=BUCKET)
        yield client
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        server.stop()
