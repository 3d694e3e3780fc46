"""The page of `mmldlm demo` in a real browser: a sentence is typed, and a generation read."""

from __future__ import annotations

import re
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


@pytest.fixture
def page(browser: Any, demo_page: Page) -> Iterator[Any]:
    """The page when it shows what the run writes from a held-out sentence."""
    browser.goto("about:blank")  # the page before ends its streams, which its console reports
    browser.requested.clear()
    browser.errors.clear()
    url = demo_page.blocks.local_url
    browser.goto(url)
    browser.get_by_text("From a held-out sentence:").wait_for()
    assert len(lines(browser)) == 3 and browser.get_by_text("step 20, trained weights").is_visible()
    yield browser
    assert browser.errors == []
    assert browser.requested and all(address.startswith((url, "data:", "blob:")) for address in browser.requested)


def lines(page: Any) -> list[str]:
    return page.locator(".lines:visible .words").all_inner_texts()


def wait_for_lines(page: Any, count: int) -> list[str]:
    from playwright.sync_api import expect

    expect(page.locator(".lines:visible .words")).to_have_count(count, timeout=TEST_TIMEOUT_S * 1000)
    return lines(page)


def fill(page: Any, label: str, value: object) -> None:
    page.get_by_label(label, exact=True).locator("visible=true").fill(str(value))


def test_a_sentence_is_typed_and_a_generation_read(page: Any, demo_page: Page) -> None:
    """The sentence has the focus, and Enter submits it."""
    fill(page, "Count", 2)
    page.get_by_label("Sentence").focus()
    page.keyboard.type(TEXT)
    page.keyboard.press("Enter")
    texts = wait_for_lines(page, 2)
    expected = re.findall('class="words">(.*?)</span>', demo_page.demo.write(TEXT, count=2))
    assert [text.split() for text in texts] == [text.split() for text in expected]
    page.get_by_role("button", name="With the next seed").locator("visible=true").click()
    page.wait_for_function("text => document.querySelector('.lines .words').innerText != text", arg=texts[0])
    assert page.get_by_label("Seed").locator("visible=true").input_value() == "1"


def test_all_forms_work_by_keyboard(page: Any) -> None:
    page.get_by_role("tab", name="To latent").focus()
    page.keyboard.press("Enter")
    page.get_by_label("Text", exact=True).focus()
    page.keyboard.type(TEXT)
    page.keyboard.press("Enter")
    assert len(wait_for_lines(page, 10)) == 10  # five neighbors of each latent
    page.get_by_role("tab", name="Between").focus()
    page.keyboard.press("Enter")
    page.get_by_label("From").focus()
    page.keyboard.type(TEXT)
    page.keyboard.press("Tab")
    page.keyboard.type("The wave.")
    page.keyboard.press("Enter")
    texts = wait_for_lines(page, 9)
    assert texts[0] == TEXT and texts[-1] == "The wave."


HOSTILE = (
    "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>${document.title='broken'}"
)


def test_text_is_never_taken_for_html_or_code(page: Any) -> None:
    """Results and errors show hostile text as it is."""
    page.get_by_role("tab", name="Between").click()
    fill(page, "From", f"The rose {HOSTILE} {{{{value}}}} `")
    fill(page, "To", "The wave.")
    page.keyboard.press("Enter")
    assert wait_for_lines(page, 9)[0] == f"The rose {HOSTILE} {{{{value}}}} `"
    page.get_by_role("tab", name="To text").click()
    fill(page, "Sentence", f"zzz {HOSTILE}")
    page.keyboard.press("Enter")
    page.get_by_text("the encoder has no latent for").wait_for()
    assert page.locator("img[src=x]").count() == 0 and page.title().endswith("mmldlm demo")


def test_an_error_is_one_line_on_the_page_until_the_next_answer(page: Any) -> None:
    page.get_by_label("Sentence").focus()
    page.keyboard.press("Enter")
    page.get_by_text("text: expected a sentence, found nothing").wait_for()
    fill(page, "Sentence", TEXT)
    page.keyboard.press("Enter")
    wait_for_lines(page, 3)


def test_a_narrow_screen_shows_all_forms(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    try:
        page.wait_for_function("document.documentElement.clientWidth == 390")
        assert page.get_by_role("tab").all_inner_texts() == ["To text", "To latent", "Between"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    finally:
        page.set_viewport_size({"width": 1280, "height": 720})
