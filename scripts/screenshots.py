"""Photograph the pages of TensorBoard on a run, for docs/review.md.

    .venv/bin/python scripts/screenshots.py RUN [OTHER ...] [--out docs/images]

The other runs appear with the first on the page "HPARAMS".

Give the runs by relative paths: the pages show them. Needs Chromium (on Debian: apt-get install chromium
fonts-dejavu-core), which is driven as in the tests; nothing leaves the machine. Exit codes: 2 without it or without
a run, 1 where a page could not be photographed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.helpers import browser
from tests.helpers.ports import free_port

# File -> page with what it shows, the window in pixels, and what is to be seen in it: a selector, and how many of it.
# Without forceSVG a worker draws the lines of the time series, with WebGL, of which a picture may know nothing.
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
COUNT = """(function all(root, selector) {
  const inner = [...root.querySelectorAll("*")].filter((each) => each.shadowRoot).map((each) => each.shadowRoot);
  return root.querySelectorAll(selector).length + inner.reduce((sum, each) => sum + all(each, selector), 0);
})(document, %s)"""
SWITCHES = ("--hide-scrollbars", "--disable-background-networking")
PATIENCE_S = 60
STILL_S = 3  # for how long a page must not change before it counts as drawn
COLORS = 256  # of a picture: enough for charts, at half of the bytes


def fail(message: str) -> None:
    print(f"screenshots: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def serve(runs: Sequence[Path], port: int) -> subprocess.Popen[bytes]:
    """TensorBoard on these runs, when it has read them."""
    spec = ",".join(f"{run.resolve().name}:{run / 'tensorboard'}" for run in runs)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir_spec", spec, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--samples_per_plugin", "text=200,images=200,scalars=100000"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/tags", timeout=5) as answer:
                if sum("loss/total" in tags for tags in json.load(answer).values()) == len(runs):
                    return server
        except OSError:
            pass
        time.sleep(0.5)
    stop(server)
    fail(f"{spec}: TensorBoard does not show every loss after {PATIENCE_S} s; are they folders of runs?")
    raise AssertionError


def stop(process: subprocess.Popen[bytes]) -> None:
    """Together with the processes that it has started."""
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=30)


def photograph(page: browser.Page, url: str, size: tuple[int, int], selector: str, least: int, to: Path) -> None:
    """The page as it is when it has what it is to show and changes no more; AssertionError where it never does."""
    page.open("about:blank")  # or only what is behind the # would change
    page.tell("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
    page.tell("Page.navigate", url=url)  # whose spelling TensorBoard changes
    page.wait(f"{COUNT % json.dumps(selector)} >= {least}")
    with tempfile.TemporaryDirectory() as folder:
        raw, before, deadline = Path(folder) / "page.png", b"", time.monotonic() + PATIENCE_S
        while (now := taken(page, raw, size)) != before:
            assert time.monotonic() < deadline, f"{url} never comes to rest"
            before = now
            time.sleep(STILL_S)
        with Image.open(raw) as picture:
            picture.convert("RGB").quantize(COLORS).save(to, optimize=True)


def taken(page: browser.Page, to: Path, size: tuple[int, int]) -> bytes:
    page.picture(to, *size)
    return to.read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description="Photograph TensorBoard's pages on a run.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run with TensorBoard files")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the PNG files (%(default)s)")
    options = parser.parse_args()
    if browser.FOUND is None:
        fail("no Chromium on this machine; on Debian: apt-get install chromium fonts-dejavu-core")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for runs, pages in ((options.runs[:1], PAGES), (options.runs, COMPARED)):
            port = free_port()
            server = serve(runs, port)
            try:
                with tempfile.TemporaryDirectory() as profile, browser.browser(Path(profile), *SWITCHES) as page:
                    for name, (address, size, selector, least) in pages.items():
                        to = options.out / f"{name}.png"
                        photograph(page, f"http://127.0.0.1:{port}/{address}", size, selector, least, to)
                        print(f"{to}: {to.stat().st_size / 1000:.0f} kB", flush=True)
            finally:
                stop(server)
    except (AssertionError, OSError) as error:
        print(f"screenshots: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
