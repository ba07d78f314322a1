// Part 5: the protocol and the whole. Rows arrive pushed, and in answer to polls when nothing was pushed;
// they carry their step, so both are idempotent, and a gap or a reload asks for what is missing.

const QUIET_MS = 500; // nothing heard for so long: ask
const QUIET_OVER_MS = 3000; // the same for a run that is over, or a page nobody looks at
const HEARTBEAT_MS = 5000; // asks so often whatever is pushed, which tells the kernel that someone watches
const LOST_MS = 5000; // an answer that took longer was lost
const LAG_MS = 2500; // from here on the panel says that it waits
const PLOTLY_LOST_MS = 20000;
const DRAW_MS = 250; // charts are drawn at most so often,
const DRAW_SHARE = 0.2; // and with many steps so seldom that drawing takes no more of the time than this

function render({ model, el }) {
  const rows = [], events = [];
  let held = []; // the evaluations among the events, as rows
  let status, epoch = -1, completionsStep = 0;
  let heard = 0, asked = -Infinity, waiting = false, drawAt = 0, frame = 0;

  const send = (message) => model.send({ ...message, ...have() });
  const have = () => ({ since: rows.at(-1)?.step ?? 0, events_since: events.at(-1)?.id ?? 0, completions_step: completionsStep, epoch });
  const poll = () => { asked = performance.now(); waiting = true; send({ type: "poll" }); };

  const header = new Header(send), knobs = new Knobs(send), notices = new Notices(), canary = new Canary(), log = new Log();
  const charts = CARDS.map((card) => new Chart(card, (step) => completions.go(step)));
  const heldOut = new Chart(HELD_OUT, (step) => completions.go(step)), all = [...charts, heldOut];
  const completions = new Completions((step) => model.send({ type: "completions", step }));
  const problem = h("div", { class: "gk-alert gk-failed", role: "alert", hidden: true });
  const root = h("div", { class: "gk-panel", "data-theme": isDark() ? "dark" : "light" },
    header.el, notices.failure, h("div", { class: "gk-cards" }, ...charts.map((chart) => chart.el)),
    h("div", { class: "gk-heldout" }, heldOut.el, canary.el), problem, notices.list, knobs.el, completions.el, log.el);
  const host = h("div", { class: "gk-host" }, root);
  el.append(host);
  show(heldOut.el, false);

  let Plotly, style;
  const page = plotlyOfPage();
  const wantPlotly = () => {
    if (page.loaded || performance.now() - page.askedAt < PLOTLY_LOST_MS) return;
    page.askedAt = performance.now();
    model.send({ type: "plotly" });
  };
  const gotPlotly = (buffer) => {
    if (page.loaded) return;
    page.loaded = true;
    try { page.resolve(evaluatePlotly(new TextDecoder().decode(buffer))); }
    catch (error) { page.reject(error); }
  };
  page.promise.then((plotly) => { Plotly = plotly; schedule(); }, (error) => {
    say(problem, `The charts can't be drawn: this page would not run plotly.js (${error}). The numbers above and run.plot() still work.`);
    show(problem, true);
  });

  const take = (message) => {
    heard = performance.now();
    if (message.answer) waiting = false;
    if (message.epoch !== epoch) { // a resume rewrote steps: all that is shown is out of date
      epoch = message.epoch;
      rows.length = events.length = completionsStep = 0;
      held = [];
      all.forEach((chart) => chart.reset());
      completions.forget();
      canary.forget();
      log.forget();
    }
    const before = events.length;
    const gap = append(rows, message.rows, message.since, "step") | append(events, message.events, message.events_since, "id");
    happened(events.slice(before));
    status = message.status;
    header.update(status);
    knobs.update(status);
    notices.update(status);
    charts.forEach((chart) => chart.label(rows));
    if (message.completions) {
      completionsStep = message.completions.step;
      completions.offer(message.completions, status.knobs.weights);
    }
    root.dataset.step = have().since;
    schedule();
    if (gap && !waiting) poll();
  };

  const happened = (fresh) => {
    log.update(events);
    if (fresh.some((event) => event.kind === "evaluation")) {
      held = evaluations(events);
      heldOut.reset(); // few and seldom: drawn anew, also where a resume measured a step again
    }
    show(heldOut.el, held.length > 0);
    if (held.length) heldOut.label(held);
    canary.update(fresh); // last: it scrolls to the question's end, once its card has its width
  };

  // Draws from the data as it stands then: nothing is queued while the page is hidden.
  const schedule = () => {
    if (frame || !Plotly || document.hidden || !root.isConnected) return;
    frame = requestAnimationFrame(() => {
      frame = 0;
      const start = performance.now(), early = drawAt - start;
      if (early > 0) { frame = setTimeout(() => { frame = 0; schedule(); }, early); return; }
      style ??= styleOf(root);
      charts.forEach((chart) => chart.draw(Plotly, rows, events, style));
      heldOut.draw(Plotly, held, events, style);
      const end = performance.now();
      drawAt = end + Math.max(DRAW_MS, (end - start) / DRAW_SHARE);
      root.dataset.drawMs = Math.round(end - start);
    });
  };

  const received = (message, buffers) => {
    if (message.type === "rows") take(message);
    else if (message.type === "plotly") gotPlotly(buffers[0]);
    else if (message.type === "completions") completions.picked(message.completions);
    else if (message.type === "set") knobs.answered(message.field, message.name, message.problem);
  };
  const tick = () => {
    const now = performance.now(), idle = document.hidden || (status && OVER.has(status.state));
    wantPlotly();
    const late = waiting && now - asked > LAG_MS;
    show(header.lag, late);
    if (late) say(header.lag, "waiting for the kernel: a cell may be running");
    if (waiting && now - asked < LOST_MS) return;
    if (waiting || now - heard > (idle ? QUIET_OVER_MS : QUIET_MS) || now - asked > HEARTBEAT_MS) poll();
  };
  const visible = () => { if (!document.hidden) { poll(); schedule(); } };
  const themed = () => {
    root.dataset.theme = isDark() ? "dark" : "light";
    style = undefined;
    all.forEach((chart) => chart.reset());
    schedule();
  };
  const resized = new ResizeObserver(() => {
    for (const chart of all) if (chart.drawn > 0 && chart.plot.offsetWidth) Plotly.Plots.resize(chart.plot);
    schedule(); // also when the panel comes back into the page
  });

  model.on("msg:custom", received);
  document.addEventListener("visibilitychange", visible);
  const unwatch = watchTheme(themed);
  resized.observe(root);
  charts.forEach((chart) => chart.label(rows));
  poll();
  wantPlotly();
  const timer = setInterval(tick, QUIET_MS / 2);
  return () => {
    clearInterval(timer);
    model.off("msg:custom", received);
    document.removeEventListener("visibilitychange", visible);
    unwatch();
    resized.disconnect();
    if (Plotly) all.forEach((chart) => Plotly.purge(chart.plot));
  };
}

// Adds what is new of `fresh`, which holds all that follows `since`; true if something in between is missing.
const append = (list, fresh, since, key) => {
  const last = list.at(-1)?.[key] ?? 0;
  if (since > last) return true;
  list.push(...fresh.filter((item) => item[key] > last));
  return false;
};

const styleOf = (root) => {
  const computed = getComputedStyle(root), read = (name) => computed.getPropertyValue(`--gk-${name}`).trim();
  return { colors: Object.fromEntries(PALETTE.map((name) => [name, read(name)])), ink: read("ink"), soft: read("soft"), grid: read("grid"),
    rule: read("rule"), card: read("card"), font: computed.fontFamily };
};

export default { render };
