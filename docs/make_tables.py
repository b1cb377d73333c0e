"""Write the tables of methods in README.md and docs/methods.md from the code: ``python docs/make_tables.py``.

Tests hold the rows that are there against the code; a new method may be left out until the tables are written again.
"""

import inspect
import sys
from pathlib import Path

from fedcomposite.algorithms import REGISTRY, fields
from fedcomposite.testing import measure_traffic

ROOT = Path(__file__).parent.parent


def participation(cls):
    return "any, with `partial_participation`" if "partial_participation" in fields(cls) else cls.info.participation


def dagger(cls):
    return " †" * cls.info.secondary


def exactness(cls):
    return ("yes" if cls.info.exact_partial else "full only") if cls.info.exact else "no"


def readme_rows(names):
    how = {"none": "–", "subgradient": "subgradient", "convex": "prox, convex", "weakly convex": "prox, weakly convex"}
    for name in names:
        cls = REGISTRY[name]
        smooth_only = cls.info.regularizer in ("none", "subgradient") and not cls.info.nonsmooth_loss
        exact = "a stationary point if h = 0" if smooth_only else "a stationary point"
        if not cls.info.exact_partial:
            exact += ", all clients taking part"
        reaches = exact if cls.info.exact else "a point with a residual"
        yield f"| `{name}`{dagger(cls)} | {how[cls.info.regularizer]} | {participation(cls)} | {reaches} |"


def methods_page(names):
    lines = [
        "# Methods",
        "",
        "Written by `python docs/make_tables.py` from the code. *Up* and *down* are vectors per client and step of",
        "the method, *proxes* are proxes of h in the whole system; both are measured on a probe run with 4 clients",
        "and 5 local steps. *Exact*: with full gradients and several local steps there is no residual, whoever takes",
        "part; *full only*: when all clients do. The contract measures it for every method.",
        "† is written from secondary sources, without the paper or its authors' code at hand, and checked by",
        "reductions to other methods and by convergence. `fedcomposite cite NAME` prints the BibTeX entry of a paper.",
        "",
        "| method | year | handles h | clients per round | exact | up | down | proxes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        cls = REGISTRY[name]
        seen = measure_traffic(cls)
        proxes = "inner solver" if cls.info.second_order else f"{seen.proxes:.3g}"  # until a tolerance: not a count
        lines.append(
            f"| [{name}](#{name.lower()}){dagger(cls)} | {cls.info.year} | {cls.info.regularizer} | "
            f"{participation(cls)} | {exactness(cls)} | "
            f"{seen.up:.2g} | {seen.down:.2g} | {proxes} |"
        )
    for name in names:
        cls = REGISTRY[name]
        text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
        where = f"[arXiv:{cls.info.arxiv}](https://arxiv.org/abs/{cls.info.arxiv})" if cls.info.arxiv else ""
        where = f"[doi:{cls.info.doi}](https://doi.org/{cls.info.doi})" if cls.info.doi else where
        source = f"{cls.info.paper}, {cls.info.year}" + (f", {where}." if where else ".")
        lines += ["", f"## {name}", "", source, "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def readme(text, names):
    begin, end = "<!-- methods -->\n", "<!-- /methods -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    header = "| class | handles h by | clients per round | with full gradients and several local steps it reaches |"
    return head + begin + "\n".join([header, "| --- | --- | --- | --- |", *readme_rows(names)]) + "\n" + end + tail


def main():
    names = [name for name in REGISTRY if REGISTRY.origin(name) == "fedcomposite"]
    (ROOT / "docs" / "methods.md").write_text(methods_page(names), encoding="utf-8")
    page = ROOT / "README.md"
    page.write_text(readme(page.read_text(encoding="utf-8"), names), encoding="utf-8")


if __name__ == "__main__":
    main()
