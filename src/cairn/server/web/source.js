// The page of the context that an answer was mostly read from, and the words they share.

const COMMON = new Set(
  ("the and was were are is has had have for from with that this these those not but into over its his her " +
    "they them their there then than who what when where which while will would can could may did does been " +
    "being about after before also only one two your you our out all any each some such very").split(" "),
);
const LEAST = 0.03; // share of a layer's attention below which no page mattered
const AROUND = 32; // tokens to show on each side of a small page

// {page, share, text} of the page that a layer gave most of its attention for one of the tokens. The text is the
// page's own, with a little on both sides if pages are small.
// The first page does not count: attention that is meant for nothing goes there.
export function findSource(pages, reads) {
  let best = { page: -1, share: LEAST };
  for (const read of reads) {
    for (const layer of read.layers) {
      layer.pages.forEach((page, i) => {
        if (page > 0 && page < read.window_page && layer.weights[i] > best.share) {
          best = { page, share: layer.weights[i] };
        }
      });
    }
  }
  if (best.page < 0) return null;
  const { before, own, after } = around(pages, best.page);
  return { ...best, text: `${before}${own}${after}`.trim() };
}

// The text of a page, and a little before and after it if pages are small. Words that a page's edge cuts belong to
// the page.
export function around({ texts, tokens_per_page: size }, page) {
  const more = Math.floor(AROUND / size);
  const before = texts.slice(Math.max(0, page - more), page).join("");
  const own = texts[page] || "";
  const after = texts.slice(page + 1, page + more + 1).join("");
  const begun = /^[\p{L}\p{N}]/u.test(own) ? before.match(/[\p{L}\p{N}]*$/u)[0] : "";
  const rest = /[\p{L}\p{N}]$/u.test(own) ? after.match(/^[\p{L}\p{N}]*/u)[0] : "";
  return {
    before: before.slice(0, before.length - begun.length),
    own: begun + own + rest,
    after: after.slice(rest.length),
  };
}

const stem = (word) => word.toLowerCase().replace(/(?:'s|s|ed)$/, "");

function split(text) {
  return text.split(/([\p{L}\p{N}][\p{L}\p{N}'’-]*)/u);
}

function shared(text) {
  const words = split(text).filter((_, i) => i % 2);
  return new Set(words.filter((word) => (word.length > 2 || /\d/.test(word)) && !COMMON.has(word.toLowerCase())).map(stem));
}

// Turn words of the answer that are in the page's text into links to it.
export function linkWords(body, source, target, onChoose) {
  const known = shared(source.text);
  const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT, (node) =>
    node.parentElement.closest("a, pre") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT,
  );
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes) {
    const parts = split(node.data).map((part, i) => {
      if (i % 2 === 0 || !known.has(stem(part)) || COMMON.has(part.toLowerCase())) return part;
      const link = document.createElement("a");
      link.className = "word";
      link.href = `#${target.id}`;
      link.textContent = part;
      link.addEventListener("click", (event) => {
        event.preventDefault();
        onChoose(part);
      });
      for (const [kind, on] of [["mouseenter", true], ["focus", true], ["mouseleave", false], ["blur", false]]) {
        link.addEventListener(kind, () => light(target, part, on));
      }
      return link;
    });
    node.replaceWith(...parts);
  }
}

// A text with the words that the answer shares marked.
export function markedText(text, answer) {
  const said = shared(answer);
  const fragment = document.createDocumentFragment();
  split(text).forEach((part, i) => {
    if (i % 2 && said.has(stem(part))) {
      const mark = document.createElement("mark");
      mark.textContent = part;
      mark.dataset.word = stem(part);
      fragment.append(mark);
    } else fragment.append(part);
  });
  return fragment;
}

function light(target, word, on) {
  for (const mark of target.querySelectorAll("mark")) mark.classList.toggle("on", on && mark.dataset.word === stem(word));
}
