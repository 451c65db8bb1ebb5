// The command palette: a dialog with a search field (WAI-ARIA combobox with a list box). It offers
// the actions of the present page, which it finds in the page, and what the server finds.
// Without this script, the button in the top bar leads to the search page.
"use strict";

(() => {
  const dialog = document.getElementById("palette");
  if (!dialog) return;
  const input = dialog.querySelector("input");
  const list = dialog.querySelector("[role=listbox]");
  const state = dialog.querySelector("[role=status]");
  const WAIT_MS = 120;
  const SEARCHING = "searching…";
  const ACTIONS_MAX = 8;
  const PLACE = /^\/console(?:[/?#]|$)/;
  let found = [];
  let at = 0;
  let waiting = null;
  let isEntered = false;
  let pending = null;

  const words = () => input.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  // Buttons of actions, each once. A row's button names its row.
  const actions = () => {
    const needed = words();
    const seen = new Map();
    for (const link of document.querySelectorAll("#main a.button[hx-get]")) {
      const href = link.getAttribute("href");
      const row = link.closest("tr, [data-row]");
      const name = row?.querySelector("th, a[href]")?.textContent.trim().replace(/\s+/g, " ") || "";
      const label = link.getAttribute("aria-label") || link.textContent.trim();
      const whole = `${label} ${name}`.toLowerCase();
      if (!seen.has(href) && needed.every((word) => whole.includes(word))) seen.set(href, { kind: "action", label, hint: name, href, isAction: true });
    }
    return [...seen.values()].slice(0, ACTIONS_MAX);
  };
  // Color schemes, chosen as in the corner of the page.
  const themes = () => {
    const needed = words();
    const choices = [...document.querySelectorAll("#theme option")];
    const whole = (one) => `theme color scheme ${one.textContent}`.toLowerCase();
    return choices
      .filter((one) => needed.length && needed.every((word) => whole(one).includes(word)))
      .map((one) => ({ kind: "theme", label: one.textContent, hint: "color scheme", theme: one.value }));
  };
  const span = (name, text) => {
    const made = document.createElement("span");
    made.className = name;
    made.textContent = text;
    return made;
  };
  const choose = (index) => {
    const options = [...list.children];
    at = Math.max(0, Math.min(options.length - 1, index));
    options.forEach((option, place) => option.setAttribute("aria-selected", String(place === at)));
    if (options[at]) {
      input.setAttribute("aria-activedescendant", options[at].id);
      options[at].scrollIntoView({ block: "nearest" });
    } else {
      input.removeAttribute("aria-activedescendant");
    }
  };
  const show = (matches, word) => {
    const text = input.value.trim().toLowerCase();
    const isSame = (one) => text && one.label.toLowerCase() === text;
    found = [...matches.filter(isSame), ...actions(), ...themes(), ...matches.filter((one) => !isSame(one))];
    list.replaceChildren(
      ...found.map((one, index) => {
        const option = document.createElement("li");
        option.id = `palette-${index}`;
        option.setAttribute("role", "option");
        option.append(span("chip", one.kind), span("palette-label", one.label), span("muted", one.hint || ""));
        return option;
      }),
    );
    input.setAttribute("aria-expanded", String(found.length > 0));
    state.textContent = word || (found.length ? `${found.length} ${found.length === 1 ? "match" : "matches"}` : "no matches");
    choose(0);
    if (isEntered && word !== SEARCHING) {
      isEntered = false;
      if (!word) go(found[at]);
    }
  };
  const ask = async () => {
    pending?.abort();
    const own = new AbortController();
    pending = own;
    try {
      const query = new URLSearchParams({ q: input.value.trim() });
      const answer = await fetch(`/console/palette?${query}`, { headers: { accept: "application/json" }, signal: own.signal });
      if (own.signal.aborted) return;
      if (answer.ok) show(await answer.json());
      else show([], answer.status === 401 ? "the session has ended: reload the page to log in" : `the server answered ${answer.status}`);
    } catch {
      if (!own.signal.aborted) show([], "the server does not answer");
    }
  };
  const open = () => {
    if (document.querySelector("dialog[open]")) return;
    isEntered = false;
    dialog.showModal();
    input.select();
    show([], SEARCHING);
    ask();
  };
  const go = (one) => {
    if (!one) return;
    dialog.close();
    if (one.isAction) document.querySelector(`#main a.button[href="${CSS.escape(one.href)}"]`)?.click();
    else if (one.theme) {
      const field = document.getElementById("theme");
      field.value = one.theme;
      field.form.requestSubmit();
    } else if (PLACE.test(one.href)) location.assign(one.href);
  };

  document.addEventListener("keydown", (event) => {
    const isKey = event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey);
    if (!isKey || event.altKey || event.shiftKey) return;
    event.preventDefault();
    if (dialog.open) dialog.close();
    else open();
  });
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-palette]");
    if (!opener || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open();
  });
  const STEPS = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) {
      event.preventDefault();
      // Before the answer to the last key arrived, Enter chooses its first match.
      if (state.textContent === SEARCHING) isEntered = true;
      else go(found[at]);
    }
    const by = STEPS[event.key];
    if (!by) return;
    event.preventDefault();
    choose(at + by);
  });
  input.addEventListener("input", () => {
    clearTimeout(waiting);
    isEntered = false;
    state.textContent = SEARCHING;
    waiting = setTimeout(ask, WAIT_MS);
  });
  list.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (option) go(found[[...list.children].indexOf(option)]);
  });
  dialog.addEventListener("close", () => {
    clearTimeout(waiting);
    pending?.abort();
  });
  const isMac = /mac|iphone|ipad/i.test(navigator.platform);
  if (isMac) document.querySelectorAll("[data-palette] kbd").forEach((key) => (key.textContent = "⌘K"));
})();
