// Files that a visitor drops or chooses: text and PDF become text, others are refused.

import { pdfText } from "/web/api.js";

const LARGEST = 20 * 2 ** 20; // bytes
const LOOKED_AT = 64 * 1024; // bytes that tell text from other data

export async function readFile(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} is larger than 20 MB. Take a part of it.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const isPdf = new TextDecoder("latin1").decode(bytes.subarray(0, 1024)).includes("%PDF-");
  const text = isPdf ? await pdfText(file) : decode(bytes, file.name);
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  return text;
}

// Exported for tests.
export function decode(bytes, name) {
  if (bytes[0] === 0xff && bytes[1] === 0xfe) return new TextDecoder("utf-16le").decode(bytes);
  if (bytes[0] === 0xfe && bytes[1] === 0xff) return new TextDecoder("utf-16be").decode(bytes);
  let odd = 0;
  const looked = bytes.subarray(0, LOOKED_AT);
  for (const byte of looked) if (byte < 32 && ![9, 10, 12, 13, 27].includes(byte)) odd++;
  if (looked.includes(0) || odd > looked.length / 100) {
    throw new Error(`${name} is neither text nor PDF. Save it as text or as PDF first.`);
  }
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return new TextDecoder("windows-1252").decode(bytes); // older text files
  }
}
