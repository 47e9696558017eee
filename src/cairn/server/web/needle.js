// Hides a sentence in a long text, in the words that cairn-nano has learnt.

const NAMES = ["Ada Lovell", "Mira Kolvane", "Tovin Brask", "Selka Rowan", "Idris Fenn", "Oda Marlick"];
export const CHARACTERS_PER_TOKEN = 3.72; // of English prose, in cairn-nano's tokens

export function randomName() {
  return NAMES[Math.floor(Math.random() * NAMES.length)];
}

export function randomCode() {
  return String(10000 + Math.floor(Math.random() * 90000));
}

export function fact(name, code) {
  return `The access code of ${name} is ${code}.`;
}

export function question(name) {
  return `What is the access code of ${name}?`;
}

// `tokens` of a text, repeated if it is short, with the sentence at a depth of 0 to 1.
export function hide(text, sentence, tokens, depth) {
  const sentences = text.trim().split(/(?<=[.?!])\s+/);
  const length = tokens * CHARACTERS_PER_TOKEN;
  const taken = [];
  for (let i = 0, total = 0; total < length; i++) {
    taken.push(sentences[i % sentences.length]);
    total += taken[i].length + 1;
  }
  let place = 0;
  for (let before = 0; place < taken.length && before < depth * length; place++) before += taken[place].length + 1;
  taken.splice(place, 0, sentence);
  return ` ${taken.join(" ")}`;
}
