"""`mmldlm convert FORMAT SOURCE OUT`: data and run configs of another trainer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mmldlm.config import split_arguments
from mmldlm.contrib.lgdlm.config import convert_config, to_config_text
from mmldlm.contrib.lgdlm.folders import LAYOUTS, find_layout, read_samples
from mmldlm.contrib.lgdlm.samples import Sample, SourceSample
from mmldlm.errors import DataError, ExitCode, UsageError
from mmldlm.prepare.readers.tables import pyarrow
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress, print_status
from mmldlm.utils.short_repr import display_name

GROUP_BYTES = 1 << 24  # of a row group, which is held in memory until it is written


def write_parquet(path: Path, samples: Iterable[Sample], group_bytes: int = GROUP_BYTES) -> int:
    """Write samples to a Parquet file with the columns `id`, `latents` and `tokens` or `text`; return their number.

    Either all samples have tokens or all have text. A row group has `group_bytes` in memory.
    """
    arrow, writer, num_samples = pyarrow(), None, 0
    for group in _groups(samples, group_bytes):
        ids, latents, contents = zip(*group, strict=True)
        is_text = isinstance(contents[0], str)
        columns = {
            "id": arrow.array(ids, arrow.string()),
            "latents": arrow.array(map(list, latents), arrow.list_(arrow.list_(arrow.float32()))),
            "text" if is_text else "tokens": arrow.array(contents, None if is_text else arrow.list_(arrow.int64())),
        }
        table = arrow.table(columns)
        writer = writer or arrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=len(group))
        num_samples += len(group)
    if writer:
        writer.close()
    return num_samples


def _groups(samples: Iterable[Sample], group_bytes: int) -> Iterator[list[Sample]]:
    group, size = list[Sample](), 0
    for sample in samples:
        group.append(sample)
        size += sample.latents.nbytes + sys.getsizeof(sample.content)
        if size >= group_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _usable(samples: Iterable[SourceSample], skip: bool, notes: list[str]) -> Iterator[Sample]:
    """Yield the samples that can be read; with `skip`, print a line on stderr for each other one."""
    num_skipped = 0
    for location, read in samples:
        try:
            sample = read()
            f"{sample.id}{sample.content}".encode()  # fails for half a surrogate pair, which Parquet cannot hold
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
        DataError: There are no such data, files contradict each other, or a sample cannot be read without `skip`.
        UsageError: The file exists already, or pyarrow is not installed.
    """
    pyarrow()
    path, notes = out / "lgdlm.parquet", list[str]()
    if not source.is_dir():
        raise DataError(f"{source}: no such folder or file; expected data or a YAML file of LGDLM")
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


def convert_lgdlm_config(source: Path, out: Path, assignments: Sequence[str]) -> None:
    """Write a run config of LGDLM as `out/NAME.yaml`; a file that exists already is a `UsageError`."""
    settings, left = convert_config(source, assignments)
    path = out / f"{source.stem}.yaml"
    if path.exists():
        raise UsageError(f"{path}: exists already; expected another folder")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(to_config_text(settings, left, source), encoding="utf-8")
    names = ", ".join(printable(display_name(key)) for key in left) or "nothing"
    print(f"{path}: {len(settings)} settings", f"not converted, see docs/migration.md: {names}", sep="\n")
    for key, advice in (("train.steps", "epochs x training samples / global batch"), ("mode", "l2t, t2l or joint")):
        if key not in settings:
            print(f"to choose: {key} ({advice}), which is at its default")


def main(argv: list[str]) -> int:
    """Run `mmldlm convert`; an `MmldlmError` propagates."""
    parser = argparse.ArgumentParser(prog="mmldlm convert", description="Convert data and configs of other trainers.")
    lgdlm = parser.add_subparsers(required=True, metavar="FORMAT").add_parser(
        "lgdlm",
        help="a data folder or a run config of the LGDLM trainer",
        description="Convert a data folder of the LGDLM trainer to a Parquet file of tokens or texts with latents, or "
        "a YAML file of it to a run config; docs/migration.md has a table of all keys.",
    )
    lgdlm.add_argument(
        "source", metavar="SOURCE", type=Path, help="the folder with tokens/, latents/ or .dat files, or a YAML file"
    )
    lgdlm.add_argument(
        "arguments",
        metavar="OUT | KEY=VALUE",
        nargs="*",
        help="folder to write to, created if needed (default: converted); for a YAML file also the keys and shell "
        "variables that the command of the run set",
    )
    lgdlm.add_argument("--layout", choices=LAYOUTS, help="see docs/data.md (default: that of tokens, else texts)")
    lgdlm.add_argument(
        "--on-problem", choices=["error", "skip"], default="error", help="unusable samples (%(default)s)"
    )
    options = parser.parse_args(argv)
    folders, assignments = split_arguments(options.arguments)
    if len(folders) > 1:
        raise UsageError(f"expected one folder to write to, found {len(folders)}: {' '.join(folders)}")
    out = Path(folders[0] if folders else "converted")
    if options.source.is_file():
        if options.layout or options.on_problem == "skip":
            raise UsageError(f"{options.source}: a file is converted as a run config, expected no options of data")
        convert_lgdlm_config(options.source, out, assignments)
        return ExitCode.DONE
    if assignments:
        raise UsageError(f"{options.source} is no file; expected no KEY=VALUE, found {assignments[0]}")
    convert_lgdlm(options.source, out, options.layout, skip=options.on_problem == "skip")
    return ExitCode.DONE
