// Draws charts with uPlot in the page's colours; without scripts the sparklines stay.
"use strict";

const headraceCharts = (() => {
  const drawn = new Map();
  const tones = { bad: "--bad", warn: "--warn", good: "--good" };

  const colour = (name) => {
    // Resolves light-dark(), which canvas does not support.
    const probe = document.createElement("span");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };

  const short = (value) => {
    if (value === null || value === undefined) return "unknown";
    const size = Math.abs(value);
    if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
    if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
    if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
    return Number.isInteger(value) ? String(value) : value.toFixed(size < 10 ? 2 : 1);
  };

  const two = (value) => String(value).padStart(2, "0");
  const clock = (seconds, isLong) => {
    const at = new Date(seconds * 1000);
    const time = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
    return isLong ? `${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())} ${time}` : time;
  };
  const isKnown = (value) => value !== null && value !== undefined;
  const latest = (values) => values.findLast(isKnown) ?? null;
  // A value between two gaps has no line, so it is drawn as a point.
  const alone = (plot, at) => {
    const values = plot.data[at];
    const found = [...values.keys()].filter((index) => isKnown(values[index]) && !isKnown(values[index - 1]) && !isKnown(values[index + 1]));
    return found.length ? found : null;
  };

  const series = (line, index, kind) => {
    const stroke = colour(tones[line.tone] || `--chart-${(index % 4) + 1}`);
    // Without a pointer over the chart, the legend shows the latest values.
    const value = (plot, _, at, row) => short(row === null ? latest(plot.data[at]) : plot.data[at][row]);
    const one = { label: line.label, stroke, width: 1.5, value, points: { show: false, filter: alone, size: 5 } };
    if (kind === "bars") {
      one.points = { show: false };
      one.paths = uPlot.paths.bars({ size: [0.8, 40], gap: 1 });
      one.fill = stroke;
    }
    return one;
  };

  const options = (data, width) => {
    const hasLabels = data.labels.length > 0;
    const isLong = !hasLabels && data.xs.length > 1 && data.xs[data.xs.length - 1] - data.xs[0] > 90000;
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const along = (x, isWhole) => (hasLabels ? data.labels[x] ?? "" : clock(x, isWhole));
    return {
      width,
      height: 176,
      cursor: { y: false, points: { size: 6 } },
      legend: { live: true },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      scales: { x: { time: !hasLabels }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, grid: { show: false }, space: 70, size: 30, values: (_, ticks) => ticks.map((tick) => along(tick, isLong)) }, { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
      series: [{ label: hasLabels ? "Range" : "UTC", value: (_, at) => (at === null ? (hasLabels ? "last" : "latest") : along(at, true)) }, ...data.lines.map((line, index) => series(line, index, data.kind))],
    };
  };

  const draw = (figure) => {
    const source = figure.querySelector("[data-live]");
    const plot = figure.querySelector(".plot");
    if (!source || !plot || !window.uPlot) return;
    const data = JSON.parse(source.textContent);
    const rows = [data.xs, ...data.lines.map((line) => line.values)];
    const [what] = plot.getAttribute("aria-label").split("; ");
    const latestValues = data.lines.filter((line) => line.values.length).map((line) => `${line.label}: latest ${short(line.values.at(-1))}`);
    plot.setAttribute("aria-label", [what, ...latestValues].join("; "));
    const before = drawn.get(figure);
    if (before && before.series.length === rows.length) {
      before.setData(rows);
      return;
    }
    if (before) before.destroy();
    drawn.set(figure, new uPlot(options(data, plot.clientWidth || 300), rows, plot));
    figure.classList.add("drawn");
    sizes.observe(plot);
  };

  const drawAll = () => {
    for (const [figure, plot] of drawn) {
      if (!figure.isConnected) {
        plot.destroy();
        drawn.delete(figure);
      }
    }
    document.querySelectorAll("[data-chart]").forEach(draw);
  };

  const sizes = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const plot = drawn.get(target.closest("[data-chart]"));
      const width = Math.floor(contentRect.width);
      if (plot && width && plot.width !== width) plot.setSize({ width, height: plot.height });
    }
  });

  const recolour = () => {
    for (const [, plot] of drawn) plot.destroy();
    drawn.clear();
    drawAll();
  };

  return { draw, drawAll, recolour };
})();
