// Moves the counters of a page that is open, and reloads parts that change. Pages work without it.
"use strict";

const EVERY_MS = 2000;
const counters = [...document.querySelectorAll("[data-views]")].slice(0, 60);
const parts = [...document.querySelectorAll("[data-live]")];

function text(total) {
  return total === 1 ? "1 view" : `${total.toLocaleString("en-US")} views`;
}

async function moveCounters() {
  const ids = counters.map((one) => one.dataset.views);
  const reply = await fetch(`/live?ids=${encodeURIComponent(ids.join(","))}`);
  if (!reply.ok) return;
  const totals = await reply.json();
  for (const one of counters) {
    const total = totals[one.dataset.views];
    if (total === undefined || total === null || one.textContent === text(total)) continue;
    one.textContent = text(total);
    one.classList.remove("moved");
    requestAnimationFrame(() => one.classList.add("moved"));
  }
}

async function reload(part) {
  const reply = await fetch(part.dataset.live);
  if (reply.ok) part.innerHTML = await reply.text();
}

async function look() {
  if (!document.hidden) {
    const work = parts.map(reload);
    if (counters.length) work.push(moveCounters());
    await Promise.allSettled(work);
  }
  setTimeout(look, EVERY_MS);
}

if (counters.length || parts.length) setTimeout(look, EVERY_MS);
