"""`mmldlm sample RUN --texts FILE | --latents FILE --out OUT.jsonl`, and joint with `--out OUT.jsonl -n COUNT`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from mmldlm.data.prepare.documents import Document
from mmldlm.inference.batch import (
    NO_ROWS,
    Item,
    Job,
    batch_processes,
    describe,
    encode_with,
    read_items,
    read_rows,
    run_batches,
)
from mmldlm.inference.generate import check_guidance, sample
from mmldlm.inference.options import sampling_config


def sample_file(options: Namespace) -> int:
    """Generate `--count` samples for each text or latent of a file, or `--count` joint ones; returns the exit code."""
    mode, count = options.mode, options.count
    with batch_processes(options) as (run, processes, progress):
        config = sampling_config(options, run)
        check_guidance(run, mode, config)
        items: Sequence[Item]
        latents = None
        if mode == "joint":
            items, count = [Document("", "noise", number) for number in range(1, count + 1)], 1
        elif options.latents:
            items, latents = read_rows(options.latents, run)
        else:
            items = read_items(options.texts, run if mode == "t2l" else None)
            latents = encode_with(run) if mode == "l2t" else None
        latent = run.store.manifest.latent
        rows = NO_ROWS if mode == "l2t" else (count, latent.tokens, latent.channels)

        def compute(
            indices: list[int], texts: list[str], latents: np.ndarray | None
        ) -> tuple[list[dict[str, Any]], np.ndarray | None]:
            slots = (torch.tensor(indices)[:, None] * count + torch.arange(count)).flatten()
            total = len(indices) if mode == "joint" else count
            made, generated = sample(
                run, mode, config, options.seed, latents, texts, total, options.length, slots=slots
            )
            parts = [slice(start, start + count) for start in range(0, len(slots), count)]
            records = [{"texts": generated[part], "tokens": list(made.lengths[part])} for part in parts]
            return records, None if mode == "l2t" else made.latents.numpy().reshape(-1, *rows)

        request = {
            "command": f"sample, {mode}",
            **describe(run, options.texts, options.latents),
            "sampling": asdict(config),
            **{name: getattr(options, name) for name in ("count", "length", "seed", "batch")},
        }
        job = Job(options.out, request, items, options.batch, options.on_problem == "skip", latents, rows)
        run_batches(job, compute, processes, progress)
        if processes.is_main:
            job.finish()
    return 0
