"use strict";

// What went wrong is left where a person, and a test, can see it.
const root = document.documentElement;
addEventListener("error", (event) => { root.dataset.error = event.message; });

const $ = (id) => document.getElementById(id);
const timeline = JSON.parse($("timeline").textContent);
const STAGE = 28, LINK = 9, GAP = 5, SLACK = 0.004;
const whole = { from: 0, to: timeline.seconds * (1 + SLACK) || 1e-3 };
const view = { ...whole };
const panels = [];
let picked = null;  // The box that is looked at: { panel, row, box }.
let scheduled = false;

// --- Quantities as people read them

function digits(value) {
  return String(Number(value.toPrecision(3)));
}

function duration(seconds) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]) {
    if (Math.abs(seconds) >= size * 0.9995) return `${digits(seconds / size)} ${unit}`;
  }
  return "0 s";
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (bytes >= 999.5 && power < units.length - 1) { bytes /= 1000; power += 1; }
  return `${digits(bytes)} ${units[power]}`;
}

const percent = (share) => `${Math.round(share * 100)}%`;
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const arrows = (track) => track.replace("->", " → ");

// --- The page

function element(parent, tag, text = "", properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  made.textContent = text;
  return parent.appendChild(made);
}

function build() {
  const [first, last] = [timeline.panels[0], timeline.panels.at(-1)];
  if (first !== last && first.seconds > 0) {
    $("summary").textContent = `measured over predicted: ${digits(last.seconds / first.seconds)}`;
  }
  for (const style of timeline.styles) {
    const item = element($("legend"), "li");
    element(item, "i").style.background = style.color;
    item.append(style.label);
  }
  timeline.panels.forEach(buildPanel);
}

function buildPanel(data) {
  const section = element($("panels"), "section");
  const heading = element(section, "h2", data.name ? `${capital(data.name)} ` : "");
  element(heading, "span", `${duration(data.seconds)}, bubble ${percent(data.bubble)}`);
  const body = element(section, "div", "", { className: "rows" });
  const chart = element(body, "canvas", "", { className: "chart", tabIndex: 0 });
  chart.setAttribute("role", "application");
  chart.setAttribute("aria-label", `${data.name} timeline of ${data.rows.length} rows; arrow keys `
    + "go from box to box, plus and minus zoom, 0 shows all");

  let top = 0;
  const rows = data.rows.map((each) => {
    const height = each.link ? LINK : STAGE;
    const line = element(body, "div", "", { className: each.link ? "row link" : "row" });
    line.style.cssText = `height: ${height}px; margin-bottom: ${GAP}px`;
    element(line, "b", arrows(each.track));
    if (!each.link) element(line, "span", `bubble ${percent(each.bubble)}`);
    const boxes = each.boxes.map(([name, style, microbatch, start, seconds, bytes]) => (
      { name, style: timeline.styles[style], microbatch, start, seconds, bytes, from: start }));
    if (each.link) queue(boxes);
    const row = { ...each, boxes, top, height };
    top += height + GAP;
    return row;
  });

  const panel = { name: data.name, rows, chart };
  panels.push(panel);
  section.dataset.rows = rows.length;
  section.dataset.boxes = rows.reduce((count, row) => count + row.boxes.length, 0);
  listen(panel);
}

// A transfer that waits for another overlaps it; it has the link, and is drawn, from its end on.
function queue(boxes) {
  let free = 0;
  for (const box of boxes) {
    const end = box.start + box.seconds;
    if (free < end) box.from = Math.max(box.start, free);
    free = Math.max(free, end);
  }
}

// --- Drawing

function draw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(drawNow);
}

function drawNow() {
  scheduled = false;
  const style = getComputedStyle(root);
  const color = (name) => style.getPropertyValue(name).trim();
  const colors = { ink: color("--ink"), quiet: color("--quiet"), lane: color("--lane"),
    line: color("--line") };
  for (const panel of panels) drawPanel(panel, colors);
  drawAxis(colors);
  const bar = $("window").firstElementChild;
  bar.style.marginLeft = `${100 * view.from / whole.to}%`;
  bar.style.width = `${100 * (view.to - view.from) / whole.to}%`;
  $("window").classList.toggle("whole", view.to - view.from >= whole.to);
  root.dataset.from = view.from;
  root.dataset.to = view.to;
}

function sharp(canvas) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height, scale: width / (view.to - view.from) };
}

const lasts = (box) => box.start + box.seconds - box.from;

function drawPanel(panel, colors) {
  const { context, width, height, scale } = sharp(panel.chart);
  for (const row of panel.rows) {
    context.fillStyle = colors.lane;
    context.fillRect(0, row.top, width, row.height);
  }
  context.fillStyle = colors.line;
  for (const tick of ticks(width).at) {
    context.fillRect(Math.round((tick - view.from) * scale), 0, 1, height);
  }
  for (const row of panel.rows) {
    for (const box of row.boxes) drawBox(context, row, box, scale, width);
  }
  if (picked) markPicked(context, panel, scale, colors.ink);
}

function drawBox(context, row, box, scale, width) {
  const left = (box.from - view.from) * scale;
  const long = lasts(box) * scale;
  if (left + long < 0 || left > width) return;
  const other = picked && picked.box.microbatch !== null
    && box.microbatch !== picked.box.microbatch;
  context.globalAlpha = other ? 0.3 : 1;
  context.fillStyle = box.style.color;
  // What is too short to see is drawn a pixel wide; neighbours stay apart where there is room.
  const shown = Math.max(long > 4 ? long - 1 : long, 1);
  if (long > 6) {
    context.beginPath();
    context.roundRect(left, row.top, shown, row.height, row.link ? 2 : 3);
    context.fill();
  } else {
    context.fillRect(left, row.top, shown, row.height);
  }
  if (!row.link && box.microbatch !== null) writeOn(context, row, box, left, shown, width);
  context.globalAlpha = 1;
}

function writeOn(context, row, box, left, long, width) {
  const from = Math.max(left, 0), room = Math.min(left + long, width) - from;
  const short = String(box.microbatch);
  const full = `${box.name} · ${duration(box.seconds)}`;
  const text = room > 7 * full.length + 12 ? full : short;
  if (room < 7 * text.length + 3) return;
  context.fillStyle = box.style.ink;
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, from + room / 2, row.top + row.height / 2 + 0.5);
}

function markPicked(context, panel, scale, color) {
  const row = panel.rows.find((each) => each.track === picked.row.track);
  const box = row && row.boxes.find((each) => each.name === picked.box.name
    && (panel !== picked.panel || each === picked.box));
  if (!box) return;
  context.strokeStyle = color;
  context.lineWidth = panel === picked.panel ? 2 : 1;
  const left = (box.from - view.from) * scale;
  const long = Math.max(lasts(box) * scale - 1, 1);
  context.beginPath();
  context.roundRect(left - 1, row.top - 1, long + 2, row.height + 2, 3);
  context.stroke();
}

function ticks(width) {
  const rough = (view.to - view.from) / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const at = [];
  for (let i = Math.ceil(view.from / step); i * step <= view.to; i += 1) at.push(i * step);
  return { step, at };
}

function drawAxis(colors) {
  const { context, width, scale } = sharp($("axis").querySelector("canvas"));
  const { step, at } = ticks(width);
  const [unit, one] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]
    .find(([, each]) => view.to >= each) || ["ns", 1e-9];
  const decimals = Math.max(0, -Math.floor(Math.log10(step / one) + 1e-9));
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "top";
  for (const tick of at) {
    const left = Math.round((tick - view.from) * scale);
    const text = `${(tick / one).toFixed(decimals)} ${unit}`;
    const half = context.measureText(text).width / 2;
    context.fillStyle = colors.line;
    context.fillRect(left, 0, 1, 5);
    context.fillStyle = colors.quiet;
    context.fillText(text, Math.min(Math.max(left - half, 0), width - 2 * half), 8);
  }
}

// --- Looking at boxes

function find(panel, x, y) {
  const row = panel.rows.find((each) => y >= each.top - 1 && y <= each.top + each.height + 1);
  if (!row) return null;
  const second = (view.to - view.from) / panel.chart.clientWidth;
  const time = view.from + x * second;
  const box = row.boxes.find((each) => (
    time >= each.from && time <= each.from + Math.max(lasts(each), second)));
  return box ? { panel, row, box } : null;
}

function counterpart({ panel, row, box }) {
  for (const other of panels) {
    const same = other !== panel && other.rows.find((each) => each.track === row.track);
    const found = same && same.boxes.find((each) => each.name === box.name);
    if (found) return { name: other.name, box: found };
  }
  return null;
}

function facts(at) {
  const { row, box } = at, other = counterpart(at);
  const lines = [["on", arrows(row.track)]];
  if (box.microbatch !== null) lines.push(["microbatch", String(box.microbatch)]);
  lines.push(["start", duration(box.start)], ["duration", duration(box.seconds)]);
  if (other) lines.push([other.name, duration(other.box.seconds)]);
  if (box.bytes) lines.push(["bytes", size(box.bytes)]);
  if (box.bytes && lasts(box) > 0) lines.push(["rate", `${size(box.bytes / lasts(box))}/s`]);
  return lines;
}

function pick(at, place) {
  const changed = (picked && picked.box) !== (at && at.box);
  picked = at;
  const tip = $("tip");
  tip.hidden = !at;
  root.dataset.picked = at ? `${at.row.track} ${at.box.name}` : "";
  if (at) {
    if (changed) fillTip(tip, at);
    const [left, top] = [place.x + 16, place.y + 18];
    const right = innerWidth - tip.offsetWidth - 8, bottom = innerHeight - tip.offsetHeight - 8;
    tip.style.left = `${Math.max(8, Math.min(left, right))}px`;
    tip.style.top = `${top > bottom ? Math.max(8, place.y - tip.offsetHeight - 12) : top}px`;
  }
  if (changed) draw();
}

function fillTip(tip, at) {
  tip.replaceChildren();
  const heading = element(tip, "strong");
  element(heading, "i").style.background = at.box.style.color;
  heading.append(`${at.box.name}: ${at.box.style.label}`);
  const list = element(tip, "dl");
  for (const [name, value] of facts(at)) {
    element(list, "dt", name);
    element(list, "dd", value);
  }
}

// --- Moving

function show(from, to) {
  const span = Math.min(Math.max(to - from, whole.to * 1e-6), whole.to);
  view.from = Math.min(Math.max(from, 0), whole.to - span);
  view.to = view.from + span;
  draw();
}

function zoom(factor, share = 0.5) {
  const fixed = view.from + share * (view.to - view.from);
  show(fixed - (fixed - view.from) * factor, fixed + (view.to - fixed) * factor);
}

function move(share) {
  const by = share * (view.to - view.from);
  show(view.from + by, view.to + by);
}

function reset() {
  show(whole.from, whole.to);
}

function listen(panel) {
  const { chart } = panel;
  let dragged = null;
  chart.addEventListener("wheel", (event) => {
    const widest = view.to - view.from >= whole.to;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move((event.deltaX || event.deltaY) / chart.clientWidth);
    } else if (widest && event.deltaY > 0) {
      return;  // There is no more to show: the page may scroll.
    } else {
      zoom(1.0015 ** event.deltaY, event.offsetX / chart.clientWidth);
    }
    event.preventDefault();
  }, { passive: false });
  chart.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    dragged = { x: event.clientX, from: view.from };
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointermove", (event) => {
    if (!dragged) {
      const at = find(panel, event.offsetX, event.offsetY);
      pick(at, { x: event.clientX, y: event.clientY });
      return;
    }
    const span = view.to - view.from;
    const from = dragged.from - (event.clientX - dragged.x) / chart.clientWidth * span;
    chart.classList.add("moving");
    pick(null);
    show(from, from + span);
  });
  const drop = () => { dragged = null; chart.classList.remove("moving"); };
  chart.addEventListener("pointerup", drop);
  chart.addEventListener("pointercancel", drop);
  chart.addEventListener("pointerleave", () => { if (!dragged) pick(null); });
  chart.addEventListener("blur", () => pick(null));
  chart.addEventListener("dblclick", reset);
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = keyAction(panel, event.key, event.shiftKey);
    if (!act) return;
    act();
    event.preventDefault();
  });
}

function keyAction(panel, key, shift) {
  const sideways = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (sideways) return shift ? () => move(0.2 * sideways) : () => step(panel, sideways, 0);
  const upwards = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (upwards) return () => step(panel, 0, upwards);
  if (key === "Escape") return () => pick(null);
  return { "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5),
    0: reset }[key];
}

function step(panel, sideways, upwards) {
  const rows = panel.rows.filter((row) => row.boxes.length);
  if (!rows.length) return;
  let row = rows[0], box = row.boxes[0];
  if (picked && picked.panel === panel) {
    const place = rows.indexOf(picked.row) + upwards;
    row = rows[Math.min(Math.max(place, 0), rows.length - 1)];
    box = upwards ? nearest(row, picked.box.start) : neighbour(row, picked.box, sideways);
  }
  const span = view.to - view.from;
  if (box.start < view.from || box.start + box.seconds > view.to) {
    const middle = box.start + box.seconds / 2;
    show(middle - span / 2, middle + span / 2);
  }
  pick({ panel, row, box }, placeOf(panel, row, box));
  const said = facts(picked).map(([name, value]) => `${name} ${value}`).join(", ");
  $("spoken").textContent = `${box.style.label}, ${said}`;
}

function neighbour(row, box, sideways) {
  const place = row.boxes.indexOf(box) + sideways;
  return row.boxes[Math.min(Math.max(place, 0), row.boxes.length - 1)];
}

function nearest(row, time) {
  const distance = (box) => Math.abs(box.start - time);
  return row.boxes.reduce((best, box) => (distance(box) < distance(best) ? box : best));
}

function placeOf(panel, row, box) {
  const chart = panel.chart.getBoundingClientRect();
  const x = (box.start - view.from) / (view.to - view.from) * chart.width;
  return { x: chart.left + Math.max(x, 0), y: chart.top + row.top + row.height / 2 };
}

// --- Beginning

build();
$("buttons").addEventListener("click", (event) => {
  const act = { in: () => zoom(1 / 1.5), out: () => zoom(1.5), all: reset };
  const button = event.target.closest("button");
  if (button) act[button.dataset.zoom]();
});
new ResizeObserver(draw).observe($("panels"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
drawNow();
root.dataset.state = "ready";
