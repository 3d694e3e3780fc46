"""Options of `mmldlm prepare`, as a dataclass and as a command line."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mmldlm.data.encoders import ImportedLatents, read_description
from mmldlm.data.encoders.learned import HEAD_WIDTH
from mmldlm.data.tokenizer import BUILT_IN
from mmldlm.errors import ConfigError, UsageError
from mmldlm.prepare.documents import FORMATS, TEXT_FORMATS, Format
from mmldlm.prepare.readers.python_docs import CORPORA
from mmldlm.settings.declaration import dump, setting
from mmldlm.settings.fields import build

# Options that do not affect the contents of the store. The store records the inputs as its sources.
_NOT_RECORDED = ("out", "inputs", "encoder_batch_size", "encoder_device", "lossy", "overwrite", "processes")


@dataclass(frozen=True)
class PrepareConfig:
    """Options of `mmldlm prepare`. Exactly one of `inputs` and `corpus` is set."""

    out: str = setting("", "folder to create", required=True, metavar="STORE")
    inputs: tuple[str, ...] = setting((), "text, JSON, CSV, Parquet or Arrow: files, folders, glob patterns", nargs="*")
    corpus: Literal["python-docs", "simple-docs"] | None = setting(None, "an embedded corpus, instead of inputs")
    format: Format | None = setting(None, f"{', '.join(FORMATS)} (default: by suffix)", choices=None)
    field: str = setting("text", "field or column with the text, or a path such as messages.-1.content (%(default)s)")
    tokens_field: str | None = setting(
        None, "column of token ids produced by --tokenizer, instead of text", metavar="FIELD"
    )
    latents_field: str | None = setting(None, "column of latents, for --encoder included", metavar="FIELD")
    key_field: str | None = setting(None, "field or column with the id of the document", metavar="FIELD")
    prefix_field: str | None = setting(
        None, "field or column with the condition of the text, such as a question; it is never masked", metavar="FIELD"
    )
    group_field: str | None = setting(None, "field or column: documents with one value share a split", metavar="FIELD")
    weight_field: str | None = setting(
        None, "field or column with the weight of the document's loss in training, at least 0", metavar="FIELD"
    )
    separator: str | None = setting(None, "line between documents, instead of a blank one (blocks)", metavar="LINE")
    tokenizer: str = setting("bpe", "bpe, words (trained here), characters (a-z and space), or a PATH")
    vocab_size: int = setting(None, "size of the trained vocabulary (bpe: 4096, words: 16384)", at_least=1)
    encoder: str = setting(
        "lsa",
        "lsa, learned (an autoencoder trained here), sentence-transformers:NAME_OR_FOLDER, precomputed:FILE, or "
        "included, for --latents-field (included with --latents-field, else lsa); or a STORE, to use its encoder",
    )
    channels: int | None = setting(
        None, "latent channels (lsa and learned: 64, lsa fewer for a small corpus; others: all)", at_least=1
    )
    prompt: str | None = setting(None, "prefix of each text for the sentence-transformers model, such as 'passage: '")
    prompt_name: str | None = setting(None, "one of the prompts defined by the model, such as query", metavar="NAME")
    encoder_revision: str | None = setting(None, "commit of a model given by name", metavar="COMMIT")
    encoder_batch_size: int = setting(32, "texts per batch (%(default)s)", at_least=1)
    encoder_device: str | None = setting(None, "such as cuda:1 (default: chosen by the library)", metavar="DEVICE")
    encoder_steps: int | None = setting(None, "training steps of learned (1000)", at_least=1, metavar="N")
    encoder_width: int | None = setting(None, "width of learned, a multiple of 32 (128)", at_least=1, metavar="W")
    teacher: str | None = setting(
        None, "sentence-transformers:NAME_OR_FOLDER, for one more latent of learned, by meaning", metavar="MODEL"
    )
    normalise: bool = setting(True, "keep the model's own norms, instead of norm 1")
    latent_tokens: int | None = setting(
        None, "latents per text, one for each of M segments (1; learned: 4)", at_least=1, metavar="M"
    )
    latent_ids: str | None = setting(
        None, "ids of the rows of precomputed:FILE (.json, .txt, .npy), or position", metavar="FILE"
    )
    latents_of: str | None = setting(
        None, "name of the model that computed the imported latents, for the record", metavar="NAME"
    )
    encoder_version: str | None = setting(
        None, "version of --latents-of: stores with the same name and version can be mixed", metavar="V"
    )
    min_length: int = setting(1, "minimum tokens of a sample (%(default)s)", at_least=1)
    max_length: int = setting(124, "maximum tokens of a sample (%(default)s: 128 with four latents, for GPUs)")
    over_length: Literal["split", "cut"] = setting("split", "longer documents (%(default)s)")
    validation_fraction: float = setting(0.04, "share of the documents (%(default)s)", above=0)
    test_fraction: float = setting(0.04, "share of the documents (%(default)s)", above=0)
    near_duplicates: bool = setting(False, "keep texts that differ in a word in the same split")
    latent_dtype: Literal["float16", "float32"] = setting("float16", "as stored (%(default)s)")
    on_problem: Literal["error", "skip"] = setting("error", "unusable documents (%(default)s)")
    max_problems: int = setting(100, "with skip: stop above this many (%(default)s)")
    lossy: bool = setting(False, "accept a tokenizer that loses half of the text or more")
    seed: int = setting(0, "seed of the splits, lsa and learned (%(default)s)")
    part_bytes: int = setting(64 << 20, "input bytes per chunk (%(default)s)", at_least=1)
    fit_documents: int = setting(100_000, "most documents to fit to (%(default)s)", at_least=1)
    overwrite: bool = setting(False, "replace an existing store, or an unfinished one of other data")
    processes: int = setting(1, "worker processes on this machine (%(default)s)", at_least=1)

    def recorded(self) -> dict[str, Any]:
        """Return the options that determine the contents of the store."""
        return {name: value for name, value in dump(self).items() if name not in _NOT_RECORDED}

    def differing(self, recorded: dict[str, Any]) -> list[str]:
        """Return the names of options with another value in `recorded`."""
        return [key for key, value in self.recorded().items() if recorded.get(key) != value]

    @property
    def imports_latents(self) -> bool:
        """True if latents come from the documents or from a file instead of an encoder."""
        return self.encoder == "included" or self.encoder.startswith("precomputed:")

    @property
    def encoder_folder(self) -> Path | None:
        """The folder of another store's encoder if `encoder` is the path of a store, else None."""
        is_kind = self.encoder in ("lsa", "learned") or self.encoder.startswith("sentence-transformers:")
        return None if is_kind or self.imports_latents else Path(self.encoder) / "encoder"

    def checked(self) -> PrepareConfig:
        """Fill in the defaults that depend on other options, and check all options, alone and combined.

        Raises:
            UsageError: An option is invalid. The message names it and the values expected.
        """
        config = self
        if self.vocab_size is None:
            # Words outside of the vocabulary are spelled in bytes, and a small network spells words that do not exist.
            config = replace(config, vocab_size=16_384 if self.tokenizer == "words" else 4096)
        if self.separator and not self.format:
            config = replace(config, format="blocks")
        config._check()
        return config

    def _check(self) -> None:
        if self.format and self.format.startswith(("lgdlm", "predecessor")):
            raise UsageError(f"--format {self.format}: run `mmldlm convert lgdlm FOLDER OUT`, then prepare OUT")
        if bool(self.inputs) == bool(self.corpus):
            raise UsageError(f"expected either input files or --corpus {' or '.join(CORPORA)}")
        try:
            build(PrepareConfig, dump(self))
        except ConfigError as error:
            name, _, problem = str(error).partition(":")
            raise UsageError(f"{_flag(name)}:{problem}") from None
        if self.min_length > self.max_length:
            raise UsageError(f"--min-length {self.min_length}: expected 1 to --max-length {self.max_length}")
        if (held_out := self.validation_fraction + self.test_fraction) >= 1:
            raise UsageError(f"--validation-fraction and --test-fraction are {held_out:g} in sum, expected below 1")
        if (self.encoder_width or HEAD_WIDTH) % HEAD_WIDTH:
            raise UsageError(f"--encoder-width {self.encoder_width}: expected a multiple of {HEAD_WIDTH}")
        if self.separator and self.format != "blocks":
            raise UsageError(f"--separator {self.separator}: --format is {self.format}, expected blocks")
        if self.group_field and self.near_duplicates:
            raise UsageError(f"--group-field {self.group_field}: expected this or --near-duplicates, not both")
        self._check_fields()
        self._check_encoder()

    def _check_fields(self) -> None:
        is_text, has_fields = self.format in TEXT_FORMATS, self.format not in ("lines", "blocks")
        for name, expected, is_invalid in (
            ("tokens_field", "Parquet or Arrow", is_text),
            ("latents_field", "Parquet or Arrow", is_text),
            ("key_field", "a table or JSON", not has_fields),
            ("prefix_field", "a table or JSON", not has_fields),
            ("group_field", "a table or JSON", not has_fields),
            ("weight_field", "a table or JSON", not has_fields),
        ):
            if (value := getattr(self, name)) and (is_invalid or self.corpus):
                source = self.corpus or self.format
                raise UsageError(f"{_flag(name)} {value}: {source} has no such fields; expected {expected}")
        if self.tokens_field and self.tokenizer in BUILT_IN:
            raise UsageError(
                f"--tokens-field {self.tokens_field}: --tokenizer is {self.tokenizer}, expected the tokenizer.json "
                "that made the tokens, or its folder"
            )

    def _check_encoder(self) -> None:
        if self.encoder == "sonar":
            raise UsageError(
                "--encoder sonar: its library needs other versions than this environment has; expected "
                "precomputed:FILE with latents made in a separate environment (docs/data.md)"
            )
        store = self.encoder_folder
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
        if self.encoder == "included" and not self.latents_field:
            raise UsageError("--encoder included: expected --latents-field")
        if self.prompt is not None and self.prompt_name is not None:
            raise UsageError(f"--prompt-name {self.prompt_name}: expected either --prompt-name or --prompt, not both")
        is_library, is_learned = self.encoder.startswith("sentence-transformers:"), self.encoder == "learned"
        reads_text = self.encoder in ("lsa", "learned") or is_library
        if self.teacher is not None and not re.match("sentence-transformers:.", self.teacher):
            raise UsageError(f"--teacher {self.teacher}: expected sentence-transformers:NAME_OR_FOLDER")
        uses_model = is_library or self.teacher is not None
        for name, is_allowed, expected in (
            ("prompt", uses_model, "sentence-transformers:..."),
            ("prompt_name", uses_model, "sentence-transformers:..."),
            ("encoder_revision", uses_model, "sentence-transformers:NAME"),
            ("encoder_device", uses_model, "sentence-transformers:..."),
            ("encoder_steps", is_learned, "learned"),
            ("encoder_width", is_learned, "learned"),
            ("teacher", is_learned, "learned"),
            ("channels", store is None, "another, or the channels of the store"),
            ("latent_tokens", reads_text, "one that reads text, and no store's"),
            ("latents_field", self.encoder == "included", "included"),
            ("latent_ids", self.encoder.startswith("precomputed:"), "precomputed:FILE"),
            ("latents_of", self.imports_latents, "included or precomputed:FILE"),
            ("encoder_version", self.imports_latents, "included or precomputed:FILE"),
        ):
            if (value := getattr(self, name)) is not None and not is_allowed:
                raise UsageError(f"{_flag(name)} {value}: --encoder is {self.encoder}, expected {expected}")
        if self.encoder_version is not None and not (self.encoder_version and self.latents_of):
            raise UsageError(f"--encoder-version {self.encoder_version!r}: expected a version of --latents-of NAME")


def _flag(name: str) -> str:
    """Return the option of the command line that sets a field."""
    return "--no-normalize" if name == "normalise" else f"--{name.replace('_', '-')}"


def parse_options(argv: list[str] | None) -> PrepareConfig:
    """Parse a command line. The default of `--encoder` depends on `--latents-field`."""
    parser = argparse.ArgumentParser(
        "mmldlm prepare", description="Prepare a store, with tokens and latents in splits, from raw data."
    )
    hints = get_type_hints(PrepareConfig)
    for item in fields(PrepareConfig):
        hint = hints[item.name]
        kind = get_args(hint)[0] if NoneType in get_args(hint) else hint
        argument: dict[str, Any] = {"default": item.default, "help": item.metadata["doc"]}
        if get_origin(kind) is Literal:
            argument["choices"] = get_args(kind)
        elif kind is bool:
            argument["action"] = "store_false" if item.default else "store_true"
        elif kind in (int, float):
            argument["type"] = kind
        argument |= item.metadata["argument"]
        if item.name == "inputs":
            parser.add_argument("inputs", **argument)
        else:
            parser.add_argument(_flag(item.name), dest=item.name, **argument)
    parser.set_defaults(encoder=None)  # which depends on the input
    values = vars(parser.parse_args(argv))
    values["encoder"] = values["encoder"] or ("included" if values["latents_field"] else "lsa")
    values["inputs"] = tuple(values["inputs"])
    return PrepareConfig(**values)
