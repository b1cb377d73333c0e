"""The documents as tests see them: fenced blocks with what is said about running them, commands, links, headings."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
FENCE = re.compile(r"^(?P<marks>(?:<!-- not run.*? -->\n+)*)```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.S | re.M)
MARK = re.compile(r"<!-- not run(?: `(?P<which>[^`]+)`)?: (?P<why>.+?) -->", re.S)
PROGRAMS = ("fedcomposite ", "make ", "python ", "pip ", "torchrun ")


class Block(NamedTuple):
    """A fenced block."""

    kind: str
    text: str
    marks: dict  # why it is not run: the whole ("") or what begins so

    def why_not(self, command=""):
        return next((why for which, why in self.marks.items() if command.startswith(which)), None)

    @property
    def commands(self):
        """The lines of a block of commands, without what is said beside them."""
        lines = [line.partition("  #")[0].partition(" # ")[0].strip() for line in self.text.splitlines()]
        return [line for line in lines if line.startswith(PROGRAMS)] if self.kind in ("", "sh", "bash") else []


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name):
    """Every fenced block of a page."""
    for found in FENCE.finditer(text_of(name)):
        marks = {m["which"] or "": " ".join(m["why"].split()) for m in MARK.finditer(found["marks"])}
        yield Block(found["kind"], found["text"], marks)


def inline_commands(name):
    """Commands in the running text, if they are whole: no placeholders of three dots."""
    text = FENCE.sub("", text_of(name))
    for command in re.findall(r"`(fedcomposite [^`]+)`", text):
        if "..." not in command:
            yield " ".join(command.split())


def prose(name):
    """A page without its fenced blocks, and without code in the text."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(name)))


def anchors(path):
    """The headings of a page as addresses, the way code hosts and MkDocs make them of ours."""
    found = []
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        found.append(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
    return found


def words(command):
    """A command line as its arguments."""
    return shlex.split(command)
