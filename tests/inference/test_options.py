"""Options of `mmldlm sample` that make no sense are refused before the run is opened."""

from __future__ import annotations

import pytest

from mmldlm import cli
from mmldlm.data.encoders import ImportedLatents
from mmldlm.errors import DataError
from mmldlm.inference.conditions import encode_or_raise
from tests.helpers.user_errors import assert_user_error

CASES = [
    ("", "--mode l2t needs --text or --latents"),
    ("--mode joint --text x", "--mode joint needs neither"),
    ("--mode t2l --latents x.npy", "--mode t2l needs --text"),
    ("--text a --out /nowhere/x.npy", "--out: expected a .npy or .jsonl file in an existing folder"),
    ("--text a -n 0", "--count: expected at least 1, found 0"),
    # settings that were options
    ("--text a --top-p 0.9", "sample --top-p is gone, use sampling.top_p=VALUE"),
    ("--text a --steps 8", "sample --steps is gone, use sampling.steps=N, in t2l sampling.t2l_steps=N"),
    # editing
    ("--edit a", "--edit: expected one [span] to rewrite, found no brackets"),
    ("--edit [a] --span-length 0", "--span-length: expected at least 1, found 0"),
    (
        "--edit [a] --length 5",
        "--length: cannot be combined with --edit, which has its own text and uses --span-length",
    ),
    ("--edit [a] --text b", "--text: cannot be combined with --edit"),
    ("--edit [a] --mode t2l", "--edit: generates from latents, expected --mode l2t, found t2l"),
    ("--edit [a] --like b --latents c.npy", "--latents: cannot be combined with --like"),
    ("--text a --like b", "--like: needs --edit, which was not given"),
    ("--text a --span-length 2", "--span-length: needs --edit"),
    # interpolation
    ("--interpolate a b --edit [a]", "--edit: cannot be combined with --interpolate"),
    ("--interpolate a b --like c", "--like: needs --edit"),
    ("--interpolate a b --points 1", "--points: expected 2 to 1000, found 1"),
    ("--interpolate a b -n 2", "--count: cannot be combined with --interpolate, which generates one text per point"),
    ("--interpolate a b --text c", "--text: cannot be combined with --interpolate"),
    ("--interpolate a b --latents c.npy", "--latents: cannot be combined with --interpolate"),
    ("--interpolate a b --mode joint", "--interpolate: generates from latents, expected --mode l2t"),
    ("--text a --points 3", "--points: needs --interpolate, which was not given"),
    # search
    ("--text a --search 8 -n 2", "--count: cannot be combined with --search, which improves one text of a latent"),
    ("--text a --search 8 --length 4", "--length: cannot be combined with --search"),
    ("--edit [a] --search 8", "--edit: cannot be combined with --search"),
    ("--mode t2l --text a --search 8", "--search: improves the text of a latent, expected --mode l2t, found t2l"),
    ("--mode joint --search 8", "--search: improves the text of a latent, expected --mode l2t, found joint"),
    # files
    ("--texts t.txt", "--texts: needs --out"),
    ("--texts t.txt --out x.npy", "--out: expected a .jsonl file"),
    ("--texts t.txt --out /nowhere/x.jsonl", "--out: expected a .jsonl file"),
    ("--texts t.txt --latents l.npy --out x.jsonl", "--mode l2t --out x.jsonl needs --texts or"),
    ("--mode joint --texts t.txt --out x.jsonl", "needs neither"),
    ("--text a --out x.jsonl", "--text: cannot be combined with --out x.jsonl"),
    ("--texts t.txt --out x.jsonl --batch 0", "--batch: expected at least 1, found 0"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("options", "expected"), CASES)
def test_options_that_make_no_sense(options: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["sample", "/nowhere", *options.split()])
    assert_user_error((status, capsys.readouterr().err), 2, expected)


@pytest.mark.quick
def test_imported_latents_have_no_encoder_to_name_words_of() -> None:
    with pytest.raises(DataError, match=r"The wave.*imported"):
        encode_or_raise(ImportedLatents("model", "1", (1, 4)), ["The wave."], ", or latents")
