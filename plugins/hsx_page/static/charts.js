// The two charts. Chart.js draws them; colours come from the page's own variables, so that they follow the theme.
import * as f from "./format.js";

const charts = new Map();
const NICE_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200];

function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["--text", "--quiet", "--line", "--busy", "--good", "--card"].map((n) => [n.slice(2), style.getPropertyValue(n).trim()]));
}

function draw(id, key, make) {
  const canvas = document.getElementById(id);
  const old = charts.get(id);
  if (!canvas || !window.Chart) {
    if (old) old.chart.destroy();
    charts.delete(id);
    return;
  }
  if (old && old.canvas === canvas && old.key === key) return;
  if (old) old.chart.destroy();
  charts.set(id, { canvas, key, chart: new window.Chart(canvas, make(colours())) });
}

export function drawCharts(doc) {
  const theme = document.documentElement.dataset.theme;
  const rates = doc.run?.rates;
  const benches = doc.run?.benchmarks ?? [];
  for (const id of charts.keys()) if (!document.getElementById(id)) draw(id, "", null); // its section is gone
  if (rates) draw("rates-chart", JSON.stringify([theme, rates]), (c) => ratesChart(rates, c));
  benches.forEach((bench, i) => draw(`bench-chart-${i}`, JSON.stringify([theme, bench]), (c) => benchChart(bench, c)));
}

function common(c) {
  return {
    animation: false,
    maintainAspectRatio: false,
    interaction: { mode: "index", intersect: false, axis: "x" },
    plugins: {
      legend: { display: false },
      tooltip: { backgroundColor: c.card, titleColor: c.text, bodyColor: c.text, borderColor: c.line, borderWidth: 1, displayColors: false },
    },
  };
}

function ratesChart(rates, c) {
  const points = rates.tok_s.map((y, i) => ({ x: rates.from + (i + 0.5) * rates.step, y }));
  const options = common(c);
  options.plugins.tooltip.callbacks = {
    title: (items) => f.clock(items[0].parsed.x, true),
    label: (item) => `${f.count(item.parsed.y)} tokens/s, ${f.bytes(rates.bytes_s[item.dataIndex])}/s`,
  };
  const step = NICE_S.find((s) => s >= (rates.step * rates.tok_s.length) / 6) ?? 86400;
  const ticks = { color: c.quiet, font: { size: 11 } };
  options.scales = {
    x: { type: "linear", min: rates.from, max: rates.from + rates.step * rates.tok_s.length, grid: { color: c.line },
         ticks: { ...ticks, stepSize: step, maxRotation: 0, includeBounds: false, callback: (v) => f.clock(v, step < 60) } },
    y: { beginAtZero: true, grid: { color: c.line }, border: { display: false }, ticks: { ...ticks, maxTicksLimit: 5, callback: (v) => f.short(v) } },
  };
  return {
    type: "line",
    data: { datasets: [{ data: points, borderColor: c.busy, backgroundColor: `color-mix(in srgb, ${c.busy} 15%, transparent)`, fill: true,
                         borderWidth: 1.5, pointRadius: points.length < 3 ? 3 : 0, stepped: "middle" }] },
    options,
  };
}

function benchChart(bench, c) {
  const names = Object.keys((bench.after ?? bench.before).loads ?? {});
  const values = (when) => names.map((n) => bench[when]?.loads?.[n]?.output_tok_s ?? null);
  const options = common(c);
  options.indexAxis = "y";
  options.interaction = { mode: "nearest", intersect: true };
  options.plugins.tooltip.callbacks = { label: (item) => `${item.dataset.label}: ${item.parsed.x.toFixed(1)} output tok/s` };
  options.plugins.legend = { display: true, position: "bottom", align: "start", labels: { color: c.text, boxWidth: 10, boxHeight: 10, font: { size: 11 } } };
  options.scales = {
    x: { beginAtZero: true, grid: { color: c.line }, ticks: { color: c.quiet, font: { size: 11 }, maxTicksLimit: 6 } },
    y: { grid: { display: false }, ticks: { color: c.text, font: { size: 11 } } },
  };
  const bars = { maxBarThickness: 14, borderWidth: 0 };
  const datasets = [{ ...bars, label: "before", data: values("before"), backgroundColor: c.quiet }];
  if (bench.after) datasets.push({ ...bars, label: "after", data: values("after"), backgroundColor: c.good });
  return { type: "bar", data: { labels: names, datasets }, options };
}
