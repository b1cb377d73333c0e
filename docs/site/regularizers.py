"""The page of regularizers: formulas, pictures drawn by the code itself, rho, fields, an example with its output."""

import dataclasses
import inspect
import io
import math
import re
import typing

import numpy as np
import torch
from cards import CARDS
from fields import kind
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedcomposite.regularizers import REGISTRY

BLUE, ORANGE, GREY = "#3a86c8", "#e07b39", "#8a8f98"
INTRODUCTION = """# Regularizers

Made from the code: every curve is drawn by `value` and `prox` of the class. The prox with step $s$ is

$$
P_s(v) = \\underset{u}{\\operatorname{argmin}} \\; h(u) + \\frac{1}{2 s} \\|u - v\\|_2^2
$$

and $S_t$ is soft-thresholding at $t$. $h$ is $\\rho$-weakly convex if $h + \\frac{\\rho}{2} \\|x\\|^2$ is convex; a
step of $1/\\rho$ or more is refused, since the prox would not be single-valued.

| you want | take |
| --- | --- |
| few coefficients, a convex problem | [L1](#l1), [ElasticNet](#elasticnet) where features are correlated |
| few coefficients, the large ones not shrunk | [SCAD](#scad), [MCP](#mcp) |
| whole groups in or out | [GroupLasso](#grouplasso), [SparseGroupLasso](#sparsegrouplasso) |
| stretches of equal coefficients | [FusedLasso](#fusedlasso) |
| few different coefficients | [ClusteredLasso](#clusteredlasso) |
| low rank | [NuclearNorm](#nuclearnorm) |
| stable coefficients, no zeros | [L2Squared](#l2squared) |
| a network for sparse tensor cores | [Sparsity2to4](#sparsity2to4) |
| a constraint | [Box](#box), [NonNegative](#nonnegative), [L1Ball](#l1ball), [L2Ball](#l2ball) |
| a constraint on sums or counts | [Simplex](#simplex), [Affine](#affine), [TopK](#topk) |

`h.on([0, 1, 2])` or `h.on("*.weight")` lets one act on some coordinates or parameters only, and
`a.on(...) + b.on(...)` puts several together.
One of your own: [add a regularizer](add-a-regularizer.md)."""


class Pictures:
    """Pictures as files of the site."""

    def __init__(self):
        self.files = {}

    def save(self, name, figure):
        """Keep a picture, without a background, so that it sits on a light and on a dark page."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        self.files[f"images/regularizers/{name}.svg"] = buffer.getvalue()


def page(pictures):
    """The whole page."""
    names = [name for name in REGISTRY if REGISTRY.origin(name) == "fedcomposite"]
    if lacking := set(names) ^ set(CARDS):
        raise RuntimeError(f"docs/site/cards.py and the regularizers differ: {', '.join(sorted(lacking))}")
    parts = [INTRODUCTION]
    for name in names:
        cls, card = REGISTRY[name], CARDS[name]
        h = cls(**card.fields)
        pictures.save(name.lower(), DRAWINGS[card.picture](h))
        parts += [
            f"## {name}",
            f"$$\n{card.value}\n$$",
            card.purpose,
            f"![{name}: value and prox](images/regularizers/{name.lower()}.svg)",
            f"$$\n{card.prox}\n$$",
            modulus(cls, h),
            table(cls),
            example(name, card, h),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def modulus(cls, h):
    """What is known of rho."""
    if h.rho == 0:
        return "ρ = 0: convex, every step is allowed."
    if math.isinf(h.rho):
        return "ρ = ∞: no modulus; the prox is a global minimiser for every step, but it jumps."
    said = re.sub(r"^Equal to ", "", inspect.getdoc(cls.rho) or "").rstrip(".")
    return f"ρ = {said}: weakly convex, steps below 1/ρ; {h.rho:g} for the one that is drawn."


def table(cls):
    """The fields."""
    chosen = [f for f in dataclasses.fields(cls) if f.init]
    if not chosen:
        return "No fields."
    rows, hints = [], typing.get_type_hints(cls, include_extras=True)
    for f in chosen:
        default = "required" if f.default is dataclasses.MISSING else f"`{f.default!r}`"
        rows.append(f"| `{f.name}` | {kind(hints[f.name])} | {default} |")
    link = f"[The class](reference/api/regularizers.md#{cls.__module__}.{cls.__qualname__}) says more."
    return "\n".join(["| field | type | default |", "| --- | --- | --- |", *rows]) + f"\n\n{link}"


def example(name, card, h):
    """How it is written, and what its prox does to a short vector."""
    shape = 400 if card.picture == "singular" else 0
    arguments = ", ".join(f"{k}={v!r}" for k, v in card.fields.items())
    lines = ["```python", f"h = fc.regularizers.{name}({arguments})"]
    if not shape:
        v = torch.tensor([2.0, -0.5, 0.3, 1.2][: 2 if card.picture == "plane" else 4])
        shown = ", ".join(f"{x + 0.0:.4g}" for x in h.prox(v, 0.5).tolist())
        lines.append(f"h.prox(torch.tensor({[round(x, 4) for x in v.tolist()]}), 0.5)  # [{shown}]")
    return "\n".join([*lines, "```"])


def canvas(columns):
    """An empty picture of some panels, readable on light and dark pages."""
    figure = Figure(figsize=(3.3 * columns, 2.6), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, columns)
    for axes in np.atleast_1d(panels):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.tick_params(colors=GREY, labelsize=8)
    return figure, panels


def titled(axes, title, x="", y=""):
    """Words around a panel."""
    axes.set_title(title, fontsize=9, color=GREY)
    axes.set_xlabel(x, fontsize=8, color=GREY)
    axes.set_ylabel(y, fontsize=8, color=GREY)


def key(axes):
    """A legend in the colour of the axes."""
    axes.legend(frameon=False, fontsize=8, labelcolor=GREY)


def line(h):
    """Value and prox along one coordinate."""
    figure, (left, right) = canvas(2)
    u = torch.linspace(-3, 3, 1201, dtype=torch.float64)
    value = h.value(u[:, None]).numpy()
    value = np.where(np.isfinite(value), value, np.nan)
    left.plot(u, value, color=BLUE, lw=2)
    if np.isnan(value).any():
        inside = u.numpy()[~np.isnan(value)]
        left.axvspan(inside[0], inside[-1], color=BLUE, alpha=0.15, lw=0)
        left.set_ylim(-0.1, 1)
    titled(left, "h(u)", "u")
    right.plot(u, u, color=GREY, lw=1, ls=":")
    for step, colour, style in ((0.5, ORANGE, "-"), (1.0, BLUE, "--")):
        shown = h.prox(u[:, None], step)[:, 0].numpy().copy()
        shown[1:][np.abs(np.diff(shown)) > 0.1] = np.nan  # a jump is not a line
        right.plot(u, shown, color=colour, lw=2, ls=style, label=f"step {step:g}")
    titled(right, "prox of v", "v")
    key(right)
    return figure


def plane(h):
    """Level sets in two coordinates, and where the prox takes points."""
    figure, (left, right) = canvas(2)
    grid = torch.linspace(-2, 2, 201, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    value = h.value(points).reshape(201, 201).T.numpy()
    if np.isfinite(value).all() and value.max() > 0:
        left.contour(grid, grid, value, levels=8, colors=[BLUE], linewidths=1)
    ends = h.prox(3 * torch.randn(20_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 0.5)
    if not np.isfinite(value).all():
        left.scatter(*ends.T.numpy(), s=1.5, color=BLUE, alpha=0.5, lw=0, rasterized=True)
        inside = np.isfinite(value).astype(float)
        left.contourf(grid, grid, inside, levels=[0.5, 1.5], colors=[BLUE], alpha=0.2)
    titled(left, "the set" if not np.isfinite(value).all() else "level sets of h", "$x_1$", "$x_2$")
    coarse = torch.linspace(-1.8, 1.8, 9, dtype=torch.float64)
    start = torch.cartesian_prod(coarse, coarse)
    move = (h.prox(start, 0.5) - start).numpy()
    right.quiver(*start.T.numpy(), *move.T, angles="xy", scale_units="xy", scale=1, color=ORANGE, width=0.006)
    titled(right, "from v to its prox, step 0.5", "$v_1$", "$v_2$")
    for axes in (left, right):
        axes.set(xlim=(-2.05, 2.05), ylim=(-2.05, 2.05), aspect="equal")
    return figure


def signal(h):
    """A noisy signal and its prox."""
    figure, axes = canvas(1)
    figure.set_size_inches(6.6, 2.6)
    clean = torch.cat([torch.full((n,), float(level)) for n, level in ((25, 0), (20, 2), (30, -1), (25, 0))])
    v = clean + 0.4 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    axes.plot(v, ".", color=GREY, ms=4, label="v")
    axes.step(range(100), h.prox(v, 1.0), where="mid", color=BLUE, lw=2, label="prox, step 1")
    titled(axes, "a noisy vector", "coordinate")
    key(axes)
    return figure


def singular(h):
    """Singular values before and after."""
    figure, axes = canvas(1)
    figure.set_size_inches(6.6, 2.6)
    g = torch.Generator().manual_seed(0)
    low = torch.randn(20, 3, generator=g) @ torch.randn(3, 20, generator=g)
    v = (low + 0.7 * torch.randn(20, 20, generator=g)).double()
    after = torch.linalg.svdvals(h.prox(v.flatten(), 1.0).reshape(20, 20))
    places = np.arange(1, 21)
    axes.bar(places - 0.2, torch.linalg.svdvals(v), 0.4, color=GREY, label="of V")
    axes.bar(places + 0.2, after, 0.4, color=BLUE, label="of its prox, step 1")
    axes.set_xticks(places[::3])
    titled(axes, f"singular values: rank 20 becomes {int((after > 1e-10).sum())}", "place")
    key(axes)
    return figure


def blocks(h):
    """Entries in blocks of four before and after."""
    figure, axes = canvas(1)
    figure.set_size_inches(6.6, 2.6)
    v = torch.randn(20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    places = np.arange(20)
    axes.bar(places - 0.2, v, 0.4, color=GREY, label="v")
    axes.bar(places + 0.2, h.prox(v, 1.0), 0.4, color=BLUE, label="prox, step 1")
    for edge in range(4, 20, 4):
        axes.axvline(edge - 0.5, color=GREY, lw=0.6, ls=":")
    titled(axes, "five blocks of four", "coordinate")
    key(axes)
    return figure


DRAWINGS = {"line": line, "plane": plane, "signal": signal, "singular": singular, "blocks": blocks}
