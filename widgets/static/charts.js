// Part 2: the cards with a curve each. Draws with the plotly.js that the kernel sends, once a page.

// One page shares one plotly, whichever panel got it first; under a symbol, so no global name is taken.
const PLOTLY = Symbol.for("grpo_kit.plotly");
const plotlyOfPage = () => {
  if (!globalThis[PLOTLY]) {
    const shared = { askedAt: -Infinity, loaded: false };
    shared.promise = new Promise((resolve, reject) => Object.assign(shared, { resolve, reject }));
    shared.promise.catch(() => {}); // told to whoever waits for it
    globalThis[PLOTLY] = shared;
  }
  return globalThis[PLOTLY];
};

// Evaluated as a CommonJS module, so that a page's require.js (AMD) never sees it. Its last line sets
// window.Plotly all the same; a Plotly that the page had stays what it was.
const evaluatePlotly = (text) => {
  const had = Object.getOwnPropertyDescriptor(globalThis, "Plotly");
  const module = { exports: {} };
  try {
    new Function("module", "exports", "define", text).call(globalThis, module, module.exports, undefined);
  } finally {
    if (had) Object.defineProperty(globalThis, "Plotly", had);
    else delete globalThis.Plotly;
  }
  return module.exports;
};

const CARDS = [
  { key: "reward", title: "total reward", term: "mean weighted reward of the step's completions; the band is their standard deviation",
    value: (row) => number(row.reward),
    series: () => [{ key: "reward", name: "total ± spread", color: "blue", spread: "reward_std" }] },
  { key: "rewards", title: "by reward function", term: "mean of each reward function over the step's completions, before its weight",
    value: () => "",
    series: (names) => names.map((name) => ({ key: `rewards/${name}`, name, color: colorOf(names, name) })) },
  { key: "kl", title: "drift from the untrained model", term: "KL divergence to the untrained model, k3 estimate, mean per token over a part of the step's answers",
    value: (row) => number(row.kl), note: "KL, per token",
    series: () => [{ key: "kl", name: "KL", color: "violet" }] },
  { key: "entropy", title: "variety of the answers", term: "entropy of the model's next-token choice, mean, in nats",
    value: (row) => known(row.entropy) ? `${number(row.entropy)} nats` : MISSING, note: "entropy: near 0 it always answers alike",
    series: () => [{ key: "entropy", name: "entropy", color: "gray" }] },
  { key: "length", title: "answer length", term: "mean completion length in tokens",
    value: (row) => known(row.length) ? `${number(row.length)} tokens` : MISSING,
    note: (row) => `cut off at the limit: ${percent(row.truncated)}`,
    series: () => [{ key: "length", name: "tokens", color: "orange" }] },
  { key: "dead_groups", title: "groups with nothing to learn from", term: "dead groups: all completions of a prompt scored alike, so every advantage is 0",
    value: (row) => percent(row.dead_groups), share: true,
    series: () => [{ key: "dead_groups", name: "all answers scored alike", color: "red" },
                   { key: "truncated", name: "cut off", color: "gray" }] },
];

// Drawn from the evaluations instead of the steps: few values that each count, so dots, and nothing smoothed.
const HELD_OUT = { key: "held_out", title: "held-out accuracy", term: "greedy answers to prompts kept out of the training; within k tries: pass@k",
  value: (row, rows) => heldOutWords(rows), note: "share of right answers", share: true, exact: true,
  series: (names, rows) => {
    const tries = rows.findLast((row) => known(row.pass_at_k));
    const greedy = { key: "accuracy", name: "greedy", color: "blue" };
    return tries ? [greedy, { key: "pass_at_k", name: `within ${tries.k} tries`, color: "green" }] : [greedy];
  } };
const QUIET = new Set(["evaluation", "canary"]); // kinds that have a card of their own and would flood a list of events

// One row an evaluation, in step order; step 0 is before training. Of two at one step, which a resume leaves, the later counts.
const evaluations = (events) => {
  const measured = events.filter((event) => event.kind === "evaluation").map((event) => [event.step, { ...event.data, step: event.step }]);
  return [...new Map(measured).values()].filter((row) => known(row.accuracy)).sort((one, other) => one.step - other.step);
};
const heldOutWords = (rows) => {
  const first = rows[0], last = rows.at(-1);
  const now = last.step > 0 ? [`now ${percent(last.accuracy)}`] : [];
  return [...now, ...(first.step === 0 ? [`before training ${percent(first.accuracy)}`] : [])].join(", ");
};

const MARKED = new Set(["reward edited", "option changed", "warning"]);
const SMOOTHING = 0.15; // weight of the newest value in the smoothed line
const MOST = 800; // points of a line; beyond, every 2nd, 4th, 8th … step is drawn
const FEW = 15; // up to so many steps, points are drawn as dots too

// Plotly reads a little HTML in its texts; names and events are data.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const wrapped = (text) => plain(text.length > 160 ? text.slice(0, 160) + "…" : text).replace(/(.{1,34})(\s+|$)/g, "$1<br>").replace(/<br>$/, "");

// Exponential mean that starts unbiased (Adam's correction); a missing value leaves a gap.
class Smooth {
  mean = 0; weight = 0;
  next(value) {
    if (!known(value)) return null;
    this.mean += SMOOTHING * (value - this.mean);
    this.weight += SMOOTHING * (1 - this.weight);
    return this.mean / this.weight;
  }
}

class Chart {
  // `pick(step)` is called when a step is clicked.
  constructor(card, pick) {
    this.card = card;
    this.pick = pick;
    this.value = h("b", { class: "gk-value" });
    this.plot = h("div", { class: "gk-plot" });
    this.empty = h("div", { class: "gk-empty" }, "waiting for the first step");
    this.note = h("div", { class: "gk-note" });
    this.el = h("section", { class: `gk-card gk-chart${card.exact ? " gk-exact" : ""}`, "aria-label": card.title },
      h("header", {}, h("h4", { title: card.term }, card.title), this.value),
      h("div", { class: "gk-plotbox" }, this.plot, this.empty), this.note);
    this.reset();
  }

  // Draw everything anew the next time.
  reset() { this.drawn = -1; }

  // The numbers need no plotly and are there at once.
  label(rows) {
    const row = rows.at(-1), names = rewardNames(rows);
    say(this.value, row ? this.card.value(row, rows) : MISSING);
    const series = this.card.series(names, rows);
    const legend = series.length > 1 || series.some((line) => line.spread) || this.card.key === "rewards";
    const signature = legend ? series.map((line) => line.name).join("\n") : "note";
    if (this.signature !== signature) {
      this.signature = signature;
      this.numbers = series.map(() => h("b"));
      this.note.replaceChildren(...(legend
        ? series.map((line, index) => h("span", { class: "gk-key" }, h("i", { style: `background:var(--gk-${line.color})` }), line.name, this.numbers[index]))
        : [h("span")]));
    }
    if (!row) return;
    if (!legend) say(this.note.firstChild, typeof this.card.note === "function" ? this.card.note(row) : this.card.note);
    else series.forEach((line, index) => { if (!line.spread) say(this.numbers[index], this.card.share ? percent(row[line.key]) : number(row[line.key])); });
  }

  draw(Plotly, rows, events, style) {
    if (!rows.length) {
      if (this.drawn > 0) Plotly.purge(this.plot);
      this.drawn = -1;
      show(this.empty, true);
      return;
    }
    const series = this.card.series(rewardNames(rows), rows);
    const names = series.map((line) => line.key).join("\n");
    const marks = events.filter((event) => MARKED.has(event.kind) && event.step !== null);
    const anew = this.drawn < 0 || this.names !== names || this.marks !== marks.length || (this.drawn <= FEW && rows.length > FEW) || rows.length > MOST * this.stride;
    if (anew) this.begin(series, names, marks, rows.length);
    if (!anew && rows.length === this.drawn) return;
    const added = this.columns(rows.slice(this.drawn));
    this.drawn = rows.length;
    show(this.empty, false);
    if (anew) {
      const traces = this.traces(added, rows.length <= FEW, style);
      Plotly.react(this.plot, [...traces, this.markTrace(marks, style)], this.layout(marks, style), CONFIG);
      this.listen();
    } else if (added[0].x.length) {
      const drawn = Plotly.extendTraces(this.plot, { x: added.map((trace) => trace.x), y: added.map((trace) => trace.y) }, added.map((_, index) => index));
      // Drawing takes the label away from under the pointer.
      if (this.hovered !== undefined) drawn.then(() => { if (this.hovered !== undefined) Plotly.Fx.hover(this.plot, { xval: this.hovered }); });
    }
  }

  listen() {
    for (const kind of ["click", "hover", "unhover"]) this.plot.removeAllListeners(`plotly_${kind}`);
    this.plot.on("plotly_click", (event) => this.pick(event.points[0].x));
    this.plot.on("plotly_hover", (event) => { this.hovered = event.points[0].x; });
    this.plot.on("plotly_unhover", () => { this.hovered = undefined; });
  }

  begin(series, names, marks, count) {
    this.drawn = 0;
    this.stride = 2 ** Math.max(0, Math.ceil(Math.log2(count / MOST)));
    this.names = names;
    this.marks = marks.length;
    this.series = series.map((line) => ({ ...line, smooth: new Smooth(), band: new Smooth() }));
  }

  // x and y of every trace for new rows: band below, band above, raw, smooth of each series in turn.
  // All rows go into the smoothed line, also those that are not drawn.
  columns(rows) {
    const thinned = (values) => values.filter((_, index) => (this.drawn + index) % this.stride === 0);
    const x = thinned(rows.map((row) => row.step));
    const traces = this.series.flatMap((line) => {
      const raw = rows.map((row) => row[line.key] ?? null), smooth = raw.map((value) => line.smooth.next(value));
      if (this.card.exact) return [raw];
      const curves = [raw, smooth];
      if (!line.spread) return curves;
      const spread = rows.map((row) => line.band.next(row[line.spread]));
      const edge = (sign) => smooth.map((value, index) => known(value) && known(spread[index]) ? value + sign * spread[index] : null);
      return [edge(-1), edge(1), ...curves];
    });
    return traces.map((values) => ({ x, y: thinned(values) }));
  }

  traces(columns, few, style) {
    const kinds = this.series.flatMap((line) => (this.card.exact ? ["raw"] : line.spread ? ["low", "high", "raw", "smooth"] : ["raw", "smooth"]).map((kind) => [line, kind]));
    return kinds.map(([line, kind], index) => {
      const color = style.colors[line.color];
      const trace = { ...columns[index], type: "scatter", mode: "lines", name: plain(line.name), hoverinfo: "skip", line: { color, width: 0 } };
      if (kind === "high") Object.assign(trace, { fill: "tonexty", fillcolor: color + "22" });
      if (kind === "smooth") trace.line = { color, width: 2, shape: "linear" };
      if (kind === "raw") {
        const hover = this.card.share ? "%{y:.0%}" : "%{y:.3~g}";
        Object.assign(trace, { opacity: few ? 0.6 : 0.32, line: { color, width: 1 }, marker: { color, size: 4 } });
        if (this.card.exact) Object.assign(trace, { opacity: 1, line: { color, width: 2 }, marker: { color, size: 6 } });
        Object.assign(trace, { mode: few || this.card.exact ? "lines+markers" : "lines", hoverinfo: "all", hovertemplate: `${plain(line.name)} <b>${hover}</b><extra></extra>` });
      }
      return trace;
    });
  }

  // Shapes have no hover, so each dashed line carries a dot at its top that has.
  markTrace(marks, style) {
    return { x: marks.map((mark) => mark.step), y: marks.map(() => 1), yaxis: "y2", type: "scatter", mode: "markers", cliponaxis: false,
      marker: { color: style.colors.violet, size: 6 }, hovertemplate: marks.map((mark) => `${wrapped(mark.text ? `${mark.kind}: ${mark.text}` : mark.kind)}<extra></extra>`) };
  }

  layout(marks, style) {
    const axis = { zeroline: false, showgrid: false, ticks: "", tickfont: { size: 10, color: style.soft }, automargin: false };
    const steps = [...new Set(marks.map((mark) => mark.step))];
    return {
      autosize: true, margin: { l: 38, r: 6, t: 7, b: 18 }, showlegend: false, hovermode: "x unified", dragmode: "zoom", uirevision: "kept",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: style.font, size: 11, color: style.ink },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style.soft, activecolor: style.ink },
      hoverlabel: { bgcolor: style.card, bordercolor: style.rule, font: { size: 11, color: style.ink, family: style.font } },
      xaxis: { ...axis, nticks: 8, tickformat: "d", hoverformat: "d", spikecolor: style.soft, spikethickness: 1, spikedash: "solid", unifiedhovertitle: { text: "step %{x}" }, autorangeoptions: { include: [1, 10] } },
      yaxis: { ...axis, nticks: 5, showgrid: true, gridcolor: style.grid, tickformat: this.card.share ? ".0%" : "", exponentformat: "power",
        ...(this.card.share ? { range: [0, 1.02], fixedrange: true } : {}) },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: steps.map((step) => ({ type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, line: { color: style.colors.violet, width: 1.2, dash: "4px,4px" } })),
    };
  }
}

const CONFIG = { displaylogo: false, responsive: false, displayModeBar: "hover", doubleClick: "reset",
  modeBarButtons: [["toImage", "resetScale2d"]], toImageButtonOptions: { filename: "grpo-kit", scale: 2 } };
