// Small pieces that all sections share.
import { html, nothing } from "./vendor/lit-html.js";
import { airflow, follow } from "./frame.js";

export const MARK = {
  success: "✓", done: "✓", good: "✓", running: "●", deferred: "●", failed: "✕", up_for_retry: "↻", retrying: "↻",
  upstream_failed: "–", "not run": "–", skipped: "–", waiting: "○", queued: "○", scheduled: "○",
  awaiting_input: "?", "": "○",
};
export const WORD = {
  deferred: "running", up_for_retry: "will be tried again", upstream_failed: "not run", awaiting_input: "waits for a person",
  "": "waiting",
};

export function tone(state) {
  if (["success", "done", "good"].includes(state)) return "good";
  if (["running", "deferred"].includes(state)) return "busy";
  if (["failed"].includes(state)) return "bad";
  if (["up_for_retry", "retrying", "awaiting_input"].includes(state)) return "warn";
  return "idle";
}

export function badge(state, word = "") {
  return html`<span class="badge ${tone(state)}"><span aria-hidden="true">${MARK[state] ?? "○"}</span> ${word || WORD[state] || state}</span>`;
}

export function out(path, text, label = "") {
  return html`<a href=${airflow(path)} @click=${follow} @auxclick=${follow} aria-label=${label || nothing}>${text}</a>`;
}

export function figure(name, value, note = "", kind = "") {
  return html`<div class="figure ${kind}"><dt>${name}</dt><dd>${value}${note ? html`<small>${note}</small>` : nothing}</dd></div>`;
}

export function section(id, title, aside, body) {
  return html`<section aria-labelledby=${id}><header><h2 id=${id}>${title}</h2>${aside ? html`<div class="aside">${aside}</div>` : nothing}</header>${body}</section>`;
}

export function runPath(run) {
  return `?${new URLSearchParams({ dag: run.dag_id, run: run.run_id })}`;
}
