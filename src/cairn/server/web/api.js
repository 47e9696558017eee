// Talking to the server.

let key = sessionStorage.getItem("cairn-key") || "";

export function setKey(value) {
  key = value;
  sessionStorage.setItem("cairn-key", value);
}

export function getKey() {
  return key;
}

async function call(path, body, signal) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await explain(response));
  return response;
}

async function explain(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${text.slice(0, 200)}`;
  }
}

export async function stats() {
  return (await call("/stats")).json();
}

export async function countTokens(text) {
  return (await call("/tokenize", { prompt: text })).json();
}

// Yields the events of a streamed answer; throws what the server says went wrong.
export async function* chat(body, signal) {
  const response = await call("/v1/chat/completions", { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new Error(parsed.error.message);
      yield parsed;
    }
  }
}
