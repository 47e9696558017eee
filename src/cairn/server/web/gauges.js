// The engine's numbers, once a second.

import { stats } from "/web/api.js";

const KEPT = 60;
const $ = (id) => document.getElementById(id);
const speeds = [];
let last = null;

export function startGauges(onState) {
  const tick = async () => {
    if (!document.hidden) {
      try {
        show(await stats(), onState);
      } catch (error) {
        const status = error.message.includes("API key") ? "needs an API key: see Settings" : "unreachable";
        onState({ status, reason: error.message, model: $("model").textContent });
      }
    }
    setTimeout(tick, 1000);
  };
  tick();
}

function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}

function show(answer, onState) {
  onState(answer);
  const now = answer.stats;
  if (!now) {
    last = null;
    return;
  }
  if (last && now.generated_tokens >= last.stats.generated_tokens) {
    const passed = answer.time - last.time;
    speeds.push((now.generated_tokens - last.stats.generated_tokens) / Math.max(passed, 0.2));
    if (speeds.length > KEPT) speeds.shift();
    const speed = speeds[speeds.length - 1];
    $("g-speed").textContent = speed < 10 ? speed.toFixed(1) : Math.round(speed);
    drawLine();
  }
  last = answer;
  $("g-load").textContent = `${now.running} · ${now.waiting}`;
  $("g-hits").textContent = percent(now.hit_tokens, now.prompt_tokens);
  $("g-drafts").textContent = percent(now.accepted_tokens, now.drafted_tokens);
  $("g-read").textContent = percent(now.read_pages, now.held_pages);
  let total = 0, cached = 0, owned = 0;
  for (const [, all, , kept, used] of now.pages) {
    total += all;
    cached += kept;
    owned += used;
  }
  $("g-pages").textContent = `${owned} in use, ${cached} cached of ${total}`;
  $("b-owned").style.width = `${(100 * owned) / total}%`;
  $("b-cached").style.width = `${(100 * cached) / total}%`;
}

function drawLine() {
  const most = Math.max(1, ...speeds);
  const points = speeds.map((speed, i) => `${i + KEPT - speeds.length},${15 - (14 * speed) / most}`);
  document.querySelector("#g-line polyline").setAttribute("points", points.join(" "));
}
