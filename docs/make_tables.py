"""Write the tables of methods in README.md and docs/methods.md from the code: ``python docs/make_tables.py``."""

import inspect
import sys
from pathlib import Path

from fedcomposite.algorithms import REGISTRY, fields
from fedcomposite.testing import measure_traffic

ROOT = Path(__file__).parent.parent


def participation(cls):
    return "any, with `partial_participation`" if "partial_participation" in fields(cls) else cls.info.participation


def exactness(cls):
    return ("yes" if cls.info.exact_partial else "full only") if cls.info.exact else "no"


def readme_rows():
    how = {"none": "–", "subgradient": "subgradient", "convex": "prox, convex", "weakly convex": "prox, weakly convex"}
    for name, cls in REGISTRY.items():
        smooth_only = cls.info.regularizer in ("none", "subgradient") and not cls.info.nonsmooth_loss
        exact = "a stationary point if h = 0" if smooth_only else "a stationary point"
        if not cls.info.exact_partial:
            exact += ", all clients taking part"
        reaches = exact if cls.info.exact else "a point with a residual"
        yield f"| `{name}` | {how[cls.info.regularizer]} | {participation(cls)} | {reaches} |"


def methods_page():
    lines = [
        "# Methods",
        "",
        "Written by `python docs/make_tables.py` from the code. *Up* and *down* are vectors per client and step of",
        "the method, *proxes* are proxes of h in the whole system; both are measured on a probe run with 4 clients",
        "and 5 local steps. *Exact*: with full gradients and several local steps there is no residual, whoever takes",
        "part; *full only*: when all clients do. The contract measures it for every method.",
        "",
        "| method | year | handles h | clients per round | exact | up | down | proxes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, cls in REGISTRY.items():
        seen = measure_traffic(cls)
        lines.append(
            f"| [{name}](#{name.lower()}) | {cls.info.year} | {cls.info.regularizer} | {participation(cls)} | "
            f"{exactness(cls)} | {seen.up:.2g} | {seen.down:.2g} | {seen.proxes:.3g} |"
        )
    for name, cls in REGISTRY.items():
        text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
        lines += ["", f"## {name}", "", cls.info.paper + f", {cls.info.year}.", "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def readme(text):
    begin, end = "<!-- methods -->\n", "<!-- /methods -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    header = "| class | handles h by | clients per round | with full gradients and several local steps it reaches |"
    return head + begin + "\n".join([header, "| --- | --- | --- | --- |", *readme_rows()]) + "\n" + end + tail


def main():
    (ROOT / "docs" / "methods.md").write_text(methods_page(), encoding="utf-8")
    page = ROOT / "README.md"
    page.write_text(readme(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
