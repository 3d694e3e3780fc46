"""Options of `mmldlm prepare` that make no sense, alone or together, are refused by name before anything is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmldlm.data.prepare.options import PrepareConfig, parse_options
from mmldlm.errors import UsageError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ()}, "expected either input files or --corpus"),
        ({"corpus": "python-docs"}, "expected either input files or --corpus"),
        ({"min_length": 200}, "--min-length 200: expected 1 to --max-length 124"),
        ({"test_fraction": 0.0}, "--validation-fraction and --test-fraction are"),
        ({"part_bytes": 0}, "--part-bytes 0: expected at least 1"),
        ({"over_length": "drop"}, "--over-length drop: expected one of split, cut"),
        ({"format": "xml"}, "--format xml: expected one of lines, blocks, jsonl, json, csv, tsv, parquet, arrow, "),
        ({"format": "lgdlm"}, "--format lgdlm: run `mmldlm convert lgdlm FOLDER OUT`, then prepare OUT"),
        ({"tokens_field": "ids"}, "--tokens-field ids: --tokenizer is bpe"),
        ({"tokens_field": "ids", "format": "jsonl"}, "--tokens-field ids: jsonl has no such fields; expected Parquet"),
        ({"key_field": "id", "format": "lines"}, "--key-field id: lines has no such fields"),
        ({"encoder": "word2vec"}, "--encoder word2vec: expected lsa, learned, sentence-transformers:"),
        ({"encoder": "sonar"}, "--encoder sonar: its library needs other versions"),
        ({"encoder": "included"}, "--encoder included: expected --latents-field"),
        ({"latents_field": "v"}, "--latents-field v: --encoder is lsa, expected included"),
        ({"latent_ids": "a.json"}, "--latent-ids a.json: --encoder is lsa, expected precomputed:FILE"),
        ({"latents_of": "E5"}, "--latents-of E5: --encoder is lsa"),
        ({"prompt_name": "query"}, "--prompt-name query: --encoder is lsa"),
        ({"encoder": "precomputed:a.npy", "latent_tokens": 2}, "--latent-tokens 2: --encoder is precomputed:a.npy"),
        ({"latent_tokens": 0}, "--latent-tokens 0: expected at least 1"),
        ({"encoder_steps": 3}, "--encoder-steps 3: --encoder is lsa, expected learned"),
        ({"encoder": "learned", "encoder_steps": 0}, "--encoder-steps 0: expected at least 1"),
        ({"encoder": "learned", "encoder_width": 100}, "--encoder-width 100: expected a multiple of 32"),
        ({"encoder": "learned", "prompt": "query: "}, "--prompt query: : --encoder is learned, expected sentence-"),
        ({"encoder_version": "1"}, "--encoder-version 1: --encoder is lsa, expected included or"),
        ({"encoder": "precomputed:a.npy", "encoder_version": "1"}, "'1': expected a version of --latents-of NAME"),
        (
            {"encoder": "precomputed:a.npy", "encoder_version": "", "latents_of": "SONAR"},
            "'': expected a version of --latents-of NAME",
        ),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError) as error:
        replace(PrepareConfig(str(tmp_path / "store"), ("a.txt",)), **options).check()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_command_line_sets_the_fields() -> None:
    given = ["a.txt", "b.txt", "--out", "store", "--channels", "8", "--no-normalise", "--near-duplicates"]
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
