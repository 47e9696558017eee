// Requests for answers, and what comes back.

import { stream } from "/web/api.js";
import { sampling, settings } from "/web/settings.js";

// What is said to the model: the turns that were answered, and the last question.
function messagesOf({ document, turns, model }) {
  const last = turns.findLastIndex((turn) => turn.role === "user");
  const said = turns.filter((turn, i) => i <= last && (i === last || !turns[last].suggested) && isSaid(turns, i));
  const messages = said.map(({ role, content }) => ({ role, content }));
  const system = settings().system.trim();
  if (document && model === "nano") {
    // It has learnt one question about one text.
    return [{ role: "system", content: document.text }, messages.at(-1)];
  }
  if (document) {
    // The text comes first, so that the next question finds it in the prefix cache.
    const { content } = messages[0];
    const brief = /\?\s*$/.test(content) ? " Answer in one short sentence." : "";
    messages[0] = { role: "user", content: `${document.text}\n\nQuestion about the text above: ${content}${brief}` };
  }
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function isSaid(turns, i) {
  if (turns[i].role === "assistant") return true;
  return turns[i].role === "user" && (i === turns.length - 1 || turns[i + 1].role === "assistant");
}

function bodyOf(conversation, cairn) {
  const own = sampling();
  const asked = conversation.turns.findLast((turn) => turn.role === "user");
  // Facts from a text, and what the page suggests, are not a matter of chance. A second try is.
  if ((conversation.document || asked.suggested) && !asked.again) own.temperature ??= 0;
  return { ...own, stream_options: { include_usage: true }, cairn: { reading: true, ...cairn } };
}

// Answer the last question of a conversation.
export function answer(conversation, base, cairn, signal, on) {
  const body = { ...bodyOf(conversation, cairn), messages: messagesOf(conversation) };
  return follow(`${base}/v1/chat/completions`, body, signal, on);
}

// Go on with the last answer, which was cut: the model sees it as its own words so far.
export function goOn(conversation, cairn, signal, on) {
  const asked = { ...conversation, turns: conversation.turns.slice(0, -1) };
  const begun = { role: "assistant", content: conversation.turns.at(-1).content };
  const messages = [...messagesOf(asked), begun];
  const body = { ...bodyOf(conversation, cairn), messages, continue_final_message: true };
  return follow("/v1/chat/completions", body, signal, on);
}

// Follow a stream to its end. Returns what came, also if it is stopped or fails (`error`).
async function follow(path, body, signal, on) {
  const got = { content: "", thoughts: "", reason: null, usage: null, pages: null, reads: [], error: null };
  got.begin = performance.now();
  try {
    for await (const event of stream(path, body, signal)) {
      got.usage = event.usage || got.usage;
      if (event.object === "cairn.reading") on.reading(event.cairn);
      for (const choice of event.choices) take(choice, got, on);
    }
  } catch (error) {
    if (!signal.aborted) got.error = error.message;
  }
  got.stopped = signal.aborted;
  got.end = performance.now();
  return got;
}

function take(choice, got, on) {
  const text = choice.delta.content || "";
  got.reason = choice.finish_reason || got.reason;
  if (choice.cairn?.pages) {
    got.pages = choice.cairn.pages;
    on.pages(got.pages);
  }
  // The token that ends an answer is no part of it.
  const reads = (choice.finish_reason !== "stop" && choice.cairn?.reads) || [];
  if (reads.length) {
    got.reads.push(...reads);
    on.reads(reads);
  }
  if (choice.delta.reasoning_content) {
    got.thoughts += choice.delta.reasoning_content;
    on.thoughts(got.thoughts);
  }
  if (text) {
    got.first ||= performance.now();
    got.content += text;
    on.text(got.content);
  }
}

// Pages that a head reads for a token: the selected ones and the window; of all there are.
export function pagesRead(got, topk) {
  let read = 0;
  let all = 0;
  // The first token comes from the prompt's last row, which reads as the prompt does.
  const reads = got.reads.length > 1 ? got.reads.slice(1) : got.reads;
  reads.forEach(({ window_page: window }, i) => {
    const count = Math.ceil((got.pages.prompt_tokens + i + 1) / got.pages.tokens_per_page);
    read += count - window + Math.min(topk, window);
    all += count;
  });
  return { read: Math.round(read / reads.length), all: Math.round(all / reads.length) };
}

export function speedOf(got) {
  const tokens = got.usage?.completion_tokens || 0;
  return tokens > 1 ? (tokens - 1) / ((got.end - got.first) / 1000) : null;
}
