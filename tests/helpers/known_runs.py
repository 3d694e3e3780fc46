"""Runs with known scores: one that knows all documents, and an untrained one."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.gaussian import SIGMA_MIN, GaussianDiffusion, per_sample
from mmldlm.loading.factory import build_objective
from mmldlm.loading.load import LoadedRun
from tests.helpers.small_model import build_model

SETTINGS = (
    "model={depth: 1, width: 32, num_heads: 2, conditioning_width: 16, modulation_rank: 4}",
    "sampling={steps: 6, doubled_words: allow}",  # documents of the corpus have some
    # Trained by cosine a network knows directions only, and no sampler finds latents of unequal lengths exactly.
    "loss.latent=mse",
    "latent.prediction=x0",
)


def fresh_run(store: Path, *settings: str) -> LoadedRun:
    """A network with its initial weights: it knows nothing."""
    config = load_config(None, [*SETTINGS, f"data.path={store}", "run.dir=unused", *settings])
    opened = Store.open(store)
    return LoadedRun(
        folder=Path("unused"),
        config=config,
        store=opened,
        tokenizer=Tokenizer.load(opened.path / "tokenizer"),
        model=build_model(config, opened.manifest).eval(),
        objective=build_objective(config, opened.manifest),
        device=torch.device("cpu"),
        step=0,
        weights="trained",
        has_ema=False,
    )


def perfect_run(store: Path, split: str = "test", *settings: str) -> LoadedRun:
    run = fresh_run(store, *settings)
    return LoadedRun(**{**vars(run), "model": KnowsAll(run, split)})


class KnowsAll(torch.nn.Module):
    """A network that has the documents of a split by heart: a text by its latent, and a latent by its text.

    Where both are noise, it sees the document of that length that its latent points at, and stays with it.
    """

    def __init__(self, run: LoadedRun, split: str):
        super().__init__()
        documents = run.store.split(split)
        rows = range(len(documents))
        self.texts = [tuple(documents.tokens(row).tolist()) for row in rows]
        raw = torch.stack([torch.from_numpy(documents.latents(row)) for row in rows])
        self.latents = torch.from_numpy(run.store.standardize(raw.numpy()))
        self.by_text = {text: row for row, text in enumerate(self.texts)}
        self.vocabulary = run.store.manifest.vocab_size
        self.process: GaussianDiffusion = run.objective.latent

    def forward(
        self,
        noised_tokens: Tensor,
        noised_latents: Tensor,
        t_text: Tensor,
        t_latent: Tensor,
        layout: PackedLayout,
        positions: Tensor,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        visible = [tuple(part.tolist()) for part in noised_tokens.split(layout.lengths)]
        inputs = zip(visible, noised_latents, t_text.tolist(), t_latent.tolist(), strict=True)
        seen = [self.seen(*sample) for sample in inputs]
        written = [self.texts[row] for row in seen]
        # A text of another length than the one asked for is cut, or starts again.
        text = [
            own[place % len(own)] for own, size in zip(written, layout.lengths, strict=True) for place in range(size)
        ]
        logits = 100.0 * F.one_hot(torch.tensor(text)[positions], self.vocabulary).float()
        x0, t = self.latents[seen], per_sample(t_latent, noised_latents)
        alpha, sigma = self.process.noise_schedule.alpha(t), self.process.noise_schedule.sigma(t)
        epsilon = (noised_latents - alpha * x0) / sigma.clamp_min(SIGMA_MIN)
        text_out = logits if targets is None else F.cross_entropy(logits, targets, reduction="none")
        length = 100.0 * F.one_hot(torch.tensor([len(own) - 1 for own in written]), 32).float()
        return text_out, self.process.target(x0, epsilon, t_latent), length

    def seen(self, tokens: tuple[int, ...], latent: Tensor, t_text: float, t_latent: float) -> int:
        if t_latent == 0:
            return int((self.latents - latent).square().sum((1, 2)).argmin())
        if t_text == 0:
            return self.by_text[tokens]
        fits = [row for row, text in enumerate(self.texts) if len(text) == len(tokens)]
        near = F.cosine_similarity(self.latents[fits].flatten(1), latent.flatten()[None])
        return fits[int(near.argmax())]
