// Talking to the server.

let key = sessionStorage.getItem("cairn-key") || "";

export function setKey(value) {
  key = value;
  sessionStorage.setItem("cairn-key", value);
}

export function getKey() {
  return key;
}

async function call(path, { method = "POST", body, type = "application/json", signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = type;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw new Error(await explain(response));
  return response;
}

const post = (path, value, signal) => call(path, { body: JSON.stringify(value), signal });

async function explain(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${text.slice(0, 200)}`;
  }
}

export async function stats() {
  return (await call("/stats", { method: "GET" })).json();
}

export async function tokenize(request) {
  return (await post("/tokenize", request)).json();
}

// Text of a PDF file, which the server extracts.
export async function pdfText(file) {
  return (await call("/pdf-text", { body: file, type: "application/pdf" })).text();
}

// Returns what is known of cairn-nano, once its engine runs.
export async function startNano(signal) {
  return (await post("/nano/start", {}, signal)).json();
}

// A file that comes with the page.
export async function bundled(name) {
  return (await call(`/web/${name}`, { method: "GET" })).text();
}

// Yields the events of a streamed answer; throws what the server says went wrong.
export async function* stream(path, body, signal) {
  const response = await post(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let value, done;
    try {
      ({ value, done } = await reader.read());
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Error("The connection to the server was lost.");
    }
    if (done) throw new Error("The connection ended before the answer did.");
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
