// The page: puts its parts together.

import { bundled } from "/web/api.js";
import { Chat } from "/web/chat.js";
import { complain, Documents } from "/web/documents.js";
import { startGauges } from "/web/gauges.js";
import { button, make } from "/web/messages.js";
import { fact, hide, question, randomCode, randomName } from "/web/needle.js";
import { PageMap } from "/web/pagemap.js";
import { startSettings } from "/web/settings.js";
import { Store } from "/web/store.js";

const $ = (id) => document.getElementById(id);
const DRAFT = "cairn-draft";

const suggestions = JSON.parse(await bundled("suggestions.json"));
startSettings();
const map = new PageMap();
document.addEventListener("cairn-theme", () => map.draw());
const store = new Store();
const chat = new Chat(store, map, refresh);
const documents = new Documents(
  (name, text) => {
    chat.begin({ name, text });
    $("question").focus();
  },
  (values) => chat.set(values),
);

let chatting = null; // the conversation for which the visitor has chosen to chat
let shownEngine = ""; // what of the server the page has been adapted to
startGauges((told) => {
  $("model").textContent = told.model;
  const state = $("state");
  const text = told.status === "ok" ? "ready" : told.status;
  if (state.textContent !== text) state.textContent = text;
  state.title = told.reason;
  state.classList.toggle("ok", told.status === "ok");
  if (!told.engine) return;
  chat.server = told;
  const engine = JSON.stringify([told.model, told.engine, told.demo]);
  if (engine === shownEngine) return;
  shownEngine = engine;
  if (!map.pages) chat.showMap();
  refresh();
});

// -- what is shown depends on the conversation --------------------------------------------------

function refresh() {
  const { conversation, server } = chat;
  const fresh = !conversation.turns.length && !conversation.document;
  $("start").hidden = !fresh || conversation === chatting || !$("needle").hidden;
  $("hint").hidden = !fresh || conversation !== chatting;
  $("messages").hidden = fresh;
  const isNano = server?.model === "cairn-nano";
  $("start-needle").disabled = !(server?.demo || isNano);
  $("start-needle-why").textContent = $("start-needle").disabled
    ? "Start the server with --demo to try it."
    : "You hide a code in a long text. cairn-nano, a model of 6 million parameters, finds it, and the map shows where it looked.";
  const canCompare = server?.engine?.can_trace && server.engine.can_read_densely;
  $("start-compare").disabled = !canCompare;
  $("start-compare-why").textContent = canCompare || !server?.engine
    ? "The same question about the same text, answered twice: with the best pages only, and with all of them. You see the time and the pages read."
    : isNano ? "cairn-nano was trained with sparse attention and has no dense form." : "Start the server with --attention-backend hsa to try it.";
  documents.show(conversation, server);
  showSuggestions();
  $("chats-count").textContent = store.all.length ? ` (${store.all.length})` : "";
}

function showSuggestions() {
  const { document: held, turns, model } = chat.conversation;
  let asks = [];
  if (held?.asks) asks = held.asks[chat.server?.model === "cairn-nano" ? "nano" : model] || [];
  else if (!held && !turns.length && model === "main") asks = suggestions.chat.map((one) => one.question);
  $("suggestions").hidden = !asks.length || !$("needle").hidden;
  $("suggestions").classList.toggle("one-line", turns.length > 0);
  $("suggestions").replaceChildren(
    make("span", "", "Try:"),
    ...asks.map((text) => button(text, () => !chat.running && chat.ask(text, { suggested: true }), "chip")),
  );
}

async function loadSample(more) {
  try {
    const text = await bundled("sample.txt");
    const { name, main, nano } = suggestions.sample;
    const [own, codes] = [main, nano].map((list) => list.map((one) => one.question));
    chat.begin({ name, text, asks: { main: own, nano: codes } }, more);
    $("question").focus();
  } catch (error) {
    complain(error.message);
  }
}

// -- three things to press ------------------------------------------------------------------------

$("start-chat").addEventListener("click", () => {
  chatting = chat.conversation;
  refresh();
  $("question").focus();
});
$("start-compare").addEventListener("click", () => loadSample({ compare: true }));
$("sample").addEventListener("click", () => loadSample());
$("start-needle").addEventListener("click", () => {
  $("n-name").value = randomName();
  $("n-code").value = randomCode();
  showNeedle(true);
  $("n-name").focus();
});
$("needle-cancel").addEventListener("click", () => showNeedle(false));
$("n-depth").addEventListener("input", () => showDepth());
$("needle").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = $("n-name").value.trim();
  const code = $("n-code").value.trim();
  const [tokens, depth] = [Number($("n-tokens").value), Number($("n-depth").value)];
  try {
    const text = hide(await bundled("prose.txt"), fact(name, code), tokens, depth / 100);
    showNeedle(false);
    const about = `${tokens.toLocaleString()} tokens of old prose, with “${fact(name, code)}” at ${depth} %`;
    const model = chat.server?.model === "cairn-nano" ? "main" : "nano";
    chat.begin({ name: about, text }, { model });
    chat.ask(question(name), { expected: code });
  } catch (error) {
    complain(error.message);
  }
});

function showNeedle(shown) {
  $("needle").hidden = !shown;
  showDepth();
  refresh();
}

function showDepth() {
  $("n-depth-shown").textContent = `${$("n-depth").value} %`;
}

// -- asking -----------------------------------------------------------------------------------

const form = $("ask");
$("question").value = localStorage.getItem(DRAFT) || "";
$("question").addEventListener("input", () => localStorage.setItem(DRAFT, $("question").value));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("question").value.trim();
  if (!text || chat.running) return;
  $("question").value = "";
  localStorage.removeItem(DRAFT); // from here on the conversation keeps it
  complain("");
  if (!$("needle").hidden) showNeedle(false);
  chat.ask(text);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
$("stop").addEventListener("click", () => chat.stop());
$("editing-cancel").addEventListener("click", () => cancelEditing());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (chat.editing >= 0) cancelEditing();
  else chat.stop();
});

function cancelEditing() {
  chat.leaveEditing();
  $("question").value = "";
}

$("document-remove").addEventListener("click", () => {
  chat.begin();
  $("question").focus();
});
$("clear").addEventListener("click", () => {
  chat.begin();
  $("question").focus();
});
$("complaint-close").addEventListener("click", () => complain(""));

// -- earlier conversations ------------------------------------------------------------------------

$("chats").addEventListener("click", () => {
  listChats();
  $("chats-dialog").showModal();
});
$("chats-clear").addEventListener("click", () => {
  for (const { id } of [...store.all]) store.remove(id);
  chat.begin();
  listChats();
});

function listChats() {
  const items = store.all.map((one) => {
    const item = make("li");
    const open = button(one.title, () => {
      $("chats-dialog").close();
      chat.open(one.id);
    }, "title");
    if (one === chat.conversation) open.setAttribute("aria-current", "true");
    const remove = button("×", () => {
      store.remove(one.id);
      if (one === chat.conversation) chat.begin();
      listChats();
    });
    remove.setAttribute("aria-label", `Delete “${one.title}”`);
    item.append(open, make("time", "", new Date(one.time).toLocaleString()), remove);
    return item;
  });
  $("chats-list").replaceChildren(...items);
  $("chats-none").hidden = items.length > 0;
  refresh();
}

$("open-help").addEventListener("click", () => $("help").showModal());
chat.show();
