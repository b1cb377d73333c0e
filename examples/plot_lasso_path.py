"""The path of a lasso across four hospitals.

From right to left the regularizer gets weaker, and coefficients enter one after the other: first the type of chest
pain, angina under exercise, ST depression. No patient leaves a hospital; all that is exchanged are sums of gradients
and Hessians. The lines mark the strengths that cross-validation over the hospitals' own patients picks.
"""

import matplotlib.pyplot as plt

import fedcomposite as fc

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
hospitals = fc.data.load("heart_disease")
problem = fc.Problem(hospitals, loss="logistic", bias=True, weights="samples", regularizer=fc.regularizers.L1(1.0))
cv = fc.cross_validate(problem, folds=5, count=25, seed=0)
path = cv.path
print(path.table().iloc[::6].to_string(index=False))
print(f"{cv.exchanges} exchanges with every hospital, for {len(path.lambdas)} strengths and 5 folds")

fig, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
names = problem.coordinate_names[:-1]  # the last one is the intercept, which the lasso leaves alone
order = path.coefficients[-1].argsort()[::-1]
for place, j in enumerate(order):
    axes.plot(path.lambdas, path.coefficients[:, j], color=plt.cm.tab10(place), label=names[j])
for lam, name in ((cv.lambda_min, "best"), (cv.lambda_1se, "within one\nstandard error")):
    axes.axvline(lam, color="grey", lw=1, ls="--")
    axes.annotate(f" {name}", (lam, 1), xycoords=("data", "axes fraction"), va="top", color="grey", fontsize=9)
axes.axhline(0, color="black", lw=0.6)
axes.set(xscale="log", xlabel="strength of the regularizer", ylabel="coefficient (standardised)")
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
fig.savefig("lasso_path.png", dpi=130)
