from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mmldlm.run.load import LoadedRun
from mmldlm.tools.demo.api import Api
from mmldlm.tools.demo.server import DemoServer


@pytest.fixture(scope="session")
def server(short_run: LoadedRun) -> Iterator[DemoServer]:
    """What `mmldlm demo` serves, in a thread of this process."""
    with DemoServer(Api(short_run), 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()
