// What pages do beyond plain HTML: live fragments, dialogs, keys, times that count. Pages work without it.
"use strict";

(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const main = () => byId("main");
  root.classList.add("scripted");

  // Times: every [data-ago] is shown as the time that passed.
  const units = [[86400, "d"], [3600, "h"], [60, "min"]];
  const span = (seconds) => {
    for (const [size, unit] of units) {
      if (seconds >= 2 * size) {
        const value = seconds / size;
        return `${value < 10 ? value.toFixed(1).replace(/\.0$/, "") : Math.round(value)} ${unit}`;
      }
    }
    return `${Math.round(seconds)} s`;
  };
  const tellTimes = () => {
    const now = Date.now();
    document.querySelectorAll("time[data-ago]").forEach((time) => {
      const passed = (now - Date.parse(time.dateTime)) / 1000;
      const text = Math.abs(passed) < 1 ? "now" : passed > 0 ? `${span(passed)} ago` : `in ${span(-passed)}`;
      if (time.textContent !== text) time.textContent = text;
    });
  };

  // Live: one stream for the page, closed while nobody looks.
  let stream = null;
  let hiddenSince = 0;
  const liveState = (word, kind) => {
    const place = byId("live-state");
    place.textContent = word;
    place.className = `when-scripted ${kind}`;
  };
  const change = (name, html) => {
    const place = main().querySelector(`[data-live="${CSS.escape(name)}"]`);
    if (!place) return;
    place.innerHTML = html;
    const figure = place.closest("[data-chart]");
    if (figure) {
      penstockCharts.draw(figure);
      return;
    }
    place.classList.remove("changed");
    requestAnimationFrame(() => place.classList.add("changed"));
  };
  const isBusy = () => document.querySelector("dialog[open]") || main().contains(document.activeElement?.closest("form"));
  let isStale = false;
  const loadAnew = () => {
    // What somebody types into is left alone; the page is loaded once that is over.
    isStale = Boolean(isBusy());
    if (isStale) return;
    const url = main().dataset.liveUrl || location.pathname + location.search;
    htmx.ajax("GET", url, { target: "#main", select: "#main", swap: "outerHTML" });
  };
  const listen = () => {
    if (stream) stream.close();
    stream = null;
    const { page, liveUrl } = main().dataset;
    if (!page) {
      liveState("", "");
      return;
    }
    const query = new URLSearchParams({ url: liveUrl, page });
    stream = new EventSource(`/console/live?${query}`);
    stream.onopen = () => liveState("live", "on");
    stream.onerror = () => liveState("not live: the numbers stand still", "off");
    stream.addEventListener("changes", (event) => {
      for (const [name, html] of Object.entries(JSON.parse(event.data))) change(name, html);
      const now = new Date();
      byId("as-of").dateTime = now.toISOString();
      byId("as-of").textContent = `${now.toISOString().slice(0, 19).replace("T", " ")} UTC`;
      tellTimes();
    });
    stream.addEventListener("stale", loadAnew);
    stream.addEventListener("trouble", (event) => {
      const { text } = JSON.parse(event.data);
      liveState(text ? `the numbers stand still: ${text}` : "live", text ? "off" : "on");
    });
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      hiddenSince = Date.now();
      if (stream) stream.close();
      stream = null;
    } else if (main().dataset.page) {
      if (Date.now() - hiddenSince > 5000) loadAnew();
      listen();
    }
  });

  // Dialogs.
  const open = (id) => {
    const dialog = byId(id);
    if (!dialog.open) dialog.showModal();
  };
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-opens]");
    if (opener) open(opener.dataset.opens);
    const closer = event.target.closest("[data-close]");
    const dialog = closer?.closest("dialog");
    if (dialog) {
      event.preventDefault();
      dialog.close();
    }
    const copier = event.target.closest("[data-copy]");
    if (copier) {
      navigator.clipboard?.writeText(copier.parentElement.querySelector("code").textContent);
      copier.textContent = "Copied";
    }
    if (event.target instanceof HTMLDialogElement) event.target.close();
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-sends]")) event.target.form.requestSubmit();
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.closest("#dialog")) {
      open("dialog");
      byId("dialog").querySelector("input:not([type=hidden]), select, textarea, .primary")?.focus();
    }
  });
  document.addEventListener("htmx:afterSettle", (event) => {
    if (event.detail.elt.id === "main" || event.detail.target.id === "main") fresh();
  });
  document.addEventListener("htmx:responseError", (event) => {
    liveState(`the server answered ${event.detail.xhr.status}`, "off");
  });
  document.addEventListener("htmx:sendError", () => liveState("the server does not answer", "off"));

  // Keys.
  let wentAt = 0;
  const rows = () => [...main().querySelectorAll("tbody tr")];
  const step = (by) => {
    const all = rows();
    if (!all.length) return;
    const now = all.findIndex((row) => row.classList.contains("at"));
    const next = all[Math.min(all.length - 1, Math.max(0, now < 0 ? 0 : now + by))];
    all[now]?.classList.remove("at");
    next.classList.add("at");
    next.scrollIntoView({ block: "nearest" });
    next.querySelector("a[href]")?.focus({ preventScroll: true });
  };
  const acts = {
    "/": () => main().querySelector(".filters input, .filters select")?.focus(),
    "?": () => open("help"),
    j: () => step(1),
    k: () => step(-1),
    r: loadAnew,
    Enter: () => main().querySelector("tr.at a[href]")?.click(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest("input, textarea, select, dialog, audio, video")) return;
    if (Date.now() - wentAt < 1200) {
      wentAt = 0;
      root.classList.remove("keys-shown");
      const link = document.querySelector(`.rooms a[data-key="${CSS.escape(event.key)}"]`);
      if (link) {
        event.preventDefault();
        link.click();
        return;
      }
    }
    if (event.key === "g") {
      wentAt = Date.now();
      root.classList.add("keys-shown");
      setTimeout(() => root.classList.remove("keys-shown"), 1200);
      return;
    }
    const inRows = main().querySelector("tr.at");
    const key = event.key === "ArrowDown" && inRows ? "j" : event.key === "ArrowUp" && inRows ? "k" : event.key;
    const act = acts[key];
    if (!act || (key === "Enter" && event.target.closest("a, button, summary"))) return;
    event.preventDefault();
    act();
  });

  const fresh = () => {
    tellTimes();
    penstockCharts.drawAll();
    listen();
  };
  setInterval(() => {
    tellTimes();
    if (isStale) loadAnew();
  }, 1000);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => penstockCharts.recolour());
  fresh();
})();
