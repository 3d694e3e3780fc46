"""What `mmldlm demo` answers over HTTP, and to whom: a real server on a real, tiny run."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmldlm.inference import encode_texts, sample
from mmldlm.inference.conditions import load_run_encoder
from mmldlm.run.load import LoadedRun
from mmldlm.tools.demo.server import MOST_BYTES, DemoServer
from tests.helpers.paths import ROOT
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.quick

TEXT = "The rose of soil and water."
JSON = {"Content-Type": "application/json"}


def asked(
    server: DemoServer, method: str, path: str, body: bytes | str | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def post(server: DemoServer, name: str, request: Any, **headers: str) -> tuple[int, Any]:
    body = request if isinstance(request, (str, bytes)) else json.dumps(request)
    status, _, content = asked(server, "POST", f"/api/{name}", body, **{**JSON, **headers})
    return status, json.loads(content)


# --- answers ----------------------------------------------------------------------------------------------


def test_about_the_run(server: DemoServer, short_run: LoadedRun) -> None:
    status, headers, content = asked(server, "GET", "/api/run")
    found = json.loads(content)
    assert status == 200 and headers["Content-Type"] == "application/json"
    assert found["weights"] == "step 20, trained weights" and found["modes"] == ["l2t", "t2l", "joint"]
    assert found["sampling"]["steps"] == short_run.config.sampling.steps == 4
    assert found["splits"].keys() == {"train", "validation", "test"}


def test_texts_are_those_of_the_command(server: DemoServer, short_run: LoadedRun) -> None:
    request = {"text": TEXT, "count": 2, "length": 7, "seed": 3, "sampling": {"steps": 3, "temperature": 0.5}}
    status, found = post(server, "write", request)
    config = replace(short_run.config.sampling, steps=3, temperature=0.5)
    latents = encode_texts(short_run, [TEXT])
    _, texts = sample(short_run, "l2t", config, 3, latents, None, count=2, length=7)
    assert status == 200 and [each["text"] for each in found["texts"]] == texts
    assert [each["tokens"] for each in found["texts"]] == [7, 7]
    for each, own in zip(found["texts"], load_run_encoder(short_run).encode(texts), strict=True):
        similar = float(own[0] @ latents[0, 0])  # both of unit length
        assert each["cosine"] is None if np.isnan(similar) else each["cosine"] == pytest.approx(similar, abs=1e-5)


def test_neighbors_are_the_nearest(server: DemoServer, short_run: LoadedRun) -> None:
    """Of the encoder's own latent: by all cosines of standardized latents, computed here."""
    status, found = post(server, "neighbours", {"text": TEXT, "neighbours": 4, "split": "validation"})
    assert status == 200 and -1 <= found["cosine"] <= 1
    store, split = short_run.store, short_run.store.split("validation")
    made, _ = sample(short_run, "t2l", short_run.config.sampling, 0, texts=[TEXT])
    for key, latent in (("own", encode_texts(short_run, [TEXT])), ("found", made.latents.numpy())):
        rows = store.standardize(split.gather(np.arange(len(split)))[2])[:, 0]
        wanted = store.standardize(latent)[0, 0]
        cosines = rows @ wanted / np.linalg.norm(rows, axis=1) / np.linalg.norm(wanted)
        assert [each["cosine"] for each in found[key]] == pytest.approx(sorted(cosines, reverse=True)[:4], abs=1e-5)
        for each in found[key]:
            assert each["cosine"] == pytest.approx(cosines[each["row"]], abs=1e-5)
            assert [each["text"]] == short_run.tokenizer.decode_batch([split.tokens(each["row"]).tolist()])


def test_a_text_that_the_encoder_does_not_know_has_neighbors_found_alone(server: DemoServer) -> None:
    status, found = post(server, "neighbours", {"text": "zzz", "neighbours": 2})
    assert status == 200 and found["cosine"] is None and found["own"] == [] and len(found["found"]) == 2


def test_points_between_two_texts(server: DemoServer) -> None:
    status, found = post(server, "interpolate", {"a": TEXT, "b": "The wave.", "points": 3, "length": 5})
    assert status == 200
    assert [point["share"] for point in found["points"]] == [0, 0.5, 1]
    assert all(isinstance(point["text"], str) for point in found["points"])


def test_the_model_is_asked_by_one_at_a_time(server: DemoServer, short_run: LoadedRun) -> None:
    inside, most, found = 0, 0, list[Any]()

    def enter(*_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)  # in which others could come in

    def leave(*_: object) -> None:
        nonlocal inside
        inside -= 1

    hooks = short_run.model.register_forward_pre_hook(enter), short_run.model.register_forward_hook(leave)
    request = {"text": TEXT, "count": 2, "sampling": {"steps": 8}}
    threads = [threading.Thread(target=lambda: found.append(post(server, "write", request))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in hooks:
        hook.remove()
    assert most == 1
    assert len(found) == 6 and all(each == found[0] for each in found) and found[0][0] == 200


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "request_", "expected"),
    [
        ("write", {}, "text: expected a sentence, found nothing"),
        ("write", {"text": " \n"}, "text: expected a sentence"),
        ("write", {"text": 5}, "text: expected a sentence"),
        ("write", {"text": "a" * 10_001}, "text: expected at most 10000 characters"),
        ("write", {"text": "\ud800"}, "half a character"),
        ("write", {"text": "zzz qqq"}, "no latent for 'zzz qqq': expected words of its corpus"),
        ("write", {"text": TEXT, "count": 0}, "count: must be at least 1"),
        ("write", {"text": TEXT, "count": 17}, "count: must be at most 16"),
        ("write", {"text": TEXT, "count": 1.5}, "count: expected whole number"),
        ("write", {"text": TEXT, "length": 33}, "length: must be at most 32"),
        ("write", {"text": TEXT, "seed": 2**70}, "seed: expected whole number of at most 63 bits"),
        ("write", {"text": TEXT, "sampling": {"steps": 513}}, "sampling.steps: must be at most 512"),
        ("write", {"text": TEXT, "sampling": {"temperature": -1}}, "sampling.temperature: must be at least 0"),
        ("write", {"text": TEXT, "sampling": 5}, "sampling: expected keys below it"),
        ("write", {"text": TEXT, "sampling": {"remask": 1, "decoding": "confidence"}}, "remask: needs decoding"),
        ("write", {"text": TEXT, "cuont": 2}, "unknown key 'cuont': did you mean 'count'?"),
        ("write", [], "expected a JSON object"),
        ("write", "{", "expected JSON"),
        ("write", b"\xff", "expected JSON"),
        ("write", "[" * 60_000, "expected JSON"),
        ("write", '{"text": "The rose", "sampling": {"guidance": NaN}}', "sampling.guidance: expected number"),
        ("neighbours", {"text": "rose " * 100}, "text: expected 1 to 32 tokens, found "),
        ("neighbours", {"text": TEXT, "split": "none"}, "no split 'none'"),
        ("interpolate", {"a": TEXT}, "b: expected a sentence"),
        ("interpolate", {"a": TEXT, "b": TEXT, "points": 1}, "points: must be at least 2"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(
    server: DemoServer, name: str, request_: Any, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    status, found = post(server, name, request_)
    assert status == 400 and found.keys() == {"error"}
    assert expected in found["error"] and "\n" not in found["error"] and len(found["error"]) < 2000
    assert not found["error"].startswith("--")
    assert capfd.readouterr() == ("", "")


def test_a_bug_is_told_and_the_server_lives_on(
    server: DemoServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server.api.run.tokenizer, "decode_batch", lambda *_: 1 // 0)
    status, found = post(server, "write", {"text": TEXT})
    assert status == 500 and found["error"].startswith("a bug, see the terminal: ZeroDivisionError")
    assert "Traceback" in capfd.readouterr().err
    monkeypatch.undo()
    assert post(server, "write", {"text": TEXT})[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:{port}"}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Host": "127.0.0.1.evil.example:{port}"}, 403),
        ({"Host": "LOCALHOST:{port}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({"Origin": "http://localhost:{port}"}, 200),
    ],
    ids=str,
)
def test_strangers_are_refused(server: DemoServer, headers: dict[str, str], status: int) -> None:
    told = {name: value.format(port=server.port) for name, value in headers.items()}
    assert asked(server, "GET", "/", **told)[0] == status
    assert asked(server, "GET", "/api/run", **told)[0] == status
    assert post(server, "write", {"text": TEXT, "sampling": {"steps": 1}}, **told)[0] == status


def test_only_this_machine_is_listened_to(server: DemoServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_page_elsewhere_cannot_send_json_unasked(server: DemoServer) -> None:
    """The kinds of content that a browser sends anywhere without asking first; and asking is not answered."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        status, _, content = asked(server, "POST", "/api/write", json.dumps({"text": TEXT}), Content_Type=kind)
        assert status == 415 and b"application/json" in content
    status, headers, _ = asked(server, "OPTIONS", "/api/write", Origin="http://evil.example")
    assert status == 501 and not [name for name in headers if name.lower().startswith("access-control")]


def test_requests_are_limited(server: DemoServer) -> None:
    for headers, status in (
        ({"Content-Length": str(MOST_BYTES + 1)}, 413),
        ({"Content-Length": str(10**30)}, 411),
        ({"Content-Length": "-1"}, 411),
        ({"Transfer-Encoding": "chunked"}, 411),
        ({}, 411),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            lines = [f"{name}: {value}" for name, value in {**JSON, **headers}.items()]
            head = f"POST /api/write HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n" + "\r\n".join(lines)
            connection.sendall(f"{head}\r\n\r\n".encode())  # no body: nobody waits for it
            assert re.match(rb"HTTP/1.0 (\d+)", connection.recv(1 << 16))[1] == str(status).encode(), headers  # type: ignore[index]


def test_nothing_else_is_there(server: DemoServer) -> None:
    for path in ("/page.html", "/../errors.py", "/api", "/api/", "/api/about", "/?x", "/api/run/"):
        status, _, content = asked(server, "GET", path)
        assert status == 404 and "nothing at" in json.loads(content)["error"], path
    for path in ("/", "/api/run", "/api/_write", "/api/answer", "/api/write/", "/api/write?x=1"):
        assert asked(server, "POST", path, "{}", **JSON)[0] == 404, path
    assert asked(server, "PUT", "/api/write", "{}")[0] == 501


def test_a_visitor_that_goes_away_is_no_error(server: DemoServer, capfd: pytest.CaptureFixture[str]) -> None:
    for part in (b"", b"GET", b"POST /api/write HTTP/1.1\r\nContent-Length: 50\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(part)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # ends by a reset
    assert asked(server, "GET", "/")[0] == 200
    assert capfd.readouterr() == ("", "")


# --- the page ---------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_may_load_nothing(server: DemoServer) -> None:
    status, headers, content = asked(server, "GET", "/")
    page = content.decode()
    assert status == 200 and headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"] and policy["script-src"].startswith("'sha256-")
    assert not re.search(r"https?://|//\w+\.|@import|url\(", page), "an address outside"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", page)
    assert not re.search(r"<[^>]+\s(on\w+|style)=", page), "what the policy refuses"


def test_the_page_is_part_of_the_package() -> None:
    told = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"mmldlm.tools.demo" = ["page.html"]' in told
