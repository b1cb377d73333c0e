"""The coordinator's live page: one file, no other address is asked for anything, and text from others is text."""

from __future__ import annotations

import base64
import hashlib

from jinja2 import Environment, PackageLoader

_PAGES = Environment(loader=PackageLoader(__package__, ""), keep_trailing_newline=True, autoescape=True)
_STYLE, _SCRIPT = (_PAGES.get_template(name).render() for name in ("monitor.css", "monitor.js"))


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser may do with the page: run this script and style, ask this service, and nothing else."""

PAGE = _PAGES.get_template("monitor.html").render()
