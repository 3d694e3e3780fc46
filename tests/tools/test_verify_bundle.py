"""`mmldlm verify BUNDLE`: what its author measured verifies, and every forgery is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmldlm import cli, train
from mmldlm.tools.verify_bundle import BEYOND, EQUAL, UNDECIDED, WITHIN, compare
from tests.helpers.forged_bundles import FOUND_BY_MEASURING, FOUND_WITHOUT_DATA, claim, reseal
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
def bundle(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "ema", tmp_path / "bundle"))


def verify(capsys: pytest.CaptureFixture[str], bundle: Path, *options: object) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    capsys.readouterr()
    status = cli.main(["verify", str(bundle), *map(str, options)])
    printed = capsys.readouterr()
    is_named = "PROBLEM" in printed.out or "mmldlm: error: " in printed.err
    assert "Traceback" not in printed.err and (status != 0) == is_named
    return status, printed.out + printed.err


def test_an_honest_bundle(bundle: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = verify(capsys, bundle)
    assert status == 0 and "not checked: whether the figures are true" in printed
    status, printed = verify(capsys, bundle, "--data", tiny_store)
    assert status == 0 and "0 within the interval, 0 BEYOND the interval, 0 different" in printed
    assert "bundle: verified\n" in printed and "not checked" not in printed
    card = (bundle / "README.md").read_text()
    figures = json.loads((bundle / "evaluation.json").read_text())
    for named in (figures["data_manifest"], "torch 2.", "mmldlm verify PATH --data STORE"):
        assert named in card
    (bundle / "LICENSE").write_text("Apache-2.0")
    (bundle / ".gitattributes").touch()
    status, printed = verify(capsys, bundle)
    assert status == 0 and "not in its manifest, LICENSE" in printed and "gitattributes" not in printed


@pytest.mark.parametrize("name", FOUND_WITHOUT_DATA)
def test_forgeries_that_contradict_themselves(
    name: str, originals: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, expected = FOUND_WITHOUT_DATA[name]
    forge(bundle, originals / "trained")
    status, printed = verify(capsys, bundle)
    assert status == 65 and expected in printed


@pytest.mark.parametrize("name", FOUND_BY_MEASURING)
def test_forgeries_that_measuring_finds(
    name: str, originals: Path, bundle: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, expected = FOUND_BY_MEASURING[name]
    forge(bundle, originals / "trained")
    assert verify(capsys, bundle)[0] == 0, "files, figures, card and hashes fit together"
    status, printed = verify(capsys, bundle, "--data", tiny_store)
    assert status == 65 and expected in printed


def test_figures_of_another_machine(bundle: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding may differ there, so an interval decides."""
    claim(bundle, lambda figures: figures["measured_by"].update(processor="another"))
    claim(bundle, lambda figures: figures.update(bits_per_token=figures["bits_per_token"] * (1 - 1e-4)))
    claim(bundle, lambda figures: figures["joint"].update(distinct_1=0.123))
    status, printed = verify(capsys, bundle, "--data", tiny_store)
    assert status == 0 and "1 within the interval, 0 BEYOND the interval, 1 different, without an interval" in printed
    assert "\nbits_per_token: " in printed and "\njoint.distinct_1: 0.123 claimed" in printed
    claim(bundle, lambda figures: figures.update(bits_per_token=3.0))
    status, printed = verify(capsys, bundle, "--data", tiny_store)
    assert status == 65 and "PROBLEM evaluation.json: bits_per_token: 3.0 claimed" in printed


def test_a_bundle_without_figures(
    originals: Path, tmp_path: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(originals / "run", tmp_path / "run")
    (run / "evaluation.json").unlink()
    bundle = tmp_path / "out"
    assert cli.main(["export", str(run), str(bundle)]) == 0
    status, printed = verify(capsys, bundle)
    assert status == 0 and "not checked: figures" in printed
    for options, named in ((["--data", tiny_store], "evaluation.json"), (["--all"], "the bundle")):
        assert_user_error(verify(capsys, bundle, *options), 2, named)
    assert_user_error(verify(capsys, run, "--data", tiny_store), 2, "--data")


def test_bundles_of_other_versions(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their cards and options differ, which accuses nobody."""
    claim(bundle, lambda figures: figures["measured_by"]["versions"].update(mmldlm="9.0.0"), with_card=False)
    (bundle / "README.md").write_text("another card")
    reseal(bundle, exported_with="9.0.0")
    status, printed = verify(capsys, bundle)
    assert status == 0 and printed.count("which another version of mmldlm wrote") == 2


def test_sentence_pairs_are_not_measured_again(
    originals: Path, tmp_path: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their file is not in the bundle. Options of the command line count."""
    pairs, run, bundle = tmp_path / "pairs.tsv", shutil.copytree(originals / "run", tmp_path / "run"), tmp_path / "out"
    pairs.write_text("".join(f"The {a} of the.\tThe rose.\t{len(a)}\n" for a in ("rose", "wave", "violin", "tulip")))
    asked = [*ASKED, "--modes", "t2l", "sampling.t2l_steps=3", "--sts", str(pairs)]
    assert cli.main(["evaluate", str(run), *asked]) == 0 and cli.main(["export", str(run), str(bundle)]) == 0
    status, printed = verify(capsys, bundle, "--data", tiny_store)
    assert status == 0 and "not checked: figures of sentence pairs" in printed


MEASURED = {"a": 10.0, "a_ci95": [9.0, 11.0], "a_shuffled": 5.0, "b": 1.0, "rows": [{"a": 3.0}], "texts": ["x"]}
VERDICTS: dict[str, list[tuple[str, object]]] = {
    EQUAL: [("a", 10.0 * (1 + 1e-9))],
    WITHIN: [("a", 10.9), ("a_shuffled", 5.9), ("a_ci95", [9.02, 11.03])],
    BEYOND: [("a", 11.1), ("a_shuffled", 6.1), ("a_ci95", [8.8, 11.2]), ("a_ci95", [10.1, 12.1])],
    UNDECIDED: [("b", 1.1), ("b", None), ("a", "10"), ("texts", ["y"]), ("c", 1.0)],
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_verdicts(verdict: str) -> None:
    for key, claimed in VERDICTS[verdict]:
        found = {line.partition(":")[0]: one for one, line in compare({**MEASURED, key: claimed}, MEASURED)}
        assert found.pop(key) == verdict and {*found.values()} <= {EQUAL}, (key, claimed)
