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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from mmldlm.data.nearest import nearest_neighbors
from mmldlm.data.tokenizer import split_prefix
from mmldlm.diffusion.noise import Mode
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import ExitCode, MmldlmError, UsageError
from mmldlm.evaluation import cosine
from mmldlm.inference.conditions import encode_or_raise
from mmldlm.inference.generate import interpolate, sample
from mmldlm.run.load import LoadedRun, add_run_options, load_run
from mmldlm.settings.declaration import dump, setting
from mmldlm.settings.fields import build
from mmldlm.utils.cpu import choose_threads
from mmldlm.utils.process import ignores_hangup
from mmldlm.utils.short_repr import truncate
from mmldlm.utils.versions import install_command

HOST, DEFAULT_PORT, MIN_PORT = "127.0.0.1", 8000, 1024
HOST_NAMES = (HOST, "localhost")  # by which a browser may address the server
MAX_TEXT_CHARS, MAX_STEPS, MAX_ERROR_CHARS = 10_000, 512, 500
MAX_WAITING = 32  # requests in the queue
MAX_BODY_BYTES = 1 << 20  # of a request, which is a few texts
FIELD_WIDTH = 120  # pixels, at least
# The browser loads nothing from elsewhere, and shows the page in no frame. Gradio needs inline and generated scripts.
CONTENT_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'"


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


Row = list[float | str | None]  # a cosine, None where there is none, and a text
Span = tuple[str, str | None]  # a piece of text, and what it is marked as


# --- requests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Fields of the page's forms, of which each form has some."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = setting(0, "seed of all random numbers", at_least=0, at_most=2**63 - 1)
    count: int = setting(3, "texts to generate", at_least=1, at_most=16)
    length: int = setting(0, "tokens of each text; 0: by the length head", at_least=0)
    neighbors: int = setting(5, "documents listed for each latent", at_least=1, at_most=50)
    points: int = setting(7, "texts between two sentences, both ends included", at_least=2, at_most=32)


class Demo:
    """Requests of the page to a run, answered as plain values.

    `fields` are those of `Request` and of its `sampling`. One that is missing or None takes its default, in `sampling`
    the run's own. Raises `MmldlmError` with one line for a request that makes no sense.
    """

    def __init__(self, run: LoadedRun):
        self.run, self.encoder = run, run.encoder

    def write(self, text: str, prefix: str = "", **fields: Any) -> list[Row]:
        """Generate texts from the latent of `text`, behind `prefix`, each with the cosine of its own latent to that."""
        request = self._request(**fields)
        latents = encode_or_raise(self.encoder, [_checked(text)])
        count, length, config = request.count, request.length, request.sampling
        _, texts = sample(self.run, "l2t", config, request.seed, latents, count=count, length=length, prefixes=[prefix])
        return _rows(cosine(self.encoder.encode(texts), latents), texts)

    def nearest(
        self, text: str, prefix: str = "", split: str = "train", **fields: Any
    ) -> tuple[float | None, list[Row], list[Row]]:
        """Generate a latent for `text`, behind `prefix`.

        Returns:
            Its cosine to the encoder's latent, and the documents nearest to it, and to the encoder's, each with the
            cosine of the standardized latents.
        """
        request = self._request(**fields)
        text, documents = _checked(text), self.run.store.split(split)
        generation, _ = sample(self.run, "t2l", request.sampling, request.seed, texts=[text], prefixes=[prefix])
        generated, encoded = generation.latents.numpy(), self.encoder.encode([text])
        tables = []
        latents = np.concatenate([generated, encoded])
        for matches in nearest_neighbors(self.run.store, documents, latents, request.neighbors):
            texts = self.run.tokenizer.decode_batch([documents.tokens(row).tolist() for row, _ in matches])
            tables.append(_rows([similarity for _, similarity in matches], texts))
        of_generated, of_encoded = tables
        return _finite(cosine(generated, encoded)[0]), of_generated, of_encoded

    def between(self, start: str, end: str, **fields: Any) -> list[Span]:
        """Generate texts along the way from the latent of `start` to that of `end`; words that are new are marked."""
        request = self._request(**fields)
        ends = encode_or_raise(self.encoder, [_checked(start), _checked(end)])
        _, texts = interpolate(self.run, request.sampling, request.seed, ends, request.points, request.length)
        spans: list[Span] = [(f"from  {start}", None)]
        for fraction, text, before in zip(np.linspace(0, 1, request.points), texts, [texts[0], *texts], strict=False):
            spans += [(f"\n{fraction:.2f}  ", None), *_mark_new_words(text, before)]
        return [*spans, (f"\nto  {end}", None)]

    def examples(self) -> list[str]:
        """Return two held-out texts."""
        split = self.run.store.split("test")
        rows = (len(split) // 3, 2 * len(split) // 3)
        return self.run.tokenizer.decode_batch([split.tokens(row).tolist() for row in rows])

    def example_prefix(self) -> str:
        """Return the prefix of the first of `examples`."""
        split = self.run.store.split("test")
        prefix, _ = split_prefix(split.tokens(len(split) // 3).tolist(), self.run.store.manifest.pad_id)
        return self.run.tokenizer.decode_batch([prefix[:-1]])[0].strip()

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


def _finite(value: float) -> float | None:
    return round(float(value), 3) if math.isfinite(value) else None


def _rows(similarities: Iterable[float], texts: Iterable[str]) -> list[Row]:
    return [[_finite(similarity), text] for similarity, text in zip(similarities, texts, strict=True)]


def _mark_new_words(text: str, before: str) -> list[Span]:
    """Return the words and the white space of `text`, with the words marked that `before` does not have as often."""
    remaining, spans = Counter(before.split()), []
    # The group keeps the white space among the parts.
    for word in re.split(r"(\s+)", text):
        remaining[word] -= 1
        is_new = word.strip() and remaining[word] < 0
        spans.append((word, "new" if is_new else None))
    return spans


# --- page and server ---------------------------------------------------------------------------------------


def import_gradio() -> Any:
    """Import gradio, which reads its settings from the environment, with its telemetry off."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["no_proxy"] = HOST  # at start gradio asks the server whether it is up; a proxy could not reach it
    try:
        import gradio
    except ImportError:
        raise UsageError(f"the demo needs gradio: {install_command('demo')}") from None
    return gradio


_SAMPLING = ("steps", "temperature", "guidance", "seed")
_LABELS = {"length": "Length (0: auto)", "t2l_steps": "Steps"}  # of the other fields: their names


class Page:
    """The page: three forms. One request at a time reaches the model, in `model_thread`."""

    def __init__(self, gradio: Any, demo: Demo, model_thread: ThreadPoolExecutor):
        self.gr, self.demo, self.run, self.model_thread = gradio, demo, demo.run, model_thread
        first, second = demo.examples()
        prefix = {"Prefix": demo.example_prefix()} if self.run.store.manifest.has_prefixes else {}
        about = f"{self.run.folder}, {self.run}; encoder {self.run.store.manifest.encoder['name']}"
        with gradio.Blocks(title=f"{self.run.folder} - mmldlm demo", analytics_enabled=False) as self.blocks:
            gradio.HTML(f"<h1>mmldlm demo</h1><p>{escape(about)}</p>")
            with gradio.Tab("To text"):
                note = "The encoder turns the sentence into a latent; the model generates texts from that latent alone."
                results = [self._table("cosine to the sentence's latent", "generated text")]
                form = self._form(
                    "l2t", note, {"Sentence": first} | prefix, ("count", "length", *_SAMPLING), demo.write, results
                )
                if "l2t" in self.run.config.trained_modes:
                    self.blocks.load(api_visibility="private", **form)
            with gradio.Tab("To latent"):
                note = (
                    "The model generates a latent for the text. Listed are the documents nearest to it, and those "
                    "nearest to the latent of the encoder, by the cosine of the standardized latents, that is, without "
                    "the mean of all."
                )
                similarity = gradio.Number(label="Cosine of the two latents", scale=0, min_width=160, render=False)
                names = ("nearest to the generated latent", "nearest to the latent of the encoder")
                results = [similarity, *(self._table("cosine", name) for name in names)]
                fields = ("neighbors", "split", "t2l_steps", "guidance", "seed")
                self._form("t2l", note, {"Text": first} | prefix, fields, demo.nearest, results)
            with gradio.Tab("Between"):
                note = (
                    "Texts along the way from one sentence's latent to the other's, all of one length and with the "
                    "same random numbers. Marked are words that the text before did not have."
                )
                options = {"show_label": False, "show_inline_category": False, "combine_adjacent": True}
                results = [gradio.HighlightedText(**options, render=False)]
                texts = {"From": first, "To": second}
                self._form("l2t", note, texts, ("points", "length", *_SAMPLING), demo.between, results)
        self.blocks.queue(max_size=MAX_WAITING)
        answer = self.blocks.process_api

        async def answer_in_one_line(*arguments: Any, **options: Any) -> Any:
            try:
                return await answer(*arguments, **options)
            except gradio.Error:
                raise
            except Exception as error:  # the fields of a request are not those of its form
                message = truncate(" ".join(str(error).split()), MAX_ERROR_CHARS)
                raise gradio.Error(escape(message), print_exception=False) from None

        self.blocks.process_api = answer_in_one_line

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
                app_kwargs={"middleware": [Middleware(same_page_only)]},
            )
        except OSError as error:
            if "Cannot find empty port" not in str(error):
                raise
            raise UsageError(f"--port: {port} is in use, expected a free one, or 0 to find one") from None
        return str(url)

    def _table(self, *headers: str) -> Any:
        kinds, widths = ["number", "str"], ["20%", "80%"]
        return self.gr.Dataframe(
            headers=headers, datatype=kinds, column_widths=widths, wrap=True, interactive=False, render=False
        )

    def _field(self, name: str) -> Any:
        """Return the input of a field, which begins with what the run would take."""
        if name == "split":
            splits = [(f"{name} ({split.samples})", name) for name, split in self.run.store.manifest.splits.items()]
            return self.gr.Dropdown(splits, value="train", label="Split", min_width=FIELD_WIDTH)
        config = self.run.config.sampling
        defaults = {**dump(Request()), **dump(config)}
        defaults["t2l_steps"] = config.of_t2l(self.run.config.latent.prediction).steps
        defaults["temperature"] = config.resolve_temperature("l2t", 1, Request().count)
        label, step = _LABELS.get(name, name.capitalize()), 0.1 if name in ("guidance", "temperature") else 1
        if name == "guidance" and "joint" not in self.run.config.trained_modes:
            return self.gr.Number(1, label=f"{label} (needs joint training)", interactive=False, min_width=FIELD_WIDTH)
        return self.gr.Number(defaults[name], label=label, step=step, min_width=FIELD_WIDTH)

    def _form(
        self,
        mode: Mode,
        note: str,
        texts: Mapping[str, str],
        names: Sequence[str],
        request: Callable[..., Any],
        results: Sequence[Any],
    ) -> dict[str, Any]:
        """Add a form of texts, as labels with examples, and fields, whose answers by `request` are shown in `results`.

        Returns:
            Arguments of a further event that asks the same.
        """
        self.gr.Markdown(
            note if mode in self.run.config.trained_modes else f"{note} **This run did not train {mode}.**"
        )
        boxes = [self.gr.Textbox(text, label=label, max_length=MAX_TEXT_CHARS) for label, text in texts.items()]
        with self.gr.Row():
            fields = {name: self._field(name) for name in names}
        with self.gr.Row():
            go = self.gr.Button("Generate", variant="primary")
            again = self.gr.Button("With the next seed")
        with self.gr.Row():
            for component in results:
                component.render()

        def respond(*values: Any) -> Any:
            given = dict(zip(fields, values[len(boxes) :], strict=True))
            return self._show_errors(lambda: request(*values[: len(boxes)], **given))

        asks = {"fn": respond, "inputs": [*boxes, *fields.values()], "outputs": list(results)}
        asks |= {"concurrency_limit": 1, "concurrency_id": "model"}  # one request at a time reaches the model
        self.gr.on([go.click, *(box.submit for box in boxes)], api_name=request.__name__, **asks)
        increment = again.click(lambda seed: (seed or 0) + 1, fields["seed"], fields["seed"], api_visibility="private")
        increment.then(api_visibility="private", **asks)
        return asks

    def _show_errors(self, respond: Callable[[], Any]) -> Any:
        """Return what `respond` returns; its errors are shown in the page and logged on the terminal."""
        try:
            return self.model_thread.submit(respond).result()
        except MmldlmError as error:
            message = str(error).removeprefix("--")  # --text and --length are fields, too
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
            if b"transfer-encoding" in headers or int(headers.get(b"content-length", "0")) > MAX_BODY_BYTES:
                await send({"type": "http.response.start", "status": 413, "headers": []})
                await send({"type": "http.response.body", "body": b"too large"})
                return
        await app(scope, receive, send_with_policy)

    return guarded_app
