"""The page of `mmldlm demo` in a real browser: a sentence is typed, and a generation read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mmldlm.tools.demo import Page
from tests.helpers.browser import browser_page, needs_browser
from tests.helpers.waiting import TEST_TIMEOUT_S

pytest.importorskip("gradio", reason="needs the extra demo")
pytestmark = needs_browser

TEXT = "The rose of soil and water."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_page() as page:
        yield page


CELLS = "[role=gridcell][aria-colindex='2']:visible"  # the texts of tables


@pytest.fixture
def page(browser: Any, demo_page: Page) -> Iterator[Any]:
    """The page when it shows what the run writes from a held-out sentence."""
    browser.goto("about:blank")  # the page before ends its streams, which its console reports
    browser.requested.clear()
    browser.errors.clear()
    url = demo_page.blocks.local_url
    browser.goto(url)
    wait_for_texts(browser, 3)
    assert browser.get_by_label("Sentence").input_value() == demo_page.demo.examples()[0]
    assert browser.get_by_text("step 20, trained weights").is_visible()
    yield browser
    assert browser.errors == []
    assert browser.requested and all(address.startswith((url, "data:", "blob:")) for address in browser.requested)


def wait_for_texts(page: Any, count: int) -> list[str]:
    from playwright.sync_api import expect

    expect(page.locator(CELLS)).to_have_count(count, timeout=TEST_TIMEOUT_S * 1000)
    return page.locator(CELLS).all_inner_texts()


def wait_for_lines(page: Any, last: str) -> list[str]:
    """Return the lines of "Between" once the last one is shown."""
    from playwright.sync_api import expect

    field = page.locator(".textfield:visible")
    expect(field).to_contain_text(last, timeout=TEST_TIMEOUT_S * 1000)
    return field.inner_text().split("\n")


def fill(page: Any, label: str, value: object) -> None:
    page.get_by_label(label, exact=True).locator("visible=true").fill(str(value))


def test_a_sentence_is_typed_and_a_generation_read(page: Any, demo_page: Page) -> None:
    """Enter submits it."""
    fill(page, "Count", 2)
    fill(page, "Sentence", TEXT)
    page.keyboard.press("Enter")
    texts = wait_for_texts(page, 2)
    assert [text.split() for text in texts] == [text.split() for _, text in demo_page.demo.write(TEXT, count=2)]
    page.get_by_role("button", name="With the next seed").locator("visible=true").click()
    page.wait_for_function(
        f"text => document.querySelector({CELLS.partition(':')[0]!r}).innerText != text", arg=texts[0]
    )
    assert page.get_by_label("Seed").locator("visible=true").input_value() == "1"


def test_all_forms_work_by_keyboard(page: Any) -> None:
    page.get_by_role("tab", name="To latent").focus()
    page.keyboard.press("Enter")
    fill(page, "Text", TEXT)
    page.keyboard.press("Enter")
    wait_for_texts(page, 10)  # five neighbors of each latent
    page.get_by_role("tab", name="Between").focus()
    page.keyboard.press("Enter")
    fill(page, "From", TEXT)
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("The wave.")
    page.keyboard.press("Enter")
    lines = wait_for_lines(page, "to  The wave.")
    points = [line[:6] for line in lines if line[1:2] == "." and line[4:6] == "  "]  # texts may have lines
    assert len(points) == 7 and lines[0] == f"from  {TEXT}" and lines[1].startswith("0.00")


HOSTILE = (
    "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>${document.title='broken'}"
)


def test_text_is_never_taken_for_html_or_code(page: Any, demo_page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and errors show hostile text as it is."""
    page.get_by_role("tab", name="Between").click()
    fill(page, "From", f"The rose {HOSTILE} {{{{value}}}} `")
    fill(page, "To", "The wave.")
    page.keyboard.press("Enter")
    assert wait_for_lines(page, "to  The wave.")[0] == f"from  The rose {HOSTILE} {{{{value}}}} `"
    page.get_by_role("tab", name="To text").click()
    monkeypatch.setattr(demo_page.run.tokenizer, "decode_batch", lambda rows: [HOSTILE] * len(rows))
    fill(page, "Count", 2)
    fill(page, "Sentence", TEXT)
    page.keyboard.press("Enter")
    assert wait_for_texts(page, 2) == [HOSTILE] * 2
    fill(page, "Sentence", f"zzz {HOSTILE}")
    page.keyboard.press("Enter")
    page.get_by_text("the encoder has no latent for").wait_for()
    assert page.locator("img[src=x]").count() == 0 and page.title().endswith("mmldlm demo")


def test_an_error_is_one_line_on_the_page_until_the_next_answer(page: Any) -> None:
    fill(page, "Sentence", "")
    page.keyboard.press("Enter")
    page.get_by_text("text: expected a sentence, found nothing").wait_for()
    fill(page, "Count", 4)
    fill(page, "Sentence", TEXT)
    page.keyboard.press("Enter")
    wait_for_texts(page, 4)


def test_a_narrow_screen_shows_all_forms(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    try:
        page.wait_for_function("document.documentElement.clientWidth == 390")
        assert page.get_by_role("tab").all_inner_texts() == ["To text", "To latent", "Between"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    finally:
        page.set_viewport_size({"width": 1280, "height": 720})
