"""The gallery: every examples/plot_*.py is run, and becomes a page with its text, pictures, output and code.

What a run made is kept under the digest of the example and of the package, so that an unchanged one is not run again.
"""

import ast
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ORDER = (
    "heart_disease", "lasso_path", "averaging", "residual", "sensors", "genes", "tasks", "svm", "network", "cnn",
    "participation", "privacy",
)  # fmt: skip
"""Examples in the order of the gallery; others follow."""


class Gallery(NamedTuple):
    """What the site gets."""

    pages: dict[str, str]
    pictures: dict[str, bytes]


def build(examples, kept, say):
    """Run what has changed, and write the pages."""
    pages, pictures, cards = {}, {}, []
    package = digest(*sorted((examples.parent / "src").rglob("*.py")))
    for name in names(examples):
        path = examples / f"plot_{name}.py"
        folder = kept / f"{name}-{digest(path)[:12]}-{package[:12]}"
        if not (folder / "output.txt").exists():
            say(f"running {path.name}")
            run(path, folder)
        shown = sorted(folder.glob("*.png"))
        pictures |= {f"gallery/{name}/{p.name}": p.read_bytes() for p in shown}
        title, text, code = read(path)
        pages[f"gallery/{name}.md"] = page(name, title, text, code, shown, folder)
        cards.append(card(name, title, shown[0]))
    pages["gallery/index.md"] = "\n\n".join(
        [
            "# Gallery",
            "Short scripts on real data where there are some. `make docs` runs them all: what you see is what they "
            "print and draw. Each is in `examples/`.",
            '<div class="gallery">\n' + "\n".join(cards) + "\n</div>",
        ]
    )
    return Gallery(pages, pictures)


def names(examples):
    """The examples in their order."""
    found = sorted(path.stem.removeprefix("plot_") for path in examples.glob("plot_*.py"))
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def digest(*paths):
    """A digest of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()


def run(path, folder):
    """Run an example in a folder of its own; its words and seconds are kept beside its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    source = str(path.parent.parent / "src")
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": source, "COLUMNS": "100", "NO_COLOR": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(path)],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{path.name} failed:\n{done.stderr}")
    (folder / "seconds.txt").write_text(f"{time.perf_counter() - start:.1f}")
    (folder / "output.txt").write_text(done.stdout, encoding="utf-8")


def read(path):
    """The title, the text and the code of an example."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    title, _, text = (ast.get_docstring(tree) or path.stem).partition("\n")
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    return title.rstrip("."), text.strip(), code


def page(name, title, text, code, pictures, folder):
    """The page of one example."""
    output = (folder / "output.txt").read_text(encoding="utf-8").rstrip()
    seconds = (folder / "seconds.txt").read_text()
    parts = [f"# {title}", text]
    parts += [f"![{title}]({name}/{p.name})" for p in pictures]
    parts += [f"```python\n{code}\n```"]
    if output:
        parts += ["It prints", f"```text\n{output}\n```"]
    parts += [f"`python examples/plot_{name}.py` makes this; it took {float(seconds):.0f} s when the site was built."]
    return "\n\n".join(parts) + "\n"


def card(name, title, picture):
    """An entry of the gallery's first page."""
    return (
        f'<a href="{name}.html"><img src="{name}/{Path(picture).name}" alt="" loading="lazy"><span>{title}</span></a>'
    )
