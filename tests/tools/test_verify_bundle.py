"""`mmldlm verify BUNDLE`: what its author measured verifies, and every forgery is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmldlm import cli, train
from mmldlm.tools.verify_bundle import BEYOND, EQUAL, UNDECIDED, WITHIN, compare
from tests.helpers.forged_bundles import FOUND_BY_MEASURING, FOUND_WITHOUT_DATA, Made, claiming, reseal
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import assert_user_error

ASKED = ("--texts", "4", "--samples", "20")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """Bundles of the EMA and of the trained weights of one run, both with figures."""
    folder = tmp_path_factory.mktemp("originals")
    config, run = folder / "config.yaml", folder / "run"
    config.write_text(TINY.format(run=run, store=tiny_store))
    assert train.main([str(config), "ema.decay=0.5"]) == 0
    for weights in ("trained", "ema"):
        assert cli.main(["evaluate", str(run), "--weights", weights, *ASKED]) == 0
        assert cli.main(["export", str(run), str(folder / weights), "--weights", weights]) == 0
    return folder


@pytest.fixture
def made(originals: Path, tmp_path: Path) -> Made:
    bundle = Path(shutil.copytree(originals / "ema", tmp_path / "bundle"))
    return Made(bundle, originals / "trained")


def verify(capsys: pytest.CaptureFixture[str], made: Made, *options: object) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    capsys.readouterr()
    status = cli.main(["verify", str(made.bundle), *map(str, options)])
    printed = capsys.readouterr()
    is_named = "PROBLEM" in printed.out or "mmldlm: error: " in printed.err
    assert "Traceback" not in printed.err and (status != 0) == is_named
    return status, printed.out + printed.err


def test_an_honest_bundle(made: Made, tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = verify(capsys, made)
    assert status == 0 and "not checked: whether the figures are true" in printed
    status, printed = verify(capsys, made, "--data", tiny_store)
    assert status == 0 and "0 within the interval, 0 BEYOND the interval, 0 different" in printed
    assert "bundle: verified\n" in printed and "not checked" not in printed
    card = (made.bundle / "README.md").read_text()
    figures = json.loads((made.bundle / "evaluation.json").read_text())
    for named in (figures["data_manifest"], "torch 2.", "mmldlm verify PATH --data STORE"):
        assert named in card
    (made.bundle / "LICENSE").write_text("Apache-2.0")
    (made.bundle / ".gitattributes").touch()
    status, printed = verify(capsys, made)
    assert status == 0 and "not in its manifest, LICENSE" in printed and "gitattributes" not in printed


@pytest.mark.parametrize("name", FOUND_WITHOUT_DATA)
def test_forgeries_that_contradict_themselves(name: str, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    forge, expected = FOUND_WITHOUT_DATA[name]
    forge(made)
    status, printed = verify(capsys, made)
    assert status == 65 and expected in printed


@pytest.mark.parametrize("name", FOUND_BY_MEASURING)
def test_forgeries_that_measuring_finds(
    name: str, made: Made, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, expected = FOUND_BY_MEASURING[name]
    forge(made)
    assert verify(capsys, made)[0] == 0, "files, figures, card and hashes fit together"
    status, printed = verify(capsys, made, "--data", tiny_store)
    assert status == 65 and expected in printed


def test_figures_of_another_machine(made: Made, tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding may differ there, so an interval decides."""

    def forge(figures: dict[str, object]) -> None:
        figures["measured_by"]["processor"] = "another"  # type: ignore[index]
        figures["bits_per_token"] *= 1 - 1e-4  # type: ignore[operator]
        figures["joint"]["distinct_1"] = 0.123  # type: ignore[index]

    claiming(forge)(made)
    status, printed = verify(capsys, made, "--data", tiny_store)
    assert status == 0 and "1 within the interval, 0 BEYOND the interval, 1 different, without an interval" in printed
    assert "\nbits_per_token: " in printed and "\njoint.distinct_1: 0.123 claimed" in printed
    claiming(lambda figures: figures.update(bits_per_token=3.0))(made)
    status, printed = verify(capsys, made, "--data", tiny_store)
    assert status == 65 and "PROBLEM evaluation.json: bits_per_token: 3.0 claimed" in printed


def test_a_bundle_without_figures(
    originals: Path, tmp_path: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(originals / "run", tmp_path / "run")
    (run / "evaluation.json").unlink()
    made = Made(tmp_path / "out", tmp_path)
    assert cli.main(["export", str(run), str(made.bundle)]) == 0
    status, printed = verify(capsys, made)
    assert status == 0 and "not checked: figures" in printed
    for options, named in ((["--data", tiny_store], "evaluation.json"), (["--all"], "the bundle")):
        assert_user_error(verify(capsys, made, *options), 2, named)
    made = Made(run, tmp_path)
    assert_user_error(verify(capsys, made, "--data", tiny_store), 2, "--data")


def test_bundles_of_other_versions(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Their cards and options differ, which accuses nobody."""
    claiming(lambda figures: figures["measured_by"]["versions"].update(mmldlm="9.0.0"), with_card=False)(made)
    (made.bundle / "README.md").write_text("another card")
    reseal(made.bundle, exported_with="9.0.0")
    status, printed = verify(capsys, made)
    assert status == 0 and printed.count("which another version of mmldlm wrote") == 2


def test_sentence_pairs_are_measured_again_with_their_file(
    originals: Path, tmp_path: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, run = tmp_path / "pairs.tsv", shutil.copytree(originals / "run", tmp_path / "run")
    words = ("rose", "wave", "oven", "violin", "tulip")
    pairs.write_text("".join(f"The {a} of the.\tThe {b} and the.\t{len(a + b)}\n" for a in words for b in words))
    made, asked = Made(tmp_path / "out", tmp_path), [*ASKED, "--modes", "t2l", "sampling.t2l_steps=3"]
    assert cli.main(["evaluate", str(run), *asked, "--sts", str(pairs)]) == 0
    assert cli.main(["export", str(run), str(made.bundle)]) == 0
    status, printed = verify(capsys, made, "--data", tiny_store)
    assert status == 0 and "not checked: figures of sentence pairs" in printed
    status, printed = verify(capsys, made, "--data", tiny_store, "--sts", pairs)
    assert status == 0 and "not checked" not in printed
    claiming(lambda figures: figures["t2l"].update(sts_spearman=0.9))(made)
    assert verify(capsys, made, "--data", tiny_store, "--sts", pairs)[0] == 65
    pairs.write_text(pairs.read_text() + "The rose.\tThe wave.\t3\n")
    assert_user_error(verify(capsys, made, "--data", tiny_store, "--sts", pairs), 2, "--sts")


MEASURED = {"a": 10.0, "a_ci95": [9.0, 11.0], "a_shuffled": 5.0, "b": 1.0, "rows": [{"a": 3.0}], "texts": ["x"]}


@pytest.mark.parametrize(
    ("key", "claimed", "verdict"),
    [
        ("a", 10.0 * (1 + 1e-9), EQUAL),
        ("a", 10.9, WITHIN),
        ("a", 11.1, BEYOND),
        ("a_shuffled", 5.9, WITHIN),
        ("a_shuffled", 6.1, BEYOND),
        ("a_ci95", [9.02, 11.03], WITHIN),
        ("a_ci95", [8.8, 11.2], BEYOND),  # wider
        ("a_ci95", [10.1, 12.1], BEYOND),  # elsewhere
        ("b", 1.1, UNDECIDED),
        ("b", None, UNDECIDED),
        ("a", "10", UNDECIDED),
        ("texts", ["y"], UNDECIDED),
        ("c", 1.0, UNDECIDED),
    ],
)
def test_verdicts(key: str, claimed: object, verdict: str) -> None:
    verdicts = {name: one for name, one, _ in compare({**MEASURED, key: claimed}, MEASURED)}
    assert verdicts.pop(key) == verdict and {*verdicts.values()} <= {EQUAL}
