"""An S3-compatible object store on this machine, moto's, and a proxy before it that plants faults."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until

BUCKET = "bucket"
_REQUESTS_OF_SETUP = 4  # which need no permission: after them the server demands valid keys


class ObjectStore:
    """A server with one bucket; `environment` has the keys of a user that may do everything."""

    def __enter__(self) -> ObjectStore:
        port = free_port()
        self.address = ("127.0.0.1", port)
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from moto.server import main; main()", "-p", str(port)],
            env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(_REQUESTS_OF_SETUP)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, "an object store")
        everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
        iam = self._client("iam", "none", "none")
        iam.create_user(UserName="user")
        key = iam.create_access_key(UserName="user")["AccessKey"]
        policy = json.dumps({"Version": "2012-10-17", "Statement": [everything]})
        iam.put_user_policy(UserName="user", PolicyName="all", PolicyDocument=policy)
        self.keys = key["AccessKeyId"], key["SecretAccessKey"]
        self.s3 = self._client("s3", *self.keys)
        self.s3.create_bucket(Bucket=BUCKET)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()
        self._server.wait()

    def environment(self, address: tuple[str, int] | None = None, secret: str | None = None) -> dict[str, str]:
        """Return the variables of a client, of this store or of a proxy at `address`."""
        host, port = address or self.address
        return {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": self.keys[0],
            "AWS_SECRET_ACCESS_KEY": secret or self.keys[1],
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def names(self, prefix: str = "") -> set[str]:
        """Return the names of all objects under `prefix`, relative to it."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", ())}

    def complete(self, run: str) -> list[int]:
        """Return the steps of the complete copies of a run's checkpoints."""
        names = self.names(f"{run}/")
        return sorted(int(name[5:13]) for name in names if name.endswith("/manifest.json") and "/checkpoints/" in name)

    def _client(self, service: str, key: str, secret: str) -> Any:
        import boto3

        keys = {"aws_access_key_id": key, "aws_secret_access_key": secret, "region_name": "us-east-1"}
        return boto3.client(service, endpoint_url=f"http://{self.address[0]}:{self.address[1]}", **keys)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(self.address, 1):
            return True
        return False


class FaultyProxy:
    """Forwards connections to `target`. `fault` may change at any time:

    "": none; "cut": every connection breaks once its client has sent `limit` bytes; "slow": a client's bytes beyond
    `limit` go nowhere. `faults` counts the connections that were hit.
    """

    def __init__(self, target: tuple[str, int], fault: str = "", limit: int = 200_000):
        self.fault, self.limit, self.faults = fault, limit, 0
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(self._target)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink, source is client), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_client: bool) -> None:
        sent, hit = 0, False
        with suppress(OSError):
            while block := source.recv(1 << 14):
                sent += len(block)
                while is_client and self.fault and sent > self.limit:
                    self.faults += not hit
                    hit = True
                    if self.fault == "cut":
                        raise OSError
                    time.sleep(0.02)
                sink.sendall(block)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
