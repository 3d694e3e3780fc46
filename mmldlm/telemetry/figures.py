"""Figures of held-out samples for TensorBoard's page "Images". They need matplotlib.

Shape letters: n samples, D numbers of a flat latent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.utils.versions import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The message to print if matplotlib is missing, else None.
MISSING = (
    None
    if find_spec("matplotlib")
    else f"figures: none in TensorBoard, since matplotlib is not installed; {install_command('figures')}"
)

COLORS = {"true": "0.45", "t2l": "tab:blue", "joint": "tab:orange", "l2t": "tab:green"}
MAX_BARS = 64  # in the figure of accuracy by position
MIN_TOKENS = 0.05  # relative to the first position: a position with fewer tokens gets no bar


@dataclass(frozen=True)
class FigureData:
    """n held-out samples and generations for them. Fields of modes that the run does not train are None.

    Latents are standardized and flat: D = M x C numbers each.
    """

    tokens: list[np.ndarray]  # n arrays int64 [length]
    true_latents: np.ndarray  # float32 [n, D]
    t2l_latents: np.ndarray | None  # float32 [n, D]: generated for the texts
    joint_latents: np.ndarray | None  # float32 [m, D]: generated from noise
    joint_tokens: list[list[int]]  # m texts: generated together with `joint_latents`
    similarity: np.ndarray | None  # [n, n]: cosine of each t2l latent (row) to each true one, on the encoder's scale
    likeliest_lengths: np.ndarray | None  # int64 [n]: l2t, argmax of the length head given the latent
    token_hits: np.ndarray | None  # [2, longest]: l2t from the latent alone, correct tokens by position, and all tokens


def _latents_by_kind(data: FigureData) -> dict[str, np.ndarray]:
    """Return the true and the generated latents by kind, [n, D] each."""
    latents = {"true": data.true_latents, "t2l": data.t2l_latents, "joint": data.joint_latents}
    return {kind: values for kind, values in latents.items() if values is not None}


def histograms(data: FigureData) -> dict[str, tuple[np.ndarray, tuple[float, float]]]:
    """Return (values, range) of each histogram by tag. Histograms of the same quantity share a range."""
    norms = {kind: np.linalg.norm(values, axis=1) for kind, values in _latents_by_kind(data).items()}
    # The ranges depend only on the true values, so the axes are the same at every step.
    true_lengths = np.array([len(tokens) for tokens in data.tokens])
    lengths = {"true": true_lengths, "likeliest": data.likeliest_lengths}
    mean_norm, max_length = float(norms["true"].mean()), 1.25 * float(true_lengths.max())
    result = {f"latent_norms/{kind}": (values, (0.5 * mean_norm, 1.5 * mean_norm)) for kind, values in norms.items()}
    return result | {
        f"lengths/{kind}": (values, (0, max_length)) for kind, values in lengths.items() if values is not None
    }


def draw(data: FigureData, bin_losses: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Draw all figures for which `data` has the arrays. Return images by tag, uint8 [height, width, 3].

    `bin_losses` are losses in equal noise bins, by modality and mode.
    """
    images = {"figures/loss_over_noise_time": _loss_over_noise_time(bin_losses)}
    if min(data.true_latents.shape) > 1:
        images["figures/latents"] = _latent_projection(data)
    if data.similarity is not None:
        images["figures/retrieval"] = _retrieval(data.similarity)
    if data.token_hits is not None:
        images["figures/token_accuracy"] = _token_accuracy(*data.token_hits)
    return images


def _loss_over_noise_time(bin_losses: Mapping[str, Sequence[float]]) -> np.ndarray:
    by_modality: dict[str, dict[str, Sequence[float]]] = {}
    for name, heights in bin_losses.items():
        modality, _, mode = name.partition("_")
        by_modality.setdefault(modality, {})[mode] = heights
    figure, panels = _new_figure(4.5 * len(by_modality), 3.6, panels=len(by_modality))
    for axes, (modality, modes) in zip(panels, by_modality.items(), strict=True):
        for mode, heights in modes.items():
            finite = np.where(np.isfinite(heights), heights, np.nan)
            axes.stairs(finite, np.linspace(0, 1, len(heights) + 1), label=mode, color=COLORS[mode], baseline=None)
        axes.set(title=f"{modality} loss, held out", xlabel="noise time t (0: data, 1: noise)", xlim=(0, 1))
        axes.set_ylabel("nats per token" if modality == "text" else "loss per latent")
        # Near t = 0 a few masked tokens weigh 1 / t. They must not set the scale for all other bins.
        values = np.concatenate([np.asarray(heights, np.float64) for heights in modes.values()])
        upper = np.percentile(values[np.isfinite(values)], 95) if np.isfinite(values).any() else 0
        axes.set_ylim(0, 1.3 * upper or 1)
        axes.legend()
    return _pixels(figure)


def _retrieval(similarity: np.ndarray) -> np.ndarray:
    figure, (axes,) = _new_figure(5.6, 4.8)
    image = axes.imshow(similarity, cmap="viridis", interpolation="nearest")
    first = float((similarity.argmax(1) == np.arange(len(similarity))).mean())
    axes.set(title=f"t2l: recall@1 {first:.0%}")
    axes.set(xlabel="true latent of text", ylabel="latent generated for text")
    figure.colorbar(image, label="cosine")
    return _pixels(figure)


def principal_axes(truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean [D] of `truth` [n, D], its first two principal axes [2, D] and their fractions of the variance.

    All of this, also the signs, depends only on `truth`, so the figures of all steps have the same basis.
    """
    mean = truth.mean(0)
    _, scales, axes = np.linalg.svd(truth - mean, full_matrices=False)
    # The SVD leaves the signs open, so we make the largest component of each axis positive.
    axes = axes[:2] * np.sign(axes[np.arange(2), np.abs(axes[:2]).argmax(1)])[:, None]
    return mean, axes, scales[:2] ** 2 / max(float((scales**2).sum()), 1e-12)


def _latent_projection(data: FigureData) -> np.ndarray:
    mean, basis, variance = principal_axes(data.true_latents)
    projected = {kind: (values - mean) @ basis.T for kind, values in _latents_by_kind(data).items()}
    figure, (axes,) = _new_figure(5.6, 4.8)
    if "t2l" in projected:  # draw a line from each true latent to the generated one
        ends = np.stack([projected["true"], projected["t2l"]])
        axes.plot(ends[..., 0], ends[..., 1], color=COLORS["t2l"], linewidth=0.5, alpha=0.4)
    for (kind, points), marker in zip(projected.items(), "o^D", strict=False):
        axes.scatter(points[:, 0], points[:, 1], s=14, marker=marker, color=COLORS[kind], label=kind, alpha=0.8)
    # The true latents set the limits. Generated latents outside of the figure are far off.
    limit = 1.5 * float(np.abs(projected["true"]).max())
    axes.set(title="latents, principal components of the true ones", xlim=(-limit, limit), ylim=(-limit, limit))
    axes.set_xlabel(f"first ({variance[0]:.0%} of the variance)")
    axes.set_ylabel(f"second ({variance[1]:.0%})")
    axes.legend()
    return _pixels(figure)


def _token_accuracy(hits: np.ndarray, totals: np.ndarray) -> np.ndarray:
    width = -(-len(totals) // MAX_BARS)  # positions per bar
    edges = np.arange(0, len(totals) + width, width)
    # Sum over the positions of each bar. The last bar may have fewer positions.
    hits, totals = (np.add.reduceat(counts, edges[:-1]) for counts in (hits, totals))
    enough = totals >= max(1, MIN_TOKENS * totals.max())
    accuracy = np.divide(hits, totals, out=np.full(len(totals), np.nan), where=enough)
    figure, (axes,) = _new_figure(6.4, 3.6)
    axes.stairs(accuracy, edges, color=COLORS["l2t"], fill=True, alpha=0.8)
    axes.set(title="l2t: first-guess token accuracy, from the latent alone", xlabel="position", ylabel="accuracy")
    axes.set(xlim=(0, edges[-1]), ylim=(0, None))
    count_axes = axes.twinx()
    count_axes.stairs(totals, edges, color=COLORS["true"], baseline=None)
    count_axes.set(ylabel="number of tokens (line)", ylim=(0, None))
    return _pixels(figure)


def _new_figure(width: float, height: float, panels: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of `width` x `height` inches at 100 dpi, and its axes. This avoids pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100)
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(1, panels, squeeze=False)[0]
    # Set margins in inches, because an automatic layout would draw everything twice.
    figure.subplots_adjust(
        left=0.7 / width, right=1 - 0.7 / width, bottom=0.55 / height, top=1 - 0.4 / height, wspace=0.25
    )
    return figure, axes


def _pixels(figure: Figure) -> np.ndarray:
    """Return the rendered figure, uint8 [height, width, 3]."""
    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
