"""A training loop around the reference, of the verbs that the trainer's loop has, over the same corrupted batches."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.reference import ReferenceModel, reference_loss
from benchmarks.task import Feed, Task, device
from mmldlm.batch import Batch
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.run.compatibility import data_shape
from mmldlm.run.factory import build_objective


class ReferenceRun:
    """AdamW and the clipping as PyTorch has them unasked; nothing is logged."""

    def __init__(self, task: Task, streams: int, flash: bool, feed: Feed):
        self.config = task.config("never-opened")
        self.feed, self.device = feed, device()
        manifest = Store.open(task.store).manifest
        self.objective, shape = build_objective(self.config, manifest), data_shape(manifest)
        torch.manual_seed(self.config.run.seed)
        self.model = ReferenceModel(task.depth, task.width, shape, streams, flash).to(self.device).train()
        optim = self.config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay
        )
        self.read: dict[str, float] = {}

    def step(self) -> None:
        (noised,) = self.corrupt(self.feed.step, [self.feed.batch()])
        self.backward(self.forward(noised))
        self.update()
        self.finish_step()

    def corrupt(self, step: int, micro_batches: list[Batch]) -> list[NoisedBatch]:
        config = self.config
        weights = mode_weights_at(step, config.mode, config.mode_schedule)
        size, samplers = config.train.global_batch_size, (config.text.sampler, config.latent.sampler)
        return [
            self.objective.corrupt(batch, draw_noise(batch, config.run.seed, step, size, weights, *samplers)).to(
                self.device
            )
            for batch in micro_batches
        ]

    def forward(self, noised: NoisedBatch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            loss, self.read = reference_loss(
                self.model, noised, self.config.loss.latent_weight, self.model.shape.max_length
            )
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish_step(self) -> None:
        """The values were read in the forward pass."""
