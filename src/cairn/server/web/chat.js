// The conversation on the page: asking, stopping, going on, and what is kept of it.

import { startNano } from "/web/api.js";
import { answer, goOn, pagesRead, speedOf } from "/web/ask.js";
import { Growing, showTurns } from "/web/messages.js";
import { settings } from "/web/settings.js";
import { findSource } from "/web/source.js";

const $ = (id) => document.getElementById(id);
const DENSE =
  "Attention is dense here: every token reads every page. Start the server with --attention-backend hsa to see pages being selected.";

export class Chat {
  // `onChange` is called when the conversation has changed in any way.
  constructor(store, map, onChange) {
    this.store = store;
    this.map = map;
    this.onChange = onChange;
    this.server = null; // what /stats says
    this.nano = null; // what /nano/start says
    this.running = null; // AbortController of the answer under way
    this.editing = -1; // turn that is being written anew
    this.maps = new Map(); // what the map shows, by answered turn
    this.actions = {
      edit: (i) => this.edit(i),
      retry: () => this.run(),
      again: () => this.again(),
      goOn: () => this.goOn(),
      word: (i, word) => this.showWord(i, word),
    };
  }

  get conversation() {
    return this.store.current;
  }

  show() {
    this.onChange();
    showTurns(this.conversation.turns, this.actions);
    this.showMap();
  }

  // The map of the newest answer of this conversation that has one.
  showMap() {
    const turn = this.conversation.turns.findLast((one) => this.maps.has(one));
    if (turn) this.map.show(this.maps.get(turn));
    else if (this.server?.engine && !this.server.engine.can_trace && this.conversation.model === "main") this.map.none(DENSE);
    else this.map.none(this.conversation.turns.length ? "Maps are not kept. The next answer draws one." : "Ask something, and the map shows which pages of the context each word was read from.");
  }

  begin(document = null, more = {}) {
    this.stop();
    this.store.create();
    Object.assign(this.conversation, { document }, more);
    this.leaveEditing();
    this.show();
  }

  open(id) {
    this.stop();
    this.store.open(id);
    this.leaveEditing();
    this.show();
  }

  set(values) {
    Object.assign(this.conversation, values);
    this.store.save();
    this.onChange();
  }

  stop() {
    this.running?.abort();
  }

  // -- asking --------------------------------------------------------------------------------

  // `suggested`: by the page; the model does not see earlier turns. `expected`: a right answer
  // contains it.
  ask(text, { suggested, expected } = {}) {
    const { turns } = this.conversation;
    if (this.editing >= 0) turns.length = this.editing;
    this.leaveEditing();
    turns.push({ role: "user", content: text, suggested, expected });
    return this.run();
  }

  again() {
    this.conversation.turns.pop();
    this.conversation.turns.at(-1).again = true;
    return this.run();
  }

  edit(i) {
    if (this.running) return;
    this.editing = i;
    $("question").value = this.conversation.turns[i].content;
    $("editing").hidden = false;
    $("question").focus();
  }

  leaveEditing() {
    this.editing = -1;
    $("editing").hidden = true;
  }

  // Answer the last question.
  async run() {
    const { conversation } = this;
    delete conversation.turns.at(-1).error;
    this.store.save();
    this.show();
    const { text } = conversation.document || {};
    if (text === null) return this.fail(conversation, "The document was too long to keep in the browser. Load it again.");
    if (conversation.compare) return this.compare(conversation);
    const item = new Growing();
    const own = this.start();
    let base = "";
    if (conversation.model === "nano") {
      base = "/nano";
      try {
        if (!this.nano) item.say("Starting cairn-nano…");
        this.nano ||= await startNano(own.signal);
      } catch (error) {
        return this.finish(own, item, conversation, { content: "", error: error.message, stopped: own.signal.aborted });
      }
    }
    const got = await answer(conversation, base, this.wanted(), own.signal, this.listen(item, true));
    return this.finish(own, item, conversation, got);
  }

  async goOn() {
    const { conversation } = this;
    const before = conversation.turns.at(-1);
    showTurns(conversation.turns.slice(0, -1), this.actions);
    const item = new Growing(before.content);
    const own = this.start();
    const got = await goOn(conversation, this.wanted(), own.signal, this.listen(item, true));
    if (got.content) conversation.turns.pop();
    return this.finish(own, item, conversation, got, before.content);
  }

  start() {
    this.running?.abort();
    this.running = new AbortController();
    this.showBusy(true);
    return this.running;
  }

  wanted() {
    const engine = this.conversation.model === "nano" ? { can_trace: true } : this.server?.engine;
    return settings().trace && engine?.can_trace ? { trace: true } : {};
  }

  listen(item, withMap) {
    return {
      reading: (told) => item.reading(told),
      text: (content) => item.text(content),
      thoughts: (thoughts) => item.think(thoughts),
      pages: (pages) => withMap && this.map.begin(pages),
      reads: (reads) => withMap && this.map.add(reads),
    };
  }

  // -- what came -----------------------------------------------------------------------------

  finish(own, item, conversation, got, before = "") {
    item.remove();
    if (got.content) {
      const turn = { role: "assistant", content: before + got.content, note: noteOf(got) };
      if (got.stopped || got.error) turn.cut = got.error || "stopped";
      else if (got.reason === "length") turn.cut = "length";
      if (got.thoughts) turn.thoughts = got.thoughts;
      const source = got.pages && findSource(got.pages, got.reads);
      if (source) turn.source = source;
      const { expected } = conversation.turns.findLast((one) => one.role === "user");
      if (expected) turn.right = turn.content.includes(expected);
      conversation.turns.push(turn);
      if (got.pages) this.maps.set(turn, { pages: got.pages, reads: got.reads, source: source ? source.page : -1 });
    } else if (conversation.turns.at(-1).role === "user") {
      conversation.turns.at(-1).error = got.error || whyNothing(got);
    }
    this.end(own, conversation, got.content ? "The answer is complete." : "There is no answer.");
  }

  fail(conversation, message) {
    conversation.turns.at(-1).error = message;
    this.end(this.running, conversation, message);
  }

  end(own, conversation, said) {
    if (this.running === own) {
      this.running = null;
      this.showBusy(false);
    }
    if (this.conversation === conversation) {
      this.store.save();
      this.show();
    } else this.store.write();
    $("announce").textContent = said;
  }

  // The same question, read sparsely and then densely.
  async compare(conversation) {
    const own = this.start();
    const turn = { role: "compare", sides: [] };
    const topk = this.server.engine.sparse_topk;
    for (const dense of [false, true]) {
      const item = new Growing();
      item.say(dense ? "Dense: every page is read…" : "Sparse: the best pages are read…");
      const got = await answer(conversation, "", { trace: true, dense }, own.signal, this.listen(item, !dense));
      item.remove();
      if (got.error || got.stopped || !got.content) {
        return this.fail(conversation, got.error || "Stopped before both were answered.");
      }
      const side = { name: dense ? "Dense" : "Sparse", content: got.content, facts: factsOf(got, topk) };
      turn.sides.push(side);
      if (!dense) {
        const source = findSource(got.pages, got.reads);
        this.maps.set(turn, { pages: got.pages, reads: got.reads, source: source ? source.page : -1 });
        if (source) side.facts.push(["mostly read from", `page ${source.page}`]);
      }
    }
    conversation.turns.push(turn);
    return this.end(own, conversation, "Both answers are complete.");
  }

  showWord(i, word) {
    const turn = this.conversation.turns[i];
    if (!this.maps.has(turn)) return;
    this.map.show(this.maps.get(turn));
    this.map.chooseWord(word);
  }

  showBusy(busy) {
    $("stop").hidden = !busy;
    $("send").hidden = busy;
    if (busy) $("announce").textContent = "The model is working.";
  }
}

function whyNothing({ stopped, thoughts }) {
  if (stopped) return "Stopped before the first word.";
  return thoughts ? "The model thought until its tokens were used up; the settings can give it more." : "The model said nothing.";
}

function seconds(from, to) {
  return `${((to - from) / 1000).toFixed(1)} s`;
}

function noteOf(got) {
  if (!got.usage) return "";
  const { prompt_tokens: read, prompt_tokens_details: details } = got.usage;
  const speed = speedOf(got);
  const rate = speed ? ` · ${speed.toFixed(1)} tokens/s` : "";
  return `${read.toLocaleString()} tokens read, ${(details?.cached_tokens || 0).toLocaleString()} of them from the cache · first word after ${seconds(got.begin, got.first)}${rate}`;
}

function factsOf(got, topk) {
  const { read, all } = pagesRead(got, topk);
  const speed = speedOf(got);
  return [
    ["pages read for a word", `${read} of ${all}`],
    ["tokens from the cache", `${(got.usage.prompt_tokens_details?.cached_tokens || 0).toLocaleString()} of ${got.usage.prompt_tokens.toLocaleString()}`],
    ["first word after", seconds(got.begin, got.first)],
    ["time for a word", speed ? `${Math.round(1000 / speed)} ms` : "–"],
    ["whole answer", seconds(got.begin, got.end)],
  ];
}
