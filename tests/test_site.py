"""The site as a visitor meets it: built from the clone, opened in a browser without a network."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("mkdocs", "material", "mkdocstrings", "latex2mathml")
BROWSER = "PyQt6.QtWebEngineWidgets"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with warnings as errors; unchanged examples of an earlier `make docs` are not run again."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        pytest.skip(f"the docs extra is not installed ({', '.join(missing)}): pip install 'fedcomposite[docs]'")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *build_command(), "--site-dir", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def build_command():
    """What `make docs` runs."""
    found = re.search(r"\$\(BIN\)/(mkdocs build.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    return found[1].split()


def test_a_warning_ends_the_build(tmp_path):
    """With --quiet, MkDocs does not see warnings and --strict says nothing."""
    if find_spec("mkdocs") is None:
        pytest.skip("the docs extra is not installed: pip install 'fedcomposite[docs]'")
    (tmp_path / "mkdocs.yml").write_text("site_name: small\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nothing.md)\n")
    done = subprocess.run([sys.executable, "-m", *build_command()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0, done.stderr
    assert "nothing.md" in done.stderr


class Reader(HTMLParser):
    """What a page leads to and loads, and the places in it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.places = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.places |= {given.get("id"), given.get("name")}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("script", "img", "link", "iframe", "source"):
            self.loaded += [v for k, v in attributes if k in ("src", "href") and v]


def test_every_link_of_the_site_leads_somewhere(site):
    pages = {path: Reader(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    for path, page in pages.items():
        for target in page.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            aim = aim / "index.html" if aim.is_dir() else aim
            assert aim.exists(), f"{path.relative_to(site)} links to {target}"
            if parts.fragment and aim in pages:
                assert unquote(parts.fragment) in pages[aim].places, f"{path.relative_to(site)} links to {target}"


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        for source in Reader(path).loaded:
            parts = urlsplit(source)
            assert not parts.netloc, f"{path.relative_to(site)} loads {source}"
            assert path.name == "404.html" or (path.parent / unquote(parts.path)).exists(), source
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path.name


def test_what_is_made_from_the_code_is_there(site):
    regularizers = (site / "regularizers.html").read_text(encoding="utf-8")
    assert regularizers.count('src="images/regularizers/') == len(list((site / "images/regularizers").glob("*.svg")))
    assert "<math" in regularizers
    assert "arithmatex" not in regularizers
    assert "fedcomposite federation join" in (site / "reference/cli.html").read_text(encoding="utf-8")
    fields = (site / "reference/toml.html").read_text(encoding="utf-8")
    for name in ("evaluation_samples", "clip_norm", "strength", "practical", "closing", "rare", "server_optimizer"):
        assert f"<code>{name}</code>" in fields
    assert "<td></td>\n</tr>" not in fields, "a field of an experiment or a site file without a word about it"
    for example in (ROOT / "examples").glob("plot_*.py"):
        page = (site / f"gallery/{example.stem.removeprefix('plot_')}.html").read_text(encoding="utf-8")
        assert "<img" in page
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r":(?:func|class|mod|meth|attr):[`<]", text), path.name  # another markup's
        assert "<!-- verdicts of" not in text, path.name


VISITS = [
    {"page": "index.html"},
    {"page": "index.html", "dark": True},
    {"page": "index.html", "query": "nuclear norm"},
    {"page": "reference/api/algorithms.html"},
    {"page": "gallery/lasso_path.html"},
    {"page": "regularizers.html", "dark": True},
    *(
        {"page": page, "width": 390}
        for page in ("index.html", "regularizers.html", "gallery/index.html", "reference/cli.html", "papers/zhang.html")
    ),
]


def test_in_a_browser(site, tmp_path):
    """Light, dark, on a phone; no errors, no requests to other hosts, and the search finds what it is asked for."""
    if find_spec("PyQt6") is None or find_spec(BROWSER) is None:
        pytest.skip("no browser: pip install PyQt6-WebEngine")
    program = Path(__file__).with_name("browser_site.py")
    done = subprocess.run(
        [sys.executable, str(program), str(site), str(tmp_path)],
        input=json.dumps(VISITS), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if "libGL" in done.stderr or "could not load" in done.stderr:
        pytest.skip(f"the browser does not start here: {done.stderr.splitlines()[-1]}")
    told = json.loads(done.stdout)
    assert len(told) == len(VISITS)
    for visit, seen in zip(VISITS, told, strict=True):
        assert seen["console"] == [], visit
        assert all(r.startswith(("file:", "data:", "blob:")) for r in seen["requests"]), visit
        assert seen["broken"] == [], visit
        assert seen["wide"] <= 0, f"{visit} is wider than the window"
        assert seen["scheme"] == ("slate" if visit.get("dark") else "default")
        if "query" in visit:
            assert any("NuclearNorm" in title or "uclear norm" in title for title in seen["found"]), seen["found"]
    assert told[5]["formulas"] > 40
    assert len(list(tmp_path.glob("*.png"))) == len(VISITS)
