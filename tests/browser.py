"""Pages in Chromium without a screen: what they ask for, what the console says, how they look to whom.

Debian's packages ``chromium`` and ``chromium-driver`` are the browser, ``selenium`` (of the test extra) its remote
control. No name but 127.0.0.1 is resolved: a page that asks another host gets no answer, and both logs tell.
"""

import base64
import contextlib
import json
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox",  # root, in containers, may not have a sandbox; the pages are our own
    "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
DESKTOP, PHONE = (1280, 900), (390, 844)
PATIENCE = 30.0
SEEN = """
const root = document.documentElement, edge = Math.min(root.clientWidth, arguments[0]);
const scrolls = e => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
const cut = [...document.querySelectorAll('table, svg, img, math, pre, p, li, h1, h2, h3')].filter(
  e => e.checkVisibility() && e.getBoundingClientRect().right > edge + 1 && !scrolls(e));
return {title: document.title, scheme: document.body.dataset.mdColorScheme,
  formulas: document.querySelectorAll('math').length,
  broken: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
  cut: cut.map(e => e.outerHTML.slice(0, 200)), wide: root.scrollWidth - edge}
"""
FAINT = """
const parts = c => { const [r, g, b, a = 1] = c.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
const over = (c, under) => [0, 1, 2].map(i => c[i] * c[3] + under[i] * (1 - c[3]));
const light = c => c.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const scheme = getComputedStyle(document.body).colorScheme;
const dark = matchMedia('(prefers-color-scheme: dark)').matches && scheme.includes('dark');
const sheet = dark ? [18, 18, 18] : [255, 255, 255];
const ground = e => e ? over(parts(getComputedStyle(e).backgroundColor), ground(e.parentElement)) : sheet;
const contrast = e => {
  const style = getComputedStyle(e), behind = ground(e);
  const front = over(parts(e.closest('svg') ? style.fill : style.color), behind);
  const [low, high] = [light(front), light(behind)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility() && e.textContent.trim()
  && contrast(e) < arguments[1]).map(e => e.outerHTML.slice(0, 120) + ' ' + contrast(e).toFixed(1));
"""
OVERLAPS = """
const found = [];
for (const picture of document.querySelectorAll('svg')) {
  const words = [...picture.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
  const frame = picture.getBoundingClientRect();
  words.forEach(([a, r], i) => {
    if (r.left < frame.left - 1 || r.right > frame.right + 1) found.push([a, 'edge']);
    for (const [b, s] of words.slice(i + 1))
      if (Math.min(r.right, s.right) - Math.max(r.left, s.left) > 1
        && Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top) > r.height / 4) found.push([a, b]);
  });
}
return found;
"""
LOADED = """
for (const picture of document.images) picture.loading = 'eager';
return document.readyState === 'complete' && [...document.images].every(i => i.complete);
"""
ON_LINE = """
const line = arguments[0], steps = 64, total = line.getTotalLength();
line.scrollIntoView({block: 'center', behavior: 'instant'});
for (let i = 1; i < steps; i++) {
  const p = line.getPointAtLength(total * i / steps).matrixTransform(line.getScreenCTM());
  if (document.elementFromPoint(p.x, p.y) === line) return [Math.round(p.x), Math.round(p.y)];
}
return null;
"""


def missing():
    """What there must be for a browser and is not, in words; nothing if all is there."""
    if find_spec("selenium") is None:
        return "no browser: selenium is not installed (pip install 'fedcomposite[test]')"
    if not any(map(shutil.which, BROWSERS)) or not shutil.which("chromedriver"):
        return "no browser: Chromium or its driver is not on the path (apt-get install chromium chromium-driver)"
    return ""


@contextlib.contextmanager
def started():
    """A browser with an empty profile, until the end of the block."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield Browser(driver)
        finally:
            driver.quit()


class Browser:
    """A window: one page after the other."""

    def __init__(self, driver):
        self.driver = driver
        self.width = 0

    def open(self, page, size=DESKTOP, *, dark=False, media=""):
        """Go to a file or an address, with nothing remembered of earlier pages."""
        self.driver.get("about:blank")
        self.console(), self.requests()
        self.resize(size)
        self.emulate(dark=dark, media=media)
        address = page if isinstance(page, str) else page.resolve().as_uri()
        parts = urlsplit(address)
        origin = {"origin": f"{parts.scheme}://{parts.netloc}", "storageTypes": "all"}
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", origin)
        self.driver.get(address)

    def resize(self, size):
        """The size of the window; a narrow one is a phone's."""
        self.width = size[0]
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def emulate(self, *, dark=False, media=""):
        """What the visitor's system prefers; ``media`` is "print" for paper."""
        wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [wish]})

    def run(self, script, *arguments):
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def seen(self):
        """Title, colours, formulas, pictures that are not there, what the window's edge cuts."""
        self.until(LOADED)
        return self.run(SEEN, self.width)

    def faint(self, selector="p, li, td, th, h1, h2, text, code", least=4.5):
        """Words that their background hides: less contrast than the Web's guidelines ask for."""
        return self.run(FAINT, selector, least)

    def overlaps(self):
        """Words of pictures that stand on each other, or leave their picture at a side."""
        return self.run(OVERLAPS)

    def until(self, script, *arguments):
        """Wait until a script returns something true, which is returned."""
        end = time.monotonic() + PATIENCE
        while not (got := self.run(script, *arguments)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)
        return got

    def one(self, selector):
        """The first element of a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def click(self, selector):
        """Press an element that can be seen."""
        self.one(selector).click()

    def write(self, selector, text):
        """Press a field and type into it."""
        self.click(selector)
        self.one(selector).send_keys(text)

    def point(self, selector):
        """Put the pointer onto a line that is drawn, where no other covers it."""
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        place = self.run(ON_LINE, self.one(selector))
        assert place, f"{selector} is covered everywhere"
        actions = ActionBuilder(self.driver)
        actions.pointer_action.move_to_location(*place)
        actions.perform()

    def console(self):
        """Lines since this was last asked: of scripts, of failed requests, of the page's own policy."""
        return [line["message"] for line in self.driver.get_log("browser")]

    def requests(self):
        """Addresses asked for since this was last asked."""
        told = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in told if m["method"] == "Network.requestWillBeSent"]

    def picture(self, path, *, whole=False):
        """What is seen as a PNG, or the whole length of the page."""
        wish = {"captureBeyondViewport": whole}
        if whole:
            size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            wish["clip"] = {**size, "scale": 1}
        made = self.driver.execute_cdp_cmd("Page.captureScreenshot", wish)
        Path(path).write_bytes(base64.b64decode(made["data"]))

    def pdf(self, path):
        """The page on paper: A4, as the browser prints it."""
        wish = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": False}
        made = self.driver.execute_cdp_cmd("Page.printToPDF", wish)
        Path(path).write_bytes(base64.b64decode(made["data"]))
