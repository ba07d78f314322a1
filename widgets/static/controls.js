// Part 4: the header line with its buttons, the fields that can be edited, warnings and the log of events.

const STATE_WORDS = { starting: "starting", running: "running", paused: "paused", stopping: "stopping", stopped: "stopped", finished: "finished", failed: "failed" };
const OVER = new Set(["stopped", "finished", "failed"]);
const STOP_SURE_MS = 4000; // how long "Stop now?" stays
const SET_LOST_MS = 10000; // a sent value that got no answer so long was lost: what the run has is shown again

class Header {
  constructor(send) {
    this.send = send;
    this.dot = h("i", { class: "gk-dot" });
    this.state = h("span", { class: "gk-state", role: "status" });
    this.step = h("b");
    this.steps = h("span");
    this.fill = h("span");
    this.bar = h("div", { class: "gk-bar", role: "progressbar", "aria-label": "steps done", "aria-valuemin": "0" }, this.fill);
    this.time = h("span", { title: "time spent < time left" });
    this.perStep = h("b");
    this.split = h("span", { title: "seconds of a step: writing answers | scoring them | updating the model" });
    this.lag = h("span", { class: "gk-lag", hidden: true, role: "status" });
    this.pause = h("button", { class: "gk-button gk-pause", type: "button", onclick: () => this.togglePause() });
    this.stop = h("button", { class: "gk-button gk-stop", type: "button", onclick: () => this.askStop() }, "Stop");
    this.skipped = h("span", { class: "gk-hint gk-skipped", hidden: true, title: "gradient scaler: an update whose gradients are not finite is dropped; in float16 they are scaled up to stay above its smallest number, and the scale is halved whenever they overflow" });
    this.sampler = h("span", { class: "gk-hint gk-sampler", hidden: true, title: "sampler gap: |log-probability by the engine that wrote an answer − by the model that learns from it|, of the same tokens; both are one model, so only rounding may lie between them: up to 0.02 on average in 16 bits" });
    this.el = h("div", { class: "gk-header" },
      h("span", { class: "gk-now" }, this.dot, this.state), h("span", { class: "gk-soft" }, this.step, this.steps), this.bar,
      h("span", { class: "gk-soft gk-figures" }, this.time), h("span", { class: "gk-soft gk-figures" }, this.perStep, this.split), this.lag,
      h("span", { class: "gk-buttons" }, this.pause, this.stop), this.skipped, this.sampler);
  }

  // The click is answered on the page at once; what the run says follows.
  togglePause() {
    this.wanted = this.status.state === "paused" ? "resume" : "pause";
    this.send({ type: this.wanted });
    this.update(this.status);
  }

  askStop() {
    if (!this.sure) {
      this.sure = setTimeout(() => { this.sure = undefined; this.update(this.status); }, STOP_SURE_MS);
    } else {
      clearTimeout(this.sure);
      this.sure = undefined;
      this.wanted = "stop";
      this.send({ type: "stop" });
    }
    this.update(this.status);
  }

  update(status) {
    const { state, step, steps } = status, over = OVER.has(state);
    if (this.status && this.status.state !== state) this.wanted = undefined;
    this.status = status;
    this.dot.dataset.state = state;
    say(this.state, STATE_WORDS[state] ?? state);
    say(this.step, `step ${step}`);
    say(this.steps, ` / ${steps}`);
    this.fill.style.width = `${steps ? Math.min(100, 100 * step / steps) : 0}%`;
    this.bar.setAttribute("aria-valuemax", steps);
    this.bar.setAttribute("aria-valuenow", step);
    say(this.time, over || !known(status.seconds_left) ? clock(status.elapsed) : `${clock(status.elapsed)} < ${clock(status.seconds_left)} left`);
    const one = (seconds) => known(seconds) ? seconds.toFixed(seconds < 10 ? 1 : 0) : MISSING;
    const { rollout, reward, update } = status.split, each = known(status.seconds_per_step);
    say(this.perStep, each ? `${one(status.seconds_per_step)} s` : "");
    say(this.split, each ? `/step (rollout ${one(rollout)} | reward ${one(reward)} | update ${one(update)})` : "");
    say(this.pause, this.wanted === "pause" ? "Pausing…" : this.wanted === "resume" ? "Resuming…" : state === "paused" ? "Resume" : "Pause");
    say(this.stop, this.wanted === "stop" || state === "stopping" ? "Stopping…" : this.sure ? "Stop now?" : "Stop");
    this.stop.classList.toggle("gk-danger", Boolean(this.sure));
    this.pause.disabled = over || state === "stopping" || Boolean(this.wanted);
    this.stop.disabled = over || state === "stopping" || this.wanted === "stop";
    say(this.skipped, status.skipped);
    show(this.skipped, Boolean(status.skipped));
    say(this.sampler, status.sampler);
    show(this.sampler, Boolean(status.sampler));
    show(this.pause, !over);
    show(this.stop, !over);
  }
}

class Knobs {
  constructor(send) {
    this.send = send;
    this.fields = h("div", { class: "gk-fields" });
    this.hint = h("span", { class: "gk-hint", role: "status" });
    this.el = h("section", { class: "gk-card gk-knobs", "aria-label": "settings of the running training" }, this.fields, this.hint);
    this.inputs = new Map();
  }

  update({ knobs, state }) {
    const wanted = [["learning_rate", null, "learning rate", "size of the optimizer's steps", knobs.learning_rate],
      ...Object.entries(knobs.weights).map(([name, weight]) => ["weight", name, name, `weight of the reward function ${name} in the total`, weight])];
    const signature = wanted.map(([field, name]) => `${field}\n${name}`).join("\n\n");
    if (signature !== this.signature) {
      this.signature = signature;
      this.inputs.clear();
      this.fields.replaceChildren(...wanted.map((one) => this.field(...one)));
    }
    for (const [field, name, , , value] of wanted) {
      const one = this.inputs.get(`${field}/${name}`), { input } = one;
      input.disabled = OVER.has(state);
      one.now = value;
      // What is being typed, is on its way, or was refused and still stands there, is not overwritten.
      if (value === one.shown || one.refused || performance.now() < one.sentUntil || document.activeElement === input) continue;
      one.shown = value;
      input.value = short(value);
    }
    if (OVER.has(state)) say(this.hint, "the run is over: nothing to change");
    else say(this.hint, "changes apply from the next step");
  }

  field(field, name, label, title, value) {
    const input = h("input", { type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false", "aria-label": label, title, value: short(value) });
    const problem = h("span", { class: "gk-problem", role: "alert", hidden: true });
    const one = { input, problem, shown: value, now: value, sentUntil: 0 };
    input.addEventListener("change", () => {
      this.problem(field, name, "");
      if (input.value === short(one.now)) return;
      one.sentUntil = performance.now() + SET_LOST_MS;
      this.send({ type: "set", field, name, value: input.value.trim() });
    });
    input.addEventListener("keydown", (event) => {
      event.stopPropagation(); // the notebook's shortcuts are not meant
      if (event.key === "Escape") { input.value = short(one.now); this.problem(field, name, ""); }
      if (event.key === "Escape" || event.key === "Enter") input.blur();
    });
    input.addEventListener("focus", () => input.select());
    this.inputs.set(`${field}/${name}`, one);
    return h("label", { title }, h("span", {}, label, field === "weight" ? " ×" : ""), input, problem);
  }

  // What the run said to a value that was sent: "" when it took it.
  answered(field, name, text) {
    this.problem(field, name, text);
    const one = this.inputs.get(`${field}/${name ?? null}`);
    if (one) Object.assign(one, { sentUntil: 0, shown: undefined }); // the next rows bring it as the run has it
  }

  problem(field, name, text) {
    const one = this.inputs.get(`${field}/${name ?? null}`);
    if (!one) return;
    one.refused = Boolean(text);
    say(one.problem, text);
    show(one.problem, one.refused);
    one.input.setAttribute("aria-invalid", String(one.refused));
  }
}

class Notices {
  constructor() {
    this.failure = h("section", { class: "gk-alert gk-failed", role: "alert", hidden: true });
    this.list = h("div", { class: "gk-alerts", role: "status" });
    this.dismissed = new Set();
  }

  update({ warnings, error }) {
    if (error !== this.error) {
      this.error = error;
      show(this.failure, Boolean(error));
      const lines = (error ?? "").trim().split("\n");
      this.failure.replaceChildren(h("p", {}, h("b", {}, "The run failed. "), lines.at(-1)),
        h("details", {}, h("summary", {}, "traceback"), h("pre", { tabindex: "0" }, error ?? "")));
    }
    const standing = new Set(warnings.map((warning) => warning.key));
    for (const key of this.dismissed) if (!standing.has(key)) this.dismissed.delete(key); // it may come back later
    const shown = warnings.filter((warning) => !this.dismissed.has(warning.key));
    const signature = JSON.stringify(shown);
    if (signature === this.signature) return;
    this.signature = signature;
    this.list.replaceChildren(...shown.map((warning) => h("section", { class: "gk-alert gk-warning" },
      h("p", {}, h("b", {}, `${warning.title} `), warning.text, " ", h("span", { class: "gk-todo" }, warning.todo)),
      h("button", { class: "gk-button gk-small", type: "button", "aria-label": `dismiss: ${warning.title}`,
        onclick: () => { this.dismissed.add(warning.key); this.update({ warnings, error }); } }, "Dismiss"))));
  }
}

// What the model answered to one question, always the same, before training and later: the newest first.
class Canary {
  constructor() {
    this.question = h("div", { class: "gk-question", tabindex: "0", role: "region", "aria-label": "question" });
    this.list = h("ol");
    this.el = h("section", { class: "gk-card gk-canary", hidden: true, "aria-label": "the same question through the run" },
      h("header", {}, h("h4", { title: "canary: one prompt, answered again and again" }, "The same question through the run")),
      this.question, this.list);
    this.forget();
  }

  forget() {
    this.prompt = undefined;
    this.steps = new Map();
    this.list.replaceChildren();
    show(this.el, false);
  }

  update(events) {
    for (const { step, data } of events.filter((event) => event.kind === "canary")) {
      if (data.prompt !== this.prompt) this.ask(data.prompt);
      this.steps.get(step)?.remove(); // answered again after a resume
      const answer = this.answer(step, data.answer);
      this.steps.set(step, answer);
      this.list.prepend(answer);
    }
  }

  ask(prompt) {
    this.forget();
    this.prompt = prompt;
    show(this.el, true);
    say(this.question, prompt);
    this.question.scrollTop = this.question.scrollHeight; // the question stands at the end
  }

  answer(step, text) {
    return h("li", {}, h("details", {},
      h("summary", {}, h("time", {}, step === 0 ? "before training" : `step ${step}`), h("span", { class: "gk-line" }, text)),
      h("div", { class: "gk-full", tabindex: "0" }, text)));
  }
}

class Log {
  constructor() {
    this.list = h("ol");
    this.count = h("span", { class: "gk-soft" });
    this.el = h("details", { class: "gk-card gk-log" }, h("summary", {}, "What happened", this.count), this.list);
    this.drawn = 0;
  }

  forget() {
    this.list.replaceChildren();
    this.drawn = 0;
  }

  update(all) {
    const events = all.filter((event) => !QUIET.has(event.kind));
    for (const event of events.slice(this.drawn)) {
      const time = new Date(1000 * event.time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
      this.list.prepend(h("li", {}, h("time", {}, time), h("span", { class: "gk-soft" }, event.step === null ? "" : `step ${event.step}`),
        h("b", {}, event.kind), h("span", {}, event.text)));
    }
    this.drawn = events.length;
    say(this.count, events.length ? ` ${events.length} event${events.length > 1 ? "s" : ""}, the last: ${events.at(-1).kind}` : " nothing yet");
  }
}
