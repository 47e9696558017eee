// What the user has set, kept in the browser; the key only as long as the tab is open.

import { getKey, setKey } from "/web/api.js";

const $ = (id) => document.getElementById(id);
const STORE = "cairn-settings";
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed"];
const START = { system: "", temperature: "", top_p: "", max_tokens: "512", seed: "", trace: true, theme: "auto" };

let values = { ...START };
try {
  values = { ...START, ...JSON.parse(localStorage.getItem(STORE) || "{}") };
} catch {
  localStorage.removeItem(STORE); // written by something else
}

export function settings() {
  return values;
}

// The fields of a request.
export function sampling() {
  const body = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (values[name] !== "") body[name === "max_tokens" ? "max_completion_tokens" : name] = Number(values[name]);
  }
  return body;
}

function save() {
  localStorage.setItem(STORE, JSON.stringify(values));
}

export function startSettings() {
  for (const name of FIELDS) {
    $(`s-${name}`).value = values[name];
    $(`s-${name}`).addEventListener("change", (event) => {
      if (!event.target.checkValidity()) {
        event.target.reportValidity();
        return;
      }
      values[name] = event.target.value;
      save();
    });
  }
  $("s-trace").checked = values.trace;
  $("s-trace").addEventListener("change", (event) => {
    values.trace = event.target.checked;
    save();
  });
  $("s-key").value = getKey();
  $("s-key").addEventListener("change", (event) => setKey(event.target.value));
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  showTheme();
  $("theme").addEventListener("click", () => {
    const next = { auto: "light", light: "dark", dark: "auto" };
    values.theme = next[values.theme] || "auto";
    save();
    showTheme();
    document.dispatchEvent(new Event("cairn-theme"));
  });
}

function showTheme() {
  if (values.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = values.theme;
  const names = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
  const [sign, name] = names[values.theme] || names.auto;
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", `Theme: ${name}`);
  $("theme").title = `Theme: ${name}`;
}
