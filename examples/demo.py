"""Sample from a run, or from a bundle of `mmldlm export`, on a web page of this machine.

    python examples/demo.py runs/quickstart [--port 8000]

The page has a tab for each mode that the network was trained for. It needs gradio, the extra `demo`, which
`scripts/setup.sh` installs. The page has no password: every user of this machine can open it. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import wraps
from html import escape
from typing import Any

import gradio as gr
import numpy as np
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

import mmldlm
from mmldlm.errors import MmldlmError, run_command
from mmldlm.evaluation import cosine
from mmldlm.inference.generate import interpolate

HOST, DEFAULT_PORT = "127.0.0.1", 8000
MAX_COUNT, MIN_POINTS, MAX_POINTS, MAX_STEPS, MAX_SEED = 16, 2, 32, 512, 2**31 - 1
# All of torch's work is done by one thread: with a second one OpenMP's threads of both would wait for one another.
model_thread = ThreadPoolExecutor(1)

Rows = list[list[Any]]  # a cosine, None where there is none, and a text


class Demo:
    """Answers of one network to the forms of the page. Empty steps and temperature are the run's own."""

    def __init__(self, model: mmldlm.Model):
        self.model = model

    def to_text(
        self, sentence: str, prefix: str, count: int, steps: int | None, temperature: float | None, seed: int
    ) -> Rows:
        """Generate texts from the latent of a sentence alone. Cosines are those of their own latents to it."""
        latents, settings = self.model.encode([sentence]), _given(steps=steps, temperature=temperature)
        made = self.model.sample(latents=latents, count=count or 1, prefixes=[prefix], seed=seed or 0, **settings)
        return self._rows(made.texts, latents)

    def to_latent(self, text: str, others: str, prefix: str, steps: int | None, seed: int) -> Rows:
        """Generate a latent for a text. Cosines are those of it to the encoder's latents of the text and of others."""
        made = self.model.sample([text], mode="t2l", prefixes=[prefix], seed=seed or 0, **_given(steps=steps))
        return self._rows([text, *filter(str.strip, others.splitlines())], made.latents)

    def joint(self, prefix: str, count: int, steps: int | None, temperature: float | None, seed: int) -> Rows:
        """Generate texts with latents from noise. Cosines compare the latents drawn first with those of the texts."""
        settings = _given(steps=steps, temperature=temperature, joint_latents="drawn")
        made = self.model.sample(mode="joint", count=count or 1, prefixes=[prefix], seed=seed or 0, **settings)
        return self._rows(made.texts, made.latents)

    def between(
        self, start: str, end: str, points: int, steps: int | None, temperature: float | None, seed: int
    ) -> Rows:
        """Generate texts along the way from the latent of one sentence to that of another."""
        config = replace(self.model.run.config.sampling, **_given(steps=steps, temperature=temperature))
        points, ends = points or MIN_POINTS, self.model.encode([start, end])
        _, texts = interpolate(self.model.run, config, seed or 0, ends, points)
        return [[round(at, 2), text] for at, text in zip(np.linspace(0, 1, points).tolist(), texts, strict=True)]

    def _rows(self, texts: list[str], latents: np.ndarray) -> Rows:
        """Return each text with the cosine of its latent by the encoder to that of `latents`, of all or of each."""
        encoder = self.model.run.available_encoder  # None where the encoder cannot be loaded
        similarities = [math.nan] * len(texts) if encoder is None else cosine(encoder.encode(texts), latents).tolist()
        rounded = [round(value, 3) if math.isfinite(value) else None for value in similarities]
        return [list(row) for row in zip(rounded, texts, strict=True)]


def make_page(model: mmldlm.Model) -> gr.Blocks:
    """Return the page, which has a tab for each mode of the network."""
    demo, tabs = Demo(model), {}

    def form(answer: Callable[..., Rows], inputs: list[Any], column: str = "cosine") -> gr.Interface:
        table = gr.Dataframe(headers=[column, "text"], datatype=["number", "str"], wrap=True)
        options: dict[str, Any] = {"api_name": answer.__name__, "flagging_mode": "never", "analytics_enabled": False}
        return gr.Interface(_with_errors(answer), inputs, table, description=answer.__doc__, **options)

    def prefix() -> gr.Textbox:
        return gr.Textbox("", label="Prefix", visible=model.run.store.manifest.has_prefixes)

    def whole_number(value: int | None, label: str, least: int, most: int) -> gr.Number:
        return gr.Number(value, label=label, precision=0, minimum=least, maximum=most)

    def numbers() -> list[gr.Number]:
        steps = whole_number(None, "Steps (empty: as the run)", 1, MAX_STEPS)
        temperature = gr.Number(None, label="Temperature (empty: as the run)", minimum=0, maximum=10)
        return [steps, temperature, whole_number(0, "Seed", 0, MAX_SEED)]

    if "l2t" in model.modes:
        inputs = [gr.Textbox(label="Sentence"), prefix(), whole_number(3, "Texts", 1, MAX_COUNT), *numbers()]
        tabs["To text"] = form(demo.to_text, inputs)
        ends = [gr.Textbox(label="From"), gr.Textbox(label="To"), whole_number(7, "Texts", MIN_POINTS, MAX_POINTS)]
        tabs["Between"] = form(demo.between, [*ends, *numbers()], "way")
    if "t2l" in model.modes:
        texts = [gr.Textbox(label="Text"), gr.Textbox(label="Other texts, one per line", lines=3)]
        steps, _, seed = numbers()
        tabs["To latent"] = form(demo.to_latent, [*texts, prefix(), steps, seed])
    if "joint" in model.modes:
        tabs["Joint"] = form(demo.joint, [prefix(), whole_number(3, "Texts", 1, MAX_COUNT), *numbers()])
    return gr.TabbedInterface([*tabs.values()], [*tabs], title=escape(f"mmldlm: {model}"), analytics_enabled=False)


def _given(**settings: float | str | None) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _with_errors(answer: Callable[..., Rows]) -> Callable[..., Rows]:
    """Return `answer` in the thread of the model; an error that the user can fix is one line on the page."""

    @wraps(answer)
    def answer_or_error(*values: Any) -> Rows:
        try:
            return model_thread.submit(answer, *values).result()
        except MmldlmError as error:
            raise gr.Error(escape(" ".join(str(error).split())), print_exception=False) from None

    return answer_or_error


def main() -> None:
    """Serve the page until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a bundle")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s")
    options = parser.parse_args()
    page = make_page(model_thread.submit(mmldlm.load, options.run).result())
    os.environ["no_proxy"] = HOST  # at start gradio asks the server whether it is up; a proxy could not reach it
    # A site's own name that leads to this machine (DNS rebinding) is refused.
    same_host = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    page.launch(
        server_name=HOST,
        server_port=options.port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size="1mb",
        app_kwargs={"middleware": [same_host]},
    )
    print(f"{options.run}: open {page.local_url} (Ctrl-C ends)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    sys.exit(run_command(main))
