// Part 3: the answers of a step, one group (one prompt) at a time.

class Completions {
  // `ask(step)` asks the kernel for an earlier step's answers.
  constructor(ask) {
    this.ask = ask;
    this.following = true; // showing the newest step
    this.group = null;
    this.best = {}; // largest size of each reward seen, for the bars
    this.select = h("select", { "aria-label": "group", class: "gk-select", onchange: () => { this.group = this.select.value; this.fill(); } });
    this.previous = this.stepButton("‹", "previous step", -1);
    this.next = this.stepButton("›", "next step", 1);
    this.title = h("span", { class: "gk-steplabel" });
    this.latest = h("button", { class: "gk-button gk-small", type: "button", hidden: true, onclick: () => this.follow() }, "newest");
    this.waiting = h("span", { class: "gk-hint", hidden: true });
    this.prompt = h("div", { class: "gk-prompt", tabindex: "0", role: "region", "aria-label": "prompt" });
    this.head = h("tr");
    this.body = h("tbody");
    this.table = h("div", { class: "gk-tablebox" }, h("table", { class: "gk-table" }, h("thead", {}, this.head), this.body));
    this.content = h("div", { hidden: true }, this.prompt, this.table);
    this.empty = h("div", { class: "gk-hint" }, "the answers of the first step appear here");
    this.controls = h("span", { class: "gk-pick", hidden: true }, this.previous, this.title, this.next, this.latest, this.select, this.waiting);
    this.el = h("section", { class: "gk-card gk-completions", "aria-label": "completions" },
      h("header", {}, h("h4", { title: "completions of the step" }, "Answers"), this.controls),
      this.empty, this.content);
    this.el.addEventListener("mouseleave", () => this.release());
  }

  stepButton(sign, label, move) {
    return h("button", { class: "gk-button gk-small", type: "button", "aria-label": label, title: label, onclick: () => this.go(this.step + move) }, sign);
  }

  // A step that the person picked, in the table or on a chart.
  go(step) {
    if (!this.newest || step < 1 || step > this.newest.step) return;
    if (step === this.newest.step) { this.follow(); return; }
    this.following = false;
    this.ask(step);
  }

  follow() {
    this.following = true;
    this.shown(this.newest);
  }

  // The newest step's answers. Kept back while someone reads: the pointer is over the table or text is selected.
  offer(completions, weights) {
    this.weights = weights;
    this.newest = completions;
    if (!this.following) { this.buttons(); return; }
    if (this.step !== undefined && this.held()) {
      say(this.waiting, `step ${completions.step} is ready: move the pointer away to see it`);
      show(this.waiting, true);
      return;
    }
    this.shown(completions);
  }

  picked(completions) {
    if (completions && !this.following) this.shown(completions);
  }

  held() {
    const selection = document.getSelection();
    const selecting = selection && !selection.isCollapsed && this.el.contains(selection.anchorNode);
    return selecting || this.content.matches(":hover") || document.activeElement === this.select;
  }

  release() {
    if (!this.waiting.hidden && this.following && !this.held()) this.shown(this.newest);
  }

  forget() {
    this.newest = undefined;
    this.step = undefined;
    this.following = true;
    show(this.content, false);
    show(this.controls, false);
    show(this.empty, true);
  }

  shown(completions) {
    show(this.waiting, false);
    this.step = completions.step;
    this.prompts = completions.prompts;
    this.rows = completions.rows;
    const groups = Object.keys(this.prompts);
    if (!groups.includes(this.group)) this.group = groups[0];
    this.select.replaceChildren(...groups.map((group, index) => {
      const totals = this.rows.filter((row) => String(row.group) === group).map((row) => row.total).filter(known);
      const mean = totals.length ? totals.reduce((sum, total) => sum + total, 0) / totals.length : null;
      const option = h("option", { value: group }, `prompt ${index + 1} of ${groups.length} · mean reward ${number(mean)}`);
      option.selected = group === this.group;
      return option;
    }));
    this.buttons();
    this.fill();
  }

  buttons() {
    say(this.title, `step ${this.step}`);
    this.previous.disabled = this.step <= 1;
    this.next.disabled = this.step >= this.newest.step;
    show(this.latest, !this.following);
  }

  fill() {
    show(this.empty, false);
    show(this.content, true);
    show(this.controls, true);
    const rows = this.rows.filter((row) => String(row.group) === this.group);
    rows.sort((one, other) => (other.total ?? -Infinity) - (one.total ?? -Infinity));
    const names = Object.keys(rows[0]?.scores ?? {});
    for (const row of this.rows) {
      for (const name of names) this.best[name] = Math.max(this.best[name] ?? 0, Math.abs(row.scores[name]?.[0] ?? 0));
    }
    if (this.prompt.textContent !== this.prompts[this.group]) {
      say(this.prompt, this.prompts[this.group]);
      this.prompt.scrollTop = this.prompt.scrollHeight; // the question stands at the end
    }
    const heading = (text, title, number) => h("th", { scope: "col", title, class: number && "gk-number" }, text);
    this.head.replaceChildren(heading("answer", "the completion, as the model wrote it"),
      ...names.map((name) => heading(name, `reward function, weight ${number(this.weights?.[name])}`)),
      heading("total", "sum of weight × reward", true), heading("advantage", "better or worse than its group's mean", true),
      heading("tokens", "length of the answer", true), heading("end", "why it ended: eos = by itself, length = cut off at the limit", true));
    const scrolled = new Map([...this.body.children].map((tr) => [tr.dataset.index, tr.querySelector(".gk-text").scrollTop]));
    this.body.replaceChildren(...rows.map((row) => this.answer(row, names)));
    for (const tr of this.body.children) tr.querySelector(".gk-text").scrollTop = scrolled.get(tr.dataset.index) ?? 0;
  }

  answer(row, names) {
    const better = row.advantage > 0 ? "gk-up" : row.advantage < 0 ? "gk-down" : "";
    const end = row.finish_reason === "length" ? "cut off" : row.finish_reason;
    return h("tr", { "data-index": row.index },
      h("td", { class: "gk-answer" }, h("div", { class: "gk-text", tabindex: "0" }, row.text)),
      ...names.map((name) => h("td", {}, this.score(row.scores[name], name, names))),
      h("td", { class: "gk-number" }, number(row.total)),
      h("td", { class: `gk-number ${better}` }, signed(row.advantage)),
      h("td", { class: "gk-number gk-soft" }, String(row.tokens)),
      h("td", { class: "gk-number gk-soft", title: row.finish_reason }, end));
  }

  score(score, name, names) {
    if (!score) return MISSING;
    const [value, reason, detail] = score;
    if (!known(value)) return h("span", { class: reason === "not applicable" ? "gk-soft" : "gk-reason", title: detail || reason }, reason);
    const share = Math.min(1, Math.abs(value) / (this.best[name] || 1));
    const color = value < 0 ? "red" : colorOf(names, name);
    return h("span", { class: "gk-score" },
      h("span", { class: "gk-track" }, h("span", { style: `width:${(100 * share).toFixed(1)}%;background:var(--gk-${color})` })),
      h("span", {}, number(value)));
  }
}
