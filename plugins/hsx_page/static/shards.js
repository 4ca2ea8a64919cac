// The shards as a grid of cells: one stop for the Tab key, arrow keys move, Enter opens the task.
import { html, nothing } from "./vendor/lit-html.js";
import * as f from "./format.js";
import { airflow, follow } from "./frame.js";
import { badge, out } from "./parts.js";

export function shardGrid(run, now, ui) {
  const column = Object.fromEntries(run.shard_columns.map((name, i) => [name, i]));
  const at = (row, name) => row[column[name]];
  const chosen = Math.min(ui.shard ?? firstOfInterest(run.shards, at), run.shards.length - 1);
  return html`
    <div class="cells" role="group" aria-label="Shards; arrow keys move, Enter opens the task" @keydown=${(e) => move(e, ui)}
      @focusin=${(e) => choose(e, ui)} @mouseover=${(e) => choose(e, ui)}>
      ${run.shards.map((row, i) => html`<a
        class="cell ${at(row, "state").replace(" ", "-")} ${at(row, "tries") > 1 ? "again" : ""} ${i === chosen ? "chosen" : ""}"
        href=${airflow(taskPath(run, row, at))} data-i=${i} tabindex=${i === chosen ? 0 : -1} @click=${follow} @auxclick=${follow}
        aria-label=${inWords(row, at)} style=${at(row, "state") === "running" ? `--part: ${part(row, at)}%` : nothing}
        >${at(row, "state") === "failed" ? "✕" : ""}</a>`)}
    </div>
    ${details(run, run.shards[chosen], at, now)}`;
}

function firstOfInterest(rows, at) {
  const found = ["running", "failed", "retrying"].map((s) => rows.findIndex((r) => at(r, "state") === s)).find((i) => i >= 0);
  return found ?? 0;
}

function taskPath(run, row, at) {
  const task = at(row, "task_id");
  if (!task) return run.url;
  return `${run.url}/tasks/${encodeURIComponent(task)}/mapped/${at(row, "map_index")}`;
}

function part(row, at) {
  return at(row, "todo") ? Math.round((100 * at(row, "done")) / at(row, "todo")) : 0;
}

function inWords(row, at) {
  const tries = at(row, "tries") > 1 ? `, try ${at(row, "tries")}` : "";
  return `${at(row, "name")}: ${at(row, "state")}, ${at(row, "done")} of ${at(row, "todo")} samples${tries}`;
}

function details(run, row, at, now) {
  const state = at(row, "state");
  const facts = [
    `${f.count(at(row, "done"))} of ${f.count(at(row, "todo"))} samples`,
    `${f.count(at(row, "tokens"))} of ${f.count(at(row, "tokens_todo"))} tokens`,
    `${f.bytes(at(row, "bytes"))} of ${f.bytes(at(row, "bytes_todo"))}`,
    at(row, "tok_s") ? `${f.count(at(row, "tok_s"))} tok/s` : "",
    at(row, "eta") && state === "running" ? `${f.span(at(row, "eta"))} to go` : "",
    at(row, "seconds") !== null ? `took ${f.span(at(row, "seconds"))}` : at(row, "began") ? `began ${f.ago(at(row, "began"), now)}` : "",
    at(row, "at") && state === "running" ? `told ${f.ago(at(row, "at"), now)}` : "",
    at(row, "tries") > 1 ? `try ${at(row, "tries")}` : "",
    at(row, "host") ? `on ${at(row, "host")}` : "",
  ].filter(Boolean);
  return html`<div class="details" aria-live="polite"><p>${badge(state)} <b>${at(row, "name")}</b>
    ${at(row, "task_id") ? out(taskPath(run, row, at), "Open task") : nothing}</p>
    <p class="quiet">${facts.join(" · ")}</p>
    ${at(row, "reason") ? html`<p class="reason">${at(row, "reason")}</p>` : nothing}</div>`;
}

function choose(event, ui) {
  const cell = event.target.closest("a.cell");
  if (!cell) return;
  const i = Number(cell.dataset.i);
  if (i !== ui.shard) {
    ui.shard = i;
    ui.draw();
  }
}

function move(event, ui) {
  const cells = [...event.currentTarget.querySelectorAll("a.cell")];
  const i = cells.indexOf(event.target.closest("a.cell"));
  if (i < 0) return;
  const wide = cells.filter((c) => c.offsetTop === cells[0].offsetTop).length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide, Home: -i, End: cells.length - 1 - i }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const to = Math.max(0, Math.min(cells.length - 1, i + step));
  cells[to].tabIndex = 0;
  cells[to].focus();
}
