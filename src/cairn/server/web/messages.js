// The list of turns on the page.

import { markdown } from "/web/markdown.js";
import { linkWords, markedText } from "/web/source.js";

const CUT = {
  stopped: "You stopped this answer.",
  length: "The answer is not complete: it reached the limit of the settings, or of the context.",
};
const list = document.getElementById("messages");

export function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(text, onClick, className = "small") {
  const made = make("button", className, text);
  made.type = "button";
  made.addEventListener("click", () => onClick(made));
  return made;
}

// Keep the newest words in view, unless the visitor has scrolled up to read.
export function keepInView(change) {
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  change();
  if (atEnd) list.scrollTop = list.scrollHeight;
}

// `actions` are what the buttons of a turn do: copy, again, goOn, edit, retry, word.
export function showTurns(turns, actions) {
  list.replaceChildren(...turns.map((turn, i) => showTurn(turn, i, i === turns.length - 1, actions)));
  const last = list.lastElementChild;
  if (last) list.scrollTop = last.offsetHeight > list.clientHeight ? last.offsetTop - list.offsetTop : list.scrollHeight;
}

function showTurn(turn, i, last, actions) {
  if (turn.role === "user") return showQuestion(turn, i, last, actions);
  if (turn.role === "compare") return showCompared(turn);
  return showAnswer(turn, i, last, actions);
}

function showQuestion(turn, i, last, actions) {
  const item = make("li", "user");
  item.append(make("span", "visually-hidden", "You: "), make("div", "body", turn.content));
  const tools = make("div", "tools");
  tools.append(button("Edit", () => actions.edit(i)));
  item.append(tools);
  if (turn.error && last) {
    const box = make("div", "failed");
    box.setAttribute("role", "alert");
    box.append(make("span", "", turn.error), button("Retry", () => actions.retry(), "small primary"));
    item.append(box);
  }
  return item;
}

function showAnswer(turn, i, last, actions) {
  const item = make("li", "assistant");
  const body = make("div", "body");
  body.append(markdown(turn.content));
  if (turn.thoughts) {
    const box = make("details", "thoughts");
    box.append(make("summary", "", "Thoughts"), make("p", "", turn.thoughts));
    item.append(box);
  }
  item.append(make("span", "visually-hidden", "Answer: "), body);
  if (turn.right !== undefined) {
    item.append(make("p", turn.right ? "verdict right" : "verdict wrong", turn.right ? "✓ This is what was hidden." : "✗ This is not what was hidden."));
  }
  if (turn.source) item.append(showSource(turn, i, body, actions));
  if (turn.cut && last) {
    const cut = make("div", "cut");
    cut.append(make("span", "", CUT[turn.cut] || `The answer broke off: ${turn.cut}`), button("Continue", () => actions.goOn(), "small primary"));
    item.append(cut);
  }
  const tools = make("div", "tools");
  tools.append(button("Copy", (own) => copy(turn.content, own)));
  if (last) tools.append(button("Regenerate", () => actions.again()));
  if (turn.note) tools.append(make("span", "note", turn.note));
  item.append(tools);
  addCodeButtons(body);
  return item;
}

function showSource(turn, i, body, actions) {
  const box = make("details", "source");
  box.id = `source-${i}`;
  box.open = true;
  const share = Math.round(100 * turn.source.share);
  box.append(make("summary", "", `Mostly read from page ${turn.source.page} (${share} % of a layer's attention)`));
  const text = make("p");
  text.append(markedText(turn.source.text, turn.content));
  box.append(text);
  linkWords(body, turn.source, box, (word) => {
    box.open = true;
    box.scrollIntoView({ block: "nearest" });
    actions.word(i, word);
  });
  return box;
}

function showCompared(turn) {
  const item = make("li", "compare");
  for (const side of turn.sides) {
    const box = make("section");
    const body = make("div", "body");
    body.append(markdown(side.content));
    const facts = make("dl");
    for (const [name, value] of side.facts) facts.append(make("dt", "", name), make("dd", "", value));
    box.append(make("h3", "", side.name), body, facts);
    item.append(box);
  }
  item.append(make("p", "note", "Both read the text itself in full. For each word of the answer, sparse attention then reads a fixed number of pages: a smaller share, the longer the text is. In a short text, choosing pages can take more time than it saves."));
  return item;
}

// A turn that is being answered: progress while the prompt is read, then the words as they come.
export class Growing {
  constructor(before = "") {
    this.item = make("li", "assistant growing");
    this.item.setAttribute("aria-busy", "true");
    this.status = make("p", "reading", "Waiting for the model…");
    this.bar = make("progress");
    this.body = make("div", "body");
    this.item.append(this.status, this.bar, this.body);
    this.before = before;
    this.frame = null;
    if (before) this.body.append(markdown(before));
    list.append(this.item);
    list.scrollTop = list.scrollHeight;
  }

  say(text) {
    this.status.textContent = text;
  }

  reading({ read_tokens: read, prompt_tokens: all }) {
    this.bar.max = all;
    this.bar.value = read;
    this.say(`Reading: ${read.toLocaleString()} of ${all.toLocaleString()} tokens`);
  }

  think(thoughts) {
    this.bar.hidden = true;
    keepInView(() => this.say(`Thinking: ${thoughts.slice(-400)}`));
  }

  text(content) {
    this.status.hidden = this.bar.hidden = true;
    this.content = this.before + content;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      keepInView(() => this.body.replaceChildren(markdown(this.content)));
    });
  }

  remove() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.item.remove();
  }
}

function addCodeButtons(body) {
  for (const box of body.querySelectorAll(".code")) {
    box.append(button("Copy", (own) => copy(box.querySelector("code").textContent, own)));
  }
}

async function copy(text, own) {
  const said = own.textContent;
  try {
    await navigator.clipboard.writeText(text);
    own.textContent = "Copied";
  } catch {
    own.textContent = select(own) ? "Selected" : "Not possible"; // not over http from elsewhere
  }
  setTimeout(() => {
    own.textContent = said;
  }, 1500);
}

function select(own) {
  const body = own.closest(".code")?.querySelector("code") || own.closest("li")?.querySelector(".body");
  if (!body) return false;
  window.getSelection().selectAllChildren(body);
  return true;
}
