"""`mmldlm verify BUNDLE`: check that a bundle fits together, and measure the figures of its model card again.

Files, weights, settings, figures and card must fit together. Somebody could change all of them and their hashes, so
with a data store the evaluation is repeated: by its own code, on the same documents, with the same times and seeds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mmldlm import __version__
from mmldlm.checkpoint.manifest import foreign, foreign_files, verify_checkpoint
from mmldlm.data.manifest import Manifest
from mmldlm.data.verify import verify_part
from mmldlm.errors import UsageError
from mmldlm.evaluate import measured_by
from mmldlm.evaluation import EvaluationConfig
from mmldlm.evaluation.suite import evaluate, provenance
from mmldlm.inference.bundle import CARD_NAME, EVALUATION_NAME, model_card
from mmldlm.loading.compatibility import LATENTS_NAME
from mmldlm.loading.load import DESCRIPTION, LoadedRun, load_run
from mmldlm.utils.cpu import choose_threads
from mmldlm.utils.files import read_regular
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.progress import Progress
from mmldlm.utils.short_repr import short_repr

ROUNDING = 1e-6  # largest relative difference of equal figures
MAX_WIDENING = 0.1  # largest relative difference between the widths of an interval and of its repetition
_INERT = ("", ".md", ".txt", ".png", ".jpg", ".svg")  # suffixes of files that users may add to a bundle
EQUAL, WITHIN, BEYOND, UNDECIDED = (
    "equal",
    "within the interval",
    "BEYOND the interval",
    "different, without an interval",
)


@dataclass(frozen=True)
class Claims:
    """Content of a bundle's `evaluation.json`."""

    figures: dict[str, Any]
    config: EvaluationConfig
    modes: list[Any]
    settings: list[str]
    version: str  # of mmldlm that measured the figures, "" if unknown

    @classmethod
    def read(cls, folder: Path) -> Claims:
        """Read the claims of a bundle, or raise `DataError` if an evaluation writes other contents."""
        path = folder / EVALUATION_NAME
        with foreign(path):
            figures = json.loads(read_regular(path, folder))
            defaults = asdict(EvaluationConfig())
            config = EvaluationConfig(**{name: type(value)(figures[name]) for name, value in defaults.items()})
            if min(config.samples - 1, config.texts, config.times, config.batch, config.seed + 1) < 1:
                raise ValueError(f"expected positive numbers, found {config}")
            version = figures.get("measured_by", {}).get("versions", {}).get("mmldlm", "")
            return cls(figures, config, list(figures["modes"]), str(figures.get("sampling", "")).split(), version)


def verify_bundle(folder: Path, data: str | None = None) -> tuple[list[str], list[str]]:
    """Check a bundle and, with the store `data`, measure its figures again.

    Returns:
        Lines about what was checked, and a line for each problem.

    Raises:
        DataError: A file of bundle or store is damaged, or config, tokenizer, latents and weights do not fit together.
        UsageError: The bundle has no figures to measure again.
    """
    saved = verify_checkpoint(folder)
    claims = Claims.read(folder) if EVALUATION_NAME in saved.files else None
    if data is not None and claims is None:
        raise UsageError(f"--data: expected a bundle with figures, found no {EVALUATION_NAME} in {folder}")
    settings = claims.settings if claims else []
    run = load_run(folder, settings=settings)
    lines, problems = [f"{len(saved.files)} files, weights and config"], list[str]()
    for line in foreign_files(folder):
        (lines if Path(line).suffix in _INERT else problems).append(line)
    if Manifest.read(folder / DESCRIPTION).latent != run.store.manifest.latent:
        problems.append(f"{folder / LATENTS_NAME}: differs from the latents in {folder / DESCRIPTION}")
    if run.info.get("exported_with") == __version__:
        problems += _differences_of_cards(run, claims)
    else:
        lines.append(f"not checked: {CARD_NAME}, which another version of mmldlm wrote")
    if claims is None:
        return [*lines, "not checked: figures, since the bundle has none"], problems
    problems += _contradictions(run, claims)
    if claims.version != __version__:
        lines.append(f"not checked: options of {EVALUATION_NAME}, which another version of mmldlm wrote")
    if data is None:
        lines.append("not checked: whether the figures are true; --data STORE measures them again")
    elif not problems:  # otherwise the figures may belong to something else
        measured, problems = _measure(load_run(folder, data=data, settings=settings), claims)
        lines += measured
    return lines, problems


def _differences_of_cards(run: LoadedRun, claims: Claims | None) -> Iterator[str]:
    """Yield the first line in which the model card differs from one with the figures of `evaluation.json`."""
    found = read_regular(run.folder / CARD_NAME, run.folder).decode(errors="replace").splitlines()
    with foreign(run.folder / EVALUATION_NAME):
        expected = model_card(run, claims.figures if claims else None).splitlines()
    for number, (line, right) in enumerate(zip_longest(found, expected, fillvalue=""), 1):
        if line != right:
            yield f"{run.folder / CARD_NAME}: line {number}: found {line.strip()!r}, expected {right.strip()!r}"
            return


def _contradictions(run: LoadedRun, claims: Claims) -> Iterator[str]:
    """Yield where `evaluation.json` says that other weights, data or options were measured."""
    figures = claims.figures
    expected = provenance(run, claims.config, claims.modes, figures.get("sts_sha256"))
    expected["data_manifest"] = run.info.get("data_manifest")
    if claims.version != __version__:  # other versions have other options
        del expected["options_sha256"]
    for key, value in expected.items():
        is_needed = key in figures or "exported_with" in run.info  # earlier versions wrote fewer keys
        if is_needed and figures.get(key) != value:
            found, of_bundle = short_repr(figures.get(key)), short_repr(value)
            yield f"{run.folder / EVALUATION_NAME}: {key}: found {found}, expected {of_bundle}, by the bundle"


def _measure(run: LoadedRun, claims: Claims) -> tuple[list[str], list[str]]:
    """Repeat an evaluation. Return lines with verdicts, and problems."""
    figures, config = claims.figures, claims.config
    if run.store.identity != (claimed := figures.get("data_manifest", run.info.get("data_manifest"))):
        found, expected = short_repr(run.store.identity), short_repr(claimed)
        return [], [f"{run.store.path}: found data with the hash {found}, expected {expected}, as in {EVALUATION_NAME}"]
    verify_part(run.store, splits=("train", config.split))
    choose_threads()
    with Progress() as progress:
        again = replace_nonfinite(evaluate(run, config, claims.modes, progress=progress))
    measuring = measured_by(run.device)
    repeats_bits = figures.get("measured_by") == measuring and measuring["name"] == "cpu"
    checked = {*provenance(run, config), *asdict(config), "sampling", "measured_by", "sts_sha256"}
    lines, problems, verdicts = list[str](), list[str](), Counter[str]()
    claims_left, measured = ({key: one[key] for key in one if key not in checked} for one in (figures, again))
    if "sts_sha256" in figures:
        claims_left["t2l"] = {key: one for key, one in figures.get("t2l", {}).items() if not key.startswith("sts_")}
        lines.append("not checked: figures of sentence pairs; mmldlm evaluate BUNDLE --sts FILE measures them")
    with foreign(run.folder / EVALUATION_NAME):
        compared = [*compare(claims_left, measured)]
    for verdict, line in compared:
        verdicts[verdict] += 1
        if verdict == BEYOND or (verdict != EQUAL and repeats_bits):
            same = "" if verdict == BEYOND else ", by the versions, processor and threads of the evaluation"
            problems.append(f"{EVALUATION_NAME}: {line}{same}")
        elif verdict != EQUAL:
            lines.append(line)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in (EQUAL, WITHIN, BEYOND, UNDECIDED))
    return [f"figures measured again: {counts}", *lines], problems


def compare(claimed: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the verdict and a line for each figure of an evaluation and of its repetition.

    A baseline without an interval gets the width of the metric whose key its own begins with.
    """
    before, after = dict(_leaves(claimed)), dict(_leaves(measured))
    for name in {**before, **after}:
        first, second = before.get(name, "nothing"), after.get(name, "nothing")
        verdict = EQUAL if first == second else _verdict(name, first, second, _half_width(name, after))
        yield verdict, f"{name}: {short_repr(first)} claimed, {short_repr(second)} measured: {verdict}"


def _verdict(name: str, claimed: Any, measured: Any, half_width: float) -> str:
    """Return the verdict on a number or an interval, of which the lower ends and the widths are compared."""
    try:
        (low, *high), (again, *high_again) = (
            value if isinstance(value, list) else [value] for value in (claimed, measured)
        )
        widths = [sum(high) - low, sum(high_again) - again] if high else [low, again]
        is_equal = math.isclose(low, again, rel_tol=ROUNDING) and math.isclose(*widths, rel_tol=ROUNDING)
    except (TypeError, ValueError):  # texts, or a figure that is missing
        return UNDECIDED
    if is_equal or math.isnan(half_width):
        return EQUAL if is_equal else UNDECIDED
    is_spread = name.endswith(("_ci95", "_standard_error"))
    is_as_wide = not is_spread or math.isclose(*widths, rel_tol=MAX_WIDENING)
    return WITHIN if is_as_wide and abs(low - again) <= half_width else BEYOND


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the figures of an evaluation by dotted names. An interval, and a list of texts, is one figure."""
    if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _half_width(name: str, measured: Mapping[str, Any]) -> float:
    """Return half the width of the interval of a figure, or of the metric that its name begins with; NaN for none."""
    parent, dot, key = name.rpartition(".")
    words = key.split("_")
    for count in range(len(words), 0, -1):
        interval = measured.get(f"{parent}{dot}{'_'.join(words[:count])}_ci95")
        if interval and None not in interval:
            return float(interval[1] - interval[0]) / 2
    return math.nan
