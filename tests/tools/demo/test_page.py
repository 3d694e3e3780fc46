"""The page of `mmldlm demo` in a real browser: a sentence is typed, and a generation read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmldlm.run.load import LoadedRun
from mmldlm.tools.demo.api import Api
from mmldlm.tools.demo.server import DemoServer
from tests.helpers import browser
from tests.helpers.browser import Page
from tests.helpers.paths import ROOT
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(browser.FOUND is None, reason="needs chromium")

TEXT = "The rose of soil and water."


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def opened(page: Page, url: str) -> Page:
    """The page as it is when it has heard of the run, and shows what that writes from a held-out sentence."""
    page.requests.clear()
    page.complaints.clear()
    page.open(url)
    page.wait("document.querySelector('#run').innerText.includes('step 20')")
    assert len(listed(page)) == 3
    assert page.text("#results p").startswith("From a held-out sentence: ")
    return page


def listed(page: Page) -> list[str]:
    """What the lines of the results say, once they are there."""
    page.wait("document.querySelector('#state').innerText.startsWith('done')")
    return page.value("[...document.querySelectorAll('#results li .words')].map((each) => each.innerText)")


def test_a_sentence_is_typed_and_a_generation_read(page: Page, short_run_dir: Path) -> None:
    """By the command, as a person would: the sentence has the focus, Enter asks."""
    command = [sys.executable, "-m", "mmldlm.cli", "demo", str(short_run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as demo:
        try:
            assert demo.stdout is not None
            url = re.search(r"http://[^ ]+", demo.stdout.readline())[0]  # type: ignore[index]
            opened(page, url)
            page.type(TEXT)
            page.press("Enter")
            texts = listed(page)
            request = urllib.request.Request(
                f"{url}api/write", json.dumps({"text": TEXT}).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                expected = [each["text"] for each in json.load(answer)["texts"]]
        finally:
            demo.kill()
    assert len(texts) == 3 and [text.split() for text in texts] == [text.split() for text in expected]
    assert page.requests and all(address.startswith(url) for address in page.requests)
    assert page.complaints == []


def test_everything_is_reached_by_the_keyboard(page: Page, server: DemoServer) -> None:
    opened(page, f"http://127.0.0.1:{server.port}/")
    page.value("document.querySelector('[role=tab]').focus()")
    page.press("ArrowRight")
    page.press("Tab")
    page.type(TEXT)
    page.press("Enter")
    assert len(listed(page)) == 10  # five neighbors of each latent
    assert re.search(r"cosine -?0\.\d{3} to the encoder", page.text("#results"))
    page.value("document.querySelector('[aria-selected=true]').focus()")
    page.press("ArrowRight")
    page.press("Tab")
    page.type(TEXT)
    page.press("Tab")
    page.type("The wave.")
    page.press("Enter")
    lines = listed(page)
    assert len(lines) == 9 and lines[0] == TEXT and lines[-1] == "The wave."
    page.value("document.querySelector('[aria-selected=true]').focus()")
    page.press("ArrowRight")
    assert page.text("[aria-selected=true]") == "Text from a latent"
    assert page.complaints == []


def test_text_is_never_taken_for_html(page: Page, server: DemoServer) -> None:
    opened(page, f"http://localhost:{server.port}/")
    hostile = "The rose <b>of</b> <img src=x onerror=document.title='broken'><script>document.title='broken'</script>"
    page.value("document.querySelector('#tab-interpolate').click()")
    page.value("document.querySelector('[name=a]').focus()")
    page.type(hostile)
    page.press("Tab")
    page.type("The wave.")
    page.press("Enter")
    assert listed(page)[0] == hostile
    assert page.value("document.querySelectorAll('#results b, #results img, #results script').length") == 0
    assert page.value("document.title") != "broken" and page.complaints == []


def test_errors_are_one_line_on_the_page(page: Page, short_run: LoadedRun) -> None:
    with DemoServer(Api(short_run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            opened(page, f"http://127.0.0.1:{server.port}/")
            page.press("Enter")
            page.wait("!document.querySelector('#error').hidden")
            assert page.text("#error") == "text: expected a sentence, found nothing"
            page.type("zzz")
            page.press("Enter")
            page.wait("document.querySelector('#error').innerText.includes('zzz')")
            assert page.text("#error").startswith("the encoder has no latent for 'zzz'")
        finally:
            server.shutdown()
            thread.join()
    page.press("Enter")
    page.wait("document.querySelector('#error').innerText.includes('does not answer')")
    assert page.text("#error") == "The server does not answer: is `mmldlm demo` still running?"
