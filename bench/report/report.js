// Lays out the report from DATA. Texts are set as text content: messages in a run directory come from servers.
"use strict";
(() => {
  const { summary, run, series } = DATA;
  const page = document.getElementById("page"), timeline = document.getElementById("timeline");
  const lanes = document.getElementById("lanes"), results = document.getElementById("results");
  results.remove();
  timeline.remove();
  if (lanes) lanes.remove();
  const figures = summary.figures;
  const value = name => figures[name] ? figures[name].value : null;
  const COLORS = ["var(--a)", "var(--b)", "var(--c)", "var(--bad)", "var(--warn)"];
  const X = [0, series.wall_s];

  const el = (tag, options = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, content] of Object.entries(options)) {
      if (name === "text") node.textContent = content; else node.setAttribute(name, content);
    }
    node.append(...children.filter(child => child !== null));
    return node;
  };
  const number = v => {
    if (v === null || v === undefined) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size < .1) return String(+v.toPrecision(2));
    const digits = size < 100 ? 2 : size < 1000 ? 1 : 0;
    return v.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  };
  const count = v => v === null || v === undefined ? "–" : Math.trunc(v).toLocaleString("en-US");
  const fixed = (v, digits) => v.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const percent = v => v === null ? "–" : fixed(v * 100, 2) + "%";
  // As in the table on the terminal: whole things without decimals, shares in percent, the rest by their size.
  const WHOLE = ["requests", "tokens", "bytes", "series", "sequences"];
  const shown = f => f.value === null ? "–" : f.unit === "fraction" ? percent(f.value)
    : WHOLE.includes(f.unit) && Number.isInteger(f.value) ? count(f.value) : number(f.value);

  // ---- head
  const load = summary.load, server = summary.server;
  const kind = { "valid": "good", "not valid": "bad", "failed": "bad" }[summary.validity] || "warn";
  const title = el("h1", { text: `${(summary.accuracy ? null : run.name) || summary.title || "run"} · ${load.model || "?"}` }, el("span", { class: "badge " + kind, text: summary.validity }));
  if (server.executor) {
    const simulated = server.executor === "simulated";
    title.append(el("span", { class: "badge " + (simulated ? "warn" : "good"), text: simulated ? "simulated executor: no model was run" : server.executor + " executor" }));
  }
  document.title = title.textContent;
  const shape = [
    load.source && load.source.random_input_len ? `${load.source.random_input_len} in / ${load.source.random_output_len} out` : null,
    load.max_concurrency ? `concurrency ${load.max_concurrency}` : null,
    load.request_rate && load.request_rate !== "inf" ? `${load.request_rate} req/s` : null,
    `${count(value("started"))} requests`, `${number(value("duration"))} s`, run.start_time,
  ].filter(Boolean).join(" · ");
  page.append(title, el("p", { class: "sub", text: shape }));
  if (run.command) page.append(el("p", { class: "sub" }, el("code", { text: run.command })));
  if (summary.reasons.length) page.append(el("ul", { class: "reasons" }, ...summary.reasons.map(text => el("li", { text }))));

  // ---- tiles
  let tiles;
  const row = cls => { tiles = el("div", { class: cls }); };
  const tile = (label, main, unit, more) => tiles.append(el("div", { class: "tile" },
    el("div", { class: "label", text: label }),
    el("div", { class: "value", text: main }, el("small", { text: unit })),
    el("div", { class: "more", text: more })));
  const dagger = name => figures[name] && !figures[name].supported && figures[name].value !== null ? " †" : "";
  const plusMinus = stderr => stderr === null ? "" : `± ${stderr.toFixed(4)}`;
  row("tiles main");
  // What the load is about comes first: the tables below it have the rest.
  if (summary.accuracy) for (const f of summary.accuracy.filters) {
    tile(f.filter.replaceAll("_", "-"), f.value === null ? "–" : f.value.toFixed(4), plusMinus(f.stderr), `${count(f.correct)} of ${count(f.n)} correct`);
  }
  if (summary.agentic) {
    const { all, scenario } = summary.agentic;
    tile("interactivity", number(value("interactivity")), "tok/s", "1 ÷ p90 of (TPOT + TTFT ÷ output tokens)");
    tile("prompt tokens cached", percent(all.realised_cached_share), "", `in a cache without end ${percent(all.theoretical_cached_share)}`);
    tile("sessions", count(value("sessions_started")), "begun", value("sessions_finished") === null ? "" : `${count(value("sessions_finished"))} finished`);
    if (scenario.name !== null) tile("scenario " + scenario.name, scenario.valid ? "would count" : "does not count", "", "no official submission");
  }
  if (tiles.children.length) page.append(tiles);
  if (results.children.length) page.append(results);
  row("tiles");
  tile("TTFT mean", number(value("mean_ttft_ms")), "ms", `p99 ${number(value("p99_ttft_ms"))}${dagger("p99_ttft_ms")}`);
  tile("ITL p50", number(value("median_itl_ms")), "ms", `p99 ${number(value("p99_itl_ms"))}${dagger("p99_itl_ms")}`);
  tile("output", number(value("output_throughput")), "tok/s", `peak ${number(value("max_output_tokens_per_s"))}`);
  tile("requests", number(value("request_throughput")), "req/s", `${count(value("completed"))} completed, ${count(value("failed"))} failed`);
  tile("TPOT mean", number(value("mean_tpot_ms")), "ms", `E2EL p50 ${number(value("median_e2el_ms"))}`);
  // Figures of one label share a tile: the first large, the others below it.
  const unit = f => f.unit === "fraction" ? "" : f.unit;
  const rows = new Map();
  for (const [name, figure] of Object.entries(figures)) {
    if (figure.side !== "server" || figure.value === null || figure.role || figure.detail) continue;
    rows.set(figure.label, [...(rows.get(figure.label) || []), [name, figure]]);
  }
  for (const [label, own] of rows) {
    const [[name, first], ...others] = own;
    const more = others.map(([, f]) => [f.part, shown(f), unit(f)].filter(Boolean).join(" ")).join(", ");
    tile([label, first.part].filter(Boolean).join(" "), shown(first), unit(first),
      name === "gen2_share" && first.n === 0 ? `no pass in ${number(value("duration"))} s observed` : more || `n = ${count(first.n)}`);
  }
  page.append(tiles);
  if (timeline.querySelector("svg")) page.append(timeline);
  if (lanes) page.append(lanes);

  // ---- charts
  const card = (grid, name, caption, { wide = false, legend = [] } = {}) => {
    const host = el("div", { class: "card" + (wide ? " wide" : "") }, el("h3", { text: name }), el("p", { class: "cap", text: caption }));
    if (legend.length > 1) host.append(el("div", { class: "legend" }, ...legend.map(s => el("span", {}, el("i", { style: `background:${s.color}` }), s.name))));
    grid.append(host);
    return host;
  };
  const section = name => { const grid = el("div", { class: "grid" }); page.append(el("h2", { text: name }), grid); return grid; };
  const beyond = (h, name) => `n = ${h.n.toLocaleString()}, p50 ${number(h.p50)}${dagger(`median_${name}_ms`)}, p99 ${number(h.p99)}${dagger(`p99_${name}_ms`)}, max ${number(h.max)} ms` + (h.beyond ? ` (${h.beyond} beyond the axis)` : "");

  const load_ = section("Load");
  if (series.ttft) Charts.histogram(card(load_, "Time to first token", beyond(series.ttft, "ttft")), series.ttft, { unit: "ms" });
  if (series.itl) Charts.histogram(card(load_, "Inter-token latency", beyond(series.itl, "itl")), series.itl, { unit: "ms" });
  if (series.requests.length || series.failed.length) {
    const sets = [
      { name: "E2EL", points: series.requests.map(p => [p[0], p[2], p]), color: "var(--a)" },
      { name: "TTFT", points: series.requests.map(p => [p[0], p[1], p]), color: "var(--b)" },
      { name: "failed after", points: series.failed, color: "var(--bad)", cross: true },
    ].filter(s => s.points.length);
    const host = card(load_, "Requests", "latency (ms) of each request by the time it was sent", { wide: true, legend: sets });
    Charts.scatter(host, sets, { x: X, unit: "ms", describe: (s, p) => s.name === "E2EL" && p[2] ? `  (${p[2][3] ?? "?"} in / ${p[2][4] ?? "?"} out)` : "" });
  }
  if (series.client.lag_ms.length) Charts.lines(card(load_, "The client itself", "worst lag of its event loop in each second (ms)"), [{ name: "", points: series.client.lag_ms, color: "var(--c)" }], { x: X, unit: "ms" });

  // ---- server side
  const inPhase = points => points.filter(p => p[0] >= X[0] && p[0] <= X[1]);
  const named = (entries) => entries.map(([name, points], i) => ({ name, points: inPhase(points), color: COLORS[i % COLORS.length] })).filter(s => s.points.length);
  const gc = named(Object.entries(series.gc)), hooked = Object.keys(series.gc).length > 0;
  const scrapes = named(Object.entries(series.metrics).map(([role, s]) => [role, s.scrape_ms || []]));
  const cores = named(Object.entries(series.process).map(([name, s]) => [name, s.cores]));
  if (hooked || scrapes.length || cores.length) {
    const grid = section("Server");
    if (hooked && !gc.length) {
      grid.before(el("p", { class: "cap", text: "Garbage collection: no pass over old objects in the measured phase." }));
    } else if (hooked) {
      const host = card(grid, "Garbage collection", "pause (ms) of each pass over old objects", { legend: gc });
      Charts.lines(host, gc, { x: X, unit: "ms", stems: true });
    }
    if (scrapes.length) Charts.lines(card(grid, "/metrics", "time of a full scrape (ms)", { legend: scrapes }), scrapes, { x: X, unit: "ms" });
    if (cores.length) Charts.lines(card(grid, "CPU", "cores in use per process", { legend: cores }), cores, { x: X, unit: "cores" });
  }

  // ---- tables
  const table = (head, rows) => el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head.map(h => el("th", h)))), el("tbody", {}, ...rows)));
  const cell = (text, cls) => el("td", cls ? { text, class: cls } : { text });
  if (summary.errors.length) {
    page.append(el("h2", { text: "Errors" }), table([{ text: "requests", class: "num" }, { text: "class" }, { text: "most frequent message" }],
      summary.errors.map(e => el("tr", {}, cell(count(e.count), "num"), cell(e.class, "key"), cell(e.message)))));
  }
  const anomalies = Object.entries(summary.anomalies);
  if (anomalies.length) page.append(el("h2", { text: "Anomalies in streams" }), table([{ text: "count", class: "num" }, { text: "what" }], anomalies.map(([name, n]) => el("tr", {}, cell(count(n), "num"), cell(name)))));
  page.append(el("h2", { text: "Self-checks" }), table([{ text: "check" }, { text: "holds" }, { text: "detail" }],
    summary.checks.map(c => el("tr", {}, cell(c.name, "key"), cell(c.ok === null ? "–" : c.ok ? "yes" : "NO"), cell(c.detail)))));
  if (summary.notes.length) page.append(el("h2", { text: "Notes" }), el("ul", { class: "notes" }, ...summary.notes.map(text => el("li", { text }))));
  page.append(el("h2", { text: "All figures" }), table([{ text: "figure" }, { text: "value", class: "num" }, { text: "unit" }, { text: "n", class: "num" }, { text: "definition" }],
    Object.entries(figures).map(([name, f]) => el("tr", {}, cell(name, "key"), cell(shown(f) + (f.supported === false && f.value !== null ? " †" : ""), "num"), cell(f.unit === "fraction" ? "" : f.unit), cell(count(f.n), "num"), cell(f.definition, "def")))));
  page.append(el("p", { class: "sub", text: "† fewer than 10 samples lie beyond this quantile: not supported by n" }));

  const git = run.git ? `${run.git.sha.slice(0, 12)}${run.git.dirty ? " (dirty)" : ""}` : null;
  const facts = [
    ["run directory", run.directory], ["host", run.host.name], ["cpu", run.host.cpu ? `${run.host.cpu}, ${run.host.cpus} CPUs` : null],
    ["devices", run.devices.join("; ")], ["python", run.host.python], ["source", git], ["recipe", run.recipe ? run.recipe.name : null],
    ["server", [server.base_url, server.engine].filter(Boolean).join(" · ")],
    ["packages", Object.entries(run.packages).map(([name, version]) => `${name} ${version}`).join(", ")],
  ].filter(([, text]) => text);
  page.append(el("h2", { text: "Where it comes from" }), table([{ text: "what" }, { text: "" }], facts.map(([name, text]) => el("tr", {}, cell(name, "key"), cell(text)))));
})();
