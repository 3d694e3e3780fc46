"""`mmldlm prepare`: raw data to a store. Splits by document, then fits tokenizer and encoder on the training split.

One process or many, each of which goes through the same stages: `read` (chunks of the input to caches of documents),
`fit` (rank 0), `encode` (caches to shards), `measure` (the spread of the latents around their mean), merge (rank 0).
Within a stage each chunk is done by whoever takes it; what a chunk becomes depends on nothing but the plan and the fit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mmldlm.checkpoint import RunLock
from mmldlm.data.manifest import MANIFEST_NAME, Manifest
from mmldlm.data.prepare.coordinator import Crew, Place, place_of
from mmldlm.data.prepare.encode import encode_chunk
from mmldlm.data.prepare.fit import SPLITS_FOLDER, fit, load_fitted_encoder
from mmldlm.data.prepare.inputs import latent_file
from mmldlm.data.prepare.latent_pairing import first_positions
from mmldlm.data.prepare.merge import concat_contents, load_contents, merge
from mmldlm.data.prepare.options import PrepareConfig, add_arguments, from_args
from mmldlm.data.prepare.plan import Plan, make_plan
from mmldlm.data.prepare.read import DOCUMENTS, Corpus, cache_chunk, count_chunk
from mmldlm.data.prepare.readers.latents import POSITION
from mmldlm.data.prepare.report import StageProgress, check_problem_budget, summary
from mmldlm.data.prepare.staging import STORE, Workshop, unfinished
from mmldlm.data.shard_writer import squared_deviations
from mmldlm.data.store_writer import check_splits, error_prefix, publish
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError, MmldlmError, PeerLostError, StorageError, UsageError, run_command
from mmldlm.utils.progress import INTERVAL_S, print_status

__all__ = ["PrepareConfig", "add_arguments", "from_args", "main", "prepare", "summary"]

_LEAVING_S = 5.0  # for processes that were started here, once the preparation has ended


def prepare(
    config: PrepareConfig,
    progress: bool = True,
    place: Place = Place(),  # noqa: B008
    interval: float = INTERVAL_S,
) -> Manifest:
    """Make the store `config.out` and return its manifest; at once where it exists with the same options and sources.

    One of several processes where `place` says so. `interval`: seconds between lines of progress. UsageError for
    options that make no sense; DataError for input that cannot be used, a split without samples, an existing store of
    other data, or the work of another preparation that was left unfinished; RunInUseError where one is at work;
    PeerLostError where another process fails.
    """
    config.check()
    if config.processes > 1:
        if place.world_size > 1:
            raise UsageError(f"--processes {config.processes}: the launcher has started {place.world_size} already")
        with _helpers(config, progress) as place:
            return _prepare(config, progress, place, interval)
    return _prepare(config, progress, place, interval)


def _prepare(config: PrepareConfig, progress: bool, place: Place, interval: float) -> Manifest:
    if place.world_size > 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes share the cores already
        if torch.cuda.is_available():
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on how many share them out
    try:
        shown = StageProgress(progress, place.rank, place.world_size, interval)
        with shown:
            return (_follow if place.rank else _lead)(config, shown, place)
    finally:
        torch.set_num_threads(threads)


def _lead(config: PrepareConfig, shown: StageProgress, place: Place) -> Manifest:
    out, folder = Path(config.out), unfinished(Path(config.out))
    shown.phase("looking through the input", announce=False)
    plan = None
    if place.world_size == 1 and not folder.exists():
        plan = make_plan(config)
        if (existing := _existing(config, plan)) is not None:
            return existing
    with _locked(folder):
        shop = None
        try:
            with Crew(folder, place, config.peer_timeout, _agreed(config)) as crew:
                plan = plan or make_plan(config)
                existing = _existing(config, plan)
                if existing is None:
                    shop = Workshop.bind(out, plan, config)
                crew.put("plan", plan.identity if shop else "")
                if shop:
                    _work(config, plan, shop, crew, shown)
                    shown.print_times()
                crew.put("done", "")
        except MmldlmError as error:
            # Work that can go on stays, and so does what another preparation has left.
            good = isinstance(error, PeerLostError | StorageError) if shop else Workshop.plan_in(folder)
            if not good:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if shop is not None or Workshop.plan_in(folder) in ("", plan.to_json()):
            shutil.rmtree(folder, ignore_errors=True)
    if existing is None:
        existing = Manifest.read(out)
        print_status(summary(existing))
    return existing


def _follow(config: PrepareConfig, shown: StageProgress, place: Place) -> Manifest:
    out, folder = Path(config.out), unfinished(Path(config.out))
    with Crew(folder, place, config.peer_timeout, _agreed(config)) as crew:
        if identity := crew.get("plan"):
            _work(config, Plan.from_json(Workshop.plan_in(folder)), Workshop(out, identity), crew, shown)
        crew.get("done")
    return Manifest.read(out)


def _work(config: PrepareConfig, plan: Plan, shop: Workshop, crew: Crew, shown: StageProgress) -> None:
    """All stages; when the leading process is through, the store is in its place."""
    chunks = range(len(plan.chunks))
    read, encoded, measured = ([f"{stage}-{chunk:05d}" for chunk in chunks] for stage in ("read", "encode", "measure"))
    told: Counter[str] = Counter()
    _read(config, plan, shop, crew, shown, read, told)
    folders = [shop.path(piece) for piece in read]
    if crew.leads and not shop.has("fit"):
        with shop.doing("fit") as (folder, result), shown.timed("fit"):
            found = [shop.result(piece) for piece in read]
            result.update(fit(config, plan.sources, folders, found, folder, told, shown))
    crew.wait(lambda: shop.has("fit"))
    _encode(config, shop, crew, shown, folders, encoded, told)
    if crew.leads and not shop.has("mean"):
        with shop.doing("mean") as (_, result):
            check_problem_budget(config, [shop.result(piece) for piece in [*read, "fit", *encoded]])
            total = concat_contents(load_contents(shop, piece) for piece in encoded)
            with error_prefix(Path(config.out)):
                check_splits(total)
            result["mean"] = total.mean(shop.result(encoded[0])["latent_tokens"]).tolist()
    crew.wait(lambda: shop.has("mean"))
    mean = np.array(shop.result("mean")["mean"])
    for chunk in _share(measured, shop, crew, shown, "measuring latents"):
        with shop.doing(measured[chunk]) as (_, result), shown.timed("measure"):
            shards = load_contents(shop, encoded[chunk]).shards
            result["squares"], result["largest"] = squared_deviations(shop.path(encoded[chunk]), shards, mean)
    if crew.leads:
        shown.phase("writing the store")
        with shown.timed("merge"):
            merge(config, plan, shop, read, encoded, measured, shop.path(STORE))
            publish(shop.path(STORE), Path(config.out), shop.folder / "replaced")


def _read(
    config: PrepareConfig,
    plan: Plan,
    shop: Workshop,
    crew: Crew,
    shown: StageProgress,
    read: list[str],
    told: Counter[str],
) -> None:
    if all(shop.has(piece) for piece in read):
        return
    latents, places = latent_file(config), [0] * len(read)
    if latents and config.latent_ids == POSITION:
        counted = [f"count-{chunk:05d}" for chunk in range(len(read))]
        for chunk in _share(counted, shop, crew, shown, "counting documents"):
            with shop.doing(counted[chunk]) as (_, result), shown.timed("count"):
                result["count"] = count_chunk(plan.chunks[chunk], config, crew.check, shown)
        places = first_positions(latents, [shop.result(piece)["count"] for piece in counted])
    for chunk in _share(read, shop, crew, shown, "reading documents"):
        with shop.doing(read[chunk]) as (folder, result), shown.timed("read"):
            cached = cache_chunk(plan.chunks[chunk], config, latents, places[chunk], folder, told, crew.check, shown)
            result.update(cached)


def _encode(
    config: PrepareConfig,
    shop: Workshop,
    crew: Crew,
    shown: StageProgress,
    folders: list[Path],
    encoded: list[str],
    told: Counter[str],
) -> None:
    fitted = shop.path("fit")
    corpus = Corpus(folders, fitted / SPLITS_FOLDER)
    tokenizer = encoder = None
    for chunk in _share(encoded, shop, crew, shown, "tokenizing and encoding"):
        tokenizer = tokenizer or Tokenizer.load(fitted / "tokenizer")
        encoder = encoder or load_fitted_encoder(config, fitted)
        with shop.doing(encoded[chunk]) as (folder, result):
            documents = shown.track(corpus.documents(chunk), DOCUMENTS, corpus.num_documents(chunk))
            contents, counted = encode_chunk(documents, tokenizer, encoder, config, folder, told, crew.check, shown)
            result.update(counted, latent_tokens=encoder.latent_tokens, contents=contents.save(folder))


def _share(pieces: list[str], shop: Workshop, crew: Crew, shown: StageProgress, stage: str) -> Iterator[int]:
    """Numbers of the pieces that fall to this process. It ends when all are done, by whomever."""
    missing = [number for number, piece in enumerate(pieces) if not shop.has(piece)]
    for number in missing:
        if not shop.has(pieces[number]) and crew.take(pieces[number]):
            shown.phase(stage if len(pieces) == 1 else f"{stage}, part {number + 1} of {len(pieces)}")
            yield number
    if not all(shop.has(pieces[number]) for number in missing):
        shown.phase(f"{stage}: waiting for other processes")
    for number in missing:
        crew.wait(lambda piece=pieces[number]: shop.has(piece))  # type: ignore[misc]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """RunInUseError where another preparation holds the folder."""
    while True:
        with RunLock(folder) as lock:
            if lock.path.exists():  # else it was cleared away by who held the lock until now
                yield
                return


def _agreed(config: PrepareConfig) -> str:
    """What all processes have to be started with."""
    given = [config.inputs, config.out, config.overwrite, config.recorded()]
    return hashlib.sha256(json.dumps(given).encode()).hexdigest()


@contextmanager
def _helpers(config: PrepareConfig, progress: bool) -> Iterator[Place]:
    """The other processes of this machine, while this one is the first of them."""
    launch, context = uuid.uuid4().hex, multiprocessing.get_context("spawn")
    places = [Place(rank, config.processes, rank, launch) for rank in range(config.processes)]
    alone = replace(config, processes=1)
    helpers = [context.Process(target=_help, args=(alone, progress, place), daemon=True) for place in places[1:]]
    for helper in helpers:
        helper.start()
    try:
        yield places[0]
    finally:
        for helper in helpers:
            helper.join(_LEAVING_S)
            helper.kill()


def _help(config: PrepareConfig, progress: bool, place: Place) -> None:
    def command() -> None:
        prepare(config, progress, place)

    sys.exit(run_command(command))


def _existing(config: PrepareConfig, plan: Plan) -> Manifest | None:
    """The manifest of a store that holds what is asked for; DataError where it holds something else."""
    out = Path(config.out)
    if not out.exists() or (config.overwrite and (out / MANIFEST_NAME).is_file()):
        return None
    if not (out / MANIFEST_NAME).is_file():
        raise DataError(f"{out}: exists and is no data store; --overwrite replaces stores only")
    manifest = Manifest.read(out)
    known = [{key: value for key, value in source.items() if key != "documents"} for source in manifest.sources]
    differing = config.differing(manifest.options)
    if known != plan.sources:
        differing.append("sources")
    if differing:
        raise DataError(f"{out}: a store with other {', '.join(differing)}; expected a new folder, or --overwrite")
    print_status(f"{out}: already prepared\n{summary(manifest)}")
    return manifest


def main(argv: list[str] | None = None) -> int:
    """`mmldlm prepare`; returns 0, lets `MmldlmError` pass."""
    parser = argparse.ArgumentParser("mmldlm prepare", description=__doc__)
    add_arguments(parser)
    prepare(from_args(parser.parse_args(argv)), place=place_of(os.environ))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
