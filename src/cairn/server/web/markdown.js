// Markdown to elements. Text becomes text nodes, never HTML, so that no answer can bring its own.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE =
  /(?<code>(`+)(?!`)([\s\S]*?[^`])\2(?!`))|(?<bold>(\*\*|__)(?=\S)([\s\S]*?\S)\5)|(?<strike>~~(?=\S)([\s\S]*?\S)~~)|(?<emphasis>\*(?=[^\s*])([^*]*?[^\s*])\*|(?<![\w])_(?=[^\s_])([^_]*?[^\s_])_(?!\w))|(?<link>\[([^\]]+)\]\(\s*<?([^\s()<>]+)>?(?:\s+"[^"]*")?\s*\))|(?<address>https?:\/\/[^\s<>()]*[^\s<>().,;:!?'"])|(?<escape>\\([\\`*_{}[\]()#+\-.!~>|]))/;

export function markdown(text) {
  const fragment = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").split("\n"), fragment, 0);
  return fragment;
}

function element(name, parent, className) {
  const made = document.createElement(name);
  if (className) made.className = className;
  parent.append(made);
  return made;
}

function blocks(lines, parent, depth) {
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    let found;
    if (!line.trim()) i++;
    else if ((found = line.match(FENCE))) i = fence(lines, i, found, parent);
    else if ((found = line.match(HEADING))) {
      // The page has its own first and second level.
      inline(found[2], element(`h${Math.min(6, found[1].length + 2)}`, parent));
      i++;
    } else if (RULE.test(line)) {
      element("hr", parent);
      i++;
    } else if (QUOTE.test(line)) {
      const inner = [];
      while (i < lines.length && QUOTE.test(lines[i])) inner.push(lines[i++].match(QUOTE)[1]);
      nest(inner, element("blockquote", parent), depth);
    } else if (ITEM.test(line)) i = list(lines, i, parent, depth);
    else if (line.includes("|") && TABLE_LINE.test(lines[i + 1] || "") && lines[i + 1].includes("-")) {
      i = table(lines, i, parent);
    } else i = paragraph(lines, i, parent);
  }
}

// Deeper than anybody writes, an answer is shown as it is.
function nest(lines, parent, depth) {
  if (depth < 12) blocks(lines, parent, depth + 1);
  else parent.append(lines.join("\n"));
}

function fence(lines, i, found, parent) {
  const close = new RegExp(`^ {0,3}${found[1][0]}{${found[1].length},}\\s*$`);
  const held = [];
  for (i++; i < lines.length && !close.test(lines[i]); i++) held.push(lines[i]);
  const box = element("div", parent, "code");
  const code = element("code", element("pre", box));
  code.textContent = held.join("\n");
  if (found[2]) code.dataset.language = found[2];
  return i + 1;
}

function list(lines, i, parent, depth) {
  const [, indent, sign] = lines[i].match(ITEM);
  const numbered = /\d/.test(sign);
  const box = element(numbered ? "ol" : "ul", parent);
  if (numbered && parseInt(sign, 10) !== 1) box.start = parseInt(sign, 10);
  while (i < lines.length) {
    const found = lines[i].match(ITEM);
    if (!found || found[1].length > indent.length + 1 || /\d/.test(found[2]) !== numbered) break;
    if (found[1].length < indent.length) break;
    const inner = [found[3]];
    const width = found[1].length + found[2].length + 1;
    for (i++; i < lines.length; i++) {
      const line = lines[i];
      const deep = line.match(/^\s*/)[0].length;
      if (!line.trim()) {
        const next = lines[i + 1] || "";
        if (!next.trim() || next.match(/^\s*/)[0].length < Math.min(width, indent.length + 2)) break;
        inner.push("");
      } else if (deep > indent.length + 1) inner.push(line.slice(Math.min(deep, width)));
      else if (ITEM.test(line) || FENCE.test(line) || HEADING.test(line)) break;
      else inner.push(line);
    }
    const item = element("li", box);
    nest(inner, item, depth);
    if (item.children.length === 1 && item.firstChild.nodeName === "P") item.firstChild.replaceWith(...item.firstChild.childNodes);
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] || "")) i++;
  }
  return i;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
}

function table(lines, i, parent) {
  const box = element("table", element("div", parent, "wide"));
  const head = element("tr", element("thead", box));
  const names = cells(lines[i]);
  for (const name of names) inline(name, element("th", head));
  const body = element("tbody", box);
  for (i += 2; i < lines.length && lines[i].includes("|"); i++) {
    const row = element("tr", body);
    for (const cell of cells(lines[i]).slice(0, names.length)) inline(cell, element("td", row));
  }
  return i;
}

function paragraph(lines, i, parent) {
  const held = [lines[i++]];
  while (
    i < lines.length && lines[i].trim() && !FENCE.test(lines[i]) && !HEADING.test(lines[i]) &&
    !RULE.test(lines[i]) && !QUOTE.test(lines[i]) && !ITEM.test(lines[i])
  ) held.push(lines[i++]);
  inline(held.join("\n"), element("p", parent));
  return i;
}

function inline(text, parent, depth = 0) {
  let rest = text;
  let found;
  while (depth < 12 && (found = rest.match(INLINE))) {
    plain(rest.slice(0, found.index), parent);
    const { code, bold, strike, emphasis, link, address, escape } = found.groups;
    if (code) element("code", parent).textContent = found[3].trim();
    else if (bold) inline(found[6], element("strong", parent), depth + 1);
    else if (strike) inline(found[8], element("del", parent), depth + 1);
    else if (emphasis) inline(found[10] || found[11], element("em", parent), depth + 1);
    else if (link) anchor(found[14], parent, (made) => inline(found[13], made, depth + 1));
    else if (address) anchor(address, parent, (made) => made.append(address));
    else if (escape) parent.append(found[17]);
    rest = rest.slice(found.index + found[0].length);
  }
  plain(rest, parent);
}

function plain(text, parent) {
  text.split(/ {2,}\n|\\\n/).forEach((part, i) => {
    if (i) element("br", parent);
    if (part) parent.append(part);
  });
}

// Links go to the web or to mail, and nowhere else.
function anchor(target, parent, fill) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) {
    fill(parent);
    return;
  }
  const made = element("a", parent);
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  fill(made);
}
