"""`Notifier`: tells somebody how a run has ended, by a command or a URL (`log.notify`).

The setting names an environment variable, which has the command or the URL. So neither the config nor anything that a
run writes has the URL's token, and a config that somebody else wrote starts no command.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from mmldlm.errors import ConfigError, ExitCode
from mmldlm.utils.progress import print_status

TIMEOUT_S = 5.0  # of the command, or of the server's answer
EVENTS: Mapping[int, str] = {
    ExitCode.DONE: "finished",
    ExitCode.STOPPED: "stopped",
    ExitCode.NUMERICAL: "diverged",
    ExitCode.PEER_LOST: "peer_lost",
    ExitCode.INTERRUPTED: "interrupted",
}  # all others are "failed"


def check_notify(setting: str) -> None:
    """Raise `ConfigError` if the variable that `log.notify` names is empty."""
    if setting and not os.environ.get(setting.removeprefix("env:"), "").strip():
        raise ConfigError(f"log.notify: {setting}: the variable is not set, expected a command or a URL in it")


class Notifier:
    """Sends one notification of a run, from its main process, at its end. A failure to do so is one warning.

    Args:
        setting: `log.notify`. With "" nothing is sent.
    """

    def __init__(self, setting: str, run_dir: Path):
        self._setting, self._run = setting, run_dir.absolute().name
        self.run_id: str | None = None  # once it is known
        self.overfitting = ""  # a line about it, if the run has overfitted
        self._thread: Thread | None = None
        self._problem = f"no answer within {TIMEOUT_S:g} s"

    def start(self, step: int, code: int, cause: str) -> None:
        """Begin to send that the run ends with an exit code, unless an end has been sent already."""
        target = os.environ.get(self._setting.removeprefix("env:"), "").strip()
        if not target or self._thread is not None:
            return
        event, detail = EVENTS.get(code, "failed"), f": exit code {code}: {cause}" if code else ""
        if self.overfitting and not code:
            event, detail = "overfitted", f": {self.overfitting}"
        text = f"{self._run} {event} after step {step:,}{detail}"
        values = {"run": self._run, "run_id": self.run_id, "event": event, "step": step, "code": code, "text": text}
        self._thread = Thread(target=self._send, args=(target, values), name="notification", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is sent, at most a second longer than the timeout, and print a warning if it was not."""
        if self._thread is not None:
            self._thread.join(TIMEOUT_S + 1)
            if self._problem:
                print_status(f"warning: log.notify: the notification was not sent: {self._problem}")
                self._problem = ""

    def _send(self, target: str, values: Mapping[str, Any]) -> None:
        try:
            self._problem = _deliver(target, values)
        except HTTPError as error:
            self._problem = f"the server answers {error.code}"
        except Exception as error:  # of any type. Its message may have the URL
            self._problem = type(error.reason if isinstance(error, URLError) else error).__name__


def _deliver(target: str, values: Mapping[str, Any]) -> str:
    """Send to a command or URL. Return what went wrong, without the target, or ""."""
    content = json.dumps(values).encode()
    if re.match(r"https?://", target):
        urlopen(Request(target, content, {"Content-Type": "application/json"}), timeout=TIMEOUT_S).close()
        return ""
    variables = {"MMLDLM_EVENT": str(values["event"]), "MMLDLM_TEXT": str(values["text"])}
    result = subprocess.run(
        shlex.split(target),
        input=content,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables},
        start_new_session=True,  # so that Ctrl-C in a terminal does not reach it
        timeout=TIMEOUT_S,
    )
    return f"the command ends with exit code {result.returncode}" if result.returncode else ""
