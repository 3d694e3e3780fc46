"""`mmldlm sample --edit` regenerates the marked span and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmldlm import cli
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import DataError, UsageError
from mmldlm.inference import encode_texts, sample
from mmldlm.inference.command import build_parser, generated_lines
from mmldlm.inference.edit import SpanEdit, mask_span
from mmldlm.loading.load import LoadedRun

pytestmark = pytest.mark.quick

MARKED = "The rose of [soil and] water."


@pytest.mark.parametrize(
    ("marked", "text", "span"),
    [
        (MARKED, "The rose of soil and water.", "soil and"),
        ("[all]", "all", "all"),
        ("here: [].", "here: .", ""),
        (r"x[\[0\]] = 1", "x[0] = 1", "[0]"),
        (r"C:\new \\[ö\]", None, None),
        (r"C:\new \\[ö]", "C:\\new \\ö", "ö"),
        ("[b]\\", "b\\", "b"),
        ("none", None, None),
        ("[one] and [two]", None, None),
        ("[one [in] another]", None, None),
        ("]backwards[", None, None),
        ("[open", None, None),
    ],
)
def test_span_in_brackets(marked: str, text: str | None, span: str | None) -> None:
    if text is None:
        with pytest.raises(UsageError, match=r"--edit: .*\[span\].*\\\["):
            SpanEdit.parse(marked)
    else:
        result = SpanEdit.parse(marked)
        assert (result.text, result.text[result.start : result.stop]) == (text, span)


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    (text,) = tokenizer.decode_batch([ids], keep_special=True)
    return text


def test_the_span_is_whole_tokens_of_the_text(short_run: LoadedRun) -> None:
    """Byte-level BPE writes a space with the word behind it; the kept text is spelled as it was."""
    tokenizer = short_run.tokenizer
    ids = tokenizer.encode_batch(["The rose of soil and water."])[0]
    row = mask_span(short_run, SpanEdit.parse(MARKED), None)
    assert len(row) == len(ids)
    assert [new for new, old in zip(row, ids, strict=True) if new != old] == [tokenizer.mask_id] * row.count(
        tokenizer.mask_id
    )
    assert shown(tokenizer, row).replace("[MASK]", "") == "The rose of water."
    for length in (1, 5):
        row = mask_span(short_run, SpanEdit.parse(MARKED), length)
        assert shown(tokenizer, row) == f"The rose of{'[MASK]' * length} water."


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("The [] rose", "The[MASK][MASK]  rose"),
        ("The[] rose", "The[MASK][MASK] rose"),
        ("[]The rose", "[MASK][MASK]The rose"),
        ("The rose[]", "The rose[MASK][MASK]"),
        ("ab[]cd", "ab[MASK][MASK]cd"),
    ],
)
def test_empty_span_keeps_the_text(short_run: LoadedRun, marked: str, expected: str) -> None:
    run = short_run if "rose" in marked else replace(short_run, tokenizer=Tokenizer.characters())
    assert shown(run.tokenizer, mask_span(run, SpanEdit.parse(marked), 2)) == expected
    with pytest.raises(UsageError, match="--span-length"):
        mask_span(run, SpanEdit.parse(marked), None)


def test_multi_token_characters_stay_whole(short_run: LoadedRun) -> None:
    tokenizer = short_run.tokenizer
    row = mask_span(short_run, SpanEdit.parse("The é[ö]ü rose"), None)
    assert row.count(tokenizer.mask_id) == 2  # bytes
    assert shown(tokenizer, row) == "The é[MASK][MASK]ü rose"


def test_versions_differ_in_the_span_only(short_run: LoadedRun) -> None:
    latents = encode_texts(short_run, ["The rose of soil and water.", "The wave."])
    config = SamplingConfig(steps=4, remask=1.0)
    row = mask_span(short_run, SpanEdit.parse(MARKED), 6)
    made, texts = sample(short_run, "l2t", config, 0, latents, count=3, template=row)
    assert len(texts) == 6 and len(set(texts)) > 1
    assert all(text.startswith("The rose of") and text.endswith(" water.") for text in texts)
    assert np.allclose(made.latents.numpy(), latents.repeat(3, axis=0), atol=1e-6)
    with pytest.raises(DataError, match=r"--edit: .*\d+ tokens.*\d+"):
        mask_span(short_run, SpanEdit.parse(MARKED), 500)


def edited(run: LoadedRun, *arguments: str) -> tuple[np.ndarray, list[str]]:
    options = build_parser().parse_args(["unused", "--edit", *arguments])
    made, lines = generated_lines(options, run, SpanEdit.parse(options.edit))
    return made.latents.numpy(), lines[1:]


def test_by_default_the_words_that_should_go_are_not_seen(short_run: LoadedRun) -> None:
    """Not even by a latent."""
    latents, lines = edited(short_run, MARKED, "-n", "3", "--span-length", "4")
    others, same = edited(short_run, "The rose of [tune] water.", "-n", "3", "--span-length", "4")
    assert lines == same and np.array_equal(latents, others) and len(latents) == 3
    assert all(line.startswith("  The rose of") and line.endswith(" water.") for line in lines)
    l2t = replace(short_run, config=replace(short_run.config, mode="l2t"))
    own = encode_texts(short_run, ["The rose of soil and water."])
    for run, more in ((l2t, ()), (short_run, ("--like", "The rose of soil and water."))):
        assert np.allclose(edited(run, MARKED, *more)[0], own, atol=1e-6)


def test_latent_is_own_or_given(short_run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--out` writes the latents that the text was generated from."""
    result = []
    for name, more in (("own", []), ("like", ["--like", "The wave."]), ("read", ["--latents", tmp_path / "like.npy"])):
        out = tmp_path / f"{name}.npy"
        arguments = ["sample", short_run_dir, "--edit", MARKED, "-n", "2", *more, "--out", out]
        assert cli.main(list(map(str, arguments))) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"edit: {MARKED}" and len(lines) == (4 if name != "read" else 6)
        assert all(line.startswith("  The rose of") and line.endswith(" water.") for line in lines[1:-1])
        result.append(np.load(out))
    own, like, read = result
    assert not np.allclose(own, like) and np.allclose(read, like.repeat(2, axis=0), atol=1e-6)
