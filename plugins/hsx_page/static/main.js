// Reads one document, draws all of it, and reads it again: every few seconds while a run goes on, else calmly.
import { html, nothing, render } from "./vendor/lit-html.js";
import { benchmarkSections, datasetSection, hostSection, runsSection } from "./around.js";
import { drawCharts } from "./charts.js";
import { ago } from "./format.js";
import { runPath } from "./parts.js";
import { runSections, stepSection } from "./run.js";

const LIVE_MS = 4000;
const CALM_MS = 30000;
const root = document.getElementById("page");
root.replaceChildren();
const ui = { doc: null, read: 0, trouble: "", shard: null, timer: 0, draw };

function draw() {
  const doc = ui.doc;
  if (!doc) {
    render(html`<p class=${ui.trouble ? "trouble" : "quiet"} role="status">${ui.trouble || "Reading Airflow's database …"}</p>`, root);
    return;
  }
  // what has passed since the answer came, on the server's clock
  const now = doc.now + (Date.now() - ui.read) / 1000;
  const shown = { ...doc, now };
  const known = chooser(doc);
  const several = new Set(known.map((r) => r.dag_id)).size > 1; // nights of two DAGs have the same names
  render(html`
    <header class="top">
      <h1>Hidden states</h1>
      ${doc.runs.length ? html`<label>Run <select @change=${(e) => { window.location.search = e.target.value; }}>
        ${known.map((r) => html`<option value=${runPath(r)} ?selected=${r.run_id === doc.run?.run_id && r.dag_id === doc.run?.dag_id}>${r.run_id}${several ? ` · ${r.dag_id}` : ""}${r.active ? ` (${r.state === "queued" ? "queued" : "goes on"})` : ""}</option>`)}
      </select></label>` : nothing}
      <p class="quiet" id="read">${doc.run?.active ? html`<span class="live" aria-hidden="true"></span> live, ` : nothing}read ${ago(doc.now, now)}</p>
    </header>
    ${ui.trouble ? html`<p class="trouble" role="alert">${ui.trouble}</p>` : nothing}
    ${doc.unread.length ? html`<div class="note" id="unread"><p>What tasks published is not all readable; the rest is shown:</p>
      <ul>${doc.unread.map((line) => html`<li class="break">${line}</li>`)}</ul></div>` : nothing}
    <div class="columns"><div class="wide">${part("run", () => runSections(shown, ui))}</div>
      <div class="narrow">${part("hosts", () => hostSection(shown))}${part("steps", () => stepSection(shown))}${part("benchmarks", () => benchmarkSections(doc.run))}</div></div>
    ${part("data sets", () => datasetSection(shown))}
    ${part("runs", () => runsSection(shown))}`, root);
  try {
    drawCharts(doc);
  } catch (error) {
    console.error(error);
  }
}

// one odd value costs its section alone
function part(name, make) {
  try {
    return make();
  } catch (error) {
    console.error(error);
    return html`<section><p class="trouble">The part "${name}" can't be shown: ${String(error)}</p></section>`;
  }
}

function chooser(doc) {
  const known = doc.runs.some((r) => r.run_id === doc.run?.run_id && r.dag_id === doc.run?.dag_id);
  return known || !doc.run ? doc.runs : [doc.run, ...doc.runs];
}

async function read() {
  window.clearTimeout(ui.timer);
  try {
    const answer = await fetch(`api/overview${window.location.search}`, { headers: { Accept: "application/json" } });
    if (answer.status === 401 || answer.status === 403) {
      ui.trouble = answer.status === 401 ? "Your login has ended: reload Airflow to log in again." : "You may not read these DAGs: ask for read access to them.";
    } else if (!answer.ok) {
      const body = await answer.json().catch(() => ({}));
      ui.trouble = `Airflow answers ${answer.status}${body.detail ? `: ${body.detail}` : ""}. Trying again.`;
    } else {
      ui.doc = await answer.json();
      ui.read = Date.now();
      ui.trouble = "";
    }
  } catch {
    ui.trouble = "Airflow does not answer. What you see is old; trying again.";
  }
  draw();
  if (ui.doc && !document.documentElement.dataset.ready) {
    document.documentElement.dataset.ready = "true";
    performance.mark("hsx-ready");
  }
  schedule();
}

function schedule() {
  window.clearTimeout(ui.timer);
  if (!document.hidden) ui.timer = window.setTimeout(read, ui.doc?.run?.active && !ui.trouble ? LIVE_MS : CALM_MS);
}

document.addEventListener("visibilitychange", () => (document.hidden ? window.clearTimeout(ui.timer) : read()));
window.addEventListener("themechange", () => draw());
window.addEventListener("load", () => ui.doc && drawCharts(ui.doc)); // the chart library may come after the first answer
window.setInterval(() => ui.doc && !document.hidden && draw(), 1000);
read();
