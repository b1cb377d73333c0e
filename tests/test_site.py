"""The site as a visitor meets it: built from the clone, opened in a browser without a network."""

import os
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
from browser import DESKTOP, PHONE

ROOT = Path(__file__).parent.parent
NEEDED = ("mkdocs", "material", "mkdocstrings", "latex2mathml")
SIZES = """
const found = ['h1', 'h2', 'h3'].map(h => document.querySelector('article ' + h)).filter(Boolean);
return found.map(h => parseFloat(getComputedStyle(h).fontSize));
"""
FOUND = (
    "const e = [...document.querySelectorAll('.md-search-result__item :is(h1, h2)')]; return e.map(t => t.innerText)"
)


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
    *((page, DESKTOP, False) for page in ("index.html", "reference/api/algorithms.html", "gallery/lasso_path.html")),
    *((page, DESKTOP, True) for page in ("index.html", "regularizers.html", "benchmarks.html")),
    *((page, PHONE, False) for page in ("index.html", "regularizers.html", "gallery/index.html", "reference/cli.html")),
    *((page, PHONE, True) for page in ("papers/zhang.html", "reproductions/index.html", "reference/toml.html")),
]


@pytest.mark.parametrize(("page", "size", "dark"), VISITS)
def test_in_a_browser(site, browser, page, size, dark):
    """Light, dark, on a phone; no errors, no requests to other hosts, nothing that is not there or is cut."""
    browser.open(site / page, size, dark=dark)
    seen = browser.seen()
    assert seen["scheme"] == ("slate" if dark else "default")
    assert seen["broken"] == []
    assert (seen["cut"], seen["wide"]) == ([], 0)
    assert browser.faint("article :is(p, li, td, th, h1, h2, h3, code)") == []
    headings = browser.run(SIZES)
    assert headings == sorted(headings, reverse=True)
    if page == "regularizers.html":
        assert seen["formulas"] > 40
        assert browser.run("return Math.min(...[...document.querySelectorAll('math')].map(m => m.clientHeight))") > 5
    assert browser.console() == []
    assert all(r.startswith((site.as_uri(), "data:", "blob:")) for r in browser.requests())


def test_the_switch_between_light_and_dark(site, browser):
    """As the system says, also when it changes and on a second visit; then light, dark, and as the system again."""
    browser.open(site / "index.html")
    for dark in (True, False, True):
        browser.emulate(dark=dark)
        browser.driver.refresh()
        assert browser.seen()["scheme"] == ("slate" if dark else "default")
    for scheme in ("default", "slate", "slate"):
        browser.click("form[data-md-component=palette] label:not([hidden])")
        assert browser.seen()["scheme"] == scheme
    browser.emulate(dark=False)
    assert browser.until("return document.body.dataset.mdColorScheme === 'default'")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture(params=["file", "http"])
def address(request, site):
    """The site as files, and from a server."""
    if request.param == "file":
        yield site.as_uri()
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_search_finds_what_it_is_asked_for(address, browser):
    """With and without a server, and what is found leads to its page."""
    browser.open(f"{address}/index.html")
    browser.write("input[name=query]", "nuclear norm")
    found = browser.until(FOUND)
    assert any("NuclearNorm" in title or "uclear norm" in title for title in found), found
    browser.click(".md-search-result__item a")
    assert "uclear" in browser.until("return !location.pathname.endsWith('/index.html') && document.body.innerText")
    assert browser.console() == []
    assert all(r.startswith((address, "data:", "blob:")) for r in browser.requests())
