"""What MkDocs calls while it builds the site: pages made from the code, links out of docs/, mathematics."""

import logging
import posixpath
import re
from pathlib import Path

import api
import commands
import fields
import gallery
import mathematics
import regularizers
import verdicts
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)")
log = logging.getLogger("mkdocs.fedcomposite")
sources: dict[str, str] = {}  # page of the site: file of the repository
drawn = regularizers.Pictures()


def on_config(config):
    """Put the pages that are made for each room and each example into the navigation."""
    for section in config.nav:
        if "Gallery" in section:
            section["Gallery"] = [
                "gallery/index.md",
                *(f"gallery/{name}.md" for name in gallery.names(ROOT / "examples")),
            ]
        if "Reference" in section:
            rooms = [{room: f"reference/api/{room}.md"} for room in api.ROOMS]
            section["Reference"][1:1] = [{"Classes and functions": rooms}]


def on_files(files, config):
    """Add the pages that are made from the code, their pictures, and files outside docs/ that pages lead to."""
    made = {
        "regularizers.md": regularizers.page(drawn),
        "reference/cli.md": commands.page(),
        "reference/toml.md": fields.page(),
        **api.pages(),
    }
    shown = gallery.build(ROOT / "examples", ROOT / "build" / "gallery", log.info)
    made |= {**shown.pages, **shown.pictures, **drawn.files}
    made |= {f"assets/{name}": (HERE / name).read_text(encoding="utf-8") for name in ("site.css", "iframe-worker.js")}
    sources.update({f.src_uri: f"docs/{f.src_uri}" for f in files.documentation_pages()})
    for path in led_to([*sources.values(), "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]):
        text = (ROOT / path).read_text(encoding="utf-8")
        made[uri(path)] = text if path.endswith(".md") else f"# {path}\n\n```python\n{text}```\n"
        sources[uri(path)] = path
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links between files of the repository into links between pages, and fill in the papers' verdicts."""
    path = sources.get(page.file.src_uri)
    if path is None:
        return markdown
    markdown = re.sub(r"<!-- site: (.*?) -->", r"\1", markdown, flags=re.S)  # leads to pages that are made here
    markdown = verdicts.filled(markdown, ROOT / "docs" / "reproductions")
    return LINK.sub(lambda found: found[1] + translated(found[2], path, page.file.src_uri), markdown)


def on_page_content(html, page, config, files):
    """Formulas become MathML, which browsers draw without a script; roles of docstrings become plain code."""
    html = re.sub(r":(?:func|class|mod|meth|attr):(?=<code>|<a )", "", html)
    html = re.sub(r":(?:func|class|mod|meth|attr):`([^`<]+)`", r"\1", html)
    return mathematics.rendered(html)


def uri(path):
    """The page of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" + ("" if path.endswith(".md") else ".md")


def translated(target, path, page):
    """A link of a file of the repository, as one of its page."""
    aim = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if not (ROOT / aim).is_file() or (aim.startswith("docs/") and page == path.removeprefix("docs/")):
        return target  # a page that is made, or nothing: MkDocs says so
    return posixpath.relpath(uri(aim), posixpath.dirname(page) or ".")


def led_to(paths):
    """Files outside docs/ that these lead to, and that those lead to."""
    found, wanted = [], [p for p in paths if not p.startswith("docs/")]
    for path in paths:
        wanted += outside(path)
    while wanted:
        path = wanted.pop()
        if path not in found:
            found.append(path)
            wanted += outside(path)
    return sorted(found)


def outside(path):
    """Files outside docs/ that one file leads to."""
    if not path.endswith(".md"):
        return []
    targets = [t for _, t in LINK.findall((ROOT / path).read_text(encoding="utf-8"))]
    aims = [posixpath.normpath(posixpath.join(posixpath.dirname(path), t)) for t in targets]
    return [a for a in aims if not a.startswith(("docs/", "..")) and (ROOT / a).is_file()]
