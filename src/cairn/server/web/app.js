// The page: a chat, a document to ask about, and the map of what was read.

import { chat, countTokens } from "/web/api.js";
import { startGauges } from "/web/gauges.js";
import { PageMap } from "/web/pagemap.js";
import { sampling, settings, startSettings } from "/web/settings.js";

const $ = (id) => document.getElementById(id);

let engine = null; // what the server can do
let turns = []; // {role, content} as they were said
let loaded = null; // {name, text}
let running = null; // AbortController of the answer under way

startSettings();
const map = new PageMap();
document.addEventListener("cairn-theme", () => map.draw());

startGauges((answer) => {
  $("model").textContent = answer.model;
  const state = $("state");
  const text = answer.status === "ok" ? "ready" : answer.status;
  if (state.textContent !== text) state.textContent = text;
  state.title = answer.reason;
  state.classList.toggle("ok", answer.status === "ok");
  engine = answer.engine;
});

// -- the document ----------------------------------------------------------------------------

$("load").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (file) await load(file.name, await file.text());
  $("file").value = "";
});
$("sample").addEventListener("click", async () => {
  const response = await fetch("/web/sample.txt");
  await load("A hut's logbook", await response.text());
  if (!$("question").value) $("question").value = "Who lost a red glove?";
});
$("document-remove").addEventListener("click", () => {
  loaded = null;
  $("document").hidden = true;
  $("question").focus();
});
const form = $("ask");
for (const kind of ["dragenter", "dragover"]) {
  form.addEventListener(kind, (event) => {
    event.preventDefault();
    form.classList.add("over");
  });
}
for (const kind of ["dragleave", "drop"]) form.addEventListener(kind, () => form.classList.remove("over"));
form.addEventListener("drop", async (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (file) await load(file.name, await file.text());
});

async function load(name, text) {
  reset();
  loaded = { name, text };
  $("document").hidden = false;
  $("document").classList.remove("bad");
  $("document-name").textContent = name;
  $("document-size").textContent = `${text.length.toLocaleString()} characters`;
  $("question").focus();
  try {
    const { count, max_model_len: most } = await countTokens(text);
    const over = count >= most ? `, and the context holds ${most.toLocaleString()}: shorten it` : "";
    $("document-size").textContent = `${count.toLocaleString()} tokens${over}`;
    $("document").classList.toggle("bad", count >= most);
  } catch (error) {
    $("document-size").textContent = error.message;
    $("document").classList.add("bad");
  }
}

// -- the chat --------------------------------------------------------------------------------

function messages() {
  const all = turns.map((turn) => ({ ...turn }));
  if (loaded) {
    // In front of everything, so that the next question finds it in the prefix cache.
    all[0].content = `Here is a document.\n\n${loaded.text}\n\nAnswer from the document. ${all[0].content}`;
  }
  const system = settings().system.trim();
  return system ? [{ role: "system", content: system }, ...all] : all;
}

function say(kind, text) {
  $("messages").querySelector(".hint")?.remove();
  const item = document.createElement("li");
  item.className = kind;
  item.textContent = text;
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function reset() {
  running?.abort();
  turns = [];
  $("messages").replaceChildren();
}

async function ask(text) {
  turns.push({ role: "user", content: text });
  say("user", text);
  const item = say("assistant waiting", "");
  running = new AbortController();
  const own = running;
  show(true);
  const traced = Boolean(settings().trace && engine?.can_trace);
  const body = { messages: messages(), ...sampling(), stream_options: { include_usage: true } };
  if (traced) body.cairn = { trace: true };
  else map.none(engine?.can_trace ? "Recording is off; the settings turn it on." : DENSE);
  const begin = performance.now();
  let first = 0;
  let usage = null;
  try {
    for await (const event of chat(body, own.signal)) {
      usage = event.usage || usage;
      for (const choice of event.choices) {
        if (choice.cairn?.pages) map.begin(choice.cairn.pages);
        if (choice.cairn?.reads) map.add(choice.cairn.reads);
        if (choice.delta.content) {
          first ||= performance.now();
          const box = $("messages");
          const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
          item.classList.remove("waiting");
          item.textContent += choice.delta.content;
          if (atEnd) box.scrollTop = box.scrollHeight;
        }
      }
    }
  } catch (error) {
    if (!own.signal.aborted) say("error", error.message);
  }
  item.classList.remove("waiting");
  if (running === own) {
    if (item.textContent) turns.push({ role: "assistant", content: item.textContent });
    else {
      turns.pop();
      item.remove();
    }
    if (usage) say("note", summary(usage, begin, first));
    running = null;
    show(false);
    $("question").focus();
  }
}

const DENSE =
  "Attention is dense here: every token reads every page. Start the server with --attention-backend hsa to see pages being selected.";

function summary(usage, begin, first) {
  const seconds = (performance.now() - first) / 1000;
  const speed = usage.completion_tokens > 1 ? `, ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens || 0;
  return (
    `${usage.prompt_tokens} tokens read (${cached} from the cache), first word after ` +
    `${((first - begin) / 1000).toFixed(2)} s${speed}`
  );
}

function show(busy) {
  $("stop").hidden = !busy;
  $("send").disabled = busy;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("question").value.trim();
  if (!text || running) return;
  $("question").value = "";
  ask(text);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) running?.abort();
});
$("clear").addEventListener("click", () => {
  reset();
  say("hint", "A new chat.");
  $("question").focus();
});
