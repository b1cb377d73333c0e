"""The coordinator's live page: one file, no other address is asked for anything, and text from others is text."""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; vertical-align: top; }
#sites td:first-child, #job td:last-child { overflow-wrap: anywhere; }
#job td:first-child, #certificates td:first-child { width: 35%; }
tr { border-bottom: 1px solid #8884; } th { font-weight: 600; }
.online { color: light-dark(#18794e, #4cc38a); } .revoked, .awaited { opacity: .7; }
.offline, .gone, .failed, .warn { color: light-dark(#c62a2f, #ff8b8b); }
svg { box-sizing: border-box; width: 100%; height: 9rem; border: 1px solid #8884; }
polyline { fill: none; stroke: light-dark(#3e63dd, #9eb1ff); stroke-width: 2; }
"""

_SCRIPT = """
"use strict";
const at = id => document.getElementById(id);
function say(id, line) { at(id).textContent = line; }
function rows(id, lines) {
  const body = at(id);
  body.replaceChildren();
  for (const cells of lines) {
    const row = document.createElement("tr");
    for (const [content, name] of cells) {
      const cell = document.createElement("td");
      cell.textContent = content;
      if (name) cell.className = name;
      row.appendChild(cell);
    }
    body.appendChild(row);
  }
}
const known = new Set(["online", "offline", "revoked", "awaited", "gone", "failed"]);
const shade = state => known.has(state) ? state : "";
const text = v => v === undefined || v === null ? "" : String(v);
const number = (v, digits) => typeof v === "number" ? v.toPrecision(digits) : text(v);
const megabytes = v => typeof v === "number" ? (v / 1e6).toPrecision(3) + " MB" : "";
function curve(points) {
  const good = points.filter(p => p.every(v => typeof v === "number"));
  const xs = good.map(p => p[0]), ys = good.map(p => p[1]);
  const [left, right] = [Math.min(...xs), Math.max(...xs)], [low, high] = [Math.min(...ys), Math.max(...ys)];
  const place = (v, a, b, size) => b > a ? (v - a) / (b - a) * size : size / 2;
  const shown = good.map(p => place(p[0], left, right, 600) + "," + (120 - place(p[1], low, high, 120)));
  at("line").setAttribute("points", good.length > 1 ? shown.join(" ") : "");
  const ends = [0, good.length - 1].map(i => good.length && number(ys[i], 6) + " after round " + xs[i]);
  say("ends", good.length > 1 ? ends.join(", ") : "");
}
function show(seen) {
  const job = seen.job, last = job.last || {}, missing = job.missing || {};
  rows("sites", seen.sites.map(s => [[s.site], [s.state, shade(s.state)],
    [typeof s.silent === "number" ? Math.round(s.silent) + " s ago" : ""],
    [s.site in missing ? "missing for " + missing[s.site] + " s" : "", "warn"]]));
  rows("job", !job.name ? [[["no job yet"]]] : [
    [["run"], [job.name]], [["kind"], [text(job.kind)]], [["state"], [job.state, shade(job.state)]],
    ...(job.kind === "run" ? [
      [["round"], [text(job.round) + " of " + text(job.rounds)]],
      [["objective"], [number(last.objective, 8)]], [["stationarity"], [number(last.stationarity, 3)]],
      [["nonzero"], [text(last.nonzeros)]],
      [["sent by the sites"], [megabytes(last.bytes_up)]], [["sent to the sites"], [megabytes(last.bytes_down)]],
      [["privacy budget used (epsilon)"], [number(last.epsilon, 3)]]
    ] : [
      [["exchanges"], [text(job.exchanges)]], [["fits running"], [text(job.fits)]], [["asked"], [text(job.asked)]]
    ]),
    [["waiting for"], [Object.keys(missing).join(", "), "warn"]],
    [["secure sums"], [job.secure ? "yes" : "no"]], [["message"], [text(job.message)]]]);
  rows("certificates", Object.entries(seen.certificates).map(([k, v]) => [[k], [Math.floor(v) + " days"]]));
  curve(job.curve || []);
}
async function look() {
  try {
    const got = await fetch("status.json", {cache: "no-store"});
    show(await got.json());
    say("when", "as of " + new Date().toLocaleTimeString());
  } catch (error) {
    say("when", "the service does not answer");
  }
  setTimeout(look, 2000);
}
look();
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser may do with the page: run this script and style, ask this service, and nothing else."""

PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedcomposite: federation</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Federation</h1>
<p id="when" role="status">loading</p>
<h2>Sites</h2>
<table><thead><tr><th>site</th><th>state</th><th>heard</th><th>this round</th></tr></thead>
<tbody id="sites"></tbody></table>
<h2>Newest run</h2>
<table><tbody id="job"></tbody></table>
<h2>Objective</h2>
<svg viewBox="0 0 600 120" preserveAspectRatio="none" role="img" aria-label="objective by round">
<polyline id="line" points="" vector-effect="non-scaling-stroke"></polyline></svg>
<p id="ends"></p>
<h2>Certificates</h2>
<table><tbody id="certificates"></tbody></table>
<script>{_SCRIPT}</script>
</body>
</html>
"""
