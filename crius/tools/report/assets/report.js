// Draws a report from the JSON in the page. All data of a run becomes text, never markup.
(() => {
"use strict";

const shown = JSON.parse(document.getElementById("data").textContent);
const runs = shown.runs, alone = runs.length === 1, root = document.documentElement;
const main = document.querySelector("main");
const MINUS = "\u2212", DASH = "\u2013";

// ---- elements and numbers

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const grouped = (value, digits = 0) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const small = (value, digits = 2) => value.toExponential(digits).replace(/e([+-])(\d+)$/, (_, sign, power) =>
  `e${sign === "-" ? "-" : ""}${power}`);
const number = (value) => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return grouped(value);
  if (size < 1e-3 || size >= 1e9) return small(value, 3);
  return size >= 1000 ? grouped(value, size >= 1e5 ? 0 : 1) : String(Number(value.toPrecision(5)));
};
const fixed = (digits) => (value) => (Math.abs(value) >= 1e5 ? small(value) : grouped(value, digits));
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const exponent = (value) => (value === 0 ? "0" : small(value));
const or = (format, unit = "") => (value) => (isNumber(value) ? format(value) + unit : DASH);
const signed = (value) => `${value < 0 ? MINUS : "+"}${Math.abs(100 * value).toFixed(1)} %`;
const many = (count, noun, nouns) => `${grouped(count)} ${count === 1 ? noun : nouns || noun + "s"}`;
const GIB = 2 ** 30;

function seconds(value) {
  if (!isNumber(value)) return DASH;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${grouped(hours)} h ${two(minutes)} min` : `${minutes} min ${two(whole % 60)} s`;
}
const moment = (value) =>
  isNumber(value) && Math.abs(value) < 8e12 ? new Date(1000 * value).toISOString().slice(0, 19).replace("T", " ") + " UTC" : DASH;
const count = (value) => (!isNumber(value) ? DASH : value >= 1e9 ? `${(value / 1e9).toPrecision(3)} B`
  : value >= 1e6 ? `${(value / 1e6).toPrecision(3)} M` : grouped(value));

function setting(value) {
  if (value === null || value === undefined) return "(not set)";
  if (value === "" || (Array.isArray(value) && !value.length)) return "(empty)";
  if (Array.isArray(value)) return value.map(setting).join(" ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
const cell = (value) => (isNumber(value) ? number(value) : value === null || value === undefined ? DASH : String(value));

const FITTED = new Set(["ranking", "results", "plan", "differences"]); // as wide as their cells
// columns: [heading, class]; a cell is a text or a node
function table(columns, rows, name) {
  const head = columns.some(([heading]) => heading)
    ? el("thead", {}, el("tr", {}, columns.map(([heading, kind]) => el("th", { class: kind }, heading)))) : null;
  const body = rows.map((row) => el("tr", {}, row.map((value, i) => el("td", { class: columns[i][1] }, value))));
  return el("div", { class: FITTED.has(name) ? "scroll fitted" : "scroll" }, el("table", { class: name }, head, el("tbody", {}, body)));
}
const pairs = (rows) => el("dl", {}, rows.filter(([, value]) => value !== null && value !== undefined && value !== "")
  .map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
const section = (title, ...content) => {
  const kept = content.flat(Infinity).filter(Boolean);
  return kept.length ? el("section", {}, el("h2", {}, title), kept) : null;
};
const note = (text) => el("p", { class: "note" }, text);

// ---- theme

let memory = null;
try { memory = window.localStorage; } catch { /* a browser may refuse it to files */ }
const remembered = () => { try { return memory && memory.getItem("crius-theme"); } catch { return null; } };
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => root.dataset.theme === "dark";
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
let forPrint = false;
function applyTheme() {
  root.dataset.theme = forPrint ? "light" : remembered() || (prefersDark.matches ? "dark" : "light");
  themeButton.textContent = isDark() ? "Light" : "Dark";
  for (const chart of charts) chart.recolour();
}
const themeButton = el("button", { type: "button", id: "theme", title: "Dark or light" , onclick: () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { memory.setItem("crius-theme", root.dataset.theme); } catch { /* for this visit only */ }
  themeButton.textContent = isDark() ? "Light" : "Dark";
  for (const chart of charts) chart.recolour();
} });
prefersDark.addEventListener("change", applyTheme);

// ---- charts

const charts = [];
const sync = uPlot.sync("steps");
let smoothing = 0.6;

const CHARTS = [
  { key: "loss", title: "Loss", unit: "nats per token", format: fixed(4), smooth: true, log: false, wide: true },
  { key: "apart", title: "", unit: "relative difference in a step", format: exponent, log: true, wide: true },
  { key: "validation", title: "Validation loss", unit: "nats per token", format: fixed(4), log: false, dots: true },
  { key: "grad_norm", title: "Gradient norm", unit: "before clipping", format: number, smooth: true, log: false },
  { key: "lr", title: "Learning rate", unit: "", format: exponent },
  { key: "tokens_per_second", title: "Tokens per second", unit: "all ranks", format: (v) => grouped(v), smooth: true },
  { key: "mfu", title: "MFU", unit: "share of the peak", format: percent },
  { key: "memory_gib", title: "Peak memory", unit: "GiB, rank 0", format: fixed(2) },
  { key: "load_max_over_mean", title: "Expert load", unit: "fullest over mean, worst layer", format: fixed(2), smooth: true },
  { key: "load_entropy", title: "Expert load entropy", unit: "1 is even, worst layer", format: fixed(3), smooth: true },
  { key: "dead_experts", title: "Dead experts", unit: "without a token in the step", format: fixed(0) },
  { key: "aux_loss", title: "Balance loss", unit: "nats", format: exponent, smooth: true },
  { key: "goodput", title: "Goodput", unit: "share of the time so far", format: percent },
];

const colour = (index) => css(`--c${index % 8}`);
const faint = (index) => colour(index) + "55";
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
const dashOf = (run) => DASHES[Math.floor(run / 8) % DASHES.length]; // runs of one colour
const swatch = (run, dash = dashOf(run)) => el("i", { "data-colour": run, class: ["", "dashed", "dotted", "dashed"][DASHES.indexOf(dash)] || null });

function curvesOf(kind) {
  if (kind.key === "apart") {
    return shown.apart.map((one, i) => ({ // a logarithmic scale has no 0
      name: runs[i + 1].name, run: i + 1, dash: dashOf(i + 1), exact: one.curve, curve: [one.curve[0], one.curve[1].map((v) => v || null)],
    }))
      .filter((one) => one.curve[1].some(isNumber));
  }
  return runs.flatMap((run, i) => {
    if (kind.key !== "validation") return run.curves[kind.key] ? [{ name: run.name, run: i, dash: dashOf(i), curve: run.curves[kind.key] }] : [];
    return Object.entries(run.validations).map(([set, curve], n) => ({
      name: [alone ? "" : run.name, set].filter(Boolean).join(" · ") || "validation",
      run: alone ? n : i, dash: alone ? dashOf(n) : DASHES[n % DASHES.length], curve,
    }));
  });
}

function smoothed(values) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    mean = smoothing * mean + (1 - smoothing) * value;
    weight = smoothing * weight + 1 - smoothing;
    return mean / weight;
  });
}

// step and value of the point of a curve that is nearest to a step; nothing outside of the curve
function pointAt([steps, values], step) {
  if (!steps.length || step < steps[0] || step > steps.at(-1)) return [step, null];
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  const at = low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  return [steps[at], values[at]];
}

const marks = runs.flatMap((run, i) => [
  ...run.restarts.filter((one) => isNumber(one.step)).map((one) => ({ run: i, step: one.step, kind: "restart", text: `resumed from step ${grouped(one.step)}` })),
  ...run.incidents.filter((one) => isNumber(one.step)).map((one) => ({ run: i, step: one.step, kind: "incident", text: one.title })),
]);

class Chart {
  constructor(kind, series, title) {
    this.kind = kind; this.series = series; this.isLog = kind.log === true;
    this.isSmooth = Boolean(kind.smooth);
    this.values = series.map(() => el("b", {}));
    this.at = el("span", { class: "at" });
    const keys = series.map((one, i) => el("span", { class: "key" },
      swatch(one.run, one.dash),
      series.length > 1 || !alone ? one.name + " " : "", this.values[i]));
    const positive = series.every((one) => one.curve[1].every((v) => v === null || v > 0));
    const logButton = "log" in kind && positive && kind.key !== "apart"
      ? el("button", { type: "button", class: "log", "aria-pressed": "false", onclick: () => {
        this.isLog = !this.isLog; logButton.setAttribute("aria-pressed", String(this.isLog)); this.build();
      } }, "log") : null;
    this.plot = el("div", { class: "plot" });
    this.card = el("figure", { class: kind.wide ? "card wide" : "card", "data-chart": kind.key },
      el("figcaption", {}, el("span", { class: "title" }, title || kind.title), el("span", { class: "unit" }, kind.unit), logButton,
        el("span", { class: "keys" }, this.at, keys)), this.plot);
  }

  data() {
    const tables = this.series.map(({ curve: [xs, ys] }) =>
      this.isSmooth && smoothing > 0 && xs.length > 20 ? [xs, ys, smoothed(ys)] : [xs, ys]);
    this.styles = [];
    tables.forEach((one, i) => {
      const { run, dash } = this.series[i], hasTwo = one.length > 2;
      const dots = this.kind.dots || one[0].length < 3;
      this.styles.push({ run, dash, isFaint: hasTwo, dots });
      if (hasTwo) this.styles.push({ run, dash, isFaint: false, dots: false });
    });
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  build() {
    const kept = this.u && this.isZoomed ? { ...this.u.scales.x } : null;
    if (this.u) { sync.unsub(this.u); this.u.destroy(); }
    const data = this.data(), axis = () => css("--muted"), grid = () => css("--grid");
    const format = this.kind.format;
    this.u = new uPlot({
      width: this.plot.clientWidth || 600, height: this.kind.wide ? 300 : 190,
      padding: [14, 16, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 7 }, y: false },
      scales: { x: { time: false }, y: this.isLog ? { distr: 3, ...(this.kind.key === "apart" ? {} : { range: (_, min, max) => [min / 1.04, max * 1.04] }) } : {} },
      axes: [
        { stroke: axis, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: FONT, size: 30, gap: 6,
          incrs: INCREMENTS, values: (_, splits) => splits.map(stepTick) },
        { stroke: axis, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: FONT, gap: 6,
          ...(this.isLog ? { splits: (_, axis, min, max) => logSplits(min, max), filter: (_, splits) => splits } : {}),
          size: (u, values) => Math.max(34, 12 + 6.6 * Math.max(0, ...(values || []).map((v) => (v || "").length))),
          values: (_, splits) => splits.map((v) => (v === null ? "" : this.tick(v))) },
      ],
      series: [{}, ...this.styles.map((style) => ({
        stroke: () => (style.isFaint ? faint(style.run) : colour(style.run)), width: style.isFaint ? 1 : 1.7,
        dash: style.dash, spanGaps: this.kind.key === "apart", points: { show: style.dots, size: 5, fill: () => colour(style.run) },
      }))],
      hooks: {
        setCursor: [(u) => this.read(u.cursor.idx)],
        drawClear: [(u) => this.drawMarks(u)],
        setScale: [(u, key) => { if (key === "x") zoomAll(u); }],
      },
    }, data, this.plot);
    sync.sub(this.u);
    this.isZoomed = Boolean(kept);
    if (kept) this.u.setScale("x", { min: kept.min, max: kept.max });
    this.read(null);
  }

  tick(value) {
    if (value === 0) return "0";
    if (this.kind.format === percent) return `${Number((100 * value).toPrecision(4))} %`;
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) return small(value, 1).replace(".0e", "e");
    return size >= 1000 ? grouped(value) : String(Number(value.toPrecision(4)));
  }

  read(place) {
    const last = place === null || place === undefined, steps = this.u ? this.u.data[0] : [];
    const found = this.series.map(({ exact, curve }) => (last ? [curve[0].at(-1), (exact || curve)[1].at(-1)] : pointAt(exact || curve, steps[place])));
    const step = last ? found.reduce((most, [own]) => Math.max(most, own ?? 0), 0) : steps[place];
    found.forEach(([own, value], i) => {
      this.values[i].textContent = isNumber(value) ? this.kind.format(value) + (own === step ? "" : ` (step ${grouped(own)})`) : DASH;
    });
    this.at.textContent = step === undefined ? "" : `${last ? "last, " : ""}step ${grouped(step)}`;
    this.card.classList.toggle("hovered", !last);
    if (this.kind.wide) {
      const reach = last || !this.u ? 0 : this.u.posToVal(6, "x") - this.u.posToVal(0, "x");
      const close = last ? [] : marks.filter((one) => Math.abs(one.step - step) <= reach);
      if (close.length) this.at.textContent += ` · ${[...new Set(close.map((one) => (alone ? "" : runs[one.run].name + ": ") + one.text))].join("; ")}`;
    }
  }

  drawMarks(u) {
    const ctx = u.ctx, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath(); ctx.rect(left, 0, width, top + height); ctx.clip();
    for (const mark of marks) {
      const x = Math.round(u.valToPos(mark.step, "x", true));
      const isRestart = mark.kind === "restart";
      ctx.strokeStyle = ctx.fillStyle = isRestart ? css("--restart") : css("--incident");
      if (!alone) ctx.strokeStyle = colour(mark.run);
      ctx.lineWidth = ratio; ctx.globalAlpha = 0.75;
      ctx.setLineDash(isRestart ? [4 * ratio, 3 * ratio] : []);
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
      ctx.globalAlpha = 1; ctx.beginPath();
      if (isRestart) { ctx.moveTo(x - 4 * ratio, top - 9 * ratio); ctx.lineTo(x + 4 * ratio, top - 9 * ratio); ctx.lineTo(x, top - 2 * ratio); }
      else ctx.arc(x, top - 6 * ratio, 3.5 * ratio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }

  recolour() {
    if (!this.u) return;
    paint(this.card);
    this.u.redraw(false, true);
  }

  resize() { if (this.u && this.plot.clientWidth) this.u.setSize({ width: this.plot.clientWidth, height: this.u.height }); }
}

// within a decade or so even steps, else powers of ten
function logSplits(min, max) {
  const powers = Math.ceil(Math.log10(max)) - Math.floor(Math.log10(min)), found = [];
  if (max / min < 20) {
    const step = INCREMENTS_OF_ANY_SIZE.find((one) => (max - min) / one <= 7);
    for (let at = Math.ceil(min / step); at * step <= max; at++) found.push(at * step);
  } else {
    for (let power = Math.ceil(Math.log10(min)); 10 ** power <= max * 1.001; power += Math.ceil(powers / 7)) found.push(10 ** power);
  }
  return found;
}

const stepTick = (step) => (step >= 1e6 ? `${step / 1e6} M` : step >= 1e4 ? `${step / 1e3} k` : grouped(step));
const FONT = "11px system-ui, sans-serif";
const INCREMENTS = [1, 2, 5].flatMap((one) => [...Array(13).keys()].map((power) => one * 10 ** power)).sort((a, b) => a - b);
const INCREMENTS_OF_ANY_SIZE = [...Array(40).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** (power - 25)));
const paint = (within) => {
  for (const swatch of within.querySelectorAll("[data-colour]")) swatch.style.setProperty("--swatch", colour(Number(swatch.dataset.colour)));
};

let zooming = false;
const resetButton = el("button", { type: "button", id: "reset", onclick: () => {
  zooming = true;
  for (const chart of charts) { chart.isZoomed = false; chart.u.setScale("x", { min: chart.u.data[0][0], max: chart.u.data[0].at(-1) }); }
  zooming = false; resetButton.hidden = true;
} }, "Reset zoom");
resetButton.hidden = true;

function zoomAll(from) {
  if (zooming || charts.some((chart) => !chart.u)) return;
  const { min, max } = from.scales.x, whole = [from.data[0][0], from.data[0].at(-1)];
  if (!isNumber(min) || !isNumber(max)) return;
  const isZoomed = min > whole[0] || max < whole[1];
  if (!isZoomed && resetButton.hidden) return;
  if (!isZoomed) return resetButton.click();
  zooming = true; resetButton.hidden = false;
  for (const chart of charts) { chart.isZoomed = true; if (chart.u !== from) chart.u.setScale("x", { min, max }); }
  zooming = false;
}

// ---- parts of the page

const PHASES = {
  compute: "steps that count", lost: "steps that were repeated after a failure", initialise: "until the model is there",
  load: "reading the checkpoint", compile: "torch.compile", data: "waiting for batches",
  save_blocked: "waiting for checkpoints", validation: "scoring held-out data", samples: "generating text", report: "writing records", profiler: "",
  gc: "collecting garbage", down: "from a failure until processes run again", other: "in no phase",
};

function state(run) {
  return [run.results.state, run.results.state === "finished" ? "good" : "open"];
}

function byline(run) {
  const start = run.start;
  return [
    start.model, isNumber(start.parameters) && `${count(start.parameters)} parameters` +
      (isNumber(start.active_parameters) && start.active_parameters < start.parameters ? `, ${count(start.active_parameters)} of them active` : ""),
    start.layout && `layout ${start.layout}`, isNumber(start.ranks) && many(start.ranks, "rank"), start.device,
  ].filter(Boolean).join(" · ");
}

function tiles(run) {
  const found = run.results, shownSteps = grouped(run.steps) + (isNumber(run.of_steps) && run.of_steps > run.steps ? ` of ${grouped(run.of_steps)}` : "");
  const rows = [["steps", shownSteps], ["final loss", isNumber(found.loss) && found.loss.toFixed(4)],
    ...Object.entries(found.validations).map(([set, value]) => [set ? `validation, ${set}` : "validation loss", or(fixed(4))(value)]),
    ["tokens/s, median", isNumber(found.tokens_per_second) && grouped(found.tokens_per_second)],
    ["MFU, median", isNumber(found.mfu) && percent(found.mfu)],
    ["peak memory", isNumber(found.memory_gib) && `${found.memory_gib.toFixed(2)} GiB`],
    ["goodput", isNumber(found.goodput) && percent(found.goodput)],
    ["wall time, last command", isNumber(found.wall_seconds) && seconds(found.wall_seconds)],
    ["restarts", found.restarts ? String(found.restarts) : null], ["incidents", run.incidents.length ? String(run.incidents.length + run.more_incidents) : null]];
  return el("div", { class: "tiles" }, rows.filter(([, value]) => value).map(([name, value]) =>
    el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name))));
}

function timeTable(run) {
  const parts = Object.entries((run.summary && run.summary.seconds) || {}).filter(([, value]) => isNumber(value) && value >= 0.005);
  if (!parts.length) return note("A run writes the shares of its time to summary.json when it ends. This run has no such file yet.");
  const whole = parts.reduce((sum, [, value]) => sum + value, 0), most = Math.max(...parts.map(([, value]) => value));
  const rows = parts.sort((a, b) => b[1] - a[1]).map(([phase, value]) => {
    const bar = el("i", { class: phase === "compute" ? "bar good" : phase === "lost" || phase === "down" ? "bar bad" : "bar" });
    bar.style.width = `${Math.max(0.3, (100 * value) / most)}%`;
    return [phase, seconds(value), percent(value / whole), el("div", { class: "track" }, bar), PHASES[phase] || ""];
  });
  return [table([["phase", ""], ["time", "r"], ["share", "r"], ["", "grow"], ["", "dim"]], rows, "time"),
    note(`Wall time of the last command: ${seconds(whole)}. Goodput, the share of steps that count: ${or(percent)(run.summary.goodput)}.`)];
}

function restartTable(run) {
  if (!run.restarts.length) return null;
  const rows = run.restarts.map((one) => [moment(one.time), or(number)(one.step), or(number)(one.failed_step), or(number)(one.steps_again),
    seconds(one.seconds), one.layout || DASH]);
  const left = run.results.restarts - rows.length;
  return [el("h3", {}, "Restarts"), table([["time", ""], ["from step", "r"], ["failed in step", "r"], ["steps repeated", "r"],
    ["time lost", "r"], ["layout", ""]], rows), left > 0 ? note(`and ${grouped(left)} earlier restarts`) : null];
}

function incidentList(run) {
  const cards = run.incidents.map((one) => {
    const isRight = (value) => value === null || isNumber(value) || value === "nan" || value === "inf";
    const tables = one.tables.map((part) => el("div", {}, el("h4", {}, part.name.replaceAll("_", " ")),
      table(part.columns.map((name, i) => [name.replaceAll("_", " "), part.rows.every((row) => isRight(row[i])) ? "r" : ""]), part.rows.map((row) => row.map(cell))),
      part.more ? note(`and ${grouped(part.more)} more`) : null));
    return el("details", { class: "incident" },
      el("summary", {}, el("span", { class: "dot" }), el("b", {}, isNumber(one.step) ? `step ${grouped(one.step)}` : "no step"), " ", one.title,
        el("span", { class: "file" }, one.name)),
      one.values.length ? pairs(one.values.map(([name, value]) => [name.replaceAll("_", " "), cell(value)])) : null,
      el("div", { class: "tables" }, tables),
      one.text ? el("pre", {}, one.text + (one.cut ? `\n... ${grouped(one.cut)} more characters in incidents/${one.name}.txt` : "")) : null);
  });
  if (!cards.length) return null;
  return [run.restarts.length ? el("h3", {}, "Incidents") : null, cards,
    run.more_incidents ? note(`${grouped(run.more_incidents)} more in ${run.path}/incidents`) : null];
}

function planTable(run) {
  if (!run.plan || !run.records) return null;
  const { plan, measured } = run.plan, known = plan.hardware !== null && plan.hardware !== undefined;
  const bytes = sum(plan.memory_bytes), error = (planned, found) => (isNumber(planned) && isNumber(found) && planned && found ? signed(planned / found - 1) : DASH);
  const rows = [["tokens/s per rank", or(number)(plan.tokens_per_second_per_rank), or(number)(measured.tokens_per_second_per_rank),
    error(plan.tokens_per_second_per_rank, measured.tokens_per_second_per_rank)],
    ["memory of rank 0", or(gib)(bytes), or(gib)(measured.memory_bytes), known ? error(bytes, measured.memory_bytes) : DASH]];
  const parts = breakdown(plan.memory_bytes, gib, "memory"), times = breakdown(plan.step_seconds, (v) => `${(1e3 * v).toFixed(1)} ms`, "step");
  return [table([["", ""], ["planned", "r"], ["measured", "r"], ["error", "r"]], rows, "plan"), parts, times,
    known ? note(`Planned for ${plan.hardware}. The first 5 steps after a start are not measured.`)
      : note("This machine is not calibrated. The plan has no speed, and its memory counts tensors only, not the rest of the processes. crius bench calibrate measures both.")];
}
const sum = (parts) => { const values = Object.values(parts || {}).filter(isNumber); return values.length ? values.reduce((a, b) => a + b, 0) : null; };
const gib = (value) => `${(value / GIB).toFixed(2)} GiB`;
function breakdown(parts, format, name) {
  const whole = sum(parts);
  if (!whole) return null;
  const large = Object.entries(parts).filter(([, value]) => isNumber(value) && value >= 0.01 * whole).sort((a, b) => b[1] - a[1]);
  const bar = el("div", { class: "stack" }, large.map(([part, value], i) => {
    const piece = el("i", { "data-colour": i, title: `${part} ${format(value)}` }); piece.style.width = `${(100 * value) / whole}%`; return piece;
  }));
  return el("div", { class: "parts" }, el("span", { class: "dim" }, `planned ${name}: ${format(whole)}`), bar, el("div", { class: "keys" },
    large.map(([part, value], i) => el("span", { class: "key" }, el("i", { "data-colour": i }), part.replaceAll("_", " ") + " ", el("b", {}, format(value))))));
}

function settingsTable(run) {
  if (!run.settings.length) return note("All settings are the defaults.");
  const hasOrigin = run.settings.some((one) => one.origin);
  const columns = [["setting", "code"], ["value", "code"], ["default", "code dim"], ...(hasOrigin ? [["from", "dim"]] : [])];
  const rows = run.settings.map((one) => [one.name, setting(one.value), setting(one.default), ...(hasOrigin ? [one.origin || ""] : [])]);
  return table(columns, rows, "settings");
}

function machine(run) {
  const start = run.start;
  if (!Object.keys(start).length) return null;
  const data = Array.isArray(start.data) ? start.data.map((line) => el("div", {}, String(line))) : null;
  return pairs([["started", moment(run.started)], ["host", start.host], ["device", start.device],
    ["ranks", isNumber(start.ranks) ? `${start.ranks}, layout ${start.layout}` : null],
    ["versions", `crius ${start.crius}, torch ${start.torch}, Python ${start.python}`],
    ["data", data && data.length ? data : null], ["hash of the data", start.data_hash],
    ["tokenizer", start.tokenizer && `${start.tokenizer}, hash ${start.tokenizer_hash}`]].map(([name, value]) =>
    [name, typeof value === "string" || value === null || value instanceof Array ? value : value === undefined ? null : String(value)]));
}

function sampleList(run) {
  const how = (one) => [isNumber(one.step) ? `step ${grouped(one.step)}` : "", one.chat === true ? "chat" : "",
    one.temperature ? `temperature ${cell(one.temperature)}` : "most probable tokens", one.top_k ? `top_k ${cell(one.top_k)}` : "",
    isNumber(one.top_p) && one.top_p < 1 ? `top_p ${cell(one.top_p)}` : "", one.temperature ? `seed ${cell(one.seed)}` : ""];
  return run.samples.map((one) => el("figure", { class: "sample" }, el("figcaption", {}, how(one).filter(Boolean).join(" · ")),
    el("pre", {}, el("span", { class: "prompt" }, one.prompt), one.chat === true ? "\n" : "", one.text)));
}

function mixtureTable(run) {
  const of = run.results.sources;
  const names = Object.keys(of).filter((key) => key.startsWith("share/")).map((key) => key.slice(6));
  if (!names.length) return null;
  const row = (name) => [name, or(fixed(4))(of[`loss/${name}`]), or(fixed(4))(run.results.validations[name]),
    or(percent)(of[`share/${name}`]), or(fixed(2))(of[`epochs/${name}`])];
  return table([["source", ""], ["training loss", "r"], ["validation loss", "r"], ["share of sequences", "r"], ["epochs", "r"]], names.map(row), "mixture");
}

function remarks(run) {
  return [
    run.damaged ? `${many(run.damaged, "damaged line")} of metrics.jsonl ${run.damaged === 1 ? "is" : "are"} left out.` : null,
    run.not_finite.number ? `The loss of ${many(run.not_finite.number, "step")} is not finite, first in step ${grouped(run.not_finite.first)}.` : null,
    run.records || run.damaged ? null : "No step has been reported yet.",
    !run.summary && run.records ? `The run ${run.results.state === "running" ? "still trains" : "ended without a summary"}. Its last record, of step ${grouped(run.steps)}, was written ${moment(run.last_record)}.` : null,
  ].filter(Boolean).map((text) => el("p", { class: "remark" }, alone ? text : `${run.name}: ${text}`));
}

function details(run) {
  const trouble = [restartTable(run), incidentList(run)].filter(Boolean);
  return [
    section("Mixture", mixtureTable(run)),
    section("Samples", sampleList(run)),
    section("Where the time went", timeTable(run)),
    trouble.length ? section(run.restarts.length && run.incidents.length ? "Restarts and incidents" : run.restarts.length ? "Restarts" : "Incidents", trouble) : null,
    section("Plan and measurement", planTable(run)),
    section("What was run", el("h3", {}, "Settings that are not the defaults"), settingsTable(run), el("h3", {}, "Machine, versions, data"),
      machine(run) || note("starts.jsonl, which has these facts, is missing."), run.repeat ? [el("h3", {}, "Repeat it"), el("pre", { class: "command" }, run.repeat)] : null),
  ];
}

// ---- several runs

function verdicts() {
  return el("ul", { class: "verdicts" }, shown.apart.map((one, i) => {
    const b = runs[i + 1].name, a = runs[0].name, name = el("span", { class: "key" }, swatch(i + 1), el("b", {}, b));
    if (!one.num_steps) return el("li", {}, name, ` and ${a} have no step in common.`);
    if (one.num_not_finite) return el("li", {}, name, ` and ${a} have ${many(one.num_not_finite, "common step")} with a loss that is not finite, first in step ${grouped(one.first_not_finite)}; common steps: ${grouped(one.num_steps)}.`);
    if (!one.largest) return el("li", {}, name, ` has the losses of ${a}, to the last bit, in all ${many(one.num_steps, "common step")}.`);
    return el("li", {}, name, " is ", el("b", { class: "apart" }, small(one.largest, 1)), ` apart from ${a}: the largest relative difference of the loss over ${many(one.num_steps, "common step")}, in step ${grouped(one.step)}. `,
      one.parts === null ? `No step differs by more than ${exponentOf(shown.tolerance)}.` : `Step ${grouped(one.parts)} is the first that differs by more than ${exponentOf(shown.tolerance)}.`);
  }));
}
const exponentOf = (value) => small(value, 0);

function rankingTable() {
  const { order, best, why, losses } = shown.ranking, settings = Object.entries(shown.ranking.settings).slice(0, 4);
  const rows = order.map((i) => [el("span", { class: "key" }, swatch(i), runs[i].name), ...settings.map(([, values]) => setting(values[i])),
    or(fixed(4))(losses[i]), i === best ? el("b", {}, "best") : state(runs[i])[0]]);
  return [table([["run", ""], ...settings.map(([name]) => [name, "code"]), ["validation loss", "r"], ["", ""]], rows, "ranking"), why && note(why)];
}

function resultTable() {
  const sets = [...new Set(runs.flatMap((run) => Object.keys(run.results.validations)))];
  const sources = [...new Set(runs.flatMap((run) => Object.keys(run.results.sources)))];
  const rows = [
    ["state", (run) => state(run)[0]], ["layout", (run) => run.start.layout || DASH], ["device", (run) => run.start.device || DASH], ["steps", (run) => grouped(run.steps)],
    ["final loss", (run) => or(fixed(6))(run.results.loss)],
    ...sets.map((set) => [set ? `validation loss, ${set}` : "validation loss", (run) => or(fixed(6))(run.results.validations[set])]),
    ...sources.map((key) => [key.replace("/", ", "), (run) => or(fixed(4))(run.results.sources[key])]),
    ["tokens/s, median", (run) => or(grouped)(run.results.tokens_per_second)], ["MFU, median", (run) => or(percent)(run.results.mfu)],
    ["peak memory", (run) => or(fixed(2), " GiB")(run.results.memory_gib)], ["goodput", (run) => or(percent)(run.results.goodput)],
    ["wall time, last command", (run) => seconds(run.results.wall_seconds)], ["restarts", (run) => grouped(run.results.restarts)],
    ["incidents", (run) => grouped(run.incidents.length + run.more_incidents)],
  ].map(([name, value]) => [name, ...runs.map((run, i) => String(value(run, i)))]).filter((row) => row.slice(1).some((value) => value !== DASH && value !== "0"));
  return tables(["", ""], "r", rows, "results");
}

function differenceTable() {
  if (!shown.settings.length) return note("None.");
  return tables(["setting", "code"], "code", shown.settings.map((one) => [one.name, ...one.values.map(setting)]), "differences");
}

// a column for each run, in tables that fit on paper
function tables(first, kind, rows, name) {
  const found = [];
  for (let at = 0; at < runs.length; at += MOST_COLUMNS) {
    const end = at + MOST_COLUMNS;
    found.push(table([first, ...runs.slice(at, end).map((run) => [run.name, kind])], rows.map(([label, ...values]) => [label, ...values.slice(at, end)]), name));
  }
  return found;
}
const MOST_COLUMNS = 6;

// ---- the page

function draw() {
  const [word, kind] = state(runs[0]);
  const header = el("header", {},
    el("div", { class: "line" }, alone ? [el("h1", {}, runs[0].name), el("span", { class: `badge ${kind}` }, word)]
      : el("h1", {}, `${runs.length} runs`), el("span", { class: "space" }), themeButton),
    el("p", { class: "byline" }, alone ? byline(runs[0]) : runs.map((run, i) => el("span", { class: "key" }, swatch(i), run.name))),
    runs.flatMap(remarks), alone ? tiles(runs[0]) : null);
  const kinds = CHARTS.map((one) => [one, curvesOf(one)]).filter(([, series]) => series.length);
  for (const [one, series] of kinds) charts.push(new Chart(one, series, one.key === "apart" ? `Distance of the loss from ${runs[0].name}` : ""));
  const slider = el("input", { type: "range", id: "smoothing", min: "0", max: "0.98", step: "0.02", value: String(smoothing), oninput: () => {
    smoothing = Number(slider.value); shownSmoothing.textContent = smoothing.toFixed(2);
    for (const chart of charts) if (chart.isSmooth) chart.build();
  } });
  const shownSmoothing = el("output", {}, smoothing.toFixed(2));
  const thinned = runs.filter((run) => run.points).map((run) =>
    `${alone ? "" : run.name + ": "}${grouped(run.records)} records are drawn as at most ${grouped(run.points)} points per curve. The smallest and the largest value of each group of records are kept.`);
  const kindsOfMarks = new Set(marks.map((one) => one.kind));
  const toolbar = el("div", { class: "toolbar" },
    el("label", {}, "Smoothing ", slider, shownSmoothing),
    kindsOfMarks.has("restart") ? el("span", { class: "key mark restart" }, el("i", {}), "restart") : null,
    kindsOfMarks.has("incident") ? el("span", { class: "key mark incident" }, el("i", {}), "incident") : null,
    el("span", { class: "space" }), el("span", { class: "hint" }, "drag to zoom, double click to reset"), resetButton);
  const far = charts.filter((chart) => chart.kind.key === "apart"), near = charts.filter((chart) => !far.includes(chart));
  const curves = near.length ? section("Curves", toolbar, el("div", { class: "charts" }, near.map((chart) => chart.card)), thinned.map(note)) : null;
  main.append(...[header,
    alone ? null : section("Which run is best", rankingTable()), alone ? null : section("Results", resultTable()),
    alone ? null : section("Settings that differ", differenceTable()), curves,
    alone ? null : el("details", { class: "run", ontoggle: () => far.forEach((chart) => chart.resize()) }, el("summary", {}, el("b", {}, "How far apart")), verdicts(), far.map((chart) => chart.card)),
    ...(alone ? details(runs[0]) : runs.map((run, i) => el("details", { class: "run" },
      el("summary", {}, el("span", { class: "key" }, swatch(i), el("b", {}, run.name)), " ", el("span", { class: "dim" }, byline(run))), details(run)))),
    el("footer", {}, `Written by crius ${shown.version}, ${moment(shown.written)}. Charts: uPlot 1.6.32, MIT.`)].filter(Boolean));
  applyTheme();
  for (const chart of charts) chart.build();
  paint(document);
}

draw();
let resizing = 0;
window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => charts.forEach((chart) => chart.resize()), 60); });
window.addEventListener("beforeprint", () => {
  forPrint = true; root.classList.add("print");
  for (const run of document.querySelectorAll("details.run")) run.open = true;
  applyTheme(); paint(document); charts.forEach((chart) => chart.resize());
});
window.addEventListener("afterprint", () => {
  forPrint = false; root.classList.remove("print");
  applyTheme(); paint(document); charts.forEach((chart) => chart.resize());
});
})();
