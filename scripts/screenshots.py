"""Capture the pages of TensorBoard on a run, for docs/review.md.

    .venv/bin/python scripts/screenshots.py RUN [OTHER ...] [--out docs/images]

The other runs appear with the first on the page "HPARAMS".

Give the runs by relative paths: the pages show them. Needs the extra dev and a Chromium (on Debian: apt-get install
chromium fonts-dejavu-core). Exit codes: 2 without them or without a run, 1 where a page could not be captured.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from PIL import Image
from playwright.sync_api import Error as BrowserError
from playwright.sync_api import sync_playwright

# By name of the file: the page, the window in pixels, and a selector with the number of its elements to wait for.
# Without forceSVG a worker draws the time series with WebGL, which a screenshot may miss.
Page = tuple[str, tuple[int, int], str, int]
PAGES: dict[str, Page] = {
    "tensorboard-timeseries": (
        "?forceSVG=true&tagFilter=^(loss|validation)/(text|latent)$#timeseries", (1400, 1000), "line-chart path", 8
    ),
    "tensorboard-custom-scalars": ("#custom_scalars", (1200, 1080), "vz-line-chart2", 6),
    "tensorboard-text": ("#text&tagFilter=samples", (1200, 1000), "td", 8),
    "tensorboard-images": ("#images&tagFilter=figures", (1100, 1000), "img", 2),
    "tensorboard-histograms": (
        "#histograms&tagFilter=lengths|norms/t|time/(text_l2t|latent_t2l)", (1100, 930), "vz-histogram-timeseries", 6
    ),
}  # fmt: skip
COMPARED: dict[str, Page] = {"tensorboard-hparams": ("#hparams", (2000, 420), "vaadin-grid, table", 1)}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SWITCHES = ("--hide-scrollbars", "--disable-gpu", "--disable-quic", "--disable-background-networking")
PAGE_TIMEOUT_S = 60
STILL_S = 3  # for how long a page must not change before it counts as drawn
COLORS = 256  # of a picture: enough for charts, at half of the bytes


def fail(message: str) -> NoReturn:
    print(f"screenshots: error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a module of this Python as a server, and stop it with all its processes at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=PAGE_TIMEOUT_S)


@contextmanager
def tensorboard(runs: Sequence[Path]) -> Iterator[str]:
    """Serve TensorBoard on these runs; yields its address once it has read them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec, url = ",".join(f"{run.resolve().name}:{run / 'tensorboard'}" for run in runs), f"http://127.0.0.1:{port}/"
    command = ["tensorboard.main", "--logdir_spec", spec, "--port", str(port), "--host", "127.0.0.1"]
    with running([*command, "--samples_per_plugin", "text=200,images=200,scalars=100000"]) as server:
        deadline, num_read = time.monotonic() + PAGE_TIMEOUT_S, 0
        while num_read < len(runs):
            if time.monotonic() > deadline or server.poll() is not None:
                fail(f"{spec}: TensorBoard does not show every loss in {PAGE_TIMEOUT_S} s; are they folders of runs?")
            time.sleep(0.5)
            with suppress(OSError), urllib.request.urlopen(f"{url}data/plugin/scalars/tags", timeout=5) as answer:
                num_read = sum("loss/total" in tags for tags in json.load(answer).values())
        yield url


def open_tensorboard(page: Any, url: str, shown: Page) -> None:
    address, (width, height), selector, least = shown
    page.set_viewport_size({"width": width, "height": height})
    page.goto("about:blank")  # otherwise a change after the # would not load the page again
    page.goto(f"{url}{address}")
    page.locator(selector).nth(least - 1).wait_for(state="attached")


def screenshot(page: Any, to: Path) -> None:
    """Save the page once it no longer changes; AssertionError if it keeps changing."""
    before, deadline = b"", time.monotonic() + PAGE_TIMEOUT_S
    while (now := page.screenshot()) != before:
        assert time.monotonic() < deadline, f"{page.url} keeps changing"
        before = now
        time.sleep(STILL_S)
    with Image.open(io.BytesIO(now)) as picture:
        picture.convert("RGB").quantize(COLORS).save(to, optimize=True)
    print(f"{to}: {to.stat().st_size / 1000:.0f} kB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Capture the pages of TensorBoard on a run.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run with TensorBoard files")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the PNG files (%(default)s)")
    options = parser.parse_args()
    if CHROMIUM is None:
        fail("no Chromium on this machine; on Debian: apt-get install chromium fonts-dejavu-core")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
            page = browser.new_page()
            page.set_default_timeout(PAGE_TIMEOUT_S * 1000)
            for runs, pages in ((options.runs[:1], PAGES), (options.runs, COMPARED)):
                with tensorboard(runs) as url:
                    for name, shown in pages.items():
                        open_tensorboard(page, url, shown)
                        screenshot(page, options.out / f"{name}.png")
            browser.close()
    except (AssertionError, OSError, BrowserError) as error:
        print(f"screenshots: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
