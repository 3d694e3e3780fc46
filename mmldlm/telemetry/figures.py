"""Figures of held-out samples for TensorBoard's page "Images", drawn with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mmldlm.telemetry.figure_data import FigureData

# What the user is told where nothing can be drawn.
MISSING = (
    None
    if find_spec("matplotlib")
    else "figures: none in TensorBoard, since matplotlib is not installed; pip install 'mmldlm[figures]'"
)

COLORS = {"true": "0.45", "t2l": "tab:blue", "joint": "tab:orange", "l2t": "tab:green"}
MOST_BARS = 64  # of the accuracy over positions
FEWEST = 0.05  # of the tokens at the first position: with fewer, a position has no bar


def latents(pictures: FigureData) -> dict[str, np.ndarray]:
    """[n, D] each: the true latents, and those that the run has made."""
    parts = {"true": pictures.truth, "t2l": pictures.found, "joint": pictures.made}
    return {name: part for name, part in parts.items() if part is not None}


def distributions(pictures: FigureData) -> dict[str, tuple[np.ndarray, tuple[float, float]]]:
    """Values of histograms by tag, and the range that those of one kind have in common."""
    norms = {name: np.linalg.norm(part, axis=1) for name, part in latents(pictures).items()}
    lengths = {"true": pictures.lengths, "likeliest": pictures.likely_lengths}
    middle, longest = float(norms["true"].mean()), 1.25 * float(pictures.lengths.max())
    found = {f"latent_norms/{name}": (values, (0.5 * middle, 1.5 * middle)) for name, values in norms.items()}
    return found | {f"lengths/{name}": (each, (0, longest)) for name, each in lengths.items() if each is not None}


def draw(pictures: FigureData, levels: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Images uint8 [height, width, 3] by tag. `levels`: losses over the noise times, by modality and mode."""
    found = {"figures/loss_over_noise_time": _loss_over_noise_time(levels)}
    if min(pictures.truth.shape) > 1:
        found["figures/latents"] = _projected(pictures)
    if pictures.similarity is not None:
        found["figures/retrieval"] = _retrieval(pictures.similarity)
    if pictures.hits is not None:
        found["figures/token_accuracy"] = _accuracy(*pictures.hits)
    return found


def _loss_over_noise_time(levels: Mapping[str, Sequence[float]]) -> np.ndarray:
    by_modality: dict[str, dict[str, Sequence[float]]] = {}
    for name, heights in levels.items():
        modality, _, mode = name.partition("_")
        by_modality.setdefault(modality, {})[mode] = heights
    figure, axes = _new(4.5 * len(by_modality), 3.6, panels=len(by_modality))
    for each, (modality, modes) in zip(axes, by_modality.items(), strict=True):
        for mode, heights in modes.items():
            shown = np.where(np.isfinite(heights), heights, np.nan)
            each.stairs(shown, np.linspace(0, 1, len(heights) + 1), label=mode, color=COLORS[mode], baseline=None)
        each.set(title=f"{modality} loss, held out", xlabel="noise time t (0: data, 1: noise)", xlim=(0, 1))
        each.set_ylabel("nats a token" if modality == "text" else "loss a latent")
        # A few masked tokens with a weight of 1 / t, beside t = 0, are no measure for the rest.
        every = np.concatenate([np.asarray(heights, np.float64) for heights in modes.values()])
        usual = np.percentile(every[np.isfinite(every)], 95) if np.isfinite(every).any() else 0
        each.set_ylim(0, 1.3 * usual or 1)
        each.legend()
    return _pixels(figure)


def _retrieval(similarity: np.ndarray) -> np.ndarray:
    figure, (axes,) = _new(5.6, 4.8)
    image = axes.imshow(similarity, cmap="viridis", interpolation="nearest")
    first = float((similarity.argmax(1) == np.arange(len(similarity))).mean())
    axes.set(title=f"t2l: {first:.0%} nearest to their own")
    axes.set(xlabel="true latent of text", ylabel="latent found for text")
    figure.colorbar(image, label="cosine")
    return _pixels(figure)


def principal_axes(truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean [D], the two axes [2, D] along which `truth` [n, D] varies most, and their shares of its variance [2].

    They follow from the data alone, signs included, so pictures of all steps have one basis.
    """
    mean = truth.mean(0)
    _, scales, axes = np.linalg.svd(truth - mean, full_matrices=False)
    axes = axes[:2] * np.sign(axes[np.arange(2), np.abs(axes[:2]).argmax(1)])[:, None]
    return mean, axes, scales[:2] ** 2 / max(float((scales**2).sum()), 1e-12)


def _projected(pictures: FigureData) -> np.ndarray:
    mean, basis, shares = principal_axes(pictures.truth)
    places = {name: (part - mean) @ basis.T for name, part in latents(pictures).items()}
    figure, (axes,) = _new(5.6, 4.8)
    if "t2l" in places:
        ends = np.stack([places["true"], places["t2l"]])
        axes.plot(ends[..., 0], ends[..., 1], color=COLORS["t2l"], linewidth=0.5, alpha=0.4)
    for (name, points), marker in zip(places.items(), "o^D", strict=False):
        axes.scatter(points[:, 0], points[:, 1], s=14, marker=marker, color=COLORS[name], label=name, alpha=0.8)
    # A frame of the data's: what lies outside is far off.
    reach = 1.5 * float(np.abs(places["true"]).max())
    axes.set(title="latents, along the true ones' main axes", xlim=(-reach, reach), ylim=(-reach, reach))
    axes.set_xlabel(f"first ({shares[0]:.0%} of the variance)")
    axes.set_ylabel(f"second ({shares[1]:.0%})")
    axes.legend()
    return _pixels(figure)


def _accuracy(hits: np.ndarray, of: np.ndarray) -> np.ndarray:
    width = -(-len(of) // MOST_BARS)
    edges = np.arange(0, len(of) + width, width)
    hits, of = (np.add.reduceat(each, edges[:-1]) for each in (hits, of))
    enough = of >= max(1, FEWEST * of.max())
    share = np.divide(hits, of, out=np.full(len(of), np.nan), where=enough)
    figure, (axes,) = _new(6.4, 3.6)
    axes.stairs(share, edges, color=COLORS["l2t"], fill=True, alpha=0.8)
    axes.set(title="l2t: tokens right at first guess, from the latent alone", xlabel="position", ylabel="share")
    axes.set(xlim=(0, edges[-1]), ylim=(0, None))
    beside = axes.twinx()
    beside.stairs(of, edges, color=COLORS["true"], baseline=None)
    beside.set(ylabel="tokens there (line)", ylim=(0, None))
    return _pixels(figure)


def _new(width: float, height: float, panels: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """A figure of so many inches of 100 pixels, without pyplot and its global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100)
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(1, panels, squeeze=False)[0]
    # Margins in inches. A layout that measures them draws everything twice.
    figure.subplots_adjust(
        left=0.7 / width, right=1 - 0.7 / width, bottom=0.55 / height, top=1 - 0.4 / height, wspace=0.25
    )
    return figure, axes


def _pixels(figure: Figure) -> np.ndarray:
    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
