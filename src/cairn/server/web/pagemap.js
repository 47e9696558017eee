// The context drawn as pages, and what each token of the answer read of them.

import { around, markedText } from "/web/source.js";

const $ = (id) => document.getElementById(id);
const GAP = 2;

export class PageMap {
  constructor() {
    this.canvas = $("pages");
    this.pages = null; // as the server tells them
    this.reads = []; // one per token of the answer
    this.place = -1; // page under the pointer or the keyboard
    this.source = -1; // page that mattered most for the answer
    this.drawn = null; // a frame is asked for
    $("layer").addEventListener("change", () => this.draw());
    $("scope").addEventListener("change", () => this.draw());
    $("token").addEventListener("input", () => {
      $("follow").checked = false;
      this.draw();
    });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => {
      $("tip").hidden = true;
    });
    this.canvas.addEventListener("keydown", (event) => this.walk(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  begin(pages) {
    this.pages = pages;
    this.reads = [];
    this.place = this.source = -1;
    $("map-body").hidden = false;
    $("scope").value = "sum";
    $("token").value = 0;
    $("follow").checked = false;
    const layer = $("layer");
    const chosen = layer.value;
    layer.replaceChildren(new Option("all, strongest", "all"), ...pages.sparse_layers.map((n) => new Option(n, n)));
    if ([...layer.options].some((option) => option.value === chosen)) layer.value = chosen;
    $("token-strip").replaceChildren();
    $("page-detail").firstElementChild.textContent =
      "Point at a page, or walk with the arrow keys, to read it.";
    $("page-detail").querySelector(".text")?.remove();
    this.draw();
  }

  add(reads) {
    for (const read of reads) {
      const index = this.reads.push(read) - 1;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = read.token;
      button.setAttribute("aria-label", `token ${index + 1}: ${read.token}`);
      button.tabIndex = -1;
      button.addEventListener("click", () => this.choose(index));
      $("token-strip").append(button);
    }
    const slider = $("token");
    slider.max = Math.max(0, this.reads.length - 1);
    if ($("follow").checked) slider.value = slider.max;
    this.draw();
  }

  // What was added and what mattered, to show it again later.
  state() {
    return this.pages && { pages: this.pages, reads: this.reads, source: this.source };
  }

  show(state) {
    this.begin(state.pages);
    this.add(state.reads);
    this.finish(state.source);
  }

  finish(source) {
    this.source = this.place = source;
    this.draw();
  }

  // The token of the answer that holds this word.
  chooseWord(word) {
    const index = this.reads.findIndex((read, i) => this.reads.slice(i, i + 6).map((one) => one.token).join("").trimStart().startsWith(word));
    if (index >= 0) this.choose(index);
    if (this.source >= 0) this.go(this.source);
  }

  choose(index) {
    $("follow").checked = false;
    $("scope").value = "token";
    $("token").value = index;
    this.draw();
  }

  none(text) {
    this.pages = null;
    $("map-body").hidden = true;
    $("map-about").textContent = text;
  }

  // -- numbers -------------------------------------------------------------------------------

  get count() {
    const tokens = this.pages.prompt_tokens + this.reads.length;
    return Math.max(1, Math.ceil(tokens / this.pages.tokens_per_page));
  }

  // Share of each page for one token: of a layer, or the most that any layer gave it.
  shares(read) {
    const wanted = $("layer").value;
    const layers = read.layers.filter((layer) => wanted === "all" || layer.layer === Number(wanted));
    const shares = new Map();
    let window = 0;
    for (const layer of layers) {
      window += layer.window / layers.length;
      layer.pages.forEach((page, i) => {
        shares.set(page, Math.max(shares.get(page) || 0, layer.weights[i]));
      });
    }
    return { shares, window, first: read.window_page };
  }

  view() {
    if (!this.reads.length) return { shares: new Map(), window: 0, first: this.count };
    if ($("scope").value === "token") return this.shares(this.reads[$("token").value]);
    const most = new Map();
    let window = 0;
    let first = 0;
    for (const read of this.reads) {
      const one = this.shares(read);
      window += one.window / this.reads.length;
      first = one.first;
      for (const [page, share] of one.shares) most.set(page, Math.max(most.get(page) || 0, share));
    }
    return { shares: most, window, first };
  }

  text(page) {
    const size = this.pages.tokens_per_page;
    const from = Math.max(0, page * size - this.pages.prompt_tokens);
    const to = Math.max(0, (page + 1) * size - this.pages.prompt_tokens);
    const own = this.reads.slice(from, to).map((read) => read.token).join("");
    return (this.pages.texts[page] || "") + own;
  }

  // -- drawing -------------------------------------------------------------------------------

  draw() {
    if (!this.pages || this.drawn !== null) return;
    this.drawn = requestAnimationFrame(() => {
      this.drawn = null;
      this.paint();
    });
  }

  paint() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const { canvas } = this;
    const width = canvas.clientWidth;
    if (!width || !this.pages) return; // hidden, or taken away since the frame was asked for
    const { count } = this;
    // Cells as large as keep the map below about 300 pixels, within reason.
    const fit = Math.sqrt((width * 300) / count);
    const cell = Math.max(7, Math.min(26, Math.floor(fit)));
    const columns = Math.max(1, Math.floor((width + GAP) / cell));
    const rows = Math.ceil(count / columns);
    this.grid = { cell, columns };
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = rows * cell * scale;
    canvas.style.height = `${rows * cell}px`;
    const draw = canvas.getContext("2d");
    draw.scale(scale, scale);
    const now = this.view();
    this.now = now;
    // Attention that is meant for nothing goes to the first page; it may not pale the others.
    const most = Math.max(1e-6, ...[...now.shares].filter(([page]) => page > 0).map(([, share]) => share));
    const answer = Math.floor(this.pages.prompt_tokens / this.pages.tokens_per_page);
    const read = color("--read");
    const side = cell - GAP;
    for (let page = 0; page < count; page++) {
      const x = (page % columns) * cell;
      const y = Math.floor(page / columns) * cell;
      draw.fillStyle = color("--cell");
      draw.fillRect(x, y, side, side);
      const share = now.shares.get(page) || 0;
      if (share > 0) {
        draw.fillStyle = `rgb(${read} / ${0.06 + 0.94 * Math.min(1, share / most) ** 1.5})`;
        draw.fillRect(x, y, side, side);
      }
      if (page >= now.first) {
        draw.strokeStyle = color("--window");
        draw.lineWidth = 2;
        draw.strokeRect(x + 1, y + 1, side - 2, side - 2);
      }
      if (page >= answer && this.reads.length) {
        draw.strokeStyle = color("--own");
        draw.lineWidth = 2;
        draw.setLineDash([2, 2]);
        draw.strokeRect(x + 1, y + 1, side - 2, side - 2);
        draw.setLineDash([]);
      }
      if (page === this.place || page === this.source) {
        draw.strokeStyle = color(page === this.source ? "--ink" : "--muted");
        draw.lineWidth = page === this.source ? 3 : 2;
        draw.strokeRect(x + 1.5, y + 1.5, side - 3, side - 3);
      }
    }
    this.label(now);
  }

  label(now) {
    const slider = $("token");
    const index = Number(slider.value);
    const one = $("scope").value === "token";
    slider.disabled = !one;
    $("token-number").textContent = this.reads.length ? `${index + 1}/${this.reads.length}` : "0";
    const buttons = $("token-strip").children;
    for (const old of $("token-strip").querySelectorAll("[aria-current]")) old.removeAttribute("aria-current");
    if (one && buttons[index]) {
      buttons[index].setAttribute("aria-current", "true");
      const strip = $("token-strip");
      const top = buttons[index].offsetTop - strip.offsetTop;
      if (top < strip.scrollTop || top > strip.scrollTop + strip.clientHeight - 24) strip.scrollTop = top - 24;
    }
    const tokens = this.pages.prompt_tokens + this.reads.length;
    const read = now.shares.size;
    const inWindow = Math.max(0, this.count - now.first);
    const about = [`${tokens} tokens on ${this.count} pages of ${this.pages.tokens_per_page}.`];
    if (this.reads.length) {
      const who = one ? `Token ${index + 1}` : "The answer's tokens and layers together";
      about.push(
        now.first === 0
          ? `${who} read every page.`
          : `${who} read ${read} of the ${now.first} pages before its window, and the ${inWindow} in it ` +
              `(${Math.round(100 * now.window)} % of the attention).`,
      );
    }
    $("map-about").textContent = about.join(" ");
    slider.setAttribute("aria-valuetext", one && this.reads[index] ? `token ${index + 1}: ${this.reads[index].token}` : "");
    if (this.place >= 0) this.describe();
  }

  // -- one page ------------------------------------------------------------------------------

  point(event) {
    if (!this.grid) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.grid.cell);
    const page = Math.floor((event.clientY - box.top) / this.grid.cell) * this.grid.columns + column;
    const tip = $("tip");
    if (column >= this.grid.columns || page < 0 || page >= this.count) {
      tip.hidden = true;
      return;
    }
    this.go(page);
    tip.textContent = `${this.headline(page)}\n${shorten(this.text(page), 200)}`;
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const above = event.clientY + 18 + tip.offsetHeight > window.innerHeight;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${above ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18}px`;
  }

  walk(event) {
    if (!this.grid) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.grid.columns, ArrowDown: this.grid.columns };
    let page = this.place;
    if (event.key in steps) page += page < 0 ? 1 : steps[event.key];
    else if (event.key === "Home") page = 0;
    else if (event.key === "End") page = this.count - 1;
    else return;
    event.preventDefault();
    this.go(Math.max(0, Math.min(this.count - 1, page)));
  }

  go(page) {
    if (page === this.place) return;
    this.place = page;
    this.draw();
  }

  headline(page) {
    const size = this.pages.tokens_per_page;
    const share = this.now?.shares.get(page) || 0;
    const windowed = this.now && page >= this.now.first ? ", in the window" : "";
    let read = share ? `at most ${(100 * share).toFixed(1)} % of a layer's attention` : "not selected";
    if (page === this.source) read += ", the page that mattered most";
    return `Page ${page}, tokens ${page * size} to ${(page + 1) * size - 1}: ${windowed ? windowed.slice(2) : read}`;
  }

  describe() {
    const detail = $("page-detail");
    detail.firstElementChild.textContent = this.headline(this.place);
    let text = detail.querySelector(".text");
    if (!text) {
      text = document.createElement("div");
      text.className = "text";
      detail.append(text);
    }
    const { before, own, after } = around(this.pages, this.place);
    const beyond = this.text(this.place).slice((this.pages.texts[this.place] || "").length); // of the answer
    const answer = this.place === this.source ? this.reads.map((read) => read.token).join("") : "";
    const page = document.createElement("span");
    page.className = this.place === this.source ? "page mattered" : "page";
    page.append(markedText(own + beyond, answer));
    text.replaceChildren(markedText(before, answer), page, markedText(after, answer));
  }
}

function shorten(text, most) {
  return text.length > most ? `${text.slice(0, most)}…` : text;
}
