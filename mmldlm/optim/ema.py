"""Settings of the exponential moving average (EMA) of the weights, and its decay as a pure function of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmldlm.errors import ConfigError
from mmldlm.settings.fields import setting

Weights = Literal["ema", "trained"]  # the EMA of the weights, or the weights themselves
WEIGHTS_LABELS: dict[Weights, str] = {"ema": "EMA weights", "trained": "trained weights"}


@dataclass(frozen=True)
class EmaConfig:
    """Settings of the EMA of the weights."""

    decay: float = setting(
        0.0,
        "decay of the EMA per accepted step, 0.999 to 0.9999 for long runs; 0: no EMA. It costs 4 bytes per trained "
        "parameter, sharded like the optimizer's state",
        at_least=0,
        below=1,
    )
    warmup: bool = setting(
        True,
        "limit the decay to (1 + n) / (10 + n) in step n, counted from 0, so that the EMA forgets the initial weights",
    )
    evaluate: bool = setting(
        True, "use the EMA for validations in training, and by default in `evaluate` and `sample` (see --weights)"
    )

    @property
    def eval_weights(self) -> Weights:
        """Weights that validations in training use."""
        return "ema" if self.decay and self.evaluate else "trained"


def decay_at(step: int, config: EmaConfig) -> float:
    """Return the decay in optimizer step `step`, counted from 0; a function without state, so it needs no resuming.

    The warmup is the one of TensorFlow's `tf.train.ExponentialMovingAverage` (there `num_updates`), which is common in
    diffusion models.
    """
    return min(config.decay, (1 + step) / (10 + step)) if config.warmup else config.decay


def check_ema(config: EmaConfig, deepspeed: Mapping[str, Any] | None) -> None:
    """Raise `ConfigError` if a DeepSpeed config keeps master weights on NVMe, where the EMA cannot read them."""
    sections = (deepspeed or {}).get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        if config.decay and (sections.get(key) or {}).get("device") == "nvme":
            raise ConfigError(
                f"ema.decay: {config.decay:g} needs master weights in memory, found zero_optimization.{key}.device "
                "nvme in the DeepSpeed file; expected cpu or none there, or ema.decay 0"
            )
