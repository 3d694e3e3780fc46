"""`mmldlm demo RUN`: a web page on this machine to sample from a run interactively."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from mmldlm.data.nearest import nearest_neighbors
from mmldlm.diffusion.noise import Mode
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import ExitCode, MmldlmError, UsageError
from mmldlm.evaluation import cosine
from mmldlm.inference.conditions import encode_or_raise, load_run_encoder
from mmldlm.inference.generate import sample
from mmldlm.inference.interpolate import interpolate
from mmldlm.run.load import LoadedRun, add_run_options, load_run
from mmldlm.settings.declaration import dump, setting
from mmldlm.settings.fields import build
from mmldlm.utils.cpu import choose_threads
from mmldlm.utils.process import ignores_hangup
from mmldlm.utils.short_repr import truncate

HOST, DEFAULT_PORT, MIN_PORT = "127.0.0.1", 8000, 1024
HOST_NAMES = (HOST, "localhost")  # by which a browser may address the server
MAX_TEXT_CHARS, MAX_STEPS, MAX_ERROR_CHARS = 10_000, 512, 500
MAX_WAITING = 32  # requests in the queue
FIELD_WIDTH = 120  # pixels, at least
# The browser loads nothing from elsewhere, and shows the page in no frame. Gradio needs inline and generated scripts.
CONTENT_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'"
CSS = """
.gradio-container { max-width: 62rem !important; margin: 0 auto !important; }
.gradio-container .html-container { padding: 0; }
.gradio-container .tab-container button { padding: 0 .75rem; }
.subdued, .lines .number { color: var(--block-label-text-color); }
.lines { list-style: none; margin: 0; padding: 0; }
.lines li { display: flex; gap: 1rem; align-items: baseline; margin: 0; padding: .55rem 0; }
.lines li + li { border-top: 1px solid var(--border-color-primary); }
.lines .number { flex: none; min-width: 2.5rem; font-size: .875rem; font-variant-numeric: tabular-nums; }
.lines .words { flex: 1; white-space: pre-wrap; overflow-wrap: anywhere; }
.lines .given { font-style: italic; }
.lines mark { background: color-mix(in srgb, var(--color-accent) 25%, transparent); color: inherit; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1rem 2.5rem; }
"""


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm demo`, which serves until it is interrupted; returns the exit code."""
    parser = argparse.ArgumentParser("mmldlm demo", description=__doc__)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: a free one; default: %(default)s")
    add_run_options(parser)
    options = parser.parse_args(argv)
    if options.port and not MIN_PORT <= options.port < 2**16:
        raise UsageError(f"--port: expected 0 or {MIN_PORT} to {2**16 - 1}, found {options.port}")
    # All of torch's work is done by one thread: a second one that computes makes a second OpenMP team, and from then on
    # libgomp puts the threads of both to sleep at every barrier.
    model_thread = ThreadPoolExecutor(1)
    run = model_thread.submit(load_run, options.run, options.checkpoint, options.data, options.weights).result()
    model_thread.submit(choose_threads).result()
    for number in (signal.SIGTERM, *([] if ignores_hangup() else [signal.SIGHUP])):
        signal.signal(number, signal.default_int_handler)  # ends the demo as Ctrl-C does
    try:
        with tempfile.TemporaryDirectory(prefix="mmldlm-demo-") as folder:
            os.environ["GRADIO_TEMP_DIR"] = folder  # its default, /tmp/gradio, belongs to the first user of a machine
            url = Page(import_gradio(), Demo(run), model_thread).launch(options.port)
            print(f"{options.run}, {run}: open {url} (Ctrl-C ends)", flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        pass
    return ExitCode.INTERRUPTED


# --- requests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Fields of the page's forms, of which each form has some."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = setting(0, "seed of all random numbers", at_least=0)
    count: int = setting(3, "texts to generate", at_least=1, at_most=16)
    length: int = setting(0, "tokens of each text; 0: by the length head", at_least=0)
    neighbors: int = setting(5, "documents listed for each latent", at_least=1, at_most=50)
    points: int = setting(7, "texts between two sentences, both ends included", at_least=2, at_most=32)


class Demo:
    """Requests of the page to a run, answered as HTML in which every text is escaped.

    `fields` are those of `Request` and of its `sampling`. One that is missing or None takes its default, in `sampling`
    the run's own. Raises `MmldlmError` with one line for a request that makes no sense.
    """

    def __init__(self, run: LoadedRun):
        self.run, self.encoder = run, load_run_encoder(run)

    def write(self, text: str, **fields: Any) -> str:
        """Generate texts from the latent of `text`, each with the cosine of its own latent to that one."""
        request = self._request(**fields)
        latents = encode_or_raise(self.encoder, [_checked(text)])
        _, texts = sample(
            self.run, "l2t", request.sampling, request.seed, latents, count=request.count, length=request.length
        )
        note = "Left: cosine of the generated text's latent, by the encoder, to the latent that it was generated from."
        return _lines(zip(cosine(self.encoder.encode(texts), latents), texts, strict=True)) + _subdued(note)

    def nearest(self, text: str, split: str = "train", **fields: Any) -> str:
        """Generate a latent for `text`; list the documents nearest to it, and those nearest to the encoder's latent."""
        request = self._request(**fields)
        text, documents = _checked(text), self.run.store.split(split)
        generation, _ = sample(self.run, "t2l", request.sampling, request.seed, texts=[text])
        generated, encoded = generation.latents.numpy(), self.encoder.encode([text])
        latents = np.concatenate([generated, encoded])
        columns = ""
        nearest = nearest_neighbors(self.run.store, documents, latents, request.neighbors)
        for name, matches in zip(("the generated latent", "the latent of the encoder"), nearest, strict=True):
            texts = self.run.tokenizer.decode_batch([documents.tokens(row).tolist() for row, _ in matches])
            rows = zip((similarity for _, similarity in matches), texts, strict=True)
            listed = _lines(rows) if matches else _subdued("The encoder has no latent for this text.")
            columns += f"<div><h4>Nearest to {name}</h4>{listed}</div>"
        similarity = _number(cosine(generated, encoded)[0], 3)
        title = f"<p>Cosine of the generated latent to that of the encoder: <strong>{similarity}</strong></p>"
        note = "Left: cosine of the standardized latents, that is, without the mean of all."
        return f'{title}<div class="columns">{columns}</div>{_subdued(note)}'

    def between(self, start: str, end: str, **fields: Any) -> str:
        """Generate texts along the way from the latent of `start` to that of `end`; words that are new are marked."""
        request = self._request(**fields)
        ends = encode_or_raise(self.encoder, [_checked(start), _checked(end)])
        _, texts = interpolate(self.run, request.sampling, request.seed, ends, request.points, request.length)
        marked = [escape(texts[0]), *map(_mark_new_words, texts[1:], texts)]
        fractions = map(_number, np.linspace(0, 1, request.points))
        given = [f'<span class="given">{escape(text)}</span>' for text in (start, end)]
        return _list([("from", given[0]), *zip(fractions, marked, strict=True), ("to", given[1])])

    def examples(self) -> list[str]:
        """Return two held-out texts."""
        split = self.run.store.split("test")
        rows = (len(split) // 3, 2 * len(split) // 3)
        return self.run.tokenizer.decode_batch([split.tokens(row).tolist() for row in rows])

    def _request(self, **fields: Any) -> Request:
        given = {key: value for key, value in fields.items() if value is not None}
        sampling = dump(self.run.config.sampling)
        # Fields of the sampler override the run's own settings; the rest are fields of `Request`.
        sampling |= {key: given.pop(key) for key in tuple(given) if key in sampling}
        request, max_length = build(Request, {**given, "sampling": sampling}), self.run.store.manifest.max_length
        for name, steps in (("steps", request.sampling.steps), ("t2l_steps", request.sampling.t2l_steps or 0)):
            if steps > MAX_STEPS:
                raise UsageError(f"sampling.{name}: must be at most {MAX_STEPS}, found {steps}")
        if request.length > max_length:
            raise UsageError(f"length: must be at most {max_length}, found {request.length}")
        return request


def _checked(text: str) -> str:
    if not text or not text.strip():
        raise UsageError("text: expected a sentence, found nothing")
    if len(text) > MAX_TEXT_CHARS:
        raise UsageError(f"text: expected at most {MAX_TEXT_CHARS} characters, found {len(text)}")
    return text.strip()


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "none"


def _subdued(text: str) -> str:
    return f'<p class="subdued">{escape(text)}</p>'


def _lines(rows: Iterable[tuple[float, str]]) -> str:
    return _list((_number(value), escape(text) or "(an empty text)") for value, text in rows)


def _list(rows: Iterable[tuple[str, str]]) -> str:
    items = (f'<li><span class="number">{left}</span><span class="words">{right}</span></li>' for left, right in rows)
    return f'<ol class="lines">{"".join(items)}</ol>'


def _mark_new_words(text: str, before: str) -> str:
    """Escape `text`, with the words marked that `before` does not have as often."""
    remaining, parts = Counter(before.split()), []
    # The group keeps the white space among the parts.
    for word in re.split(r"(\s+)", text):
        remaining[word] -= 1
        is_new = word.strip() and remaining[word] < 0
        parts.append(f"<mark>{escape(word)}</mark>" if is_new else escape(word))
    return "".join(parts)


# --- page and server ---------------------------------------------------------------------------------------


def import_gradio() -> Any:
    """Import gradio, which reads its settings from the environment, with its telemetry off."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["no_proxy"] = HOST  # at start gradio asks the server whether it is up; a proxy could not reach it
    try:
        import gradio
    except ImportError:
        raise UsageError("the demo needs gradio: pip install mmldlm[demo]") from None
    return gradio


class Page:
    """The page: three forms. One request at a time reaches the model, in `model_thread`."""

    def __init__(self, gradio: Any, demo: Demo, model_thread: ThreadPoolExecutor):
        self.gr, self.demo, self.run, self.model_thread = gradio, demo, demo.run, model_thread
        self.modes = self.run.config.trained_modes
        self.examples = demo.examples()
        self.one_at_a_time = {"concurrency_limit": 1, "concurrency_id": "model"}
        about = f"{self.run.folder}, {self.run}; encoder {self.run.store.manifest.encoder['name']}"
        with gradio.Blocks(title=f"{self.run.folder} - mmldlm demo", analytics_enabled=False) as self.blocks:
            gradio.HTML(f'<h1>mmldlm demo</h1><p class="subdued">{escape(about)}</p>')
            with gradio.Tab("To text"):
                self._write_form()
            with gradio.Tab("To latent"):
                self._nearest_form()
            with gradio.Tab("Between"):
                self._between_form()
        self.blocks.queue(max_size=MAX_WAITING)

    def launch(self, port: int) -> str:
        """Serve the page to this machine only, in a thread, and return its address. Port 0 takes a free one.

        If another process listens on the port, that is a `UsageError`.
        """
        from starlette.middleware import Middleware  # which gradio needs, too

        theme = self.gr.themes.Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"])
        try:
            _, url, _ = self.blocks.launch(
                server_name=HOST,
                server_port=port or _free_port(),
                share=False,
                inbrowser=False,
                quiet=True,
                prevent_thread_lock=True,
                ssr_mode=False,
                mcp_server=False,
                run_history=False,  # otherwise the browser would keep every request
                enable_monitoring=False,
                footer_links=[],
                theme=theme,
                css=CSS,
                app_kwargs={"middleware": [Middleware(same_page_only)]},
            )
        except OSError as error:
            if "Cannot find empty port" not in str(error):
                raise
            raise UsageError(f"--port: {port} is in use, expected a free one, or 0 to find one") from None
        return str(url)

    def _write_form(self) -> None:
        self._note(
            "l2t", "The encoder turns the sentence into a latent; the model generates texts from that latent alone."
        )
        text = self._text("Sentence", self.examples[0], autofocus=True)
        with self.gr.Row():
            fields = {"count": self._number("Count", Request.count), "length": self._length(), **self._sampling()}
        results = self._buttons("Generate", self.demo.write, [text], fields)
        if "l2t" in self.modes:
            title = f"<p>From a held-out sentence: <strong>{escape(self.examples[0])}</strong></p>"
            self.blocks.load(
                lambda: self._show_errors(lambda: title + self.demo.write(self.examples[0])),
                outputs=results,
                api_visibility="private",
                **self.one_at_a_time,
            )

    def _nearest_form(self) -> None:
        self._note(
            "t2l",
            "The model generates a latent for the text. Listed are the documents nearest to it, and those nearest to "
            "the latent of the encoder.",
        )
        text = self._text("Text", self.examples[0])
        splits = [(f"{name} ({split.samples})", name) for name, split in self.run.store.manifest.splits.items()]
        with self.gr.Row():
            neighbors = self._number("Neighbors", Request.neighbors)
            split = self.gr.Dropdown(splits, value="train", label="Split", min_width=FIELD_WIDTH)
            fields = {"neighbors": neighbors, "split": split, **self._sampling(generates_text=False)}
        self._buttons("Find", self.demo.nearest, [text], fields)

    def _between_form(self) -> None:
        self._note(
            "l2t",
            "Texts along the way from one sentence's latent to the other's, all of one length and with the same random "
            "numbers. Marked are words that the text before did not have.",
        )
        texts = [self._text("From", self.examples[0]), self._text("To", self.examples[1])]
        with self.gr.Row():
            fields = {"points": self._number("Points", Request.points), "length": self._length(), **self._sampling()}
        self._buttons("Generate", self.demo.between, texts, fields)

    def _note(self, mode: Mode, note: str) -> None:
        self.gr.Markdown(note if mode in self.modes else f"{note} **This run did not train {mode}.**")

    def _text(self, label: str, example: str, **options: Any) -> Any:
        return self.gr.Textbox(label=label, placeholder=f"such as: {example}", max_length=MAX_TEXT_CHARS, **options)

    def _number(self, label: str, value: float, **options: Any) -> Any:
        return self.gr.Number(value, label=label, min_width=FIELD_WIDTH, **options)

    def _length(self) -> Any:
        return self._number("Length (0: auto)", Request.length)

    def _sampling(self, generates_text: bool = True) -> dict[str, Any]:
        config, has_guidance = self.run.config.sampling, "joint" in self.modes
        if not generates_text:
            fields = {"t2l_steps": self._number("Steps", config.resolve_t2l_steps(self.run.config.latent.prediction))}
        else:
            fields = {"steps": self._number("Steps", config.steps)}
            fields["temperature"] = self._number("Temperature", config.temperature, step=0.1)
        label = "Guidance" if has_guidance else "Guidance (needs joint training)"
        fields["guidance"] = self._number(label, config.guidance, step=0.1, interactive=has_guidance)
        fields["seed"] = self._number("Seed", Request.seed)
        return fields

    def _buttons(self, verb: str, request: Callable[..., str], texts: list[Any], fields: dict[str, Any]) -> Any:
        """Add the buttons of a form with a field `seed`, and a place for the results, which is returned."""

        def respond(*values: Any) -> str:
            given = dict(zip(fields, values[len(texts) :], strict=True))
            return self._show_errors(lambda: request(*values[: len(texts)], **given))

        with self.gr.Row():
            go = self.gr.Button(verb, variant="primary")
            again = self.gr.Button("With the next seed")
        results, seed = self.gr.HTML(), fields["seed"]
        options = {"inputs": [*texts, *fields.values()], "outputs": results, **self.one_at_a_time}
        self.gr.on([go.click, *(text.submit for text in texts)], respond, api_name=request.__name__, **options)
        increment = again.click(lambda value: (value or 0) + 1, seed, seed, api_visibility="private")
        increment.then(respond, api_visibility="private", **options)
        return results

    def _show_errors(self, respond: Callable[[], str]) -> str:
        """Return what `respond` returns; its errors are shown in the page and logged on the terminal."""
        try:
            return self.model_thread.submit(respond).result()
        except MmldlmError as error:
            message = str(error).removeprefix("--")  # options of `mmldlm sample` have the names of the fields
            print(f"mmldlm demo: {message}", file=sys.stderr, flush=True)
        except Exception as error:
            message = f"internal error, see the terminal: {type(error).__name__}: {' '.join(str(error).split())}"
            traceback.print_exc()
        raise self.gr.Error(escape(truncate(message, MAX_ERROR_CHARS)), print_exception=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def same_page_only(app: Any) -> Any:
    """ASGI middleware: refuses what another site has a browser send here, and sets the page's content policy.

    Such a site has a host name of its own that resolves to this machine (DNS rebinding), or its own origin.
    """

    async def guarded_app(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", CONTENT_POLICY.encode())]
            await send(message)

        if scope["type"] == "http":
            headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
            host = headers.get(b"host", "")
            # Requests without an Origin pass: a browser sends none when it opens the page.
            if host.partition(":")[0] not in HOST_NAMES or headers.get(b"origin", f"http://{host}") != f"http://{host}":
                await send({"type": "http.response.start", "status": 403, "headers": []})
                await send({"type": "http.response.body", "body": b"only for pages of this server"})
                return
        await app(scope, receive, send_with_policy)

    return guarded_app
