"""Options of `mmldlm prepare` that make no sense, alone or together, are refused by name before anything is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmldlm.errors import UsageError
from mmldlm.prepare.options import PrepareConfig, parse_options
from tests.helpers.user_errors import refused

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"inputs": ()}, "--corpus"),
        ({"corpus": "python-docs"}, "--corpus"),
        ({"min_length": 200}, "--min-length 200 --max-length 124"),
        ({"min_length": 0}, "--min-length 0"),
        ({"test_fraction": 0.0}, "--test-fraction 0"),
        ({"test_fraction": 0.96}, "--validation-fraction --test-fraction 1"),
        ({"part_bytes": 0}, "--part-bytes 0 1"),
        ({"vocab_size": 0}, "--vocab-size 0 1"),
        ({"over_length": "drop"}, "--over-length drop split cut"),
        ({"format": "xml"}, "--format xml lines blocks jsonl json csv tsv parquet arrow"),
        ({"format": "lgdlm"}, "--format lgdlm convert"),
        ({"format": "predecessor-dat"}, "--format predecessor-dat convert lgdlm"),
        ({"tokens_field": "ids"}, "--tokens-field ids --tokenizer bpe"),
        ({"tokens_field": "ids", "format": "jsonl"}, "--tokens-field ids jsonl Parquet"),
        ({"key_field": "id", "format": "lines"}, "--key-field id lines"),
        ({"encoder": "word2vec"}, "--encoder word2vec lsa learned sentence-transformers:"),
        ({"encoder": "sonar"}, "--encoder sonar precomputed:FILE"),
        ({"encoder": "included"}, "--encoder included --latents-field"),
        ({"latents_field": "v"}, "--latents-field v --encoder lsa included"),
        ({"latent_ids": "a.json"}, "--latent-ids a.json --encoder lsa precomputed:FILE"),
        ({"latents_of": "E5"}, "--latents-of E5 --encoder lsa"),
        ({"prompt_name": "query"}, "--prompt-name query --encoder lsa"),
        ({"encoder": "precomputed:a.npy", "latent_tokens": 2}, "--latent-tokens 2 --encoder precomputed:a.npy"),
        ({"latent_tokens": 0}, "--latent-tokens 0 1"),
        ({"encoder_steps": 3}, "--encoder-steps 3 --encoder lsa learned"),
        ({"encoder": "learned", "encoder_steps": 0}, "--encoder-steps 0 1"),
        ({"encoder": "learned", "encoder_width": 100}, "--encoder-width 100 32"),
        ({"encoder": "learned", "encoder_width": 0}, "--encoder-width 0 1"),
        ({"encoder": "learned", "prompt": "query:"}, "--prompt query: --encoder learned sentence-transformers:"),
        ({"teacher": "sentence-transformers:a"}, "--teacher sentence-transformers:a --encoder lsa learned"),
        ({"encoder": "learned", "teacher": "minilm"}, "--teacher minilm sentence-transformers:NAME_OR_FOLDER"),
        ({"encoder_version": "1"}, "--encoder-version 1 --encoder lsa included"),
        ({"encoder": "precomputed:a.npy", "encoder_version": "1"}, "--encoder-version 1 --latents-of"),
        ({"encoder": "precomputed:a.npy", "encoder_version": "", "latents_of": "X"}, "--encoder-version --latents-of"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict, named: str) -> None:
    with refused(UsageError, *named.split()):
        replace(PrepareConfig(str(tmp_path / "store"), ("a.txt",)), **options).checked()


def test_a_command_line_sets_the_fields() -> None:
    given = ["a.txt", "b.txt", "--out", "store", "--channels", "8", "--no-normalize", "--near-duplicates"]
    more = ["--test-fraction", "0.1"]
    config = PrepareConfig(
        "store",
        ("a.txt", "b.txt"),
        channels=8,
        normalise=False,
        near_duplicates=True,
        test_fraction=0.1,
    )
    assert parse_options([*given, *more]) == config
    assert parse_options(["a", "--out", "b", "--latents-field", "v"]).encoder == "included"
