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

  // A press: from the pointer's down to its click nothing moves or is replaced, or what was pressed is no longer under it and
  // the click is lost. What comes meanwhile waits. A tap's click may come a while after the finger went.
  const PRESSABLE = "a, button, summary, label.check";
  const CLICK_MS = 350;
  let isPressed = false;
  let isDown = false;
  let releasing = null;
  const late = [];
  const owed = new Set();
  const whenReleased = (act) => {
    if (isPressed) late.push(act);
    else act();
  };
  const askOwed = () => {
    const asking = [...owed];
    owed.clear();
    for (const elt of asking) if (elt.isConnected) elt.closest("form").dispatchEvent(new Event("change"));
  };
  const release = () => {
    isPressed = false;
    for (const act of late.splice(0)) act();
    askOwed();
  };
  const letGo = (ms) => {
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
      // What leads away from the page leaves nothing to ask again.
      const isLeaving = name === "click" && event.target.closest("a[href]") && !event.defaultPrevented;
      if (isLeaving && !event.ctrlKey && !event.metaKey && !event.shiftKey) owed.clear();
      letGo(ms);
    });
  }
  document.addEventListener("pointermove", (event) => {
    // It was let go where this page did not hear of it.
    if (isDown && event.isPrimary && !event.buttons) letGo(CLICK_MS);
  });

  // What follows a form as it is filled in waits for a press, and for the answer to the form; then it is asked again.
  const isFollower = (elt) => elt.matches(".filters, #form [hx-get]");
  const isHeld = (elt) => isPressed || Boolean(elt.closest("#form form.htmx-request"));
  document.addEventListener("htmx:confirm", (event) => {
    const { elt, triggeringEvent } = event.detail;
    if (!isFollower(elt) || !isHeld(elt) || triggeringEvent?.type === "submit") return;
    event.preventDefault();
    owed.add(elt);
  });
  document.addEventListener("htmx:beforeRequest", (event) => {
    const { elt } = event.detail;
    if (!isFollower(elt)) return;
    // What is answered to a form that was replaced meanwhile is not of the new one.
    const judge = ({ detail }) => {
      if (!elt.isConnected) detail.shouldSwap = false;
    };
    elt.addEventListener("htmx:beforeSwap", judge, { once: true });
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (!event.detail.successful) askOwed();
  });

  // Live: one stream for the page, closed while nobody looks. It says something every 4 s.
  const SILENT_MS = 12000;
  const HIDDEN_MS = 5000;
  const AGAIN_MS = 5000;
  let stream = null;
  let heardAt = 0;
  let listenedAt = 0;
  let opened = "";
  let trouble = "";
  let refusal = "";
  let refusedUntil = 0;
  let isOver = false;
  let isStale = false;
  let staleAt = 0;
  let isLoading = false;
  let isJoining = false;
  let notBefore = 0;
  let typedAt = 0;
  let hiding = null;
  // What this tab was sent counts through all the pages that it loads.
  const tab = main().dataset.page || "";
  const liveState = (word, kind) => {
    const place = byId("live-state");
    if (place.textContent !== word) place.textContent = word;
    place.className = `when-scripted ${kind}`;
  };
  const tellLive = () => {
    if (Date.now() < refusedUntil) liveState(refusal, "off");
    else if (isOver) liveState("not live: the login has ended, load the page to log in again", "off");
    else if (!stream) liveState("still" in main().dataset ? "stands still: r loads it anew" : "", "");
    else if (stream.readyState !== EventSource.OPEN && !(isJoining && Date.now() - listenedAt < AGAIN_MS)) liveState("not live: the numbers stand still", "off");
    else if (Date.now() - heardAt > SILENT_MS) liveState("not live: the server says nothing", "off");
    else if (trouble) liveState(`the numbers stand still: ${trouble}`, "off");
    else if (isStale && isBusy()) liveState("not all is live: what came or went is shown once you are done here", "off");
    else if (isStale && Date.now() - staleAt > 2 * AGAIN_MS) liveState("not all is live: what came or went is not shown yet", "off");
    else liveState("live", "on");
  };
  const tellMoment = (moment, stamp) => {
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
  // What was said of the last action, where each table and the page were scrolled to, which row was chosen, and what had the
  // focus: as they are when the answer comes, for a person goes on while it is asked for. Rows come and go: one is known by its
  // first link.
  const boxes = () => [...main().querySelectorAll(".scroll")];
  const linkOf = (row) => row?.querySelector("a[href]")?.getAttribute("href");
  let kept = null;
  let scrolledTo = [0, 0];
  const keep = (isSamePage) => {
    const at = rows().findIndex((row) => row.matches(".at"));
    const focused = main().contains(document.activeElement) ? document.activeElement : null;
    const { id } = focused || {};
    kept = { at, link: linkOf(rows()[at]), focused, id, href: focused?.getAttribute("href"), box: boxes().indexOf(focused), told: null, scrolled: [], isSamePage };
    scrolledTo = [scrollX, scrollY];
    if (!isSamePage) return;
    kept.told = main().querySelector(":scope > .told");
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
  // What had the focus, or is in its place where that has gone.
  const sameIn = (row) => {
    const same = kept.href && `a[href="${CSS.escape(kept.href)}"]`;
    const found = same ? row?.querySelector(same) || main().querySelector(same) || row?.querySelector("a[href]") : boxes()[kept.box];
    return found || (kept.id && byId(kept.id)) || main();
  };
  const putBack = () => {
    if (!kept) return;
    if (kept.told && !main().querySelector(":scope > .told")) main().prepend(kept.told);
    kept.scrolled.forEach(([left, top], index) => boxes()[index]?.scrollTo(left, top));
    const row = chosen();
    row?.classList.add("at");
    if (kept.focused) sameIn(row).focus({ preventScroll: true });
    kept = null;
  };
  const address = () => main().dataset.liveUrl || location.pathname + location.search;
  const loadAnew = () => {
    // What somebody types into is left alone; the page is loaded once that is over, and by itself once in AGAIN_MS at most.
    if (!isStale) staleAt = Date.now();
    isStale = true;
    if (isBusy() || isLoading || Date.now() < notBefore) {
      tellLive();
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
    // From one stream that was heard to the next: what stands here is of a moment ago.
    isJoining = stream?.readyState === EventSource.OPEN && Date.now() - heardAt <= SILENT_MS;
    shut();
    trouble = "";
    const { page, frame, liveUrl } = main().dataset;
    if (!page || isOver) {
      tellLive();
      return;
    }
    const query = new URLSearchParams({ url: liveUrl, page, frame, tab });
    const own = new EventSource(`/console/live?${query}`);
    stream = own;
    heardAt = listenedAt = Date.now();
    own.onopen = () => {
      heardAt = Date.now();
      // It was away: whatever was said meanwhile was not heard.
      if (opened === page) loadAnew();
      opened = page;
      tellLive();
    };
    own.onerror = () => {
      isJoining = false;
      tellLive();
    };
    const hear = (name, act) =>
      own.addEventListener(name, (event) => {
        heardAt = Date.now();
        if (event.lastEventId) tellMoment(event.lastEventId);
        act(JSON.parse(event.data));
        tellLive();
      });
    hear("beat", () => {});
    hear("stale", loadAnew);
    hear("changes", (changes) =>
      whenReleased(() => {
        for (const [name, html] of Object.entries(changes)) change(name, html);
        tellTimes();
      }));
    hear("trouble", ({ text }) => {
      trouble = text;
    });
    hear("over", () => {
      isOver = true;
      shut();
    });
  };
  const lookAfter = () => {
    // A connection that died without a word is never heard again, and one that was refused is not tried again.
    const isShut = stream?.readyState === EventSource.CLOSED && Date.now() - listenedAt > AGAIN_MS;
    if (isShut || (stream && Date.now() - heardAt > 2 * SILENT_MS)) listen();
    if (isStale && !document.hidden) loadAnew();
    tellLive();
  };
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(shut, HIDDEN_MS);
    else if (!stream && main().dataset.page) listen();
  });
  document.addEventListener("input", (event) => {
    typedAt = Date.now();
    const preview = event.target.closest("#form")?.querySelector(".preview");
    if (preview) preview.textContent = "counting …";
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
  document.addEventListener("htmx:beforeSwap", (event) => {
    const { elt, path } = event.detail.requestConfig;
    if (elt === document.body) {
      // A filter was sent while the page was loaded anew: what comes is of the address before.
      if (isPressed || path !== address()) event.detail.shouldSwap = false;
      else keep(true);
    } else if (isFollower(elt) && isHeld(elt)) {
      event.detail.shouldSwap = false;
      owed.add(elt);
    } else if (event.detail.target.id === "main") {
      keep(false);
    }
  });
  document.addEventListener("htmx:beforeCleanupElement", (event) => {
    // The new content stands before the old one: the focus goes straight from one to the other, and never to nothing.
    if (event.target.id === "main") putBack();
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id === "main") scrollTo(...scrolledTo);
    // The lines that follow what is typed are swapped as well: only a form that came itself takes the focus.
    const { id } = event.detail.target;
    if (id === "dialog-body") open("dialog");
    if (id !== "dialog-body" && id !== "form") return;
    const form = byId("form");
    (form?.querySelector("[aria-invalid]") || form?.querySelector("input:not([type=hidden]), select, textarea, .primary"))?.focus();
  });
  document.addEventListener("htmx:afterSettle", (event) => {
    if (event.detail.elt.id === "main" || event.detail.target.id === "main") fresh();
  });
  const refuse = (text) => {
    refusal = text;
    refusedUntil = Date.now() + 2 * AGAIN_MS;
    tellLive();
  };
  document.addEventListener("htmx:responseError", (event) => refuse(`the server answered ${event.detail.xhr.status}`));
  document.addEventListener("htmx:sendError", () => refuse("the server does not answer"));

  // Keys.
  const GO_MS = 2000;
  let wentAt = -GO_MS;
  const rows = () => [...main().querySelectorAll("tbody tr, [data-row]")];
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
      loadAnew();
    },
    Enter: () => main().querySelector(".at a[href]")?.click(),
  };
  const leave = (event) => {
    // What was typed and not sent is gone, what is shown stays: by itself a browser would empty a search field and send that.
    const field = event.target;
    event.preventDefault();
    if (isChanged(field) && "defaultValue" in field) field.value = field.defaultValue;
    field.blur();
  };
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
    const inRows = main().querySelector("tr.at, [data-row].at");
    const key = event.key === "ArrowDown" && inRows ? "j" : event.key === "ArrowUp" && inRows ? "k" : event.key;
    const act = acts[key];
    if (!act || (key === "Enter" && event.target.closest("a, button, summary"))) return;
    event.preventDefault();
    act();
  });

  // On a phone menus are wider than the page: where one is stands in view.
  const showPlace = () =>
    document.querySelectorAll("nav [aria-current]").forEach((link) => {
      const list = link.closest("ul");
      list.scrollLeft += link.getBoundingClientRect().left - list.getBoundingClientRect().left - 20;
    });
  const fresh = () => {
    isStale = false;
    showPlace();
    tellMoment(main().dataset.at, main().dataset.stamp);
    tellTimes();
    headraceCharts.drawAll();
    listen();
  };
  setInterval(() => {
    whenReleased(tellTimes);
    lookAfter();
  }, 1000);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => headraceCharts.recolour());
  fresh();
})();
