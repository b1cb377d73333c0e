"""What the regularizers' page says of each beyond its docstring: the formulas, what it is for, and one of its kind."""

from typing import NamedTuple


class Card(NamedTuple):
    """One regularizer."""

    value: str
    """h in LaTeX."""
    prox: str
    """The prox with step s, in LaTeX."""
    purpose: str
    fields: dict
    """Those of the one that is drawn and shown."""
    picture: str
    """What is drawn: "line" (one coordinate), "plane" (two), "signal", "singular" or "blocks"."""


SOFT = r"S_{%s}(v_j) = \operatorname{sign}(v_j)\,(|v_j| - %s)_+"

CARDS = {
    "Zero": Card("h(x) = 0", "p = v", "Smooth problems, and a baseline.", {}, "line"),
    "L1": Card(
        r"h(x) = \lambda \sum_j w_j |x_j|",
        "p_j = " + SOFT % (r"s \lambda w_j", r"s \lambda w_j"),
        "Few nonzero coefficients, a convex problem. Large coefficients are shrunk by as much as small ones; "
        "weights (the adaptive lasso) or SCAD and MCP mend that.",
        {"lam": 1.0},
        "line",
    ),
    "L2Squared": Card(
        r"h(x) = \frac{\lambda}{2} \|x\|_2^2",
        r"p = \frac{v}{1 + s \lambda}",
        "Ridge: stable coefficients where features are correlated. No zeros.",
        {"lam": 1.0},
        "line",
    ),
    "ElasticNet": Card(
        r"h(x) = \sum_j \lambda_1 |x_j| + \frac{\lambda_2}{2} x_j^2",
        r"p_j = \frac{S_{s \lambda_1}(v_j)}{1 + s \lambda_2}",
        "Zeros, and correlated features that enter together. λ₁ and λ₂ are the fields `l1` and `l2`.",
        {"l1": 0.7, "l2": 1.0},
        "line",
    ),
    "PositivePart": Card(
        r"h(x) = \lambda \sum_j \max(x_j, 0)",
        r"p_j = v_j - \min(\max(v_j, 0), s \lambda)",
        "Coefficients that should not be positive, without forbidding it.",
        {"lam": 1.0},
        "line",
    ),
    "MCP": Card(
        r"h(x) = \kappa \sum_j \phi(x_j), \quad \phi(u) = \lambda |u| - \frac{u^2}{2 \theta} "
        r"\text{ up to } |u| = \theta \lambda, \text{ then constant}",
        r"p_j = \frac{S_{s \kappa \lambda}(v_j)}{1 - s \kappa / \theta} \text{ up to } |v_j| = \theta \lambda" + ", "
        r"\quad p_j = v_j \text{ beyond}",
        "Zeros without bias: large coefficients are not shrunk. θ sets how fast it flattens; the problem is weakly "
        "convex, so a stationary point is what one gets.",
        {"lam": 1.0, "theta": 2.0},
        "line",
    ),
    "SCAD": Card(
        r"h(x) = \kappa \sum_j \phi(x_j), \quad \phi'(u) = \lambda \text{ up to } \lambda, \quad "
        r"\frac{(a \lambda - u)_+}{a - 1} \text{ beyond}",
        r"p_j = S_{s \kappa \lambda}(v_j) \text{ up to } \lambda (1 + s \kappa), \quad "
        r"\frac{(a - 1) v_j - \operatorname{sign}(v_j)\, s \kappa a \lambda}{a - 1 - s \kappa} "
        r"\text{ up to } a \lambda, \quad v_j \text{ beyond}",
        "As MCP, with a stretch of plain l1 first: zeros without bias, a = 3.7 by custom.",
        {"lam": 1.0, "a": 3.0},
        "line",
    ),
    "L0": Card(
        r"h(x) = \lambda \, \#\{j : x_j \neq 0\}",
        r"p_j = v_j \text{ where } |v_j| > \sqrt{2 s \lambda}, \quad 0 \text{ elsewhere}",
        "Counting coefficients outright. No method here is proven with it, though all with a prox can be run.",
        {"lam": 0.5},
        "line",
    ),
    "TopK": Card(
        r"\|x\|_0 \leq k",
        r"p = v \text{ on its } k \text{ largest entries}, \quad 0 \text{ elsewhere}",
        "A model of exactly known size. Nothing is proven with it, either.",
        {"k": 1},
        "plane",
    ),
    "GroupLasso": Card(
        r"h(x) = \lambda \sum_g w_g \|x_g\|_2",
        r"p_g = \left(1 - \frac{s \lambda w_g}{\|v_g\|_2}\right)_+ v_g",
        "Features that enter or leave together: levels of a factor, genes of a pathway, splines of one variable, "
        "rows (neurons) of a layer.",
        {"lam": 0.5, "groups": 2},
        "plane",
    ),
    "SparseGroupLasso": Card(
        r"h(x) = \lambda_1 \|x\|_1 + \lambda_2 \sum_g w_g \|x_g\|_2",
        r"p_g = \left(1 - \frac{s \lambda_2 w_g}{\|u_g\|_2}\right)_+ u_g, \quad u = S_{s \lambda_1}(v)",
        "Few groups, and few coefficients within them.",
        {"l1": 0.4, "l2": 0.3, "groups": 2},
        "plane",
    ),
    "LinfNorm": Card(
        r"h(x) = \lambda \max_j |x_j|",
        r"p = v - \Pi_{\|\cdot\|_1 \leq s \lambda}(v)",
        "Coefficients of one common size, as for quantised weights.",
        {"lam": 1.0},
        "plane",
    ),
    "NuclearNorm": Card(
        r"h(x) = \lambda \sum_i \sigma_i(X)",
        r"P = U \operatorname{diag}\left((\sigma_i - s \lambda)_+\right) W^\top "
        r"\quad \text{where } V = U \operatorname{diag}(\sigma) W^\top",
        "Low rank: tasks, or classes, that share a few directions.",
        {"lam": 4.0, "shape": (20, 20)},
        "singular",
    ),
    "FusedLasso": Card(
        r"h(x) = \lambda \sum_j |x_{j+1} - x_j| + \lambda_1 \sum_j |x_j|",
        r"p = S_{s \lambda_1}\left(\text{total-variation denoising of } v \text{ with } s \lambda\right)",
        "Coefficients in an order (positions, time, frequencies) that are constant over stretches.",
        {"lam": 1.5, "l1": 0.2},
        "signal",
    ),
    "ClusteredLasso": Card(
        r"h(x) = \sum_g w_g \left[ \lambda \sum_{i < k \in g} |x_i - x_k| + \lambda_1 \sum_{i \in g} |x_i| \right]",
        r"p_g = S_{s \lambda_1 w_g}\left(\text{monotone regression of sorted } v_g \text{ with } s \lambda w_g\right)",
        "Coefficients in no order that become equal to one another: sites or levels that fall into few classes.",
        {"lam": 0.3, "groups": 2, "l1": 0.2},
        "plane",
    ),
    "Sparsity2to4": Card(
        r"h(x) = \lambda \sum_{\text{blocks}} |abc| + |abd| + |acd| + |bcd|",
        r"p = \text{the best of three candidates per block}",
        "At most two nonzeros in every block of four, the pattern that GPUs multiply at twice the speed.",
        {"lam": 0.6},
        "blocks",
    ),
    "Box": Card(
        r"l \leq x_j \leq u",
        r"p_j = \min(\max(v_j, l), u)",
        "Known bounds. They are the fields `low` and `high`, either may be infinite.",
        {"low": -1.0, "high": 1.5},
        "line",
    ),
    "NonNegative": Card(r"x_j \geq 0", r"p_j = \max(v_j, 0)", "Amounts, mixtures, rates.", {}, "line"),
    "L2Ball": Card(
        r"\|x\|_2 \leq r",
        r"p = v \min\left(1, \frac{r}{\|v\|_2}\right)",
        "A bounded model, as theory often asks for.",
        {"radius": 1.0},
        "plane",
    ),
    "L1Ball": Card(
        r"\|x\|_1 \leq r",
        r"p_j = S_t(v_j), \quad t \text{ such that } \|p\|_1 = r",
        "The lasso as a constraint: a budget in place of a strength.",
        {"radius": 1.0},
        "plane",
    ),
    "Simplex": Card(
        r"x_j \geq 0, \quad \sum_j x_j = c",
        r"p_j = (v_j - t)_+, \quad t \text{ such that } \sum_j p_j = c",
        "Weights of a mixture or a portfolio.",
        {"total": 1.0},
        "plane",
    ),
    "Affine": Card(
        "A x = b",
        r"p = v - A^\top (A A^\top)^{+} (A v - b)",
        "Known linear relations: contrasts that sum to zero, calibrated totals.",
        {"A": ((1.0, 1.0),), "b": (1.0,)},
        "plane",
    ),
}
"""By name. The site is not built while a shipped regularizer has no card."""
