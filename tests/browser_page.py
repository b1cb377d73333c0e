"""A page in Qt's Chromium, without a screen: what it asked for, what its console said, what a pointer on it shows."""

import json
import os
import sys

os.environ.update(QT_QPA_PLATFORM="offscreen", QTWEBENGINE_CHROMIUM_FLAGS="--no-sandbox --disable-gpu")
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInterceptor
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

POINTED = """
const t = document.querySelector('polyline.trace');
t.dispatchEvent(new MouseEvent('mousemove', {clientX: 300, clientY: 300, bubbles: true}));
[document.getElementById('tip').textContent, document.querySelectorAll('.faded').length,
 document.documentElement.scrollWidth, window.innerWidth,
 [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width)]
"""
said = {"console": [], "requests": []}
app = QApplication(sys.argv)


class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, message, line, source):  # noqa: N802
        said["console"].append(message)


class Watch(QWebEngineUrlRequestInterceptor):
    def interceptRequest(self, info):  # noqa: N802
        said["requests"].append(info.requestUrl().toString())


view = QWebEngineView()
page, watch = Page(view), Watch()
page.setUrlRequestInterceptor(watch)
view.setPage(page)
view.resize(1060, 900)
view.show()


def pointed(found):
    said["pointed"] = found
    app.quit()


view.loadFinished.connect(lambda ok: page.runJavaScript(POINTED, pointed))
view.load(QUrl.fromLocalFile(os.path.abspath(sys.argv[1])))
QTimer.singleShot(60_000, app.quit)
app.exec()
print(json.dumps(said), flush=True)
os._exit(0)
