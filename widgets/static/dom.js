// Part 1 of the panel: elements and numbers. The parts are joined into one module in the order
// dom, charts, completions, controls, panel (see panel.py).
// Text from the model, the data and the rewards is data: it reaches the page as text nodes only.

const h = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};

// Set text only when it differs, so that a selection in it survives.
const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const show = (node, shown) => { if (node.hidden === shown) node.hidden = !shown; };

const MISSING = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

// About three significant digits: 163, 12.4, 2.71, 0.031, 5e-6.
const number = (value) => {
  if (!known(value)) return MISSING;
  const size = Math.abs(value);
  const text = size >= 1000 ? Math.round(value).toLocaleString("en-US")
    : size >= 100 ? value.toFixed(0)
    : size >= 10 ? value.toFixed(1)
    : size >= 1 || size === 0 ? String(Number(value.toFixed(2)))
    : size >= 1e-3 ? String(Number(value.toFixed(3)))
    : String(Number(value.toPrecision(3)));
  return text.replace("-", "−").replace("e−", "e-");
};
// A number as it is typed: 5e-6, 0.5, 2.
const short = (value) => value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential() : String(value);
const percent = (share) => known(share) ? `${Math.round(100 * share)} %` : MISSING;
const signed = (value) => !known(value) ? MISSING : (value > 0 ? "+" : "") + value.toFixed(2).replace("-", "−");
const clock = (seconds) => {
  if (!known(seconds)) return MISSING;
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
};

// JupyterLab, VS Code and Colab each say in their own way whether they are dark; else the system says.
const isDark = () => {
  const body = document.body.dataset;
  if (body.jpThemeLight) return body.jpThemeLight === "false";
  if (body.vscodeThemeKind) return body.vscodeThemeKind.includes("dark") || body.vscodeThemeKind === "vscode-high-contrast";
  const colab = document.documentElement.getAttribute("theme");
  if (colab) return colab === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
};

// Calls `changed` when the page turns dark or light; returns a function that stops that.
const watchTheme = (changed) => {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const observer = new MutationObserver(changed);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["theme"] });
  media.addEventListener("change", changed);
  return () => { observer.disconnect(); media.removeEventListener("change", changed); };
};

const PALETTE = ["blue", "green", "orange", "violet", "red", "gray"];
const rewardNames = (rows) => Object.keys(rows.at(-1) ?? {})
  .filter((key) => key.startsWith("rewards/") && !key.endsWith("/none"))
  .map((key) => key.slice("rewards/".length));
const colorOf = (names, name) => PALETTE[Math.max(0, names.indexOf(name)) % PALETTE.length];
