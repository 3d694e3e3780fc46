from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmldlm.run.load import LoadedRun
from mmldlm.tools.demo import Demo, Page, import_gradio


@pytest.fixture(scope="session")
def demo_page(short_run: LoadedRun) -> Iterator[Page]:
    """The page of `mmldlm demo`, served by this process."""
    page = Page(import_gradio(), Demo(short_run), ThreadPoolExecutor(1))
    page.launch(0)
    yield page
    page.blocks.close()
