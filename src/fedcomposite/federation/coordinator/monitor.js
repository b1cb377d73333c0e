
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
