"""`mmldlm convert FORMAT SOURCE OUT`: data of another trainer."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from mmldlm.contrib.lgdlm.folders import LAYOUTS, find_layout, read_samples
from mmldlm.contrib.lgdlm.samples import Sample, SourceSample
from mmldlm.errors import DataError, ExitCode, UsageError
from mmldlm.prepare.documents import batches
from mmldlm.prepare.readers.files import pyarrow
from mmldlm.utils.progress import Progress, print_status


def write_parquet(path: Path, samples: Iterable[Sample]) -> int:
    """Write samples to a Parquet file with the columns `id`, `latents` and `tokens` or `text`, and return their number.

    Either all samples have tokens or all have text. A row group has 512 samples, which are in memory together.
    """
    arrow, writer, num_samples = pyarrow(), None, 0
    for group in batches(samples):
        ids, latents, contents = zip(*group, strict=True)
        is_text = isinstance(contents[0], str)
        columns = {
            "id": arrow.array(ids, arrow.string()),
            "latents": arrow.array(map(list, latents), arrow.list_(arrow.list_(arrow.float32()))),
            "text" if is_text else "tokens": arrow.array(contents, None if is_text else arrow.list_(arrow.int64())),
        }
        table = arrow.table(columns)
        writer = writer or arrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
        num_samples += len(group)
    if writer:
        writer.close()
    return num_samples


def _usable(samples: Iterable[SourceSample], skip: bool, notes: list[str]) -> Iterator[Sample]:
    """Yield the readable samples. With `skip`, print a line on stderr for each unreadable one."""
    num_skipped = 0
    for location, read in samples:
        try:
            sample = read()
            f"{sample.id}{sample.content}".encode()  # fails for half a surrogate pair, which Parquet cannot store
        except (DataError, UnicodeEncodeError) as error:
            if not skip:
                raise DataError(f"{location}: {error}; --on-problem skip leaves such samples out") from None
            print_status(f"{location}: {error}")
            num_skipped += 1
        else:
            yield sample
    if num_skipped:
        notes.append(f"{num_skipped} samples left out")


def convert_lgdlm(source: Path, out: Path, layout: str | None, skip: bool) -> None:
    """Write the samples of a data folder of the LGDLM trainer to `out/lgdlm.parquet`, which appears when complete.

    Raises:
        DataError: The folder has no data, files contradict each other, or a sample is unreadable and `skip` is false.
        UsageError: The file exists already, or pyarrow is not installed.
    """
    pyarrow()
    path, notes = out / "lgdlm.parquet", list[str]()
    if not source.is_dir():
        raise DataError(f"{source}: no such folder; expected data of LGDLM (its configs: see docs/migration.md)")
    if path.exists():
        raise UsageError(f"{path}: exists already; expected another folder")
    layout = layout or find_layout(source)
    out.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".incomplete")
    try:
        with Progress() as progress:
            progress.phase("converting", announce=False)
            samples = progress.track(read_samples(source, layout, notes), "samples")
            num_samples = write_parquet(temporary, _usable(samples, skip, notes))
        if not num_samples:
            raise DataError(f"{source}: no usable samples of the layout {layout}")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{path}: {num_samples} samples of the layout {layout}", *notes, sep="; ")
    tokens = "" if layout == "texts" else " --tokens-field tokens --tokenizer TOKENIZER"
    print(f"Next: mmldlm prepare {path}{tokens} --latents-field latents --key-field id --out STORE")


def main(argv: list[str]) -> int:
    """Run `mmldlm convert` and return 0, or raise `MmldlmError`."""
    parser = argparse.ArgumentParser(prog="mmldlm convert", description="Convert data of other trainers.")
    lgdlm = parser.add_subparsers(required=True, metavar="FORMAT").add_parser(
        "lgdlm",
        help="a data folder of the LGDLM trainer",
        description="Convert a data folder of the LGDLM trainer to a Parquet file of tokens or texts with latents. "
        "docs/migration.md has the settings of its run configs.",
    )
    lgdlm.add_argument("source", metavar="SOURCE", type=Path, help="the folder with tokens/, latents/ or .dat files")
    lgdlm.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        nargs="?",
        default="converted",
        help="folder to write to, created if needed (%(default)s)",
    )
    lgdlm.add_argument("--layout", choices=LAYOUTS, help="see docs/data.md (default: that of tokens, else texts)")
    lgdlm.add_argument(
        "--on-problem", choices=["error", "skip"], default="error", help="unusable samples (%(default)s)"
    )
    options = parser.parse_args(argv)
    convert_lgdlm(options.source, options.out, options.layout, skip=options.on_problem == "skip")
    return ExitCode.DONE
