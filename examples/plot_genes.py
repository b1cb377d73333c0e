"""Group lasso for genes.

Five laboratories measure the same 200 genes in 40 samples each. Genes work in pathways of ten, and three pathways
matter. The lasso picks single genes: it misses some, and takes one from a pathway that has nothing to do with it. The
group lasso keeps or drops a pathway as a whole, and finds the three. The strength of each is chosen by BIC along its
path. (The data are drawn; the pathways are correlated, as real ones are.)
"""

import matplotlib.pyplot as plt
import numpy as np

import fedcomposite as fc

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
rng = np.random.default_rng(0)
pathways, size = 20, 10
truth = np.zeros((pathways, size))
truth[[2, 7, 13]] = rng.uniform(0.3, 0.8, (3, size)) * rng.choice([-1, 1], (3, 1))
laboratories = []
for shift in rng.normal(0, 0.3, (5, 1)):
    common = rng.normal(size=(40, pathways, 1))
    X = (0.6 * common + 0.8 * rng.normal(size=(40, pathways, size))).reshape(40, -1) + shift
    laboratories.append((X, X @ truth.ravel() + 2.0 * rng.normal(size=40)))
silos = fc.Silos.from_arrays(laboratories).standardize()

terms = {"lasso": fc.regularizers.L1(1.0), "group lasso": fc.regularizers.GroupLasso(1.0, groups=size)}
shown = {"truth": truth}
for name, h in terms.items():
    problem = fc.Problem(silos, loss="least_squares", regularizer=h, bias=True, weights="samples")
    path = fc.path(problem, count=20, ratio=0.05)
    found = path.coefficients[path.bic.argmin()].reshape(pathways, size)
    shown[name] = found
    kept = np.flatnonzero(np.abs(found).max(1) > 0)
    print(f"{name:12} {np.count_nonzero(found):3} genes, in pathways {', '.join(map(str, kept))}")

fig, panels = plt.subplots(1, 3, figsize=(9, 4.2), layout="constrained", sharey=True)
for axes, (name, values) in zip(panels, shown.items(), strict=True):
    picture = axes.imshow(np.where(values == 0, np.nan, values), cmap="RdBu_r", vmin=-0.8, vmax=0.8, aspect="auto")
    axes.set(title=f"{name}: {np.count_nonzero(values)} genes", xlabel="gene of the pathway", xticks=[])
panels[0].set(ylabel="pathway", yticks=range(0, pathways, 5))
fig.colorbar(picture, ax=panels, shrink=0.8, label="coefficient (white: zero)")
fig.savefig("genes.png", dpi=130)
