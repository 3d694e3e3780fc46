"""Options of `mmldlm prepare`, as a dataclass and as a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmldlm.data.encoders import ImportedLatents, read_description
from mmldlm.data.encoders.autoencoder import HEAD_WIDTH
from mmldlm.data.prepare.documents import FORMATS, TEXT_FORMATS, Format
from mmldlm.data.prepare.readers.python_docs import CORPORA
from mmldlm.data.tokenizer import BUILT_IN
from mmldlm.errors import UsageError

# Options that do not affect the contents of the store.
_NOT_RECORDED = (
    "out",
    "inputs",
    "overwrite",
    "lossy",
    "encoder_batch_size",
    "encoder_device",
    "processes",
    "cluster",
    "cluster_options",
)


CLUSTERS = ("slurm", "ray")


@dataclass(frozen=True)
class PrepareConfig:
    """Options of `mmldlm prepare`. Exactly one of `inputs` and `corpus` is set."""

    out: str
    inputs: tuple[str, ...] = ()
    corpus: str | None = None
    format: Format | None = None
    field: str = "text"
    tokens_field: str | None = None
    latents_field: str | None = None
    key_field: str | None = None
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    encoder: str = "lsa"
    channels: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    encoder_revision: str | None = None
    encoder_batch_size: int = 32
    encoder_device: str | None = None
    encoder_steps: int | None = None
    encoder_width: int | None = None
    normalise: bool = True
    latent_tokens: int | None = None
    latent_ids: str | None = None
    latents_of: str | None = None
    encoder_version: str | None = None
    min_length: int = 1
    max_length: int = 128
    over_length: str = "split"
    validation_fraction: float = 0.04
    test_fraction: float = 0.04
    near_duplicates: bool = False
    latent_dtype: str = "float16"
    on_problem: str = "error"
    max_problems: int = 100
    lossy: bool = False
    seed: int = 0
    part_bytes: int = 64 << 20
    fit_documents: int = 100_000
    overwrite: bool = False
    processes: int = 1
    cluster: str | None = None
    cluster_options: tuple[str, ...] = ()

    def recorded(self) -> dict[str, Any]:
        """Return the options that determine the contents of the store, without the inputs (recorded as its sources)."""
        return {key: value for key, value in asdict(self).items() if key not in _NOT_RECORDED}

    def differing(self, recorded: dict[str, Any]) -> list[str]:
        """Return the names of options with another value in `recorded`; an absent option counts as its default."""
        defaults = PrepareConfig("").recorded()
        return [key for key, value in self.recorded().items() if recorded.get(key, defaults[key]) != value]

    @property
    def imports_latents(self) -> bool:
        """True if latents are read from the documents or from a file instead of computed by an encoder."""
        return self.encoder == "included" or self.encoder.startswith("precomputed:")

    @property
    def encoder_folder(self) -> Path | None:
        """The encoder of another store, whose path `encoder` then is; None if it is a kind of encoder."""
        is_kind = self.encoder in ("lsa", "learned") or self.encoder.startswith("sentence-transformers:")
        return None if is_kind or self.imports_latents else Path(self.encoder) / "encoder"

    def check(self) -> None:
        """Check all options, alone and combined; a `UsageError` names the first invalid one and the values expected."""
        if self.format and self.format.startswith(("lgdlm", "predecessor")):
            raise UsageError(f"--format {self.format}: run `mmldlm convert lgdlm FOLDER OUT`, then prepare OUT")
        if bool(self.inputs) == bool(self.corpus):
            raise UsageError(f"expected either input files or --corpus {' or '.join(CORPORA)}")
        if not 1 <= self.min_length <= self.max_length:
            raise UsageError(f"--min-length {self.min_length}: expected 1 to --max-length {self.max_length}")
        fractions = (self.validation_fraction, self.test_fraction)
        if min(fractions) <= 0 or sum(fractions) >= 1:
            raise UsageError(
                f"--validation-fraction and --test-fraction are {fractions}, expected above 0, sum below 1"
            )
        if self.channels is not None and self.channels < 1:
            raise UsageError(f"--channels {self.channels}: expected at least 1")
        for option, count in (
            ("--part-bytes", self.part_bytes),
            ("--fit-documents", self.fit_documents),
            ("--processes", self.processes),
        ):
            if count < 1:
                raise UsageError(f"{option} {count}: expected at least 1")
        # argparse checks some of these, but a config may be made without a command line.
        for option, value, allowed in (
            ("--corpus", self.corpus, (None, *CORPORA)),
            ("--format", self.format, (None, *FORMATS)),
            ("--over-length", self.over_length, ("split", "cut")),
            ("--latent-dtype", self.latent_dtype, ("float16", "float32")),
            ("--on-problem", self.on_problem, ("error", "skip")),
            ("--cluster", self.cluster, (None, *CLUSTERS)),
        ):
            if value not in allowed:
                raise UsageError(f"{option} {value}: expected one of {', '.join(map(str, allowed))}")
        if self.cluster_options and not self.cluster:
            raise UsageError(f"--cluster-option {self.cluster_options[0]}: expected --cluster")
        if self.cluster and self.processes > 1:
            raise UsageError(f"--processes {self.processes}: expected 1, as --cluster {self.cluster} runs the tasks")
        self._check_formats()
        self._check_encoder()

    def _check_formats(self) -> None:
        is_text = self.format in TEXT_FORMATS
        for option, value, expected, is_invalid in (
            ("--tokens-field", self.tokens_field, "Parquet or Arrow", is_text),
            ("--latents-field", self.latents_field, "Parquet or Arrow", is_text),
            ("--key-field", self.key_field, "a table or JSON", self.format in ("lines", "blocks")),
        ):
            if value and (is_invalid or self.corpus):
                source = self.corpus or self.format
                raise UsageError(f"{option} {value}: {source} has no such fields; expected {expected}")
        if self.tokens_field and self.tokenizer in BUILT_IN:
            raise UsageError(
                f"--tokens-field {self.tokens_field}: --tokenizer is {self.tokenizer}, expected the tokenizer.json "
                "that made the tokens, or its folder"
            )

    def _check_encoder(self) -> None:
        is_library = self.encoder.startswith("sentence-transformers:")
        if self.encoder == "sonar":
            raise UsageError(
                "--encoder sonar: its library needs other versions than this environment has; expected "
                "precomputed:FILE with latents made in a separate environment (docs/data.md)"
            )
        is_learned = self.encoder == "learned"
        store, is_fitted = self.encoder_folder, self.encoder in ("lsa", "learned")
        if store is not None and not store.is_dir():
            raise UsageError(
                f"--encoder {self.encoder}: expected lsa, learned, sentence-transformers:NAME_OR_FOLDER, "
                "included, precomputed:FILE or the folder of a data store"
            )
        if store is not None and read_description(store)["kind"] == ImportedLatents.kind:
            raise UsageError(
                f"--encoder {self.encoder}: has imported latents and no encoder for other texts; expected the same "
                "--latents-of and --encoder-version for latents of one model"
            )
        if self.imports_latents and self.corpus:
            raise UsageError(f"--encoder {self.encoder}: {self.corpus} has no latents, expected one that reads text")
        if self.latents_field and self.encoder != "included":
            raise UsageError(f"--latents-field {self.latents_field}: --encoder is {self.encoder}, expected included")
        if self.encoder == "included" and not self.latents_field:
            raise UsageError("--encoder included: expected --latents-field")
        if self.prompt is not None and self.prompt_name is not None:
            raise UsageError(f"--prompt-name {self.prompt_name}: expected either --prompt-name or --prompt, not both")
        is_precomputed = self.encoder.startswith("precomputed:")
        for option, value, is_allowed, expected in (
            ("--prompt", self.prompt, is_library, "sentence-transformers:..."),
            ("--prompt-name", self.prompt_name, is_library, "sentence-transformers:..."),
            ("--encoder-revision", self.encoder_revision, is_library, "sentence-transformers:NAME"),
            ("--encoder-device", self.encoder_device, is_library, "sentence-transformers:..."),
            ("--encoder-steps", self.encoder_steps, is_learned, "learned"),
            ("--encoder-width", self.encoder_width, is_learned, "learned"),
            ("--channels", self.channels, store is None, "another, or the channels of the store"),
            ("--latent-tokens", self.latent_tokens, is_fitted or is_library, "one that reads text, and no store's"),
            ("--latent-ids", self.latent_ids, is_precomputed, "precomputed:FILE"),
            ("--latents-of", self.latents_of, self.imports_latents, "included or precomputed:FILE"),
            ("--encoder-version", self.encoder_version, self.imports_latents, "included or precomputed:FILE"),
        ):
            if value is not None and not is_allowed:
                raise UsageError(f"{option} {value}: --encoder is {self.encoder}, expected {expected}")
        if self.encoder_version is not None and not (self.encoder_version and self.latents_of):
            raise UsageError(f"--encoder-version {self.encoder_version!r}: expected a version of --latents-of NAME")
        for option, count in (
            ("--latent-tokens", self.latent_tokens),
            ("--encoder-batch-size", self.encoder_batch_size),
            ("--encoder-steps", self.encoder_steps),
        ):
            if count is not None and count < 1:
                raise UsageError(f"{option} {count}: expected at least 1")
        if self.encoder_width is not None and (self.encoder_width < 1 or self.encoder_width % HEAD_WIDTH):
            raise UsageError(f"--encoder-width {self.encoder_width}: expected a multiple of {HEAD_WIDTH}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm prepare` to `parser`; the defaults are those of `PrepareConfig`."""
    default = PrepareConfig("")
    add: Callable[..., argparse.Action] = parser.add_argument
    add("inputs", nargs="*", help="text, JSON, CSV, Parquet or Arrow: files, folders, glob patterns")
    add("--corpus", choices=CORPORA, help="an embedded corpus, instead of inputs")
    add("--out", required=True, metavar="STORE", help="folder to create")
    add("--format", help=f"{', '.join(FORMATS)} (default: by suffix)")
    add("--field", default=default.field, help="field or column with the text (%(default)s)")
    add("--key-field", metavar="FIELD", help="field or column with the id of the document")
    add("--tokens-field", metavar="FIELD", help="column of token ids produced by --tokenizer, instead of text")
    add("--latents-field", metavar="FIELD", help="column of latents, for --encoder included")
    add(
        "--tokenizer",
        default=default.tokenizer,
        help="bpe, words (trained here), characters (a-z and space), or a PATH",
    )
    add("--vocab-size", type=int, default=default.vocab_size, help="of the trained tokenizer (%(default)s)")
    add(
        "--encoder",
        help="lsa, learned (an autoencoder trained here), sentence-transformers:NAME_OR_FOLDER, precomputed:FILE, or "
        "included, for --latents-field (included with --latents-field, else lsa); or a STORE, for the encoder of it",
    )
    add("--channels", type=int, help="latent channels (64 for lsa and learned, or as many as lsa can have; else all)")
    add("--latent-tokens", type=int, metavar="M", help="latents of a text, each of one of M segments (1; learned: 4)")
    add("--latent-ids", metavar="FILE", help="ids of the rows of precomputed:FILE (.json, .txt, .npy), or position")
    add("--latents-of", metavar="NAME", help="name of the model that computed the imported latents, for the record")
    add("--encoder-version", metavar="V", help="of --latents-of: all stores with both have latents of one encoder")
    add("--prompt", help="prefix of each text for the sentence-transformers model, such as 'passage: '")
    add("--prompt-name", metavar="NAME", help="one of the prompts defined by the model, such as query")
    add("--encoder-revision", metavar="COMMIT", help="of a sentence-transformers model given by name")
    add("--encoder-batch-size", type=int, default=default.encoder_batch_size, help="texts per batch (%(default)s)")
    add("--encoder-steps", type=int, metavar="N", help="training steps of learned (1000)")
    add("--encoder-width", type=int, metavar="W", help="width of learned, a multiple of 32 (128)")
    add("--encoder-device", metavar="DEVICE", help="such as cuda:1 (default: chosen by the library)")
    add("--no-normalise", dest="normalise", action="store_false", help="keep the norms of the model's vectors")
    add("--min-length", type=int, default=default.min_length, help="minimum tokens of a sample (%(default)s)")
    add("--max-length", type=int, default=default.max_length, help="maximum tokens of a sample (%(default)s)")
    add("--over-length", choices=["split", "cut"], default=default.over_length, help="longer documents (%(default)s)")
    add("--validation-fraction", type=float, default=default.validation_fraction, help="of documents (%(default)s)")
    add("--test-fraction", type=float, default=default.test_fraction, help="of documents (%(default)s)")
    add("--near-duplicates", action="store_true", help="keep texts that differ in a word in the same split")
    add("--latent-dtype", choices=["float16", "float32"], default=default.latent_dtype, help="as stored (%(default)s)")
    add("--on-problem", choices=["error", "skip"], default=default.on_problem, help="unusable documents (%(default)s)")
    add("--max-problems", type=int, default=default.max_problems, help="with skip: stop above this many (%(default)s)")
    add("--lossy", action="store_true", help="accept a tokenizer to which half of the text or more is unknown")
    add("--seed", type=int, default=default.seed, help="of the split, lsa and learned (%(default)s)")
    add("--part-bytes", type=int, default=default.part_bytes, help="input bytes per chunk (%(default)s)")
    add("--fit-documents", type=int, default=default.fit_documents, help="maximum to fit to (%(default)s)")
    add("--processes", type=int, default=default.processes, help="on this machine (%(default)s)")
    add("--cluster", choices=CLUSTERS, help="run the tasks on the machines of a cluster (docs/data.md)")
    add("--cluster-option", dest="cluster_options", action="append", metavar="NAME=VALUE", help="such as partition=cpu")
    add("--overwrite", action="store_true", help="replace an existing store, or an unfinished one of other data")


def from_args(arguments: argparse.Namespace) -> PrepareConfig:
    """Return the options of parsed `arguments`, with the default of `--encoder` that suits the input."""
    values = {key: value for key, value in vars(arguments).items() if key in PrepareConfig.__dataclass_fields__}
    if values["encoder"] is None:
        values["encoder"] = "included" if values["latents_field"] else "lsa"
    lists = {"inputs": tuple(arguments.inputs), "cluster_options": tuple(arguments.cluster_options or ())}
    return PrepareConfig(**values | lists)
