"""Settings of the moving average of the weights, and its decay as a pure function of the step."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmldlm.errors import ConfigError
from mmldlm.settings.fields import setting

Weights = Literal["ema", "trained"]  # the average of the weights, or the weights themselves
WORDS: dict[Weights, str] = {"ema": "average of the weights (ema)", "trained": "trained weights"}


@dataclass(frozen=True)
class EmaConfig:
    decay: float = setting(
        0.0,
        "share of the average that stays in each step that is taken, for long runs 0.999 to 0.9999; 0: no average. "
        "It costs 4 bytes a trained parameter, shared out as the optimizer's state is",
        at_least=0,
        below=1,
    )
    warmup: bool = setting(
        True, "in step n, counted from 0, at most (1 + n) / (10 + n) of it stays, so that it forgets the first weights"
    )
    evaluate: bool = setting(
        True,
        "validations in training measure the average, and `evaluate` and `sample` take it where --weights says nothing",
    )

    @property
    def measured(self) -> Weights:
        """What a validation in training measures."""
        return "ema" if self.decay and self.evaluate else "trained"


def add_weights_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=list(WORDS),
        help="of a checkpoint that has both: ema, the average, or trained; default: ema, unless ema.evaluate is false",
    )


def decay_at(step: int, config: EmaConfig) -> float:
    """Share of the average that stays in optimizer step `step`, counted from 0; no state, so it resumes as it is.

    The warm-up is that of TensorFlow's `tf.train.ExponentialMovingAverage` (there `num_updates`), which diffusion
    models took over.
    """
    return min(config.decay, (1 + step) / (10 + step)) if config.warmup else config.decay


def check_ema(config: EmaConfig, deepspeed: Mapping[str, Any] | None) -> None:
    """`ConfigError` where the engine, of this DeepSpeed file, keeps the weights out of reach."""
    sections = (deepspeed or {}).get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        if config.decay and (sections.get(key) or {}).get("device") == "nvme":
            raise ConfigError(
                f"ema.decay: {config.decay:g} needs master weights in memory, found zero_optimization.{key}.device "
                "nvme in the DeepSpeed file; expected cpu or none there, or ema.decay 0"
            )
