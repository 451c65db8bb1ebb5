// Draws charts with uPlot in the page's colours; without scripts the sparklines stay.
// Charts of one board share the crosshair, the marks and the selection of a time.
"use strict";

const headraceCharts = (() => {
  const drawn = new Map();
  const TONES = { bad: "--bad", warn: "--warn", good: "--good", muted: "--muted" };
  const PERCENTILES = { p50: "--chart-1", p90: "--chart-6", p99: "--chart-2" };
  // Distances of ticks, by unit: whole values get whole ticks, times those of clocks.
  const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const ROUND = Array.from({ length: 20 }, (_, power) => [1, 2, 5].map((step) => Number(`${step}e${power - 6}`))).flat();
  const WHOLE = ROUND.filter((step) => step >= 1);
  const [MINUTE_S, HOUR_S, DAY_S] = [60, 3600, 86400];
  const CLOCK = [
    ...[10, 15, 30],
    ...[1, 2, 5, 10, 15, 30].map((step) => step * MINUTE_S),
    ...[1, 2, 3, 6, 12].map((step) => step * HOUR_S),
    ...[1, 2, 5, 10, 20, 50, 100].map((step) => step * DAY_S),
  ];
  const TIMES = [...ROUND.filter((step) => step < 10), ...CLOCK];
  const COLOURS = 8;
  const HEIGHT = 176;
  const BOARD_HEIGHT = 150;
  const NEAR_PX = 7;
  const SIGN_PX = 9;

  // Resolves light-dark(), which canvas does not support.
  let resolved = new Map();
  const colour = (name) => {
    if (!resolved.has(name)) {
      const probe = document.createElement("span");
      probe.style.color = `var(${name})`;
      document.body.append(probe);
      resolved.set(name, getComputedStyle(probe).color);
      probe.remove();
    }
    return resolved.get(name);
  };
  // The sign of a kind of marks as its legend has it: a color, and points from 0 to 1.
  let signs = new Map();
  const signOf = (kind) => {
    if (!signs.has(kind)) {
      const probe = document.createElement("i");
      probe.className = `kind ${kind}`;
      document.body.append(probe);
      const { backgroundColor, clipPath } = getComputedStyle(probe);
      const numbers = [...clipPath.matchAll(/([\d.]+)(?:%|px)/g)].map(([, share]) => Number(share) / 100);
      signs.set(kind, { color: backgroundColor, points: numbers.flatMap((x, at) => (at % 2 ? [] : [[x, numbers[at + 1]]])) });
      probe.remove();
    }
    return signs.get(kind);
  };
  const faded = (text, share) => text.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);

  const digits = (value) => String(Number(value.toFixed(Math.abs(value) < 10 ? 2 : 1)));
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e9) return `${digits(value / 1e9)}G`;
    if (size >= 1e6) return `${digits(value / 1e6)}M`;
    if (size >= 1e4) return `${digits(value / 1e3)}k`;
    return digits(Math.abs(value) >= 100 ? Math.round(value) : value);
  };
  const seconds = (value) => {
    if (!value) return "0";
    if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
    if (value < 1) return `${digits(Number((value * 1e3).toPrecision(3)))} ms`;
    if (value < 120) return `${digits(Number(value.toPrecision(3)))} s`;
    return value < 7200 ? `${digits(Number((value / 60).toPrecision(3)))} min` : `${digits(Number((value / 3600).toPrecision(3)))} h`;
  };
  // A tick in the unit of its axis, which follows from the distance of ticks.
  const timeTick = (value, each) => {
    if (!value || each < 1) return seconds(value);
    const [size, unit] = [[DAY_S, "d"], [HOUR_S, "h"], [MINUTE_S, "min"], [1, "s"]].find(([least]) => each >= least);
    return `${digits(value / size)} ${unit}`;
  };
  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let [left, unit] = [value, 0];
    for (; left >= 1024 && unit < units.length - 1; unit += 1) left /= 1024;
    return `${left >= 100 || !unit ? Math.round(left) : digits(Number(left.toPrecision(3)))} ${units[unit]}`;
  };
  const written = ({ unit, top }) => (value) => {
    if (value === null || value === undefined) return "no data";
    if (value === top) return `≥ ${seconds(value)}`;
    if (unit === "s") return seconds(value);
    return unit === "bytes/s" ? `${bytes(value)}/s` : short(value);
  };

  const two = (value) => String(value).padStart(2, "0");
  const day = (at) => `${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())}`;
  const clock = (time, hasDay) => {
    const at = new Date(time * 1000);
    const hours = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
    return hasDay ? `${day(at)} ${hours}` : hours;
  };
  const isKnown = (value) => value !== null && value !== undefined;
  const latest = (values) => values.findLast(isKnown) ?? null;
  // A value between two gaps has no line, so it is drawn as a point.
  const alone = (plot, at) => {
    const values = plot.data[at];
    const found = [...values.keys()].filter((index) => isKnown(values[index]) && !isKnown(values[index - 1]) && !isKnown(values[index + 1]));
    return found.length ? found : null;
  };

  // The rows that uPlot draws: sums for stacks, with the end of the last step as one more x.
  const rowsOf = (data) => {
    if (data.kind === "heat") return [data.xs, data.counts.map((counts) => counts && counts.reduce((sum, n) => sum + n, 0))];
    const rows = data.lines.map((line) => line.values);
    if (data.kind !== "stack") return [data.xs, ...rows];
    const sums = data.xs.map(() => 0);
    const stacked = rows.map((values) => values.map((value, x) => (isKnown(value) ? (sums[x] += value) : null)));
    const end = data.xs.length ? [data.xs[data.xs.length - 1] + data.step] : [];
    return [[...data.xs, ...end], ...stacked.map((values) => [...values, ...(end.length ? [values[values.length - 1]] : [])])];
  };

  const strokeOf = (line, index) => {
    if (line.label in PERCENTILES) return colour(PERCENTILES[line.label]);
    const place = line.label.startsWith("other") ? "--muted" : `--chart-${line.color || (index % COLOURS) + 1}`;
    return colour(TONES[line.tone] || place);
  };
  const series = (state, line, index) => {
    const { data } = state;
    const stroke = strokeOf(line, index);
    // Without a pointer over the chart, the legend shows the latest values.
    const value = (plot, _, at, row) => {
      const values = state.data.lines[at - 1]?.values ?? [];
      const shown = row === null ? latest(values) : values[Math.min(row, values.length - 1)];
      // Counts are scaled to whole minutes, so digits after the point would be noise.
      return written(data)(data.unit.endsWith("/min") && shown >= 1 ? Math.round(shown) : shown);
    };
    const one = { label: line.label, stroke, width: 1.5, value, points: { show: false, filter: alone, size: 5 } };
    if (data.kind === "bars") {
      one.points = { show: false };
      one.paths = uPlot.paths.bars({ size: [0.8, 40], gap: 1 });
      one.fill = stroke;
    }
    if (data.kind === "stack") {
      one.points = { show: false };
      one.width = 0;
      one.paths = uPlot.paths.stepped({ align: 1 });
      one.fill = faded(stroke, 0.82);
    }
    return one;
  };

  // A heat map: a column for each step, a row for each bucket, darker with more values.
  const heatSeries = (state) => ({
    label: "values",
    stroke: colour("--chart-1"),
    paths: () => null,
    points: { show: false },
    value: (plot, _, at, row) => {
      const { counts, bounds } = state.data;
      const index = row === null ? counts.findLastIndex(Boolean) : row;
      const column = counts[index];
      const total = column ? column.reduce((sum, n) => sum + n, 0) : 0;
      if (!column || !total) return column ? "0" : "no data";
      const most = column.indexOf(Math.max(...column));
      const within = most < bounds.length ? `up to ${seconds(bounds[most])}` : `over ${seconds(bounds[bounds.length - 1])}`;
      return `${short(total)}, most ${within}`;
    },
  });
  const drawHeat = (state) => (plot) => {
    const { xs, counts, step } = state.data;
    const most = Math.max(1, ...counts.flatMap((column) => column ?? []));
    const { ctx } = plot;
    ctx.save();
    ctx.fillStyle = colour("--chart-1");
    counts.forEach((column, x) => {
      if (!column) return;
      const left = Math.round(plot.valToPos(xs[x], "x", true));
      const width = Math.max(1, Math.round(plot.valToPos(xs[x] + step, "x", true)) - left - (xs.length < 100 ? 1 : 0));
      column.forEach((count, row) => {
        if (!count) return;
        const top = Math.round(plot.valToPos(row + 1, "y", true));
        ctx.globalAlpha = 0.15 + (0.85 * Math.log1p(count)) / Math.log1p(most);
        ctx.fillRect(left, top, width, Math.round(plot.valToPos(row, "y", true)) - top - 1);
      });
    });
    ctx.restore();
  };

  // Marks of the board: deploys, outages, alerts and changes of the plan.
  const marksOf = (state) => {
    const text = state.figure.closest("[data-board]")?.querySelector("[data-live='board:marks']")?.textContent ?? "[]";
    if (state.marksText !== text) [state.marksText, state.marks] = [text, JSON.parse(text)];
    return state.marks;
  };
  const drawMarks = (state) => (plot) => {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const mark of marksOf(state)) {
      const left = Math.round(plot.valToPos(mark.at, "x", true)) + 0.5;
      const { color, points } = signOf(mark.kind);
      ctx.fillStyle = ctx.strokeStyle = color;
      if (mark.until) {
        ctx.globalAlpha = 0.14;
        ctx.fillRect(left, bbox.top, Math.max(ratio, plot.valToPos(mark.until, "x", true) - left), bbox.height);
        ctx.globalAlpha = 1;
      }
      ctx.lineWidth = ratio;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      const size = SIGN_PX * ratio;
      ctx.beginPath();
      for (const [x, y] of points) ctx.lineTo(left + (x - 0.5) * size, bbox.top + y * size);
      ctx.fill();
    }
    ctx.restore();
  };
  const showTip = (state) => (plot) => {
    const { left } = plot.cursor;
    const isHere = left >= 0 && plot.over.matches(":hover");
    const near = (mark) => {
      const from = plot.valToPos(mark.at, "x");
      return left >= from - NEAR_PX && left <= (mark.until ? plot.valToPos(mark.until, "x") : from) + NEAR_PX;
    };
    const found = isHere ? marksOf(state).filter(near).slice(-3) : [];
    const tip = state.tip;
    tip.hidden = !found.length;
    if (!found.length) return;
    const hasDay = isLongOf(state.data);
    tip.textContent = found.map((mark) => `${clock(mark.at, hasDay)} ${mark.name}: ${mark.text}`).join("\n");
    const isRight = left > plot.over.clientWidth / 2;
    tip.style.left = isRight ? "" : `${left + 10}px`;
    tip.style.right = isRight ? `${plot.over.clientWidth - left + 10}px` : "";
  };

  // A selection zooms; on charts with a list it offers the list of that time instead.
  const moment = (time) => new Date(time * 1000).toISOString().replace(/(:00)?\.000Z$/, "Z");
  const urlOf = (address, from, to) => {
    const url = new URL(address, location.href);
    for (const name of ["range", "before", "cursor"]) url.searchParams.delete(name);
    url.searchParams.set("from", moment(from));
    url.searchParams.set("to", moment(to));
    return url.href;
  };
  const select = (state) => (plot) => {
    const { left, width } = plot.select;
    if (width < 4) return;
    const step = state.data.step || 1;
    const from = Math.floor(plot.posToVal(left, "x") / step) * step;
    const to = Math.max(from + step, Math.ceil(plot.posToVal(left + width, "x") / step) * step);
    const { brush } = state.figure.dataset;
    if (!brush) {
      location.assign(urlOf(location.href, from, to));
      return;
    }
    const offer = state.figure.querySelector(".brushed");
    const [path, name] = brush.split("|");
    const links = [[urlOf(path, from, to), `Show ${name}`]];
    if (state.figure.closest("[data-board]")) links.push([urlOf(location.href, from, to), "Zoom in"]);
    offer.replaceChildren(`${clock(from)} to ${clock(to)} UTC `);
    for (const [href, text] of links) {
      const link = document.createElement("a");
      [link.href, link.textContent, link.className] = [href, text, "button"];
      offer.append(link, " ");
    }
    offer.hidden = false;
  };

  const isLongOf = ({ xs }) => xs.length > 1 && xs[xs.length - 1] - xs[0] > 90000;
  const indexAt = (state) => (plot, _, row, x) => {
    const { xs, step } = state.data;
    if (row === null || row === undefined) return row;
    const found = step && xs[row] > x ? row - 1 : row;
    return Math.max(0, Math.min(found, xs.length - 1));
  };
  const boundText = (bound) => timeTick(bound, CLOCK.findLast((step) => bound % step === 0) ?? 0);
  const yAxis = (state, axis) => {
    const { data } = state;
    if (data.kind !== "heat") {
      const isWhole = data.lines.every((line) => line.values.every((value) => !isKnown(value) || Number.isInteger(value)));
      const [incrs, text] = { s: [TIMES, timeTick], "bytes/s": [BINARY, bytes] }[data.unit] ?? [isWhole ? WHOLE : ROUND, short];
      return { ...axis, size: 58, incrs, values: (_, ticks, __, ___, each) => ticks.map((tick) => text(tick, each)) };
    }
    const rows = data.bounds.length;
    const every = Math.max(1, Math.ceil(rows / 5));
    const splits = data.bounds.map((_, index) => index + 1).filter((row) => (rows - row) % every === 0);
    return { ...axis, grid: { show: false }, size: 58, splits: () => splits, values: (_, ticks) => ticks.map((row) => boundText(data.bounds[row - 1])) };
  };
  const yRange = ({ kind, bounds }) => (_, low, high) => {
    if (kind === "heat") return [0, bounds.length + 1];
    return [Math.min(0, low ?? 0), high > 0 ? high * 1.1 : 1];
  };

  const options = (state, width) => {
    const { data, figure } = state;
    const hasLabels = data.labels.length > 0;
    const isLong = !hasLabels && isLongOf(data);
    const isOnBoard = Boolean(figure.closest("[data-board]"));
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: colour("--muted"), font, grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const along = (x, hasDay) => (hasLabels ? data.labels[x] ?? "" : clock(x, hasDay));
    const tick = (x, each) => (!hasLabels && each >= DAY_S ? day(new Date(x * 1000)) : along(x, isLong));
    // Whole bars, and whole steps.
    const isOfBars = hasLabels && data.kind === "bars";
    const edges = () => (isOfBars ? [-0.5, data.xs.length - 0.5] : [data.xs[0], data.xs[data.xs.length - 1] + data.step]);
    const lines = data.kind === "heat" ? [heatSeries(state)] : data.lines.map((line, index) => series(state, line, index));
    const bands = data.kind === "stack" ? data.lines.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })) : [];
    return {
      width,
      height: isOnBoard ? BOARD_HEIGHT : HEIGHT,
      padding: [8, 18, 0, 0],
      bands,
      cursor: {
        y: false,
        points: { size: 6, show: data.kind === "line" },
        drag: { x: isOnBoard || Boolean(figure.dataset.brush), y: false, setScale: false },
        dataIdx: indexAt(state),
        sync: isOnBoard ? { key: "board", setSeries: false, scales: ["x", null], filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } } : undefined,
      },
      legend: { live: true },
      tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "Etc/UTC"),
      scales: { x: { time: !hasLabels, ...((data.step || isOfBars) && data.xs.length ? { range: edges } : {}) }, y: { range: yRange(data) } },
      axes: [{ ...axis, grid: { show: false }, space: isLong ? 90 : 60, size: 24, ...(data.step ? { incrs: CLOCK.filter((step) => step >= MINUTE_S) } : {}), values: (_, ticks, __, ___, each) => ticks.map((x) => tick(x, each)) }, yAxis(state, { ...axis, space: 28 })],
      series: [{ label: hasLabels ? "Range" : "UTC", value: (_, at) => (at === null ? (hasLabels ? "last" : "latest") : along(at, true)) }, ...lines],
      hooks: { drawClear: data.kind === "heat" ? [drawHeat(state)] : [], draw: [drawMarks(state)], setCursor: [showTip(state)], setSelect: [select(state)] },
    };
  };

  const describe = (plot, data) => {
    const [what] = plot.getAttribute("aria-label").split("; ");
    const values = data.lines.filter((line) => line.values.length).map((line) => `${line.label}: latest ${written(data)(latest(line.values))}`);
    plot.setAttribute("aria-label", [what, ...values].join("; "));
  };
  const shapeOf = (data) => JSON.stringify([data.kind, data.lines.map((line) => [line.label, line.tone, line.color]), data.bounds, data.step, data.unit]);

  const draw = (figure) => {
    const source = figure.querySelector("[data-live]");
    const place = figure.querySelector(".plot");
    if (!source || !place || !window.uPlot) return;
    const data = JSON.parse(source.textContent);
    describe(place, data);
    const before = drawn.get(figure);
    const shape = shapeOf(data);
    if (before?.shape === shape) {
      before.data = data;
      before.plot.setData(rowsOf(data));
      return;
    }
    before?.plot.destroy();
    const tip = document.createElement("p");
    [tip.className, tip.hidden] = ["tip", true];
    const state = { figure, data, shape, tip, marks: [], marksText: "" };
    state.plot = new uPlot(options(state, place.clientWidth || 300), rowsOf(data), place);
    state.plot.over.append(tip);
    drawn.set(figure, state);
    figure.classList.add("drawn");
    sizes.observe(place);
  };

  const drawAll = () => {
    for (const [figure, { plot }] of drawn) {
      if (!figure.isConnected) {
        plot.destroy();
        drawn.delete(figure);
      }
    }
    document.querySelectorAll("[data-chart]").forEach(draw);
  };

  const sizes = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const plot = drawn.get(target.closest("[data-chart]"))?.plot;
      const width = Math.floor(contentRect.width);
      if (plot && width && plot.width !== width) plot.setSize({ width, height: plot.height });
    }
  });

  const recolour = () => {
    resolved = new Map();
    signs = new Map();
    for (const [, { plot }] of drawn) plot.destroy();
    drawn.clear();
    drawAll();
  };

  return { draw, drawAll, recolour };
})();
