"use strict";
// Draws every picture from the data that the page carries; redraws when the width changes.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const SEATS = ["--a", "--b", "--c", "--d", "--e"];
const $ = (selector) => document.querySelector(selector);
const color = (name) => `var(${name})`;
const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const ms = (value) =>
  value >= 10000 ? `${number(value / 1000, 1)} s` : `${number(value, value < 100 ? 1 : 0)} ms`;

// ---- a small drawing board

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function board(container, height, label) {
  const width = Math.max(280, container.clientWidth);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  container.replaceChildren(svg);
  const add = (name, attributes, text) => svg.appendChild(node(name, attributes, text));
  return { svg, add, width, height };
}

const linear = (low, high, from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);
const logarithmic = (low, high, from, to) => {
  const scale = linear(Math.log(low), Math.log(high), from, to);
  return (value) => scale(Math.log(value));
};

function ticks(high, count, low = 0) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

function logTicks(low, high) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    for (const m of [1, 2, 5]) if (m * power >= low && m * power <= high) found.push(m * power);
  return found;
}

function axes(b, box, x, y, marks) {
  for (const value of marks.y) {
    b.add("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) });
    b.add("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, marks.yText(value));
  }
  b.add("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
  for (const value of marks.x)
    b.add("text", { x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, marks.xText(value));
  b.add("text", { x: box.right, y: box.bottom + 36, "text-anchor": "end" }, marks.xTitle);
  b.add("text", { x: box.left, y: box.top - 12 }, marks.yTitle);
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
const hint = (mark, text) => mark.appendChild(node("title", {}, text));

// ---- the report

function drawReport() {
  const report = data.report;
  $("#report h2").textContent = report.title;
  $("#report .note").textContent = `${report.workload}; ${report.step_time}`;
  const rows = Object.entries(report.policies);
  const most = Math.max(...rows.map(([, row]) => row.output_tokens_per_s));
  const columns = [
    ["tokens/s", (row) => number(row.output_tokens_per_s)],
    ["steps", (row) => number(row.steps)],
    ["TTFT p50", (row) => row.ttft_ms && ms(row.ttft_ms.p50)],
    ["TTFT p99", (row) => row.ttft_ms && ms(row.ttft_ms.p99)],
    ["ITL p99", (row) => row.itl_ms && ms(row.itl_ms.p99)],
    ["padding", (row) => row.padding_waste !== undefined && `${number(100 * row.padding_waste)} %`],
    ["preempted", (row) => row.preemptions > 0 && number(row.preemptions)],
  ].filter(([, text]) => rows.some(([, row]) => text(row)));
  const table = $("#report table");
  const line = (cells, kind) => {
    const made = table.insertRow();
    cells.forEach((cell) => made.appendChild(document.createElement(kind)).append(cell));
    return made;
  };
  table.replaceChildren();
  line(["", ...columns.map(([head]) => head)], "th");
  for (const [name, row] of rows) {
    const made = line([name, ...columns.map(([, text]) => text(row) || "–")], "td");
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.width = `${Math.round((72 * row.output_tokens_per_s) / most)}px`;
    made.cells[1].prepend(bar);
    if (row.output_tokens_per_s === most) made.className = "best";
  }
}

// ---- slots

let arrivals = "together";

function drawGantt() {
  const runs = data.gantt[arrivals];
  const end = Math.max(...runs.map((run) => run.end));
  const cell = 26, gap = 44, top = 22;
  const blockHeight = (run) => run.lanes * cell + gap;
  const height = top + runs.reduce((sum, run) => sum + blockHeight(run), 0);
  const b = board($("#gantt .chart"), height, "Which request has which slot, step by step, for each policy");
  const pitch = Math.min(60, b.width / end);
  const x = (step) => step * pitch;
  let y = top;
  for (const run of runs) {
    const letter = (who) => "ABCDE"[who];
    b.add("text", { class: "strong", x: 0, y: y - 8 }, run.name);
    b.add("text", { x: Math.min(x(run.end), b.width), y: y - 8, "text-anchor": "end" }, `${run.steps} steps`);
    const taken = new Set(run.cells.map(([step, lane]) => `${Math.round(step)}:${lane}`));
    for (let step = 0; step < run.end - 0.01; step += 1)
      for (let lane = 0; lane < run.lanes; lane += 1)
        if (!taken.has(`${step}:${lane}`))
          b.add("rect", {
            x: x(step) + 1.5, y: y + lane * cell + 1.5, width: pitch - 3, height: cell - 3, rx: 3,
            fill: "none", stroke: color("--idle"), "stroke-dasharray": "3 3",
          });
    for (const [step, lane, who] of run.cells) {
      const mark = b.add("rect", {
        x: x(step) + 1, y: y + lane * cell + 1, width: pitch - 2, height: cell - 2, rx: 3,
        fill: color(SEATS[who]),
      });
      hint(mark, `${letter(who)}: arrives at ${run.arrivals[who]}, first token at ${run.first[who]}`);
      if (pitch > 14)
        b.add("text", {
          x: x(step) + pitch / 2, y: y + lane * cell + cell / 2 + 4, "text-anchor": "middle",
          style: "fill:var(--on);font-weight:600",
        }, letter(who));
    }
    run.arrivals.forEach((at, who) => {
      if (arrivals === "staggered")
        b.add("text", {
          x: x(at) + 2, y: y + run.lanes * cell + 14, style: `fill:${color(SEATS[who])};font-weight:600`,
        }, `▴${letter(who)}`);
    });
    y += blockHeight(run);
  }
  const slots = (run) => run.lanes * Math.ceil(run.end - 0.01);
  const idle = runs.map((run) => `${run.name} ${number(100 - (100 * run.cells.length) / slots(run))} %`);
  const wait = (run) => Math.max(...run.first.map((first, who) => first - run.arrivals[who]));
  const waits = runs.map((run) => `${run.name} ${number(wait(run))}`);
  $("#gantt figcaption").textContent =
    `Idle slots: ${idle.join(", ")}. Longest wait for a first token, in steps: ${waits.join(", ")}.`;
}

document.querySelectorAll("[data-arrivals]").forEach((button) =>
  button.addEventListener("click", () => {
    arrivals = button.dataset.arrivals;
    press("[data-arrivals]", button);
    drawGantt();
  }));

function press(group, pressed) {
  document.querySelectorAll(group).forEach((each) => each.setAttribute("aria-pressed", each === pressed));
}

// ---- padding

function drawLayouts() {
  const prompts = data.padding.prompts;
  const widest = Math.max(...prompts);
  const total = prompts.reduce((sum, length) => sum + length, 0);
  const b = board($("#layouts"), 150, "Three prompts, padded and packed");
  const cell = Math.min(30, (b.width - 24) / (widest + total));
  const square = (x, y, seat) =>
    b.add("rect", {
      x: x + 1, y: y + 1, width: cell - 2, height: cell - 2, rx: 3,
      ...(seat === null
        ? { fill: "none", stroke: color("--idle"), "stroke-dasharray": "3 3" }
        : { fill: color(SEATS[seat]) }),
    });
  prompts.forEach((length, row) => {
    for (let i = 0; i < widest; i += 1) square(i * cell, 22 + row * cell, i < length ? row : null);
  });
  const slots = widest * prompts.length;
  b.add("text", { class: "strong", x: 0, y: 12 }, `padded [${prompts.length}, ${widest}]`);
  b.add("text", { x: 0, y: 40 + prompts.length * cell },
    `${slots - total} of ${slots} are padding: ${number((100 * (slots - total)) / slots)} %`);
  const left = widest * cell + 24;
  const starts = [0];
  b.add("text", { class: "strong", x: left, y: 12 }, `packed [${total}]`);
  let at = 0;
  prompts.forEach((length, row) => {
    for (let i = 0; i < length; i += 1) square(left + at++ * cell, 22, row);
    starts.push(at);
  });
  b.add("text", { x: left, y: 40 + cell }, `cu_seqlens = [${starts.join(", ")}]`);
}

function drawTax() {
  const at = Number($("#sigma").value);
  const point = data.padding.sweep[at];
  $("#sigma ~ output").textContent = `σ ${point.sigma.toFixed(1)}`;
  const lengths = [...point.lengths].sort((a, b) => b - a);
  const longest = lengths[0];
  const b = board($("#tax"), 16 * lengths.length + 34, "Rows of a static batch: real tokens and padding");
  const x = linear(0, longest, 0, b.width);
  b.add("text", { class: "strong", x: 0, y: 12 }, "one static batch, longest first");
  b.add("text", { x: b.width, y: 12, "text-anchor": "end" }, `${number(longest)} tokens`);
  lengths.forEach((length, row) => {
    const y = 22 + row * 16;
    b.add("rect", { x: 0, y, width: x(length), height: 12, rx: 2, fill: color("--calm") });
    if (length < longest)
      b.add("rect", {
        x: x(length) + 1, y: y + 0.5, width: Math.max(0, b.width - x(length) - 1.5), height: 11, rx: 2,
        fill: "none", stroke: color("--idle"), "stroke-dasharray": "3 3",
      });
  });
  const gain = point.continuous / point.static;
  $("#padding figcaption").textContent =
    `Over ${number(data.padding.requests)} requests in groups of ` +
    `${data.padding.batch}: ${number(100 * point.waste)} % of all rows are padding. ` +
    `${number(point.static)} tokens/s padded, ${number(point.continuous)} continuous: ` +
    `${gain.toFixed(2)} times as much.`;
}

// ---- the knee

function drawKnee() {
  const chosen = Number($("#kv").value);
  const curve = data.knee.curves[chosen];
  $("#kv ~ output").textContent = number(curve.kv);
  const b = board($("#knee .chart"), 320, "Step time over batch size");
  const box = { left: 44, right: b.width - 8, top: 30, bottom: 270 };
  const high = 40;
  const most = 640;
  const x = linear(0, most, box.left, box.right);
  const y = linear(0, high, box.bottom, box.top);
  axes(b, box, x, y, {
    x: ticks(most, b.width > 500 ? 7 : 4), xText: number, xTitle: "sequences in the batch",
    y: ticks(high, 6), yText: number, yTitle: "step time, ms",
  });
  const clipped = (points) => {
    const inside = points.filter(([n, t]) => t <= high && n <= most);
    const next = points[inside.length];
    if (!next || !inside.length) return inside;
    const [n0, t0] = inside[inside.length - 1];
    if (next[0] > most) return inside;
    return [...inside, [n0 + ((next[0] - n0) * (high - t0)) / (next[1] - t0), high]];
  };
  data.knee.curves.forEach((each, i) => {
    b.add("path", {
      d: path(clipped(each.points).map(([n, t]) => [x(n), y(t)])), fill: "none",
      stroke: color(i === chosen ? "--accent" : "--idle"), "stroke-width": i === chosen ? 2.5 : 1,
      "stroke-linejoin": "round",
    });
  });
  const ridge = data.knee.ridge;
  b.add("line", {
    x1: x(ridge), x2: x(ridge), y1: box.top, y2: box.bottom, stroke: color("--calm"), "stroke-dasharray": "4 4",
  });
  b.add("text", { x: x(ridge) - 6, y: box.top + 10, "text-anchor": "end", style: "fill:var(--calm)" },
    `ridge: ${number(ridge)}`);
  const base = data.knee.curves[0].points[0][1];
  if (curve.doubled) {
    b.add("circle", { cx: x(curve.doubled), cy: y(2 * base), r: 5, fill: color("--accent") });
    const onLeft = x(curve.doubled) > b.width / 2;
    b.add("text", {
      class: "strong", x: x(curve.doubled) + (onLeft ? -8 : 10), y: y(2 * base) + (onLeft ? -10 : 18),
      "text-anchor": onLeft ? "end" : "start",
    }, `twice the step at ${number(curve.doubled)}`);
  }
  const room = curve.fits ? ` The device's memory holds ${number(curve.fits)} such sequences.` : "";
  $("#knee figcaption").textContent =
    `${data.knee.text}. The arithmetic takes over at ${number(ridge)} tokens; with ` +
    `${number(curve.kv)} KV tokens each, the step has doubled at ` +
    `${curve.doubled ? number(curve.doubled) : "more than 1,024"} sequences.${room}`;
}

// ---- the spike

const SPIKE_TITLES = {
  "unchunked": "whole prompt in one step",
  "fixed-512": "fixed budget of 512 tokens",
  "adaptive": "adaptive",
};

function drawGaps() {
  const panels = data.spike.panels;
  const narrow = $("#gaps").clientWidth < 520;
  const panel = narrow ? 136 : 118;
  const b = board($("#gaps"), panels.length * panel + 44, "Inter-token time after a long prompt arrives");
  const box = { left: 44, right: b.width - 8 };
  const last = Math.max(...panels.map((each) => each.ttft)) + 60;
  const x = linear(-100, last, box.left, box.right);
  const high = Math.max(...panels.map((each) => each.worst));
  const order = ["unchunked", "fixed-512", "adaptive"];
  [...panels].sort((p, q) => order.indexOf(p.name) - order.indexOf(q.name)).forEach((each, i) => {
    const bottom = 26 + (i + 1) * panel - 40, top = bottom - 78;
    const y = linear(0, high, bottom, top);
    const name = each.name === "adaptive" ? `adaptive, target ${data.spike.target_ms} ms` : SPIKE_TITLES[each.name];
    b.add("text", { class: "strong", x: box.left, y: top - (narrow ? 26 : 10) }, name);
    b.add("text", { x: narrow ? box.left : box.right, y: top - 10, "text-anchor": narrow ? "start" : "end" },
      `worst ${ms(each.worst)}, first token after ${ms(each.ttft)}`);
    for (const value of [0, Math.round(high / 2), Math.round(high)]) {
      b.add("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) });
      b.add("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, number(value));
    }
    for (const [at, gap] of each.gaps) {
      if (at > last) continue;
      const left = Math.max(box.left, x(at - gap));
      const mark = b.add("rect", {
        x: left + 0.5, y: y(gap), width: Math.max(1, x(at) - left - 1), height: bottom - y(gap), rx: 1,
        fill: color(gap > 2 * data.spike.target_ms ? "--accent" : "--calm"),
      });
      hint(mark, `${ms(gap)}, ending ${ms(at)} after the newcomer`);
    }
    b.add("line", { x1: x(0), x2: x(0), y1: top, y2: bottom + 4, stroke: color("--ink"), "stroke-width": 1.5 });
    b.add("line", {
      x1: x(each.ttft), x2: x(each.ttft), y1: top, y2: bottom + 4, stroke: color("--good"), "stroke-width": 1.5,
      "stroke-dasharray": "3 3",
    });
  });
  const bottom = 26 + panels.length * panel - 24;
  for (const value of ticks(last, b.width > 500 ? 6 : 4))
    b.add("text", { x: x(value), y: bottom, "text-anchor": "middle" }, number(value));
  b.add("text", { x: box.right, y: bottom + 18, "text-anchor": "end" }, "ms after the newcomer arrived; dashed: its first token");
}

function drawTrade() {
  const budgets = data.spike.budgets;
  const fixed = budgets.filter((each) => each.name !== "adaptive").sort((p, q) => p.budget - q.budget);
  const adaptive = budgets.find((each) => each.name === "adaptive");
  const b = board($("#trade"), 300, "Newcomer's first token over everybody else's rhythm");
  const box = { left: 52, right: b.width - 10, top: 30, bottom: 250 };
  const x = logarithmic(20, 450, box.left, box.right);
  const high = Math.max(...fixed.map((each) => each.ttft)) * 1.05;
  const y = linear(0, high, box.bottom, box.top);
  axes(b, box, x, y, {
    x: [20, 30, 50, 100, 200, 400], xText: number, xTitle: "p99 time between tokens, ms",
    y: ticks(high, 5), yText: (v) => number(v / 1000, 1), yTitle: "newcomer's first token, s",
  });
  const target = data.spike.target_ms;
  b.add("rect", { x: box.left, y: box.top, width: x(target) - box.left, height: box.bottom - box.top, fill: color("--good"), opacity: 0.08 });
  b.add("path", {
    d: path(fixed.map((each) => [x(each.itl_p99), y(each.ttft)])), fill: "none", stroke: color("--idle"), "stroke-width": 1.5,
  });
  const named = new Set([48, 128, 512, 2048, 8192]);
  for (const each of fixed) {
    const at = [x(each.itl_p99), y(each.ttft)];
    const mark = b.add("circle", { cx: at[0], cy: at[1], r: 4, fill: color("--calm") });
    hint(mark, `budget ${number(each.budget)}: p99 ${ms(each.itl_p99)}, first token ${ms(each.ttft)}`);
    if (named.has(each.budget)) b.add("text", { x: at[0] + 8, y: at[1] - 7, "text-anchor": each.budget === 8192 ? "end" : "start" }, number(each.budget));
  }
  const at = [x(adaptive.itl_p99), y(adaptive.ttft)];
  b.add("circle", { cx: at[0], cy: at[1], r: 6, fill: color("--accent") });
  b.add("text", { class: "strong", x: at[0] + 12, y: at[1] - 8 }, "adaptive");
  const verdict = data.spike.verdict;
  $("#spike figcaption").textContent =
    `Each dot is one fixed budget; the tinted band keeps ${target} ms. Adaptive: p99 ${ms(adaptive.itl_p99)}, ` +
    `first token after ${ms(adaptive.ttft)}, ${verdict.adaptive_over_best_fixed.toFixed(2)} times the ` +
    `${ms(verdict.best_fixed_ttft_ms)} of the best fixed budget that keeps the target (${verdict.best_fixed}).`;
}

// ---- the frontier

let latency = "ttft";
const points = data.frontier.points;
const seqsList = [...new Set(points.map((p) => p.seqs))].sort((p, q) => p - q);
const budgetList = [...new Set(points.map((p) => p.budget))].sort((p, q) => p - q);
const visited = new Set();

function drawFrontier() {
  const seqs = seqsList[Number($("#seqs").value)];
  const budget = budgetList[Number($("#budget").value)];
  $("#seqs ~ output").textContent = number(seqs);
  $("#budget ~ output").textContent = number(budget);
  visited.add(`${seqs}:${budget}`);
  const b = board($("#frontier .chart"), 360, "Latency over throughput for every pair of knobs");
  const box = { left: 56, right: b.width - 16, top: 30, bottom: 308 };
  const rates = points.map((p) => p.rate), late = points.map((p) => p[latency]);
  const x = linear(Math.min(...rates) * 0.92, Math.max(...rates) * 1.03, box.left, box.right);
  const low = Math.min(...late) * 0.8, high = Math.max(...late) * 1.25;
  const y = logarithmic(low, high, box.bottom, box.top);
  axes(b, box, x, y, {
    x: ticks(Math.max(...rates), b.width > 500 ? 6 : 4, Math.min(...rates) * 0.92),
    xText: number, xTitle: "output tokens per second",
    y: logTicks(low, high), yText: number,
    yTitle: latency === "ttft" ? "p99 time to first token, ms" : "p99 time between tokens, ms",
  });
  const labels = [];
  for (const each of seqsList) {
    const line = points.filter((p) => p.seqs === each).sort((p, q) => p.budget - q.budget);
    b.add("path", {
      d: path(line.map((p) => [x(p.rate), y(p[latency])])), fill: "none",
      stroke: color(each === seqs ? "--calm" : "--idle"), "stroke-width": each === seqs ? 2 : 1.25,
    });
    if (latency === "ttft" && line.length) {
      const at = [x(line[0].rate) - 8, y(line[0][latency]) + 4];
      while (labels.some(([left, top]) => Math.abs(left - at[0]) < 24 && Math.abs(top - at[1]) < 13)) at[1] += 13;
      labels.push(at);
      b.add("text", { x: at[0], y: at[1], "text-anchor": "end" }, number(each));
    }
  }
  for (const p of points) {
    const here = p.seqs === seqs && p.budget === budget;
    const been = visited.has(`${p.seqs}:${p.budget}`);
    const mark = b.add("circle", {
      cx: x(p.rate), cy: y(p[latency]), r: here ? 8 : 4.5,
      fill: color(here ? "--good" : p.kept ? "--accent" : "--soft"),
      opacity: here ? 1 : been || p.kept ? 0.85 : 0.35, style: "cursor:pointer",
    });
    hint(mark, `${p.seqs} sequences, ${number(p.budget)} tokens`);
    mark.addEventListener("click", () => {
      $("#seqs").value = seqsList.indexOf(p.seqs);
      $("#budget").value = budgetList.indexOf(p.budget);
      drawFrontier();
    });
  }
  const p = points.find((each) => each.seqs === seqs && each.budget === budget);
  if (p) b.svg.appendChild(b.svg.querySelector('circle[r="8"]'));
  $("#frontier figcaption").textContent = p
    ? `${number(p.rate)} tokens/s, p99 first token ${ms(p.ttft)}, p99 between tokens ${ms(p.itl)}` +
      (p.best
        ? ". On the frontier: no other pair is better in throughput and first token."
        : p.kept
          ? ". Kept for its rhythm: what has more throughput or an earlier first token stalls more."
          : ". Another pair is better in every respect.")
    : "This pair was not run: a budget below the number of sequences cannot let each decode.";
}

document.querySelectorAll("[data-latency]").forEach((button) =>
  button.addEventListener("click", () => {
    latency = button.dataset.latency;
    press("[data-latency]", button);
    drawFrontier();
  }));

// ---- all of it

function slider(id, count, at, draw) {
  const input = $(id);
  input.max = count - 1;
  input.value = at;
  input.addEventListener("input", draw);
}

function drawAll() {
  drawGantt();
  drawLayouts();
  drawTax();
  drawKnee();
  drawGaps();
  drawTrade();
  drawFrontier();
}

slider("#sigma", data.padding.sweep.length, Math.min(4, data.padding.sweep.length - 1), drawTax);
slider("#kv", data.knee.curves.length, 0, drawKnee);
slider("#seqs", seqsList.length, Math.min(3, seqsList.length - 1), drawFrontier);
slider("#budget", budgetList.length, Math.min(2, budgetList.length - 1), drawFrontier);
$("#frontier .note").textContent =
  `${data.frontier.workload}. Lines join budgets under one cap of sequences; the labels name the cap. ` +
  `Red: no other pair is better in throughput, first token and rhythm alike.`;
drawReport();
drawAll();
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  drawAll();
});
