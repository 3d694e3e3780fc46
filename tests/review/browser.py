"""A page as a browser without network shows it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def show(page: Path, *options: str) -> str:
    """The document tree, as HTML, of a page that headless Chromium has loaded and laid out."""
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    fixed = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ]
    profile = page.parent / "browser-profile"
    command = [browser, *fixed, "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", *options, "--dump-dom", page.resolve().as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
