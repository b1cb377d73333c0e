"""The verdicts on a paper's claims, from the folders that `fedcomposite reproduce` wrote."""

import re

MARK = re.compile(r"<!-- verdicts of (\S+) -->")


def filled(markdown, folder):
    """A page with the verdicts in the place of each mark."""
    return MARK.sub(lambda found: tables(folder, found[1]), markdown)


def tables(folder, paper):
    """What became of the claims of one paper, by figure."""
    parts = []
    for page in sorted(folder.glob(f"{paper}-*/verdict.md")):
        text = page.read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        claims = text.split("\n## ")[0]  # what the verdicts rest on comes after, and has other columns
        rows = [line for line in claims.splitlines() if line.startswith("|")]
        name = page.parent.name
        picture = f"![{title}](../reproductions/{name}/figure.png)"
        again = (
            f"`fedcomposite reproduce {name}` makes it again; [the whole verdict](../reproductions/{name}/verdict.md)."
        )
        parts += [f"### {title}", "\n".join(rows), picture, again]
    return "\n\n".join(parts)
