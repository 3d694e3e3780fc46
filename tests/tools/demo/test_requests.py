"""What `mmldlm demo` answers, and to whom: a real server on a real, tiny run."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from mmldlm.errors import MmldlmError
from mmldlm.inference import encode_texts, sample
from mmldlm.inference.generate import interpolate
from mmldlm.run.load import LoadedRun
from mmldlm.tools.demo import Demo, Page, import_gradio
from tests.helpers.waiting import TEST_TIMEOUT_S

gradio_client = pytest.importorskip("gradio_client", reason="needs the extra demo")
pytestmark = pytest.mark.quick

TEXT = "The rose of soil and water."
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def demo(short_run: LoadedRun) -> Demo:
    return Demo(short_run)


@pytest.fixture(scope="module")
def client(demo_page: Page) -> Any:
    return gradio_client.Client(demo_page.blocks.local_url, verbose=False)


# --- answers ----------------------------------------------------------------------------------------------


def rounded(similarity: float) -> float | None:
    return None if np.isnan(similarity) else round(float(similarity), 3)


def test_texts_are_those_of_sample(demo: Demo, short_run: LoadedRun) -> None:
    rows = demo.write(TEXT, count=2, length=7, steps=3, temperature=0.5, seed=3)
    config = replace(short_run.config.sampling, steps=3, temperature=0.5)
    latents = encode_texts(short_run, [TEXT])
    _, texts = sample(short_run, "l2t", config, 3, latents, None, count=2, length=7)
    cosines = [own[0] @ latents[0, 0] for own in short_run.encoder.encode(texts)]  # of unit length
    assert rows == [[rounded(similarity), text] for similarity, text in zip(cosines, texts, strict=True)]


def test_an_empty_field_takes_its_default(demo: Demo, short_run: LoadedRun) -> None:
    config = short_run.config.sampling
    sampling = {"steps": config.steps, "temperature": config.temperature, "guidance": config.guidance}
    given = demo.write(TEXT, count=3, length=0, seed=0, **sampling)
    assert demo.write(TEXT, **dict.fromkeys(("count", "length", "seed", *sampling))) == given
    assert demo.write(TEXT) == given and len(given) == 3
    assert demo.write(TEXT, seed=1) != given


def test_neighbors_are_the_nearest(demo: Demo, short_run: LoadedRun) -> None:
    """The reference is computed here from all cosines of standardized latents."""
    similarity, *tables = demo.nearest(TEXT, neighbors=4, split="validation")
    store, split = short_run.store, short_run.store.split("validation")
    generation, _ = sample(short_run, "t2l", short_run.config.sampling, 0, texts=[TEXT])
    generated, encoded = generation.latents.numpy(), encode_texts(short_run, [TEXT])
    for latent, table in zip((generated, encoded), tables, strict=True):
        latents = store.standardize(split.gather(np.arange(len(split)))[2])[:, 0]
        query = store.standardize(latent)[0, 0]
        cosines = latents @ query / np.linalg.norm(latents, axis=1) / np.linalg.norm(query)
        nearest = np.argsort(-cosines, kind="stable")[:4]
        texts = short_run.tokenizer.decode_batch([split.tokens(row).tolist() for row in nearest])
        assert [text for _, text in table] == texts
        assert [value for value, _ in table] == pytest.approx(cosines[nearest], abs=6e-4)
    expected = generated.ravel() @ encoded.ravel() / np.linalg.norm(generated) / np.linalg.norm(encoded)
    assert similarity == pytest.approx(expected, abs=6e-4)


def test_neighbors_of_a_text_without_a_latent(demo: Demo) -> None:
    similarity, of_generated, of_encoded = demo.nearest("zzz", neighbors=2)
    assert similarity is None and len(of_generated) == 2 and of_encoded == []


def test_texts_between_two(demo: Demo, short_run: LoadedRun) -> None:
    spans = demo.between(TEXT, "The wave.", points=3, length=5, seed=2)
    ends = encode_texts(short_run, [TEXT, "The wave."])
    _, texts = interpolate(short_run, short_run.config.sampling, 2, ends, 3, 5)
    numbers = ("from", "0.00", "0.50", "1.00", "to")
    lines = [f"{number}  {text}" for number, text in zip(numbers, [TEXT, *texts, "The wave."], strict=True)]
    assert "".join(text for text, _ in spans) == "\n".join(lines)
    pairs = [(Counter(before.split()), Counter(text.split())) for before, text in pairwise(texts)]
    marked = Counter(text for text, mark in spans if mark)
    assert marked == sum((text - before for before, text in pairs), Counter())


def test_the_client_gets_what_the_page_shows(client: Any, demo: Demo) -> None:
    result = client.predict(TEXT, 2, 7, 3, 0.5, 1, 3, api_name="/write")
    assert result["data"] == demo.write(TEXT, count=2, length=7, steps=3, temperature=0.5, guidance=1, seed=3)
    similarity, *tables = client.predict(TEXT, 2, "test", 3, 1, 0, api_name="/nearest")
    expected = demo.nearest(TEXT, split="test", neighbors=2, t2l_steps=3, guidance=1, seed=0)
    assert (similarity, *(table["data"] for table in tables)) == expected
    result = client.predict(TEXT, "The wave.", 3, 5, 2, 1, 1, 0, api_name="/between")
    fields = {"points": 3, "length": 5, "steps": 2, "temperature": 1, "guidance": 1, "seed": 0}
    between = "".join(text for text, _ in demo.between(TEXT, "The wave.", **fields))
    assert "".join(span["token"] for span in result) == between


def test_one_request_at_a_time_reaches_the_model(client: Any, short_run: LoadedRun) -> None:
    inside, most = 0, 0

    def enter(*_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)  # in which others could come in

    def leave(*_: object) -> None:
        nonlocal inside
        inside -= 1

    hooks = short_run.model.register_forward_pre_hook(enter), short_run.model.register_forward_hook(leave)
    jobs = [client.submit(TEXT, 2, 0, 8, 1, 1, 0, api_name="/write") for _ in range(3)]
    jobs += [client.submit(TEXT, 2, "train", 8, 1, 0, api_name="/nearest") for _ in range(3)]
    results = [job.result(timeout=TEST_TIMEOUT_S) for job in jobs]
    for hook in hooks:
        hook.remove()
    assert most == 1 and results[:3] == [results[0]] * 3 and results[3:] == [results[3]] * 3


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("write", {"text": ""}, "text: expected a sentence, found nothing"),
        ("write", {"text": " \n"}, "text: expected a sentence, found nothing"),
        ("write", {"text": "a" * 10_001}, "text: expected at most 10000 characters, found 10001"),
        ("write", {"text": "zzz qqq"}, "no latent for 'zzz qqq': expected words of its corpus"),
        ("write", {"text": TEXT, "count": 0}, "count: must be at least 1"),
        ("write", {"text": TEXT, "count": 17}, "count: must be at most 16"),
        ("write", {"text": TEXT, "count": 1.5}, "count: expected whole number"),
        ("write", {"text": TEXT, "length": 33}, "length: must be at most 32"),
        ("write", {"text": TEXT, "seed": 2**70}, "seed: must be at most 9223372036854775807"),
        ("write", {"text": TEXT, "steps": 513}, "sampling.steps: must be at most 512"),
        ("write", {"text": TEXT, "temperature": -1}, "sampling.temperature: must be at least 0"),
        ("write", {"text": TEXT, "guidance": float("nan")}, "sampling.guidance: expected finite number"),
        ("nearest", {"text": "rose " * 100}, "text: expected 1 to 32 tokens, found "),
        ("nearest", {"text": TEXT, "split": "none"}, "no split 'none'"),
        ("between", {"start": TEXT, "end": ""}, "text: expected a sentence"),
        ("between", {"start": TEXT, "end": TEXT, "points": 1}, "points: must be at least 2"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_one_line(
    demo: Demo, name: str, values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(MmldlmError) as error:
        getattr(demo, name)(**values)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_errors_are_answered_and_logged_and_the_server_lives_on(
    client: Any, short_run: LoadedRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    request = (TEXT, 1, 5, 1, 1, 1, 0)
    with pytest.raises(gradio_client.exceptions.AppError, match="count: must be at most 16, found 17"):
        client.predict(TEXT, 17, 5, 1, 1, 1, 0, api_name="/write")
    log = capfd.readouterr().err
    assert log == "mmldlm demo: count: must be at most 16, found 17\n"
    monkeypatch.setattr(short_run.tokenizer, "decode_batch", lambda *_: 1 // 0)
    with pytest.raises(gradio_client.exceptions.AppError, match="internal error, see the terminal: ZeroDivisionError"):
        client.predict(*request, api_name="/write")
    assert "Traceback" in capfd.readouterr().err
    monkeypatch.undo()
    assert len(client.predict(*request, api_name="/write")["data"]) == 1


@contextmanager
def answer(page: Page, method: str, path: str, body: Any, headers: dict[str, str]) -> Iterator[Any]:
    connection = http.client.HTTPConnection("127.0.0.1", page.blocks.server_port, timeout=TEST_TIMEOUT_S)
    connection.request(method, path, body, headers)
    yield connection.getresponse()
    connection.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:{port}"}, 403),
        ({"Host": "127.0.0.1.evil.example:{port}"}, 403),
        ({"Host": "LOCALHOST:{port}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Origin": "http://localhost:{port}", "Host": "localhost:{port}"}, 200),
    ],
    ids=str,
)
def test_only_pages_of_this_server_are_answered(demo_page: Page, headers: dict[str, str], status: int) -> None:
    sent = {name: value.format(port=demo_page.blocks.server_port) for name, value in headers.items()}
    call = json.dumps({"data": [TEXT, 1, 5, 1, 1, 1, 0]})
    for method, path, body in (("GET", "/", None), ("GET", "/config", None), ("POST", "/gradio_api/call/write", call)):
        with answer(demo_page, method, path, body, {**JSON, **sent}) as response:
            assert response.status == status, path
            assert "evil" not in (response.headers["Access-Control-Allow-Origin"] or "")


def test_bodies_are_bounded_and_missing_fields_are_answered(
    demo_page: Page, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for body in (json.dumps({"data": ["x" * (2 << 20)]}), iter([b"{}"])):  # the second one without a length
        with answer(demo_page, "POST", "/gradio_api/call/write", body, JSON) as response:
            assert response.status == 413
    with answer(demo_page, "POST", "/gradio_api/call/write", json.dumps({"data": []}), JSON) as response:
        event = json.loads(response.read())["event_id"]
    with answer(demo_page, "GET", f"/gradio_api/call/write/{event}", None, {}) as response:
        assert b"error" in response.read()
    assert "Traceback" not in capsys.readouterr().err


def test_only_this_machine_is_listened_to(monkeypatch: pytest.MonkeyPatch, demo: Demo) -> None:
    """Whatever gradio's variables in the environment say."""
    for name, value in {"SERVER_NAME": "0.0.0.0", "SHARE": "True", "MCP_SERVER": "True", "SSR_MODE": "True"}.items():
        monkeypatch.setenv(f"GRADIO_{name}", value)
    page = Page(import_gradio(), demo, ThreadPoolExecutor(1))
    url = urlsplit(page.launch(0))
    try:
        assert url.hostname == "127.0.0.1" and url.port is not None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", url.port), timeout=TEST_TIMEOUT_S)
        assert not page.blocks.share and page.blocks.share_url is None and not page.blocks.analytics_enabled
        assert not page.blocks.ssr_mode and not page.blocks.mcp_server
    finally:
        page.blocks.close()


def test_the_page_may_load_nothing_from_elsewhere(demo_page: Page) -> None:
    with answer(demo_page, "GET", "/", None, {}) as response:
        policy = response.headers["Content-Security-Policy"]
    sources = {source for rule in policy.split("; ") for source in rule.split()[1:]}
    assert policy.startswith("default-src 'self' ") and "frame-ancestors 'none'" in policy
    assert sources == {"'self'", "'unsafe-inline'", "'unsafe-eval'", "data:", "blob:", "'none'"}
