// Draws the charts of the page with uPlot. Texts of a job get into the page as text only, never as HTML.
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [1, 2], [12, 4]];
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];
const STEPS = Array.from({ length: 36 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));
const DAY = 86400, HEIGHT = 210, MAX_PRINT_WIDTH = 660;
const charts = new Map(); // by title: the chart and the names of its lines

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function formatNumber(value, digits = 3) {
  const size = Math.abs(value);
  if (value && (size >= 1e9 || size < 1e-4)) return value.toExponential(2).replace(/e(.)(\d)$/, "e$10$2"); // as Python
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
}

function formatValue(value, unit, digits) {
  if (value == null) return "–";
  if (!unit.startsWith("B")) return formatNumber(value, digits) + (unit === "%" ? " %" : "");
  let power = 0;
  for (; Math.abs(value) >= 999.5 && power < 4; power += 1) value /= 1000;
  return formatNumber(value, digits) + " " + ["", "k", "M", "G", "T"][power] + unit;
}

function formatTime(seconds, step) {
  if (step >= DAY) return seconds / DAY + " d";
  const whole = Math.round(seconds), two = (number) => String(number).padStart(2, "0");
  if (step >= 3600 || whole >= 7200) {
    const rest = step < 60 ? ":" + two(whole % 60) : "";
    return Math.floor(whole / 3600) + ":" + two(Math.floor((whole % 3600) / 60)) + rest + " h";
  }
  if (step >= 60) return seconds / 60 + " min";
  return step < 10 ? Number(seconds.toFixed(1)) + " s" : seconds + " s";
}

const colorOf = (role) => color(role) || color("soft");

// Returns the series and bands of uPlot for the lines of a chart, and its data with a common x axis.
function readChart(chart) {
  const series = [{ label: chart.end === null ? "step" : "time" }], bands = [], tables = chart.end === null ? [] : [[[0, chart.end]]];
  for (const table of chart.tables) {
    const columns = [table.xs];
    for (const line of table.lines) {
      const stroke = () => colorOf(line.role);
      series.push({ label: line.name, stroke, width: 1.7, dash: DASHES[line.dash % DASHES.length] });
      columns.push(line.ys);
      if (line.low) {
        for (let n = 0; n < 2; n += 1) series.push({ label: "", class: "bound", dash: [] });
        columns.push(line.high, line.low);
        bands.push({ series: [series.length - 2, series.length - 1], fill: () => colorOf(line.role) + "38" });
      }
    }
    tables.push(columns);
  }
  const last = (ys) => ys.findLast((y) => y != null);
  for (const each of series.slice(1)) {
    each.points = { size: 5, fill: () => color("paper"), ...(each.class ? { show: false } : {}) };
    each.value = (plot, y, number, index) => formatValue(index == null ? last(plot.data[number]) : y, chart.unit);
  }
  return { series, bands, data: uPlot.join(tables) };
}

function formatX(chart, x) {
  return chart.end === null ? formatNumber(x, 12) : formatTime(x, 1);
}

// Shows the values of all lines beside the pointer.
function makeTooltip(chart) {
  const box = document.createElement("div");
  box.className = "tooltip";
  const show = (plot) => {
    const { left, idx, idxs } = plot.cursor;
    box.hidden = idx == null || !plot.over.matches(":hover");
    if (box.hidden) return;
    const lines = plot.series.map((each, number) => [each, plot.data[number][idxs[number]]]).slice(1);
    const rows = lines.filter(([each, y]) => each.show && !each.class && y != null);
    const words = rows.map(([each, y]) => each.label + ": " + formatValue(y, chart.unit));
    box.textContent = [plot.series[0].label + ": " + formatX(chart, plot.data[0][idx]), ...words].join("\n");
    const width = plot.over.clientWidth;
    box.style.left = Math.max(0, left < width / 2 ? left + 12 : left - 12 - box.offsetWidth) + "px";
  };
  return { hooks: { init: (plot) => plot.over.append(box), setCursor: show } };
}

function makeOptions(chart, series, bands, width) {
  const axis = {
    stroke: () => color("soft"),
    font: '11px system-ui, "DejaVu Sans", sans-serif',
    grid: { stroke: () => color("line"), width: 1 },
    ticks: { stroke: () => color("line"), width: 1, size: 4 },
  };
  const time = (plot, ticks) => ticks.map((x) => formatTime(x, ticks[1] - ticks[0]));
  const step = (plot, ticks) => ticks.map((x) => formatX(chart, x));
  series[0].value = (plot, x, number, index) => (index == null ? "last" : formatX(chart, x));
  const isMetric = chart.end === null;
  return {
    width,
    height: HEIGHT,
    series,
    bands,
    plugins: [makeTooltip(chart)],
    cursor: {
      sync: { key: isMetric ? "steps" : "time", scales: ["x", null], setSeries: false },
      drag: { x: true, y: false, dist: 4 },
      y: false,
      points: { size: 6 },
    },
    legend: { markers: { width: 2, dash: (plot, number) => (series[number].dash.length ? "dashed" : "solid") } },
    scales: {
      x: { time: false },
      y: {
        range: (plot, low, high) => {
          if (low === null) return [0, 1];
          const margin = 0.06 * (high - low || Math.abs(high) || 1);
          return [isMetric && low !== 0 ? low - margin : Math.min(0, low), high + margin];
        },
      },
    },
    axes: [
      { ...axis, size: 30, space: 60, ...(isMetric ? { label: "step", labelSize: 16, labelFont: axis.font } : {}), values: isMetric ? step : time, incrs: isMetric ? STEPS : [...SECONDS, ...STEPS.map((n) => n * DAY)] },
      { ...axis, size: 66, values: (plot, ticks) => ticks.map((y) => formatValue(y, chart.unit, 6)) },
    ],
  };
}

// Draws each chart, or updates it with new data; keeps the range to which it is zoomed.
function drawCharts() {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = JSON.parse(figure.dataset.chart);
    const { series, bands, data } = readChart(chart);
    const names = JSON.stringify(series.map((each) => each.label));
    const old = charts.get(chart.title);
    const range = old && zoomedRange(old.plot);
    if (old && old.names === names) {
      figure.append(old.plot.root);
      old.plot.setData(data, !range);
      if (range) old.plot.setScale("x", range);
    } else {
      if (old) old.plot.destroy();
      const plot = new uPlot(makeOptions(chart, series, bands, figure.clientWidth), data, figure);
      if (range) plot.setScale("x", range);
      charts.set(chart.title, { plot, names });
    }
  }
}

function zoomedRange(plot) {
  const { min, max } = plot.scales.x, xs = plot.data[0];
  return min > xs[0] || max < xs[xs.length - 1] ? { min, max } : null;
}

function resizeCharts(limit = Infinity) {
  for (const { plot } of charts.values()) {
    if (!plot.root.isConnected) continue;
    plot.setSize({ width: Math.min(plot.root.parentElement.clientWidth, limit), height: HEIGHT });
    plot.redraw(false);
  }
}

drawCharts();
addEventListener("resize", () => resizeCharts());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => resizeCharts());
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  resizeCharts(MAX_PRINT_WIDTH);
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  resizeCharts();
});
