"""Two million documents, about 200 million tokens: memory, kills, bytes. MMLDLM_DOCUMENTS makes it smaller."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from mmldlm.data.store import Store
from mmldlm.data.verify import verify_part
from mmldlm.errors import DataError
from tests.helpers.large_corpus import build, peak_until, started, write_synthetic_corpus
from tests.helpers.prepare_runs import differing, finished_tasks
from tests.helpers.sample_corpus import flip_bit

pytestmark = pytest.mark.slow
DOCUMENTS = int(os.environ.get("MMLDLM_DOCUMENTS", "2000000"))
LIMIT = 2 << 30  # bytes, summed over the processes


def test_a_large_corpus_within_2_gib_killed_twice(tmp_path: Path) -> None:
    corpus = write_synthetic_corpus(tmp_path / "corpus.txt", DOCUMENTS)
    options = ["--part-bytes", min(64 << 20, corpus.stat().st_size // 16), "--max-length", 256]
    one, two = tmp_path / "one", tmp_path / "two"
    seconds, peak, stages = build(corpus, one, 1, *options)
    rates = {stage: round(DOCUMENTS / max(0.01, spent)) for stage, spent in stages.items()}
    print(f"\none process: {seconds:.0f} s, {DOCUMENTS / seconds:.0f} documents/s, {peak >> 20} MiB; by stage {rates}")
    assert peak < LIMIT
    store = Store.open(one)
    assert sum(len(store.split(name)) for name in store.manifest.splits) == DOCUMENTS
    assert 90 < np.mean(store.split("train").lengths) < 110
    chunks = len(store.manifest.splits["test"].shards)
    peaks = []
    for moment in (chunks // 2, chunks + 1 + chunks // 2):  # while reading, while encoding
        process = started(corpus, two, 2, *options)
        peaks.append(peak_until(process, lambda: len(finished_tasks(two)) >= moment))  # noqa: B023
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds, peak, _ = build(corpus, two, 2, *options)
    peaks.append(peak)
    print(f"two processes: {[each >> 20 for each in peaks]} MiB; the last {seconds:.0f} s")
    assert max(peaks) < LIMIT
    assert differing(one, two) == []
    assert verify_part(store) == (0, [])
    flip_bit(one / "train-00003.latents.npy")
    with pytest.raises(DataError, match=r"train-00003.latents.npy: damaged"):
        verify_part(Store.open(one))
