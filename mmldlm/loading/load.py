"""Load a trained run or a bundle: config, data and weights, ready to sample and evaluate.

A bundle (`mmldlm export`) is a checkpoint of the weights alone. It has `BUNDLE_CONFIG` in place of a run's
`config.yaml`, and like a run folder it has a description of the data in `DESCRIPTION`.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmldlm.checkpoint.manifest import MANIFEST, Checkpoint, foreign, verify_checkpoint
from mmldlm.checkpoint.state import check_model_state, load_model_state
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.checkpoint.tensors import TensorFiles
from mmldlm.config import CONFIG_NAME, RunConfig, load_config
from mmldlm.data.encoders import LatentEncoder, load_encoder
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.candidates import Fit
from mmldlm.diffusion.noise import MODES, SampleStreams
from mmldlm.diffusion.objective import Network, Objective
from mmldlm.diffusion.sampling import Sampler, SamplingConfig
from mmldlm.errors import ConfigError, DataError, MmldlmError, UsageError
from mmldlm.loading.compatibility import check_compatible, match_training_data, saved_ema
from mmldlm.loading.factory import build_meta_model, build_objective, set_matmul_precision
from mmldlm.optim.ema import WEIGHTS_LABELS, Weights
from mmldlm.settings.declaration import restore
from mmldlm.settings.successors import REMOVED_WORDS, current, current_overrides
from mmldlm.utils.files import read_regular
from mmldlm.utils.meta_device import materialize
from mmldlm.utils.printable import printable
from mmldlm.utils.short_repr import short_repr, truncate
from mmldlm.utils.torch_defaults import torch_defaults

if TYPE_CHECKING:
    from mmldlm.distributed.collectives import Collectives

BUNDLE_CONFIG = "config.json"
REPLACEABLE = re.compile(
    r"((sampling|evaluation)\.\w+|attention\.backend|precision)=.*", re.DOTALL
)  # without training again
SEARCH_ROUNDS = 8  # by default, with a small encoder
DESCRIPTION = "data"  # folder with the data store's manifest and encoder, without samples


@dataclass(frozen=True)
class LoadedRun:
    """A trained run, ready to sample and evaluate."""

    folder: Path
    config: RunConfig
    store: Store
    tokenizer: Tokenizer
    model: Network
    objective: Objective
    device: torch.device
    step: int
    weights: Weights  # which weights the model has
    has_ema: bool  # whether the checkpoint has an EMA besides the trained weights
    info: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint's versions, revision and data

    @functools.cached_property
    def words(self) -> Tensor:
        """Mask of the tokens that are words, bool [V]."""
        is_word = torch.zeros(self.store.manifest.vocab_size, dtype=torch.bool)
        is_word[list(self.tokenizer.word_ids)] = True
        return is_word.to(self.device)

    @functools.cached_property
    def encoder(self) -> LatentEncoder:
        """The encoder that computed the latents of the store."""
        return load_encoder(self.store.path / "encoder")

    @functools.cached_property
    def available_encoder(self) -> LatentEncoder | None:
        """`encoder`, or None, with a notice on stderr, if the encoder cannot be loaded here."""
        try:
            return self.encoder
        except MmldlmError as error:
            by = "the network's own t2l" if self.encodes else "their likelihood"
            print(printable(f"texts are chosen by {by}, without the encoder: {error}"), file=sys.stderr)
            return None

    @property
    def encodes(self) -> bool:
        """Return whether the network finds the latent of a text, without a prefix, in one pass or more (t2l)."""
        return "t2l" in self.config.trained_modes and not self.store.manifest.has_prefixes

    def sampler(self, config: SamplingConfig, every_step: bool = False) -> Sampler:
        """Return a sampler of the network."""
        return Sampler(
            self.model, self.objective.text, self.objective.latent, config, self.words, every_step=every_step
        )

    def fit(self, config: SamplingConfig) -> Fit:
        """Return a function that compares texts with latents: the cosine of the text's latent by the run's encoder.

        The function loads the encoder when it is first called. If the encoder cannot be loaded, the network finds the
        latents of the texts, or if it does not do t2l, all fits are NaN.
        """

        def fit(tokens: list[list[int]], latents: Tensor) -> Tensor:
            if (encoder := self.available_encoder) is not None:
                encoded = torch.from_numpy(encoder.encode(self.tokenizer.decode_batch(tokens)))
                return self._agreement(encoded, latents)
            if self.encodes:
                return self.fit_by_network(config)(tokens, latents)
            return torch.full((len(tokens),), torch.nan)

        return fit

    def search_rounds(self, config: SamplingConfig) -> int:
        """Return how many rounds a search for the text of a latent may take.

        Raises:
            UsageError: `config.search` is set, but the encoder cannot be loaded.
        """
        if config.search is None:
            encoder = self.available_encoder
            return SEARCH_ROUNDS if encoder is not None and encoder.is_small else 0
        if config.search and self.available_encoder is None:
            raise UsageError(f"sampling.search: expected a run whose encoder can be loaded, found {config.search}")
        return config.search

    def fit_by_network(self, config: SamplingConfig, every_step: bool = False) -> Fit:
        """Return a function like `fit`, which finds the latents of texts by the network alone.

        Args:
            every_step: See `Sampler`.
        """

        def fit(tokens: list[list[int]], latents: Tensor) -> Tensor:
            # All texts start from the same noise, so a fit does not depend on the other texts.
            streams = SampleStreams(0, MODES.index("t2l"), torch.zeros(len(tokens), dtype=torch.int64))
            made = self.sampler(config, every_step).generate("t2l", streams, latents, tokens)
            return self._agreement(torch.from_numpy(self.store.restore(made.latents.numpy())), latents)

        return fit

    def _agreement(self, found: Tensor, latents: Tensor) -> Tensor:
        """Return the cosine [B] of latents on the encoder's scale and standardized ones, averaged over their tokens."""
        given = torch.from_numpy(self.store.restore(latents.cpu().numpy()))
        return torch.cosine_similarity(found.double(), given.double(), dim=-1).mean(-1)

    def __str__(self) -> str:
        return f"step {self.step}, {WEIGHTS_LABELS[self.weights]}"


def add_run_options(parser: ArgumentParser) -> None:
    """Add the run to a parser, and the options that replace its newest checkpoint, data store and weights."""
    parser.add_argument("run", type=Path, help="run folder, or bundle of `mmldlm export`")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder; default: the newest valid one")
    parser.add_argument("--data", help="data store, if it is no longer at the config's data.path")
    parser.add_argument(
        "--weights",
        choices=list(WEIGHTS_LABELS),
        help="weights of a checkpoint that has both: ema or trained; default: ema, unless ema.evaluate is false",
    )


def add_settings(parser: ArgumentParser) -> None:
    """Add settings that replace the settings of the run. `parse_intermixed_args` takes them at any place."""
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings that replace the run's own, such as sampling.steps=8"
    )


def add_search(parser: ArgumentParser) -> None:
    """Add `--search`, a setting that many users want to vary. See `given_settings`."""
    parser.add_argument("--search", metavar="N", help="l2t: rounds of edits of a text; as sampling.search=N")


def given_settings(options: Namespace) -> list[str]:
    """Return the settings from the options of `add_settings` and `add_search`."""
    search = getattr(options, "search", None)
    return [*options.settings, *([f"sampling.search={search}"] if search else [])]


def run_config(run_dir: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of a run's latest start, or of a bundle. Raise `DataError` if the folder is neither."""
    path, bundled = Path(run_dir) / CONFIG_NAME, Path(run_dir) / BUNDLE_CONFIG
    if bundled.is_file():
        return _bundle_config(bundled, overrides)
    if not path.is_file():
        raise DataError(
            f"{run_dir}: not a run folder or bundle, expected {CONFIG_NAME} and checkpoints/ from `mmldlm train`, or "
            f"{BUNDLE_CONFIG} from `mmldlm export`"
        )
    try:
        return load_config(path, overrides, may_extend=False)
    except ImportError as error:
        raise UsageError(
            f"{run_dir}: a run folder needs the package {error.name}: install it, or use a bundle of `mmldlm export`"
        ) from None


def _bundle_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    try:
        with foreign(path):
            tree = current(json.loads(read_regular(path, path.parent)), str(path), is_record=True)
            config = restore(RunConfig, tree)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (ConfigError, ValueError) as error:  # e.g. the config of another version
        raise DataError(f"{path}: {truncate(str(error), 400)}; expected the config of `mmldlm export`") from None
    if not overrides:
        return config
    overrides = current_overrides(overrides)
    try:
        from mmldlm.settings.fields import build, set_dotted
    except ImportError:  # YAML or pydantic is missing, and a bundle does not need them
        return restore(RunConfig, _with_json(tree, overrides))
    for assignment in overrides:
        set_dotted(tree, assignment)
    return build(RunConfig, tree)


def _with_json(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tree of a config with overrides whose values are JSON. `restore` checks the values."""
    for assignment in overrides:
        key, _, text = assignment.partition("=")
        *groups, name = key.split(".")
        group = functools.reduce(lambda node, part: node[part], groups, tree)
        value: Any = text
        with suppress(ValueError):
            value = json.loads(text)
        group[name] = value
    return tree


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, rather than a run or a bundle."""
    return (path / MANIFEST).is_file() and not (path / BUNDLE_CONFIG).is_file()


def newest_checkpoint(run_dir: Path | str, config: RunConfig) -> Checkpoint:
    """Return the newest intact checkpoint of a run, or the bundle. Raise `DataError` if there is none."""
    if (Path(run_dir) / BUNDLE_CONFIG).is_file():
        return verify_checkpoint(Path(run_dir))
    checkpoint = CheckpointStore(Path(run_dir) / "checkpoints", config.checkpoint.retention).newest(repair=False)
    if checkpoint is None:
        raise DataError(f"{run_dir}: no checkpoint in checkpoints/ yet; train first")
    return checkpoint


def _open_data(folder: Path, config: RunConfig) -> Store:
    """Open the data of a run. For a bundle, or if the data is gone, open the description of the data in the folder."""
    paths = [*config.data.mixture] or [config.data.path]
    gone = next((path for path in paths if not path or not Path(path).is_dir()), None)
    if gone is None:
        return open_data(config.data.location)
    description = folder / DESCRIPTION
    if not description.is_dir():
        raise DataError(f"{gone}: the run's data store is not there; give its path with --data")
    if gone:
        message = f"{gone}: the run's data store is not there; using the encoder in {description}"
        print(printable(message), file=sys.stderr)
    return Store.open(description)


def choose_weights(saved: Checkpoint, requested: Weights | None, has_ema: bool, evaluate_ema: bool) -> Weights:
    """Return which weights to use. A bundle has only one kind. For a run see `load_run`."""
    available: Sequence[Any] = [saved.info["weights"]] if "weights" in saved.info else ["trained", "ema"][: 1 + has_ema]
    if requested is not None and requested not in available:
        missing = "no EMA of the weights (ema.decay)" if requested == "ema" else "no trained weights besides the EMA"
        raise DataError(f"{saved.path}: has {missing}; expected --weights {available[0]}")
    default: Weights = available[-1] if evaluate_ema or len(available) == 1 else "trained"
    return requested or default


@torch_defaults()
def load_run(
    run_dir: Path | str,
    checkpoint: Path | str | None = None,
    data: str | None = None,
    weights: Weights | None = None,
    settings: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> LoadedRun:
    """Load a trained run for generation and evaluation.

    Args:
        run_dir: Run folder, or bundle of `mmldlm export`.
        checkpoint: Checkpoint folder. By default the newest intact checkpoint of the run.
        data: Path of a data store that replaces the config's data.
        weights: "ema" or "trained". By default the EMA if the checkpoint has one, unless `ema.evaluate` is false.
        settings: Settings KEY=VALUE that replace settings of the run, see `REPLACEABLE`.
        device: By default the GPU, if there is one.

    Raises:
        ConfigError: A setting cannot be replaced, or is out of bounds.
        DataError: The folder is not a run, has no checkpoint or not the requested EMA, or the data store is missing or
            has changed.
    """
    folder = Path(run_dir)
    for setting in settings:
        if not REPLACEABLE.fullmatch(setting):
            raise ConfigError(
                f"expected a key of sampling, evaluation, attention.backend or precision, found {short_repr(setting)}"
            )
    config = run_config(folder, [*([f"data.path={data}", "data.mixture={}"] if data else []), *settings])
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    set_matmul_precision(config)
    is_given = checkpoint is not None and Path(checkpoint) != folder
    while True:
        saved = verify_checkpoint(Path(str(checkpoint))) if is_given else newest_checkpoint(folder, config)
        try:
            with foreign(saved.path):
                return _load_checkpoint(folder, config, saved, weights, device)
        except (DataError, OSError):
            if is_given or saved.path.exists():
                raise
            # Otherwise the run has removed this checkpoint in the meantime, and has a newer one.


def _load_checkpoint(
    folder: Path, config: RunConfig, saved: Checkpoint, weights: Weights | None, device: torch.device
) -> LoadedRun:
    store = match_training_data(saved, _open_data(folder, config))
    check_compatible(saved, config, store)
    model = build_meta_model(config, store.manifest, device.type)
    tensors = TensorFiles.open(saved, "model")
    check_model_state(model, tensors)  # before a stranger's sizes take memory
    materialize(model, device)
    ema = saved_ema(saved, model)
    weights = choose_weights(saved, weights, ema is not None, config.ema.evaluate)
    # The EMA has only the trained parameters. Frozen parameters come from the model's tensors.
    load_model_state(model, tensors if ema is None or weights == "trained" else tensors.overlay(ema))
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise DataError(f"{saved.path}: {name} has values that are not finite, expected a trained network")
    if "alignment" in saved.tensors:  # the latents of such a bundle were vectors of another encoder
        raise DataError(f"{folder}: `mmldlm align` made this bundle, and is gone: {REMOVED_WORDS['align']}")
    tokenizer = Tokenizer.load(saved.file("tokenizer/tokenizer.json"))
    if tokenizer.identity != store.manifest.tokenizer["sha256"]:
        raise DataError(f"{saved.path}: the tokenizer of the checkpoint and the tokenizer of the data differ")
    return LoadedRun(
        folder=folder,
        config=config,
        store=store,
        tokenizer=tokenizer,
        model=model.eval(),
        objective=build_objective(config, store.manifest),
        device=device,
        step=saved.step,
        weights=weights,
        has_ema=ema is not None,
        info=saved.info,
    )


def load_run_on_all_ranks(options: Namespace, processes: Collectives) -> LoadedRun:
    """Load the run and the settings that the options name, with the same checkpoint on every rank (collective)."""
    checkpoint = options.checkpoint
    with processes.raise_on_all_ranks("loading of the run"):
        if (
            checkpoint is None and processes.is_main
        ):  # one rank chooses, since a running run may save another checkpoint
            checkpoint = newest_checkpoint(options.run, run_config(options.run)).path
    checkpoint = processes.gather(str(checkpoint), "choice of the checkpoint")[0]
    try:
        with processes.raise_on_all_ranks("loading of the run"):
            return load_run(options.run, checkpoint, options.data, options.weights, given_settings(options))
    except (MmldlmError, OSError):
        is_there = processes.gather(Path(checkpoint).exists(), "search for the checkpoint")[0]
        if options.checkpoint is not None or is_there:
            raise
    return load_run_on_all_ranks(options, processes)
