// Figures as people read them. Bytes are binary (KiB), times are the reader's own, everything has its unit.

const GROUPED = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const nothing = "–";

export function count(n) {
  return n === null || n === undefined ? nothing : GROUPED.format(n);
}

export function many(n, one) {
  return `${count(n)} ${one}${n === 1 ? "" : "s"}`;
}

// 1,234,567 -> 1.23 M: for places where the exact number stands elsewhere
export function short(n) {
  if (n === null || n === undefined) return nothing;
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (Math.abs(n) >= size) return `${digits(n / (unit === "k" ? 1e3 : size))} ${unit}`;
  }
  return GROUPED.format(n);
}

export function bytes(n) {
  if (n === null || n === undefined) return nothing;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) {
    n /= 1024;
    i += 1;
  }
  return i === 0 ? `${GROUPED.format(n)} B` : `${digits(n)} ${units[i]}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return nothing;
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.round((s % 86400) / 3600)} h`;
}

export function ago(at, now) {
  if (!at) return nothing;
  const s = now - at;
  return s < 2 ? "just now" : s < 120 ? `${Math.round(s)} s ago` : `${span(s)} ago`;
}

export function clock(at, withSeconds = false) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (withSeconds) options.second = "2-digit";
  return new Date(at * 1000).toLocaleTimeString([], options);
}

export function moment(at) {
  if (!at) return nothing;
  const day = new Date(at * 1000).toLocaleDateString("en-CA");
  const today = new Date().toLocaleDateString("en-CA");
  return day === today ? clock(at, true) : `${day} ${clock(at)}`;
}

export function percent(part, whole) {
  if (!whole) return nothing;
  const p = (100 * part) / whole;
  return `${part < whole && p > 99 ? 99 : Math.floor(p)} %`;
}

function digits(x) {
  return x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2);
}
