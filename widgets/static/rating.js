// The rating panel, after dom.js. One answer at a time with thumbs, or two side by side.
// The kernel sends the next few questions; an answer given is taken off the page at once and told to the kernel.

const RATING_QUIET_MS = 500; // nothing heard for so long: ask
const RATING_HIDDEN_MS = 3000; // the same for a page nobody looks at
const RATING_LOST_MS = 5000; // an answer that took longer was lost
const RATING_LAG_MS = 2500; // from here on the panel says that it waits

const SVG = "http://www.w3.org/2000/svg";
const THUMB = "M2 9.5h3.2v8.2H2zM6.7 9.7 10 2.6c1.5 0 2.4 1 2.2 2.5L11.7 8h4.4c1.4 0 2.2 1.1 1.9 2.3l-1.4 5.8c-.3 1-1.1 1.6-2.1 1.6H6.7z";
const thumb = (down) => {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  for (const [key, value] of Object.entries({ viewBox: "0 0 20 20", "aria-hidden": "true", class: down ? "gk-icon gk-upsidedown" : "gk-icon" })) svg.setAttribute(key, value);
  path.setAttribute("d", THUMB);
  svg.append(path);
  return svg;
};
const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

// A prompt or an answer: text only, and scrolled back when it is another one.
class TextBox {
  constructor(label, name) {
    this.el = h("div", { class: name, tabindex: "0", role: "region", "aria-label": label });
  }

  show(id, text, atEnd = false) {
    if (this.id === id && this.el.textContent === text) return;
    this.id = id;
    say(this.el, text);
    this.el.scrollTop = atEnd ? this.el.scrollHeight : 0;
  }
}

const choice = (name, key, onclick, ...children) =>
  h("button", { class: `gk-button gk-choice ${name}`, type: "button", onclick, "data-key": key }, ...children, h("kbd", { "aria-hidden": "true" }, key));

class OneView {
  constructor(send) {
    this.prompt = new TextBox("prompt", "gk-prompt");
    this.answer = new TextBox("answer", "gk-ratetext");
    const tell = (message) => this.question && send({ ...message, ids: [this.question.id] });
    this.el = h("div", { class: "gk-rateone", hidden: true }, this.prompt.el, this.answer.el,
      h("div", { class: "gk-choices" },
        choice("gk-good", "1", () => tell({ type: "rate", up: true }), thumb(false), "Good"),
        choice("gk-bad", "2", () => tell({ type: "rate", up: false }), thumb(true), "Bad"),
        choice("gk-skip", "3", () => tell({ type: "skip" }), "Skip")));
  }

  update([question]) {
    this.question = question;
    show(this.el, Boolean(question));
    if (!question) return;
    this.prompt.show(question.id, question.prompt, true);
    this.answer.show(question.id, question.text);
  }
}

class PairView {
  constructor(send) {
    this.prompt = new TextBox("prompt", "gk-prompt");
    this.answers = [new TextBox("first answer", "gk-ratetext"), new TextBox("second answer", "gk-ratetext")];
    const tell = (better) => {
      if (!this.pair) return;
      const ids = this.pair.map((question) => question.id);
      send(better === undefined ? { type: "skip", ids } : { type: "prefer", better: ids[better], worse: ids[1 - better], ids });
    };
    const side = (index) => h("div", { class: "gk-side" }, this.answers[index].el,
      choice("gk-better", String(index + 1), () => tell(index), "This one is better"));
    this.el = h("div", { class: "gk-ratepair", hidden: true }, this.prompt.el,
      h("div", { class: "gk-sides" }, side(0), side(1)),
      h("div", { class: "gk-choices" }, choice("gk-skip", "3", () => tell(undefined), "Can't say, skip both")));
  }

  update([pair]) {
    this.pair = pair;
    show(this.el, Boolean(pair));
    if (!pair) return;
    const id = pair.map((question) => question.id).join();
    this.prompt.show(id, pair[0].prompt, true);
    pair.forEach((question, index) => this.answers[index].show(id, question.text));
  }
}

function render({ model, el }) {
  let version = 0, progress, questions = [], pairs = [], mode = "one";
  let heard = 0, asked = -Infinity, waiting = false;
  const given = new Map(); // id → until when it is left out: the kernel hears of an answer later than the page

  const send = (message) => {
    asked = performance.now();
    waiting = true;
    model.send({ ...message, version });
  };
  const answer = ({ ids, ...message }) => {
    for (const id of ids) given.set(id, performance.now() + RATING_LOST_MS);
    say(problem, "");
    send(message.type === "skip" ? { ...message, ids } : message.type === "rate" ? { ...message, id: ids[0] } : message);
    update();
  };

  const views = { one: new OneView(answer), pair: new PairView(answer) };
  const tab = (name, text) => h("button", { class: "gk-button gk-small", type: "button", role: "tab", onclick: () => { mode = name; update(); } }, text);
  const tabs = { one: tab("one", "one at a time"), pair: tab("pair", "two side by side") };
  const step = h("span", { class: "gk-steplabel" });
  const counter = h("span", { class: "gk-counter", role: "status" });
  const bar = h("span"), barBox = h("div", { class: "gk-bar", hidden: true }, bar);
  const lag = h("span", { class: "gk-lag", role: "status", hidden: true }, "waiting for the kernel: a cell may be running");
  const empty = h("div", { class: "gk-nothing", role: "status" }), problem = h("div", { class: "gk-problem", role: "alert" });
  const root = h("div", { class: "gk-panel gk-rating", tabindex: "-1", "data-theme": isDark() ? "dark" : "light", onkeydown: (event) => pressed(event) },
    h("section", { class: "gk-card", "aria-label": "rate answers" },
      h("header", {}, h("h4", {}, "Rate answers"), step, lag, h("span", { class: "gk-tabs", role: "tablist" }, tabs.one, tabs.pair)),
      h("div", { class: "gk-ratestatus" }, counter, barBox),
      views.one.el, views.pair.el, empty, problem));
  // Keeps JupyterLab's one-key shortcuts away from the keys meant here; it asks the element with the focus first.
  for (const node of [root, ...root.querySelectorAll("button, [tabindex]")]) node.setAttribute("data-lm-suppress-shortcuts", "true");
  el.append(h("div", { class: "gk-host" }, root));

  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const button = views[mode].el.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (!button || views[mode].el.hidden) return;
    event.preventDefault();
    event.stopPropagation();
    button.click();
  };

  const update = () => {
    const now = performance.now(), open = (question) => !(given.get(question.id) > now);
    const left = questions.filter(open);
    const comparable = pairs.filter((pair) => pair.every(open));
    for (const name of ["one", "pair"]) tabs[name].setAttribute("aria-selected", String(name === mode));
    views.one.update(mode === "one" ? left : []);
    views.pair.update(mode === "pair" ? comparable : []);
    const shown = mode === "one" ? left[0] : comparable[0]?.[0];
    say(step, shown?.step ? `step ${shown.step}` : "");
    show(empty, !shown);
    if (!progress || (questions.length && !left.length)) say(empty, "asking the kernel…");
    else if (left.length) say(empty, "No two answers to the same prompt are left to compare: rate the rest one at a time.");
    else say(empty, "Nothing to rate just now. Answers appear here as soon as training has written some.");
    if (progress) told(left.length);
  };

  const told = (left) => {
    const { waits, rated, asked: all, seconds_left: seconds } = progress;
    show(barBox, waits);
    if (waits) {
      say(counter, `${rated} of ${all} rated, training waits for you` + (known(seconds) ? ` (${clock(seconds)} left)` : ""));
      bar.style.width = `${all ? 100 * rated / all : 0}%`;
    } else if (all || left) say(counter, `${all} to rate, ${rated} rated so far, training does not wait`);
    else say(counter, rated ? `${count(rated, "rating")} so far` : "");
  };

  const received = (message) => {
    if (message.type !== "state") return;
    heard = performance.now();
    waiting = false;
    progress = message.progress;
    for (const [id, until] of given) if (until < heard) given.delete(id);
    if (message.questions) ({ version, questions, pairs } = message);
    if (message.problem) { say(problem, message.problem); given.clear(); }
    root.dataset.version = version;
    update();
  };
  const tick = () => {
    const now = performance.now(), quiet = document.hidden ? RATING_HIDDEN_MS : RATING_QUIET_MS;
    show(lag, waiting && now - asked > RATING_LAG_MS);
    if (waiting && now - asked < RATING_LOST_MS) return;
    if (waiting || now - heard > quiet) send({ type: "poll" });
  };
  const visible = () => { if (!document.hidden) send({ type: "poll" }); };

  model.on("msg:custom", received);
  document.addEventListener("visibilitychange", visible);
  const unwatch = watchTheme(() => { root.dataset.theme = isDark() ? "dark" : "light"; });
  update();
  send({ type: "poll" });
  const timer = setInterval(tick, RATING_QUIET_MS / 2);
  return () => {
    clearInterval(timer);
    model.off("msg:custom", received);
    document.removeEventListener("visibilitychange", visible);
    unwatch();
  };
}

export default { render };
