// The chosen run: figures, steps, shards, rates, failures, a dry run's answer.
import { html, nothing } from "./vendor/lit-html.js";
import * as f from "./format.js";
import { badge, figure, MARK, out, section, tone } from "./parts.js";
import { shardGrid } from "./shards.js";

export function runSections(doc, ui) {
  const run = doc.run;
  if (!run) return section("run", "Run", "", html`<p class="quiet">No run of hsx yet. Trigger <code>${doc.dags[0] ?? "hsx_extraction"}</code>; a dry run tells what it would do and touches nothing.</p>`);
  const title = run.active ? "Current run" : "Run";
  return html`
    ${section("run", title, out(run.url, "Open in Airflow"), html`
      <p class="lead">${badge(run.state)} <b class="break">${run.run_id}</b>
        <span class="quiet">${[run.profile && `profile ${run.profile}`, run.dry_run && "dry run", run.began && `began ${f.moment(run.began)}`,
          run.began && `${run.active ? "for" : "took"} ${f.span((run.ended ?? doc.now) - run.began)}`].filter(Boolean).join(" · ")}</span></p>
      ${run.skipped_because && !run.dry_run ? html`<p class="note">${run.skipped_because}</p>` : nothing}
      ${figures(run)}
    `)}
    ${run.foretold && (run.dry_run || !run.shards.length) ? foretold(run) : nothing}
    ${run.shards.length ? section("shards", "Shards", legend(run.totals.states), shardGrid(run, doc.now, ui)) : nothing}
    ${run.rates ? section("rates", "Rate over time", html`<span class="quiet">tokens/s, all shards together</span>`, html`
      <div class="chart"><canvas id="rates-chart" role="img" aria-label=${ratesInWords(run)}></canvas></div>`) : nothing}
    ${failures(run)}
  `;
}

function figures(run) {
  const t = run.totals;
  if (!t) return nothing;
  const trouble = (t.states.failed ?? 0) + (t.states.retrying ?? 0);
  return html`
    <progress max=${t.samples_todo || 1} value=${t.samples} aria-label="samples of this run"></progress>
    <dl class="figures">
      ${figure("Samples", f.count(t.samples), `of ${f.count(t.samples_todo)}, ${f.percent(t.samples, t.samples_todo)}`)}
      ${figure("Tokens", f.short(t.tokens), `of ${f.short(t.tokens_todo)}`)}
      ${figure("Written", f.bytes(t.bytes), `of ${f.bytes(t.bytes_todo)}`)}
      ${figure("Rate", t.tok_s === null ? f.nothing : `${f.count(t.tok_s)} tok/s`, t.pace_tok_s && t.samples ? `${f.count(t.pace_tok_s)} tok/s on the whole` : "")}
      ${figure("Time to go", run.active ? f.span(t.eta_s) : f.nothing, run.active && t.eta_s ? "until the last shard" : "")}
      ${figure("Failed shards", f.count(t.states.failed ?? 0), t.states.retrying ? `${t.states.retrying} will be tried again` : "", trouble ? "bad" : "")}
    </dl>`;
}

function legend(states) {
  return html`<ul class="legend">${["done", "running", "waiting", "retrying", "failed", "not run"].filter((s) => states[s]).map((s) => html`
    <li><span class="cell ${s.replace(" ", "-")}" aria-hidden="true">${s === "failed" ? "✕" : ""}</span>${f.count(states[s])} ${s}</li>`)}</ul>`;
}

export function stepSection(doc) {
  const run = doc.run;
  if (!run?.steps.length) return nothing;
  const done = run.steps.filter((s) => s.state === "success").length;
  return section("steps", "Steps", html`<span class="quiet">${done} of ${run.steps.length} done</span>`, html`
    <ol class="steps">${run.steps.map((s) => html`
      <li class=${tone(s.state)}>
        <span class="mark" aria-hidden="true">${MARK[s.state] ?? "○"}</span>
        <span class="name">${out(s.url, s.task_id.replaceAll("_", " ").replaceAll(".", " · "), `${s.task_id}: ${s.state || "waiting"}`)}</span>
        <span class="took">${s.began && s.state !== "skipped" && s.state !== "upstream_failed" ? f.span((s.ended ?? doc.now) - s.began) : ""}</span>
        ${s.says || s.count !== null || s.tries > 1 ? html`<span class="says">${s.count === null ? s.says : `${f.count(s.done)} of ${f.count(s.count)} shards`}${s.tries > 1 && s.count === null ? html` <em>try ${s.tries}</em>` : nothing}</span>` : nothing}
      </li>`)}</ol>`);
}

function foretold(run) {
  const t = run.foretold;
  const work = t.samples > 0;
  return section("foretold", run.dry_run ? "A dry run: what would happen" : work ? "What would happen" : "Nothing to do", "", html`
    <ul class="answer">${t.lines.map((line) => html`<li>${line}</li>`)}</ul>
    ${work ? html`<dl class="figures">
      ${figure("Samples", f.count(t.samples), `in ${f.many(t.shards, "shard")}; ${f.count(t.done)} done before`)}
      ${figure("Tokens", f.count(t.tokens))}
      ${figure("Needs", f.bytes(t.needed_bytes), `${f.bytes(t.free_bytes)} free, ${f.bytes(t.reserve_bytes)} stay free`, t.verdict === "fits" ? "" : "bad")}
      ${figure("Extraction", f.span(t.extract_s), t.tok_s ? `at the measured ${f.count(t.tok_s)} tok/s` : "no rate measured yet")}
      ${figure("Production down", f.span(t.down_s), t.down_s ? "stop to serving again" : "not measured yet")}
      ${figure("Would be deleted", f.bytes(t.deletes.reduce((sum, d) => sum + d.bytes, 0)), `${f.many(t.deletes.length, "folder")}, policy ${t.policy}`, t.deletes.length ? "bad" : "")}
    </dl>` : nothing}
    ${t.deletes.length ? html`<div class="scroll"><table><thead><tr><th>Old states that would go</th><th class="n">Files</th><th class="n">Size</th></tr></thead>
      <tbody>${t.deletes.map((d) => html`<tr><td class="break"><code>${d.path}</code></td><td class="n">${f.count(d.files)}</td><td class="n">${f.bytes(d.bytes)}</td></tr>`)}</tbody></table></div>` : nothing}`);
}

function failures(run) {
  if (!run.failures.length) return nothing;
  const shown = run.failures.slice(0, 50);
  const more = run.failures.length - shown.length;
  return section("failures", "Failures", html`<span class="quiet">${run.failures.length === 1 ? "one failed try" : `${f.count(run.failures.length)} failed tries, newest first`}</span>`, html`
    <div class="scroll"><table class="stack"><thead><tr><th>Task</th><th class="n">Try</th><th>When</th><th>Reason</th><th>Now</th></tr></thead>
      <tbody>${shown.map((x) => html`<tr>
        <td data-name="Task">${out(x.url, x.map_index >= 0 ? x.label || `${x.task_id} ${x.map_index}` : x.task_id.replaceAll("_", " "))}</td>
        <td class="n" data-name="Try">${x.try}</td><td data-name="When" class="nowrap">${f.moment(x.at)}</td>
        <td data-name="Reason" class="reason">${x.message || "No reason was published (the worker died, or the task was ended by hand): its log says more."}</td>
        <td data-name="Now">${badge(x.state)}</td></tr>`)}</tbody></table></div>
    ${more > 0 ? html`<p class="quiet">${f.count(more)} older ones are left out.</p>` : nothing}`);
}

function ratesInWords(run) {
  const rates = run.rates.tok_s;
  const most = Math.max(...rates);
  return `Tokens a second over ${f.span(run.rates.step * rates.length)}: at most ${f.count(most)}, at last ${f.count(rates[rates.length - 1])}`;
}
