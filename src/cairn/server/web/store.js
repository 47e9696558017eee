// Conversations, kept in this browser and nowhere else.

const KEY = "cairn-conversations";
const MOST = 40; // conversations
const LONGEST = 500_000; // characters of a document; longer ones are not kept

/* A conversation: { id, title, time, model: "main" | "nano", compare, document, turns }
   document: { name, text, asks }; text is null if it was too long to keep
   turns: { role: "user", content, suggested, again, expected, error }
          { role: "assistant", content, thoughts, cut, note, source, right }
          { role: "compare", sides: [{ name, content, facts }] } */

export class Store {
  constructor() {
    this.all = [];
    try {
      const held = JSON.parse(localStorage.getItem(KEY) || "[]");
      if (Array.isArray(held)) this.all = held.filter((one) => one && one.id && Array.isArray(one.turns));
    } catch {
      localStorage.removeItem(KEY); // written by something else
    }
    this.current = this.all[0] || this.create();
  }

  // A new conversation; it is kept once something is said in it.
  create() {
    this.current = { id: crypto.randomUUID?.() || String(Math.random()), title: "", time: 0, model: "main", compare: false, document: null, turns: [] };
    return this.current;
  }

  open(id) {
    this.current = this.all.find((one) => one.id === id) || this.create();
    return this.current;
  }

  remove(id) {
    this.all = this.all.filter((one) => one.id !== id);
    this.write();
  }

  // Put the current conversation first, and keep what there is room for.
  save() {
    const one = this.current;
    const first = one.turns.find((turn) => turn.role === "user");
    if (!first && !one.document) return;
    one.title = (first?.content || one.document.name).slice(0, 80);
    one.time = Date.now();
    this.all = [one, ...this.all.filter((other) => other.id !== one.id)].slice(0, MOST);
    this.write();
  }

  write() {
    while (this.all.length) {
      try {
        localStorage.setItem(KEY, JSON.stringify(this.all, shorten));
        return;
      } catch {
        this.all.pop(); // the browser has no room: the oldest goes
      }
    }
    localStorage.removeItem(KEY);
  }
}

function shorten(name, value) {
  return name === "document" && value?.text?.length > LONGEST ? { ...value, text: null } : value;
}
