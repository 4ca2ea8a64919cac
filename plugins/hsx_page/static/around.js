// What is around a run: the hosts, production before and after, the data sets, the other runs.
import { html, nothing } from "./vendor/lit-html.js";
import * as f from "./format.js";
import { badge, out, runPath, section } from "./parts.js";

export function hostSection(doc) {
  const title = doc.hosts.length > 1 ? "Hosts" : "Host";
  if (!doc.hosts.length) return section("host", title, "", html`<p class="quiet">No run has looked at a host yet.</p>`);
  return section("host", title, html`<span class="quiet">as tasks last saw it</span>`, html`<div class="hosts">${doc.hosts.map((h) => host(h, doc.now))}</div>`);
}

function host(h, now) {
  const state = { production: "success", extraction: "running", stopped: "up_for_retry" }[h.mode] ?? "";
  const word = { production: "production serves", extraction: "extraction", stopped: "production is stopped" }[h.mode] ?? "unknown";
  const lapsed = h.lease && h.lease.expires < now;
  const lease = h.lease?.unread ? "can't be read" : "free";
  return html`<article><p class="lead"><b>${h.name}</b> ${badge(state, word)}</p>
    <dl class="pairs">
      <dt>Mode since</dt><dd>${h.at ? html`${f.moment(h.at)} <span class="quiet">${f.ago(h.at, now)}</span>` : f.nothing}</dd>
      ${h.changing ? html`<dt>Now</dt><dd>${h.changing}</dd>` : nothing}
      <dt>Server</dt><dd>${h.pid ? `pid ${h.pid}${h.port ? `, port ${h.port}` : ""}` : "none runs"}</dd>
      <dt>Last token</dt><dd>${h.healthy_at ? html`${f.moment(h.healthy_at)} <span class="quiet">${f.ago(h.healthy_at, now)}</span>` : f.nothing}</dd>
      <dt>Lease</dt><dd>${h.lease && !h.lease.unread
        ? html`<a href=${runPath(h.lease)} class="break">${h.lease.run_id}</a><br /><span class="quiet">${lapsed
            ? `lapsed ${f.ago(h.lease.expires, now)}: the guard on the host gives it back`
            : `renewed ${f.ago(h.lease.renewed, now)}, lapses in ${f.span(h.lease.expires - now)} without Airflow`}</span>`
        : lease}</dd>
    </dl></article>`;
}

export function benchmarkSections(run) {
  return (run?.benchmarks ?? []).map((b, i, all) => benchmark(b, i, all.length > 1 ? ` on ${b.host}` : ""));
}

function benchmark(b, i, where) {
  const loads = Object.keys((b.after ?? b.before).loads ?? {});
  const aside = b.after ? badge(b.after.within_tolerance ? "good" : "failed", b.after.within_tolerance ? "as before" : "slower than before") : html`<span class="quiet">the run has not measured it after yet</span>`;
  return section(`bench-${i}`, `Production before and after${where}`, aside, html`
    <div class="chart low"><canvas id=${`bench-chart-${i}`} role="img" aria-label=${(b.after ?? b.before).text}></canvas></div>
    <div class="scroll"><table class="tight"><thead><tr><th>Load</th><th class="n">Output, tok/s</th><th class="n">First token, ms</th><th class="n">Each token, ms</th><th class="n">After : before</th></tr></thead>
      <tbody>${loads.map((name) => html`<tr><td>${name}</td>
        <td class="n">${pair(b, name, "output_tok_s", 1)}</td><td class="n">${pair(b, name, "ttft_ms", 0)}</td><td class="n">${pair(b, name, "tpot_ms", 1)}</td>
        <td class="n">${Number.isFinite(b.after?.ratios?.[name]) ? `${(100 * b.after.ratios[name]).toFixed(0)} %` : f.nothing}</td></tr>`)}</tbody></table></div>`);
}

function pair(b, load, name, digits) {
  const one = (when) => b[when]?.loads?.[load]?.[name];
  const text = (x) => (Number.isFinite(x) ? x.toFixed(digits) : f.nothing);
  return b.after ? html`${text(one("before"))} <span class="nowrap">→ ${text(one("after"))}</span>` : text(one("before"));
}

export function datasetSection(doc) {
  if (!doc.datasets.length) return section("datasets", "Data sets", "", html`<p class="quiet">None yet: a run hands its data set over after its last check.</p>`);
  return section("datasets", "Data sets", html`<span class="quiet">${doc.datasets.length}</span>`, html`<div class="scroll"><table class="stack">
    <thead><tr><th>Data set</th><th class="n">Samples</th><th class="n">Tokens</th><th class="n">Size</th><th>Formats</th><th>Proof</th><th>Changed</th><th>Hand-off</th></tr></thead>
    <tbody>${doc.datasets.map((d) => html`<tr>
      <td data-name="Data set" class="break"><b>${d.dataset_id}</b><br /><span class="quiet">${[d.layers.length && `layers ${d.layers.join(", ")}`, d.engine.name && `${d.engine.name} ${d.engine.version}`].filter(Boolean).join(" · ") || d.dir}</span></td>
      <td class="n" data-name="Samples">${f.count(d.samples)}${d.planned ? html`<br /><span class="quiet">of ${f.count(d.planned)}</span>` : nothing}</td>
      <td class="n" data-name="Tokens" title=${f.count(d.tokens)}>${f.short(d.tokens)}</td><td class="n" data-name="Size">${f.bytes(d.bytes)}</td>
      <td data-name="Formats">${Object.keys(d.formats).join(", ") || f.nothing}</td>
      <td data-name="Proof">${d.proved ? badge("good", `${f.count(d.proved)} samples by next token`) : f.nothing}</td>
      <td data-name="Changed" class="nowrap">${f.ago(d.at, doc.now)}<br /><span class="quiet">${f.moment(d.at)}</span></td>
      <td data-name="Hand-off">${d.handed_off ? handoff(d) : html`<span class="quiet">not yet: a run makes it</span>`}</td></tr>`)}</tbody></table></div>`);
}

function handoff(d) {
  return html`<details><summary>${d.consumers.length ? f.many(d.consumers.length, "training run") : "handed off"}</summary>
    <p class="quiet">On the host:</p><code class="break">${d.handoff}</code>
    ${d.consumers.map((c) => html`<p>${badge(c.state)} ${out(`dags/${encodeURIComponent(c.dag_id)}/runs/${encodeURIComponent(c.run_id)}`, c.dag_id)}</p>`)}
    ${Object.entries(d.commands).map(([name, command]) => html`<p class="quiet">${name.replaceAll("_", " ")}:</p><code class="break">${command}</code>`)}
    <p><a href=${runPath(d)}>The run that made it</a></p></details>`;
}

export function runsSection(doc) {
  if (!doc.runs.length) return nothing;
  return section("runs", "Runs", html`<span class="quiet">${doc.runs.length === 1 ? "the only one" : `the last ${doc.runs.length}`}</span>`, html`<div class="scroll"><table class="stack">
    <thead><tr><th>Run</th><th>State</th><th>Profile</th><th class="n">To do</th><th class="n">Size</th><th>Began</th><th class="n">Took</th></tr></thead>
    <tbody>${doc.runs.map((r) => html`<tr class=${doc.run && r.run_id === doc.run.run_id && r.dag_id === doc.run.dag_id ? "chosen" : ""}>
      <td data-name="Run" class="break"><a href=${runPath(r)}>${r.run_id}</a></td>
      <td data-name="State">${badge(r.state)}${r.dry_run ? html` <span class="quiet">dry run</span>` : nothing}</td>
      <td data-name="Profile">${r.profile || f.nothing}</td><td class="n" data-name="To do">${r.todo === null ? f.nothing : `${f.count(r.todo)} samples`}</td>
      <td class="n" data-name="Size">${f.bytes(r.todo_bytes)}</td>
      <td data-name="Began" class="nowrap">${f.moment(r.began)}</td>
      <td class="n nowrap" data-name="Took">${r.began ? f.span((r.ended ?? doc.now) - r.began) : f.nothing}</td></tr>`)}</tbody></table></div>`);
}
