"""Options of `mmldlm prepare`, as a dataclass and as a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mmldlm.data.corpora import FORMATS, Format
from mmldlm.errors import UsageError

PYTHON_DOCS = "python-docs"


@dataclass(frozen=True)
class PrepareConfig:
    """Options of `mmldlm prepare`; either `inputs` or `corpus`."""

    out: str
    inputs: tuple[str, ...] = ()
    corpus: str | None = None
    format: Format | None = None
    field: str = "text"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    encoder: str = "lsa"
    channels: int | None = None
    prompt: str | None = None
    normalise: bool = True
    min_length: int = 1
    max_length: int = 128
    over_length: str = "split"
    validation_fraction: float = 0.04
    test_fraction: float = 0.04
    near_duplicates: bool = False
    latent_dtype: str = "float16"
    on_problem: str = "error"
    max_problems: int = 100
    seed: int = 0
    overwrite: bool = False

    def recorded(self) -> dict[str, Any]:
        """What decides the contents of the store, apart from the inputs, which are its sources."""
        return {key: value for key, value in asdict(self).items() if key not in ("out", "inputs", "overwrite")}

    def check(self) -> None:
        """UsageError naming the first option that makes no sense."""
        if bool(self.inputs) == bool(self.corpus):
            raise UsageError(f"expected either input files or --corpus {PYTHON_DOCS}")
        if not 1 <= self.min_length <= self.max_length:
            raise UsageError(f"--min-length {self.min_length}: expected 1 to --max-length {self.max_length}")
        fractions = (self.validation_fraction, self.test_fraction)
        if min(fractions) <= 0 or sum(fractions) >= 1:
            raise UsageError(
                f"--validation-fraction and --test-fraction are {fractions}, expected above 0, sum below 1"
            )
        if self.channels is not None and self.channels < 1:
            raise UsageError(f"--channels {self.channels}: expected at least 1")
        for option, value, allowed in (
            ("--corpus", self.corpus, (None, PYTHON_DOCS)),
            ("--over-length", self.over_length, ("split", "cut")),
            ("--latent-dtype", self.latent_dtype, ("float16", "float32")),
            ("--on-problem", self.on_problem, ("error", "skip")),
        ):
            if value not in allowed:
                raise UsageError(f"{option} {value}: expected one of {', '.join(map(str, allowed))}")
        if self.encoder != "lsa" and not self.encoder.startswith("sentence-transformers:"):
            raise UsageError(f"--encoder {self.encoder}: expected lsa or sentence-transformers:NAME_OR_FOLDER")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = PrepareConfig("")
    add: Callable[..., argparse.Action] = parser.add_argument
    add("inputs", nargs="*", help="UTF-8 text or JSON lines: files, folders, glob patterns")
    add("--corpus", choices=[PYTHON_DOCS], help="the embedded corpus, in place of inputs")
    add("--out", required=True, metavar="STORE", help="folder to make")
    add("--format", choices=FORMATS, help="a document a line, blank-line separated, or JSON lines (default: by suffix)")
    add("--field", default=default.field, help="field of a JSON line that holds the text (%(default)s)")
    add("--tokenizer", default=default.tokenizer, help="bpe (trained here), characters (a-z and space), or a PATH")
    add("--vocab-size", type=int, default=default.vocab_size, help="of the trained tokenizer (%(default)s)")
    add("--encoder", default=default.encoder, help="lsa, or sentence-transformers:NAME_OR_FOLDER (%(default)s)")
    add("--channels", type=int, help="latent channels (64 for lsa, else all that the model has)")
    add("--prompt", help="put before each text by the sentence-transformers model, such as 'passage: '")
    add("--no-normalise", dest="normalise", action="store_false", help="keep the model's own vector norms")
    add("--min-length", type=int, default=default.min_length, help="tokens of the shortest sample kept (%(default)s)")
    add("--max-length", type=int, default=default.max_length, help="tokens of the longest sample (%(default)s)")
    add("--over-length", choices=["split", "cut"], default=default.over_length, help="longer documents (%(default)s)")
    add("--validation-fraction", type=float, default=default.validation_fraction, help="of documents (%(default)s)")
    add("--test-fraction", type=float, default=default.test_fraction, help="of documents (%(default)s)")
    add("--near-duplicates", action="store_true", help="keep texts that differ in one word in one split")
    add("--latent-dtype", choices=["float16", "float32"], default=default.latent_dtype, help="as stored (%(default)s)")
    add("--on-problem", choices=["error", "skip"], default=default.on_problem, help="unusable documents (%(default)s)")
    add("--max-problems", type=int, default=default.max_problems, help="with skip: give up beyond these (%(default)s)")
    add("--seed", type=int, default=default.seed, help="of the split and of lsa (%(default)s)")
    add("--overwrite", action="store_true", help="replace an existing store")


def from_args(arguments: argparse.Namespace) -> PrepareConfig:
    values = {key: value for key, value in vars(arguments).items() if key in PrepareConfig.__dataclass_fields__}
    return PrepareConfig(**values | {"inputs": tuple(arguments.inputs)})
