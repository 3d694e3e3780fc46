"""Evaluates a run on held-out samples while it trains: losses, figures, texts, and metrics of generations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from mmldlm.evaluation.prompts import prompt_samples
from mmldlm.evaluation.quality import quality
from mmldlm.evaluation.validate import validation_ids, validation_losses
from mmldlm.evaluation.visualize import collect_figure_data, figure_metrics, figures_due, text_samples
from mmldlm.loading.load import LoadedRun
from mmldlm.trainer.step_numbers import StepNumbers
from mmldlm.utils.callback import Callback


class Validation(Callback):
    """Logs losses, figures, texts and their quality on the validation split, and keeps the best checkpoints.

    `save` starts a checkpoint, see `Trainer.save`.
    """

    def __init__(self, numbers: StepNumbers, save: Callable[..., None]):
        self.numbers, self.log, self.components = numbers, numbers.log, numbers.components
        self.config, self.engine, self.save = numbers.config, numbers.engine, save

    def after_step(self, step: int) -> None:
        """Validate, and measure the quality of generated texts and latents, if it is due (collective)."""
        config, store = self.config, self.components.store
        if config.validation_due(step, store.manifest.splits["train"].samples):
            self._validate(step)
        if config.train.is_due(step, config.validation.quality_every):
            ids = validation_ids(store.split("validation"), config.validation.quality_samples)
            with self.eval_mode("quality") as run:
                self.log.tracker.quality(step, quality(run, ids, self.engine))

    @contextmanager
    def eval_mode(self, activity: str) -> Iterator[LoadedRun]:
        """Yield the network for evaluation: no dropout, no gradients, and EMA weights if `ema.eval_weights` says so.

        The clock of the steps stops meanwhile, and heartbeats report `activity`.
        """
        config, components, engine, log = self.config, self.components, self.engine, self.log
        self.numbers.fetch()
        with log.paused():
            log.tracker.heartbeat(log.state.step, activity)
            engine.unwrapped_model.eval()
            with torch.no_grad(), engine.ema_scope() if config.ema.eval_weights == "ema" else nullcontext():
                yield LoadedRun(
                    folder=Path(config.run.dir),
                    config=config,
                    store=components.store,
                    tokenizer=components.tokenizer,
                    model=engine.eval_forward,
                    objective=components.objective,
                    device=engine.device,
                    step=log.state.step,
                    weights=config.ema.eval_weights,
                    has_ema=config.ema.decay > 0,
                )
            # No `finally`: an error in the body ends the run, see `Engine.ema_scope`.
            engine.unwrapped_model.train()

    def _validate(self, step: int) -> None:
        """Log losses, figures and texts, and save a checkpoint if the loss is one of the lowest (collective)."""
        config, components, engine, log = self.config, self.components, self.engine, self.log
        tracker, state = log.tracker, log.state
        with self.eval_mode("validation") as run:
            losses = validation_losses(
                components.objective, components.store, components.validation_ids, config, engine
            )
            figure_data = collect_figure_data(run, engine) if figures_due(step, config) else None
            texts = text_samples(run, engine, figure_data)
            if components.prompts is not None:
                texts["samples/prompts"] = prompt_samples(run, engine, components.prompts)
            values = {**losses.values, **(figure_metrics(figure_data) if figure_data else {})}
            tracker.validation(step, {**values, "weights": config.ema.eval_weights}, losses.bin_losses)
            for tag, rows in texts.items():
                tracker.samples(step, rows, tag)
            if figure_data:
                tracker.log_figures(step, figure_data, losses.bin_losses)
        if self.numbers.plateau is not None:
            self.numbers.plateau.observe(step, values["validation/total"])
        loss = values[config.judged_by]
        if state.judge(config.judged_by, loss, config.checkpoint.keep_best):
            self.save(validation_loss=loss)
