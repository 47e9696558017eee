// The text that questions are about: where it comes from, which model reads it, and why.

import { tokenize } from "/web/api.js";
import { readFile } from "/web/files.js";
import { CHARACTERS_PER_TOKEN } from "/web/needle.js";

const $ = (id) => document.getElementById(id);

export class Documents {
  // `onLoad(name, text)` is called with a file's text; `onChange` when the visitor chooses.
  constructor(onLoad, onChange) {
    this.onLoad = onLoad;
    $("load").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", async () => {
      const [file] = $("file").files;
      if (file) await this.take(file);
      $("file").value = "";
    });
    $("asked").addEventListener("change", () => onChange({ model: $("asked").value }));
    $("compare").addEventListener("change", () => onChange({ compare: $("compare").checked }));
    this.listenForDrops();
  }

  listenForDrops() {
    let inside = 0; // dragenter comes for every element on the way
    const shown = () => $("drop").toggleAttribute("hidden", inside <= 0);
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragenter", (event) => {
      if (holdsFiles(event)) inside++;
      shown();
    });
    addEventListener("dragleave", (event) => {
      if (holdsFiles(event)) inside--;
      shown();
    });
    addEventListener("dragover", (event) => holdsFiles(event) && event.preventDefault());
    addEventListener("drop", async (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      inside = 0;
      shown();
      const [file] = event.dataTransfer.files;
      if (file) await this.take(file);
    });
  }

  async take(file) {
    complain("");
    $("load").disabled = true;
    try {
      const text = await readFile(file);
      this.onLoad(file.name, text);
    } catch (error) {
      complain(error.message);
    } finally {
      $("load").disabled = false;
    }
  }

  // Show what a conversation is about. `server` is what /stats says of it.
  show({ document: held, model, compare }, server) {
    $("document").hidden = !held;
    if (!held) return;
    const engine = server?.engine;
    const asksNano = model === "nano";
    $("document-name").textContent = held.name;
    $("asked").replaceChildren(new Option(server?.model || "this server's model", "main"), ...(server?.demo ? [new Option("cairn-nano", "nano")] : []));
    $("asked").value = model;
    $("asked-label").hidden = !server?.demo;
    $("why").textContent = asksNano
      ? "Finds facts like “The access code of Ada Lovell is 48213.” in very long texts. It was trained for that alone."
      : "Answers any question in its own words. Small models get details of long texts wrong.";
    const canCompare = !asksNano && engine?.can_trace && engine.can_read_densely;
    $("compare-label").hidden = !canCompare;
    $("compare").checked = Boolean(compare && canCompare);
    this.count(held, asksNano, server);
  }

  async count(held, asksNano, server) {
    if (held.text === null) {
      this.tell("was too long to keep; load it again", true);
      return;
    }
    this.tell(`${held.text.length.toLocaleString()} characters`, false);
    if (asksNano) {
      this.tell(`about ${Math.round(held.text.length / CHARACTERS_PER_TOKEN).toLocaleString()} tokens`, false);
      return;
    }
    try {
      if (this.counted?.text !== held.text) {
        const { count, max_model_len: most } = await tokenize({ prompt: held.text });
        this.counted = { text: held.text, count, most };
      }
      if ($("document-name").textContent !== held.name || $("asked").value === "nano") return;
      const { count, most } = this.counted;
      const other = server?.demo ? ", or ask cairn-nano for a fact in it" : "";
      this.tell(`${count.toLocaleString()} tokens${count >= most ? `; the context holds ${most.toLocaleString()}: shorten it${other}` : ""}`, count >= most);
    } catch (error) {
      this.tell(error.message, true);
    }
  }

  tell(text, bad) {
    $("document-size").textContent = text;
    $("document").classList.toggle("bad", bad);
  }
}

export function complain(text) {
  $("complaint-text").textContent = text;
  $("complaint").hidden = !text;
}
