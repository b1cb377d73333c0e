"""Formulas as MathML, at build time."""

import html as entities
import re

from latex2mathml.converter import convert

SHOWN = re.compile(r'<(span|div) class="arithmatex">\s*(.*?)\s*</\1>', re.S)


def rendered(html):
    """A page with every formula that the Markdown extension marked drawn as MathML."""
    return SHOWN.sub(lambda found: formula(found[2]), html)


def formula(marked):
    """One formula, between its marks."""
    text = entities.unescape(marked.strip())
    block = text.startswith(r"\[")
    drawn = convert(text[2:-2].strip(), display="block" if block else "inline")
    return f'<div class="formula">{drawn}</div>' if block else drawn
