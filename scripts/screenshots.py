"""Photograph the pages of TensorBoard on a run, for docs/review.md.

    .venv/bin/python scripts/screenshots.py RUN [OTHER ...] [--out docs/images] [--browser /usr/bin/chromium]

The other runs are shown beside the first on the page "HPARAMS".

Needs Chromium (on Debian: apt-get install chromium fonts-dejavu-core); nothing leaves the machine. Exit codes: 2
without it or without a run, 1 where a page could not be photographed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

# File -> page with what it shows, and the window in pixels.
PAGES = {
    "tensorboard-timeseries": ("?tagFilter=^(loss|validation)/(text|latent)$#timeseries", (1400, 1000)),
    "tensorboard-custom-scalars": ("#custom_scalars", (1200, 1080)),
    "tensorboard-text": ("#text&tagFilter=samples", (1200, 1000)),
    "tensorboard-images": ("#images&tagFilter=figures", (1100, 1000)),
}
COMPARED = {"tensorboard-hparams": ("#hparams", (2000, 420))}
PATIENCE_S = 60
COLOURS = 256  # of a picture: enough for charts, at half of the bytes


def fail(message: str) -> None:
    print(f"screenshots: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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


def photograph(browser: str, url: str, size: tuple[int, int], to: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--disable-background-networking", "--virtual-time-budget=20000", f"--user-data-dir={folder}/profile"]
        flags += [f"--window-size={size[0]},{size[1]}", f"--screenshot={raw}"]
        subprocess.run([browser, *flags, url], check=True, capture_output=True, timeout=180)
        with Image.open(raw) as page:
            page.convert("RGB").quantize(COLOURS).save(to, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Photograph TensorBoard's pages on a run.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run with TensorBoard files")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the PNG files (%(default)s)")
    parser.add_argument("--browser", default="chromium", help="Chromium or Chrome (%(default)s)")
    options = parser.parse_args()
    browser = shutil.which(options.browser)
    if browser is None:
        fail(f"no {options.browser} on this machine; on Debian: apt-get install chromium fonts-dejavu-core")
        raise AssertionError
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for runs, pages in ((options.runs[:1], PAGES), (options.runs, COMPARED)):
            port = free_port()
            server = serve(runs, port)
            try:
                for name, (page, size) in pages.items():
                    to = options.out / f"{name}.png"
                    photograph(browser, f"http://127.0.0.1:{port}/{page}", size, to)
                    print(f"{to}: {to.stat().st_size / 1000:.0f} kB")
            finally:
                stop(server)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        print(f"screenshots: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
