"""A stand-in for the server of W&B: what its client asks for at a start, and the history, kept by line number."""

from __future__ import annotations

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.ports import free_port


class WandbServer:
    """Runs of W&B clients by id: their config and display name, and the lines of their history by number.

    `start` and `stop` make it reachable and unreachable; it keeps what it has.
    """

    def __init__(self) -> None:
        self.port, self.lock = free_port(), threading.Lock()
        self._url = f"http://127.0.0.1:{self.port}"
        self.runs: dict[str, dict[str, Any]] = {}
        self._server: ThreadingHTTPServer | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that send a client here."""
        return {
            "WANDB_BASE_URL": self._url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_MODE": "online",
            "WANDB_INIT_TIMEOUT": "10",
        }

    def histories(self) -> dict[str, list[dict[str, Any]]]:
        """Return the lines of each run that has any, by its display name."""
        histories = {}
        for run in filter(lambda run: run["lines"], self.runs.values()):
            assert sorted(run["lines"]) == list(range(len(run["lines"]))) and run["name"] not in histories
            histories[run["name"]] = [json.loads(run["lines"][number]) for number in range(len(run["lines"]))]
        return histories

    @property
    def is_running(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        if self._server is not None:
            return
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                with owner.lock:
                    answer = json.dumps(owner.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_PUT = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to a request."""
        stream = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path)
        if stream is not None:
            part = (json.loads(body).get("files") or {}).get("wandb-history.jsonl")
            for number, line in enumerate(part["content"] if part else [], part["offset"] if part else 0):
                self.runs[stream[1]]["lines"][number] = line
            return {}
        if path != "/graphql":
            return {}
        request = json.loads(body)
        values = request.get("variables", {})
        if request["operationName"] == "Viewer":
            return {"data": {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}"}}}
        if request["operationName"] == "RunResumeStatus":
            run = self.runs.get(values["name"])
            return {"data": {"model": {"id": "1", "name": "p", "entity": _ENTITY, "bucket": run and _resumed(run)}}}
        if request["operationName"] == "UpsertBucket":
            name = values["name"]
            run = self.runs.setdefault(name, {"id": name, "lines": {}})
            run["name"] = values.get("displayName") or run.get("name")
            run["config"] = values.get("config") or run.get("config")
            project = {"id": "1", "name": "p", "entity": _ENTITY}
            bucket = {"id": name, "name": name, "displayName": run["name"], "project": project, "historyLineCount": 0}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": not run["lines"]}}}
        if request["operationName"] == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self._url}/upload"} for name in values["files"]]
            return {"data": {"createRunFiles": {"runID": values["run"], "uploadHeaders": [], "files": files}}}
        return {"data": {}}


_ENTITY = {"id": "1", "name": "me"}


def _resumed(run: dict[str, Any]) -> dict[str, Any]:
    lines = run["lines"]
    last = lines[max(lines)] if lines else None
    return {
        "id": run["id"],
        "name": run["id"],
        "displayName": run["name"],
        "summaryMetrics": last or "{}",
        "historyLineCount": len(lines),
        "historyTail": json.dumps([last] if last else []),
        "eventsLineCount": 0,
        "eventsTail": "[]",
        "logLineCount": 0,
        "config": run["config"] or "{}",
        "tags": [],
        "notes": "",
        "wandbConfig": '{"t": 1}',
    }
