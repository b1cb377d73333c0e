"""Times until death at four hospitals: a sparse Cox model, its hazard ratios, and survival with numbers at risk.

Every hospital has a baseline of its own; the partial likelihood, stratified by hospital, is a sum over them.
"""

import numpy as np

import fedcomposite as fc

hospitals = fc.data.load("survival", clients=4, samples=200)
problem = fc.Problem(hospitals, loss="cox", regularizer=fc.regularizers.L1(1.0), weights="samples")
cv = fc.cross_validate(problem, folds=5, count=20, ratio=0.02)
print(cv)
print(fc.confidence(problem, cv)[["coefficient", "hazard_ratio", "hazard_lower", "hazard_upper", "p"]].round(3))
print(fc.quality(problem, cv, horizon=60.0).table.round(3))
print(fc.logrank_test(problem, "treated"))

curves = fc.event_curves(problem, by="treated", times=np.arange(3, 121, 3))
for group in curves.table["group"].unique():
    print(
        group,
        curves.at(60, group=group)[["at_risk", "survival", "survival_lower", "survival_upper"]].round(3).to_dict(),
    )

if __name__ == "__main__":
    import matplotlib.pyplot as plt

    for group, color in zip(curves.table["group"].unique(), ("tab:blue", "tab:orange"), strict=True):
        curve = curves.of("all", group)
        plt.step(curve["time"], curve["survival"], where="post", color=color, label=group)
        plt.fill_between(
            curve["time"], curve["survival_lower"], curve["survival_upper"], step="post", alpha=0.2, color=color
        )
    plt.ylim(0, 1)
    plt.xlabel("months")
    plt.ylabel("survival")
    plt.legend()
    plt.savefig("survival.png")
