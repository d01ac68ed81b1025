// Lays out the charts of a profile from DATA. All arms share their axes; texts are set as text content.
"use strict";
(() => {
  const host = document.getElementById("charts");
  const arms = DATA.arms, several = arms.length > 1;
  const COLORS = ["var(--a)", "var(--b)", "var(--c)", "var(--warn)", "var(--bad)"];
  const X = [0, Math.max(...arms.map(arm => arm.duration_s), 0.001)];

  const el = (tag, options = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, content] of Object.entries(options)) {
      if (name === "text") node.textContent = content; else node.setAttribute(name, content);
    }
    node.append(...children);
    return node;
  };
  const card = (grid, title, caption, { wide = false, legend = [] } = {}) => {
    const node = el("div", { class: wide ? "card wide" : "card" }, el("h3", { text: title }), el("p", { class: "cap", text: caption }));
    if (legend.length > 1 || (legend.length === 1 && legend[0].name)) {
      node.append(el("div", { class: "legend" }, ...legend.map(s => el("span", {}, el("i", { style: `background: ${s.color}` }), s.name))));
    }
    grid.append(node);
    return node;
  };

  const missing = arms.filter(arm => arm.why_empty);
  const drawn = arms.filter(arm => arm.ttft_ms.length || arm.passes_ms.length || arm.metrics_ms.length || arm.rss_mb.length || arm.health_ms.length);
  if (drawn.length) host.append(el("h2", { text: "over time" }));
  for (const arm of missing) host.append(el("p", { class: "cap", text: `${arm.label}: no charts: ${arm.why_empty}` }));
  if (!drawn.length) return;
  const grid = el("div", { class: "grid" });
  host.append(grid);

  // One time axis and one scale in milliseconds for all arms.
  const latencies = arms.filter(arm => arm.ttft_ms.length || arm.passes_ms.length);
  let most = 0;
  for (const arm of latencies) for (const p of [...arm.ttft_ms, ...arm.passes_ms]) most = Math.max(most, p[1]);
  for (const arm of latencies) {
    const sets = [
      { name: "time to first token", points: arm.ttft_ms, color: "var(--a)" },
      { name: "gen-2 pause", points: arm.passes_ms, color: "var(--bad)", bar: true },
    ].filter(s => s.points.length);
    const what = [arm.ttft_ms.length ? "time to first token of each request by when it was sent" : null, arm.passes_ms.length ? "pause of each gen-2 pass" : "no gen-2 pass was seen"].filter(Boolean).join(", ");
    const kind = arm.ttft_ms.length ? "Pauses over latencies" : "Pauses";
    const title = several ? `${kind}: ${arm.label}` : kind;
    Charts.scatter(card(grid, title, `${what} (ms)`, { wide: true, legend: sets }), sets, { x: X, unit: "ms", yMax: most * 1.06 || 1 });
  }

  const overlay = (key, title, caption, unit) => {
    const sets = arms.map((arm, i) => ({ name: several ? arm.label : "", points: arm[key], color: COLORS[i % COLORS.length] })).filter(s => s.points.length);
    if (sets.length) Charts.lines(card(grid, title, caption, { legend: sets }), sets, { x: X, unit });
  };
  overlay("metrics_ms", "/metrics", "time of a full scrape (ms)", "ms");
  overlay("rss_mb", "Resident memory of the API process", "MB", "MB");
  overlay("series", "Series in /metrics", "sample lines of a scrape", "series");
  overlay("health_ms", "/health at 10 Hz", "how long a trivial request waits for the event loop (ms)", "ms");
})();
