"""HTTP of the page, on this machine alone: the page at `/`, the run at `/api/run`, requests by POST at `/api/NAME`.

Whoever can reach the port may ask: other users of the machine, and every web page that its browsers show. So that such
pages cannot, a request must name this server as its host (no name of a stranger's that leads here: DNS rebinding), come
from this page if it says where it comes from, and be JSON, which browsers send elsewhere only when they are allowed to.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from mmldlm.errors import MmldlmError
from mmldlm.tools.demo.api import Api, Busy
from mmldlm.utils.short_repr import short_repr, truncate

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
MOST_BYTES = 64 * 2**10  # of a request
PAGE = Path(__file__).with_name("page.html")
HTML, JSON = "text/html; charset=utf-8", "application/json"


class DemoServer(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True  # a generation that is under way does not hold up the end

    def __init__(self, api: Api, port: int):
        """`port` 0 takes a free one. OSError where it cannot be had."""
        super().__init__((HOST, port), _Handler)
        self.api, self.page = api, PAGE.read_bytes()
        self.hosts = [f"{name}:{self.port}" for name in NAMES]
        self.policy = content_policy(self.page.decode())

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle of an answer is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


def content_policy(page: str) -> str:
    """What the browser is to refuse, whatever the page says: all but its own style and script, and this server."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in found)

    rules = {
        "default-src": "'none'",
        "style-src": hashes("style"),
        "script-src": hashes("script"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, why: str):
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: DemoServer
    server_version, sys_version = "mmldlm", ""
    timeout = 30  # seconds that a connection may be silent

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, answer: Any) -> None:
        try:
            self._check_sender()
            status, kind, content = answer()
        except _Refused as error:
            status, kind, content = error.status, JSON, _json({"error": str(error)})
        except Busy as error:
            status, kind, content = HTTPStatus.SERVICE_UNAVAILABLE, JSON, _json({"error": str(error)})
        except MmldlmError as error:
            # Options of the command line and fields of a request have the same names.
            status, kind, content = HTTPStatus.BAD_REQUEST, JSON, _json({"error": str(error).removeprefix("--")})
        except OSError:
            raise  # nobody is there any more
        except Exception as error:
            traceback.print_exc()
            why = f"a bug, see the terminal: {type(error).__name__}: {' '.join(str(error).split())}"
            status, kind, content = HTTPStatus.INTERNAL_SERVER_ERROR, JSON, _json({"error": truncate(why, 500)})
        self._send(status, kind, content)

    def _check_sender(self) -> None:
        hosts, origin = self.headers.get_all("Host", []), self.headers.get("Origin")
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            raise _Refused(HTTPStatus.FORBIDDEN, f"Host: expected {self.server.hosts[0]}, found {short_repr(hosts)}")
        if origin is not None and origin.lower() not in [f"http://{host}" for host in self.server.hosts]:
            raise _Refused(HTTPStatus.FORBIDDEN, f"Origin: expected this page, found {short_repr(origin)}")

    def _get(self) -> tuple[HTTPStatus, str, bytes]:
        if self.path == "/":
            return HTTPStatus.OK, HTML, self.server.page
        if self.path == "/api/run":
            return HTTPStatus.OK, JSON, _json(self.server.api.about())
        raise _Refused(HTTPStatus.NOT_FOUND, f"nothing at {short_repr(self.path)}")

    def _post(self) -> tuple[HTTPStatus, str, bytes]:
        folder, _, name = self.path.rpartition("/")
        if folder != "/api" or not self.server.api.knows(name):
            raise _Refused(HTTPStatus.NOT_FOUND, f"nothing at {short_repr(self.path)}")
        if self.headers.get_content_type() != JSON:
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type: expected {JSON}")
        return HTTPStatus.OK, JSON, _json(self.server.api.answer(name, self._body()))

    def _body(self) -> Any:
        told = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", told) or "Transfer-Encoding" in self.headers:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length: expected the bytes of the request")
        if int(told) > MOST_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {MOST_BYTES} bytes, found {told}")
        content = self.rfile.read(int(told))
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:  # no JSON or no UTF-8, or too deep
            raise _Refused(
                HTTPStatus.BAD_REQUEST, f"expected JSON ({truncate(' '.join(str(error).split()))})"
            ) from None

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", self.server.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library itself refuses: another method, a request that is none."""
        self._send(HTTPStatus(code), JSON, _json({"error": message or HTTPStatus(code).phrase}))

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
