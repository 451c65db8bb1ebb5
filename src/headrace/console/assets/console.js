// Enhancements of plain HTML pages: live updates, dialogs, keyboard shortcuts, relative times.
// Pages work without this script.
"use strict";

(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const main = () => byId("main");
  root.classList.add("scripted");

  // Relative times: every [data-ago] shows the time since its datetime.
  const units = [[31536000, "y"], [86400, "d"], [3600, "h"], [60, "min"]];
  const span = (seconds) => {
    for (const [size, unit] of units) {
      if (seconds >= 2 * size) {
        const value = seconds / size;
        return `${value < 10 ? value.toFixed(1).replace(/\.0$/, "") : Math.round(value)} ${unit}`;
      }
    }
    return `${Math.round(seconds)} s`;
  };
  const updateTimes = () => {
    const now = Date.now();
    document.querySelectorAll("time[data-ago]").forEach((time) => {
      const passed = (now - Date.parse(time.dateTime)) / 1000;
      const text = Math.abs(passed) < 1 ? "now" : passed > 0 ? `${span(passed)} ago` : `in ${span(-passed)}`;
      if (time.textContent !== text) time.textContent = text;
    });
  };

  // Between pointerdown and click, updates wait: replacing the pressed element would lose the click.
  // The click of a tap may arrive some time after the finger is lifted.
  const PRESSABLE = "a, button, summary, label.check";
  const CLICK_MS = 350;
  let isPressed = false;
  let isDown = false;
  let releasing = null;
  const late = [];
  const delayed = new Set();
  const whenReleased = (act) => {
    if (isPressed) late.push(act);
    else act();
  };
  const repeatDelayed = () => {
    const pending = [...delayed];
    delayed.clear();
    for (const elt of pending) if (elt.isConnected) elt.closest("form").dispatchEvent(new Event("change"));
  };
  const release = () => {
    isPressed = false;
    for (const act of late.splice(0)) act();
    repeatDelayed();
  };
  const scheduleRelease = (ms) => {
    isDown = false;
    clearTimeout(releasing);
    releasing = setTimeout(release, ms);
  };
  document.addEventListener("pointerdown", (event) => {
    if (!event.isPrimary || event.button || !event.target.closest(PRESSABLE)) return;
    clearTimeout(releasing);
    isPressed = isDown = true;
  });
  for (const [name, ms] of [["pointerup", CLICK_MS], ["pointercancel", 0], ["click", 0]]) {
    document.addEventListener(name, (event) => {
      if (!isPressed) return;
      // After a click that leaves the page, no request needs to be repeated.
      const isLeaving = name === "click" && event.target.closest("a[href]") && !event.defaultPrevented;
      if (isLeaving && !event.ctrlKey && !event.metaKey && !event.shiftKey) delayed.clear();
      scheduleRelease(ms);
    });
  }
  document.addEventListener("pointermove", (event) => {
    // The pointer was released outside of this page.
    if (isDown && event.isPrimary && !event.buttons) scheduleRelease(CLICK_MS);
  });

  // Requests that follow typing wait while a button is pressed and while the form is being sent.
  // They are repeated afterwards.
  const isTypingRequest = (elt) => elt.matches(".filters, #form [hx-get]");
  const isHeld = (elt) => isPressed || Boolean(elt.closest("#form form.htmx-request"));
  document.addEventListener("htmx:confirm", (event) => {
    const { elt, triggeringEvent } = event.detail;
    if (!isTypingRequest(elt) || !isHeld(elt) || triggeringEvent?.type === "submit") return;
    event.preventDefault();
    delayed.add(elt);
  });
  document.addEventListener("htmx:beforeRequest", (event) => {
    const { elt } = event.detail;
    if (!isTypingRequest(elt)) return;
    // Discard the response if its form was replaced meanwhile.
    const judge = ({ detail }) => {
      if (!elt.isConnected) detail.shouldSwap = false;
    };
    elt.addEventListener("htmx:beforeSwap", judge, { once: true });
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (!event.detail.successful) repeatDelayed();
  });

  // Live updates: one event stream per page, closed while the tab is hidden. Heartbeat: 4 s.
  const SILENT_MS = 12000;
  const HIDDEN_MS = 5000;
  const AGAIN_MS = 5000;
  let stream = null;
  let receivedAt = 0;
  let connectedAt = 0;
  let opened = "";
  let unavailable = "";
  let refusal = "";
  let refusedUntil = 0;
  let isLoggedOut = false;
  let isStale = false;
  let staleAt = 0;
  let isLoading = false;
  let isJoining = false;
  let notBefore = 0;
  let typedAt = 0;
  let hiding = null;
  // The byte budget of a tab covers all pages that it loads.
  const tab = main().dataset.page || "";
  const liveState = (word, kind) => {
    const place = byId("live-state");
    if (place.textContent !== word) place.textContent = word;
    byId("reload").hidden = !("still" in main().dataset);
    place.className = `when-scripted ${kind}`;
  };
  const showLiveState = () => {
    if (Date.now() < refusedUntil) liveState(refusal, "off");
    else if (isLoggedOut) liveState("not live: the session has ended, reload the page to log in", "off");
    else if (!stream) liveState("still" in main().dataset ? "no live updates" : "", "");
    else if (stream.readyState !== EventSource.OPEN && !(isJoining && Date.now() - connectedAt < AGAIN_MS)) liveState("not live: disconnected, values are not updated", "off");
    else if (Date.now() - receivedAt > SILENT_MS) liveState("not live: no response from the server", "off");
    else if (unavailable) liveState(`values are not updated: ${unavailable}`, "off");
    else if (isStale && isBusy()) liveState("partly live: new and removed rows appear when you finish editing", "off");
    else if (isStale && Date.now() - staleAt > 2 * AGAIN_MS) liveState("partly live: new and removed rows appear soon", "off");
    else if (main().querySelector("[data-down]")) liveState(`not live: ${[...main().querySelectorAll("[data-down]")].map((one) => one.dataset.down).join(", ")} down, old or no values are shown`, "off");
    else if (main().querySelector(".load-error")) liveState("partly live: some values could not be read", "off");
    else liveState("live", "on");
  };
  const showMoment = (moment, stamp) => {
    byId("as-of").dateTime = moment;
    byId("as-of").textContent = stamp || `${new Date(moment).toISOString().slice(0, 19).replace("T", " ")} UTC`;
  };
  const change = (name, html) => {
    const place = main().querySelector(`[data-live="${CSS.escape(name)}"]`);
    if (!place) return;
    const before = place.innerHTML;
    place.innerHTML = html;
    if (place.innerHTML === before) return;
    if (place.querySelector("[hx-get]")) htmx.process(place);
    const figure = place.closest("[data-chart]");
    if (figure) {
      headraceCharts.draw(figure);
      return;
    }
    place.classList.remove("changed");
    requestAnimationFrame(() => place.classList.add("changed"));
  };
  const isChanged = (field) =>
    field.matches("select")
      ? field.selectedIndex !== Math.max(0, [...field.options].findIndex((option) => option.defaultSelected))
      : "defaultValue" in field && field.value !== field.defaultValue;
  const isBusy = () => {
    if (isPressed || document.querySelector("dialog[open]")) return true;
    const field = document.activeElement;
    if (!field?.form || !main().contains(field)) return false;
    return isChanged(field) || Date.now() - typedAt < AGAIN_MS;
  };
  // State to keep over a reload: flash message, scroll positions, selected row and focus. It is read
  // when the response arrives, as the user may act meanwhile. The first link identifies a row.
  const boxes = () => [...main().querySelectorAll(".scroll")];
  const linkOf = (row) => row?.querySelector("a[href]")?.getAttribute("href");
  let kept = null;
  let scrolledTo = [0, 0];
  const keep = (isSamePage) => {
    const at = rows().findIndex((row) => row.matches(".at"));
    const focused = main().contains(document.activeElement) ? document.activeElement : null;
    const { id } = focused || {};
    kept = { at, link: linkOf(rows()[at]), focused, id, href: focused?.getAttribute("href"), box: boxes().indexOf(focused), flash: null, scrolled: [], isSamePage, opened: [...main().querySelectorAll("details[open]")].map((one) => one.id) };
    scrolledTo = [scrollX, scrollY];
    if (!isSamePage) return;
    kept.flash = main().querySelector(":scope > .flash");
    kept.scrolled = boxes().map((box) => [box.scrollLeft, box.scrollTop]);
  };
  const chosen = () => {
    const all = rows();
    if (kept.link && linkOf(all[kept.at]) !== kept.link) {
      const moved = all.find((row) => linkOf(row) === kept.link);
      if (moved) return moved;
    }
    return kept.isSamePage || linkOf(all[kept.at]) === kept.link ? all[kept.at] : undefined;
  };
  // The element that had the focus, or the one in its place.
  const sameIn = (row) => {
    const same = kept.href && `a[href="${CSS.escape(kept.href)}"]`;
    const found = same ? row?.querySelector(same) || main().querySelector(same) || row?.querySelector("a[href]") : boxes()[kept.box];
    return found || (kept.id && byId(kept.id)) || main();
  };
  const restore = () => {
    if (!kept) return;
    if (kept.flash && !main().querySelector(":scope > .flash")) main().prepend(kept.flash);
    for (const one of main().querySelectorAll("details[id]")) one.open ||= kept.opened.includes(one.id);
    kept.scrolled.forEach(([left, top], index) => boxes()[index]?.scrollTo(left, top));
    const row = chosen();
    row?.classList.add("at");
    if (kept.focused) sameIn(row).focus({ preventScroll: true });
    kept = null;
  };
  const address = () => main().dataset.liveUrl || location.pathname + location.search;
  const reload = () => {
    // Do not replace a form while the user types. Reload at most once in AGAIN_MS.
    if (!isStale) staleAt = Date.now();
    isStale = true;
    if (isBusy() || isLoading || Date.now() < notBefore) {
      showLiveState();
      return;
    }
    isLoading = true;
    const ended = () => {
      isLoading = false;
      notBefore = Date.now() + AGAIN_MS;
    };
    htmx.ajax("GET", address(), { target: "#main", select: "#main", swap: "outerHTML" }).then(ended, ended);
  };
  const shut = () => {
    if (stream) stream.close();
    stream = null;
  };
  const listen = () => {
    // Switching between two working streams: the shown values are recent.
    isJoining = stream?.readyState === EventSource.OPEN && Date.now() - receivedAt <= SILENT_MS;
    shut();
    unavailable = "";
    const { page, layout, liveUrl } = main().dataset;
    if (!page || isLoggedOut) {
      showLiveState();
      return;
    }
    const query = new URLSearchParams({ url: liveUrl, page, layout, tab });
    const own = new EventSource(`/console/live?${query}`);
    stream = own;
    receivedAt = connectedAt = Date.now();
    own.onopen = () => {
      receivedAt = Date.now();
      // After a reconnect, missed updates require a reload.
      if (opened === page) reload();
      opened = page;
      showLiveState();
    };
    own.onerror = () => {
      isJoining = false;
      showLiveState();
    };
    const on = (name, act) =>
      own.addEventListener(name, (event) => {
        receivedAt = Date.now();
        if (event.lastEventId) showMoment(event.lastEventId);
        act(JSON.parse(event.data));
        showLiveState();
      });
    on("heartbeat", () => {});
    on("stale", reload);
    on("changes", (changes) =>
      whenReleased(() => {
        for (const [name, html] of Object.entries(changes)) change(name, html);
        updateTimes();
      }));
    on("unavailable", ({ text }) => {
      unavailable = text;
    });
    on("logged_out", () => {
      isLoggedOut = true;
      shut();
    });
  };
  const checkStream = () => {
    // EventSource does not detect dead connections and does not retry refused ones.
    const isShut = stream?.readyState === EventSource.CLOSED && Date.now() - connectedAt > AGAIN_MS;
    if (isShut || (stream && Date.now() - receivedAt > 2 * SILENT_MS)) listen();
    if (isStale && !document.hidden) reload();
    showLiveState();
  };
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(shut, HIDDEN_MS);
    else if (!stream && main().dataset.page) listen();
  });
  document.addEventListener("input", (event) => {
    typedAt = Date.now();
    const preview = event.target.closest("#form")?.querySelector(".preview");
    if (preview) preview.textContent = "counting…";
  });

  // Dialogs.
  const open = (id) => {
    const dialog = byId(id);
    if (!dialog.open) dialog.showModal();
  };
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-opens]");
    if (opener) open(opener.dataset.opens);
    if (event.target.closest("#reload")) {
      event.preventDefault();
      acts.r();
    }
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
  document.addEventListener("htmx:beforeSwap", (event) => {
    const { elt, path } = event.detail.requestConfig;
    if (elt === document.body) {
      // A filter changed during the reload: the response is for the previous URL.
      if (isPressed || path !== address()) event.detail.shouldSwap = false;
      else keep(true);
    } else if (isTypingRequest(elt) && isHeld(elt)) {
      event.detail.shouldSwap = false;
      delayed.add(elt);
    } else if (event.detail.target.id === "main") {
      keep(false);
    }
  });
  document.addEventListener("htmx:beforeCleanupElement", (event) => {
    // The new content is inserted before the old is removed, so the focus moves without a gap.
    if (event.target.id === "main") restore();
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id === "main") scrollTo(...scrolledTo);
    // Only a new form takes the focus; previews are swapped as well.
    const { id } = event.detail.target;
    if (id === "dialog-body") open("dialog");
    if (id !== "dialog-body" && id !== "form") return;
    const form = byId("form");
    (form?.querySelector("[aria-invalid]") || form?.querySelector("input:not([type=hidden]), select, textarea, .primary"))?.focus();
  });
  document.addEventListener("htmx:afterSettle", (event) => {
    if (event.detail.elt.id === "main" || event.detail.target.id === "main") pageLoaded();
  });
  const refuse = (text) => {
    refusal = text;
    refusedUntil = Date.now() + 2 * AGAIN_MS;
    showLiveState();
  };
  document.addEventListener("htmx:responseError", (event) => refuse(`the server answered ${event.detail.xhr.status}`));
  document.addEventListener("htmx:sendError", () => refuse("the server does not answer"));

  // Keys.
  const GO_MS = 2000;
  let wentAt = -GO_MS;
  const rows = () => [...main().querySelectorAll("tbody tr:not(.u-series), [data-row]")].filter((row) => row.checkVisibility());
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
    r: () => {
      notBefore = 0;
      reload();
    },
    Enter: () => main().querySelector(".at a[href]")?.click(),
  };
  const leave = (event) => {
    // Restore the submitted value. By default, browsers would clear a search field and submit it.
    const field = event.target;
    event.preventDefault();
    if (isChanged(field) && "defaultValue" in field) field.value = field.defaultValue;
    field.blur();
  };
  // Moderation: a key presses its button. One form is sent once, and a held key decides one job.
  let isSent = false;
  addEventListener("pageshow", () => {
    isSent = false;
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.matches(".moderation")) return;
    if (isSent) event.preventDefault();
    isSent = true;
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.key === "Escape" && event.target.closest(".filters")) leave(event);
    if (event.target.closest("input, textarea, select, dialog, audio, video")) return;
    if (event.timeStamp - wentAt < GO_MS) {
      wentAt = -GO_MS;
      root.classList.remove("keys-shown");
      const link = document.querySelector(`.rooms a[data-key="${CSS.escape(event.key)}"]`);
      if (link) {
        event.preventDefault();
        link.click();
        return;
      }
    }
    if (event.key === "g") {
      wentAt = event.timeStamp;
      root.classList.add("keys-shown");
      setTimeout(() => root.classList.remove("keys-shown"), GO_MS);
      return;
    }
    const button = main().querySelector(`[data-press="${CSS.escape(event.key)}"]`);
    if (button) {
      event.preventDefault();
      if (!event.repeat) button.click();
      return;
    }
    const inRows = main().querySelector("tr.at, [data-row].at");
    const key = event.key === "ArrowDown" && inRows ? "j" : event.key === "ArrowUp" && inRows ? "k" : event.key;
    const act = acts[key];
    if (!act || (key === "Enter" && event.target.closest("a, button, summary"))) return;
    event.preventDefault();
    act();
  });

  // On a phone, menus are wider than the page: scroll the current item into view.
  const showPlace = () =>
    document.querySelectorAll("nav [aria-current]").forEach((link) => {
      const list = link.closest("ul");
      list.scrollLeft += link.getBoundingClientRect().left - list.getBoundingClientRect().left - 20;
    });
  const pageLoaded = () => {
    isStale = false;
    showPlace();
    showMoment(main().dataset.at, main().dataset.stamp);
    updateTimes();
    headraceCharts.drawAll();
    listen();
  };
  setInterval(() => {
    whenReleased(updateTimes);
    checkStream();
  }, 1000);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => headraceCharts.recolour());
  pageLoaded();
})();
