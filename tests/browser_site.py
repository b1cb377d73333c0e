"""Pages of the built site in Qt's Chromium, without a screen: what they asked for, what the console said, pictures.

``python browser_site.py SITE PICTURES`` reads a list of visits from its standard input, each with ``page``, and
optionally ``name`` (of the picture), ``width``, ``dark``, ``query`` (typed into the search) and ``scroll`` (to an
element); it prints what came of each.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(QT_QPA_PLATFORM="offscreen", QTWEBENGINE_CHROMIUM_FLAGS="--no-sandbox --disable-gpu")
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInterceptor
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

SEARCH = """
const field = document.querySelector('input[name=query]');
document.querySelector('#__search').click();
field.focus();
field.value = %s;
field.dispatchEvent(new InputEvent('input', {bubbles: true}));
field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
"""
SEEN = """
({title: document.title, scheme: document.body.dataset.mdColorScheme,
  found: [...document.querySelectorAll('.md-search-result__item :is(h1, h2)')].map(e => e.textContent),
  formulas: document.querySelectorAll('math').length,
  broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  links: [...document.querySelectorAll('a[href]')].map(a => a.href)})
"""
POLL, PATIENCE = 100, 300  # milliseconds between looks, and looks
app = QApplication(sys.argv)
site, pictures = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
visits, told = json.load(sys.stdin), []


class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, message, line, source):  # noqa: N802
        told[-1]["console"].append(message)


class Watch(QWebEngineUrlRequestInterceptor):
    def interceptRequest(self, info):  # noqa: N802
        told[-1]["requests"].append(info.requestUrl().toString())


view = QWebEngineView()
page, watch = Page(view), Watch()
page.setUrlRequestInterceptor(watch)
view.setPage(page)
view.show()


def visit():
    if len(told) == len(visits):
        app.quit()
        return
    wish = visits[len(told)]
    told.append({"page": wish["page"], "console": [], "requests": []})
    view.resize(wish.get("width", 1280), wish.get("height", 900))
    view.load(QUrl.fromLocalFile(str(site / wish["page"])))


def arrived(ok):
    if not ok:
        return
    wish = visits[len(told) - 1]
    dark = "document.querySelector('#__palette_1').click()" if wish.get("dark") else ""
    light = "document.querySelector('#__palette_0').click()" if not wish.get("dark") else ""
    page.runJavaScript(f"{dark}{light}; window.scrollTo(0, 0)")
    if "scroll" in wish:
        page.runJavaScript(f"document.querySelector({json.dumps(wish['scroll'])}).scrollIntoView()")
    if "query" in wish:
        page.runJavaScript("{" + SEARCH % json.dumps(wish["query"]) + "}")
    look(PATIENCE)


def look(left):
    page.runJavaScript(SEEN, lambda seen: judge(seen, left))


def judge(seen, left):
    wish = visits[len(told) - 1]
    ready = not wish.get("query") or seen["found"]
    if ready and left > PATIENCE - 8:  # what fades in has done so
        left = min(left, PATIENCE) - 1
        QTimer.singleShot(POLL, lambda: look(left))
    elif ready or left == 0:
        told[-1] |= seen
        view.grab().save(str(pictures / (wish.get("name", f"{len(told)}") + ".png")))
        visit()
    else:
        QTimer.singleShot(POLL, lambda: look(left - 1))


view.loadFinished.connect(arrived)
visit()
QTimer.singleShot(240_000, app.quit)
app.exec()
print(json.dumps(told), flush=True)
os._exit(0)
