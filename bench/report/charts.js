// Small SVG charts: histogram, line, scatter, stems. Nothing here knows what is plotted.
"use strict";
const Charts = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const M = { l: 52, r: 12, t: 8, b: 32 };

  const svg = (tag, attributes, parent) => {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (parent) parent.append(node);
    return node;
  };
  const text = (parent, x, y, content, attributes = {}) => {
    const node = svg("text", { x, y, ...attributes }, parent);
    node.textContent = content;
    return node;
  };

  // Round steps of 1, 2 or 5 that give about `count` ticks.
  const ticks = (low, high, count) => {
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
    const result = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) result.push(i * step);
    return result;
  };
  const short = value => {
    const size = Math.abs(value);
    if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
    return String(+value.toPrecision(4));
  };

  // Draws at the width there is, again when it changes: text that is scaled with a chart cannot be read on a small screen.
  const fitted = draw => (host, ...args) => {
    let drawn = 0, nodes = [];
    const fit = () => {
      const style = getComputedStyle(host);
      const width = Math.max(200, Math.floor(host.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
      if (width === drawn) return;
      drawn = width;
      nodes.forEach(node => node.remove());
      const before = new Set(host.children);
      draw(host, width, ...args);
      nodes = [...host.children].filter(node => !before.has(node));
    };
    fit();
    new ResizeObserver(fit).observe(host);
  };

  // The frame: axes, grid, labels. Returns the drawing area and its scales.
  const frame = (host, width, { x, y, xLabel, yLabel, height = 210 }) => {
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    host.append(root);
    const span = (range) => (range[1] - range[0]) || 1;
    const X = v => M.l + (v - x[0]) / span(x) * (width - M.l - M.r);
    const Y = v => height - M.b - (v - y[0]) / span(y) * (height - M.t - M.b);
    for (const v of ticks(y[0], y[1], 4)) {
      svg("line", { x1: M.l, x2: width - M.r, y1: Y(v), y2: Y(v), class: "gridline" }, root);
      text(root, M.l - 7, Y(v) + 4, short(v), { "text-anchor": "end" });
    }
    for (const v of ticks(x[0], x[1], Math.max(2, Math.min(12, Math.floor(width / 85))))) {
      svg("line", { x1: X(v), x2: X(v), y1: height - M.b, y2: height - M.b + 4, class: "axis" }, root);
      text(root, X(v), height - M.b + 16, short(v), { "text-anchor": "middle" });
    }
    svg("line", { x1: M.l, x2: width - M.r, y1: height - M.b, y2: height - M.b, class: "axis" }, root);
    text(root, (M.l + width - M.r) / 2, height - 2, xLabel, { "text-anchor": "middle" });
    text(root, 0, M.t + 2, yLabel, { "text-anchor": "start" }).setAttribute("dy", "0");
    return { root, X, Y, x, y, width, height, base: height - M.b, top: M.t };
  };

  const upTo = (values, least = 0) => {
    let most = least;
    for (const v of values) if (v !== null && v > most) most = v;
    return most > 0 ? most * 1.08 : 1;
  };

  // A tooltip that follows the pointer; `find(x)` gives its text for a data coordinate, or null.
  const hover = (host, area, find) => {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    host.append(tip);
    area.root.addEventListener("pointermove", event => {
      const box = area.root.getBoundingClientRect();
      const scale = area.width / box.width;
      const px = (event.clientX - box.left) * scale;
      const value = area.x[0] + (px - M.l) / (area.width - M.l - M.r) * (area.x[1] - area.x[0]);
      const content = find(value);
      tip.hidden = content === null;
      if (content === null) return;
      tip.textContent = content;
      const parent = host.getBoundingClientRect();
      const left = event.clientX - parent.left + 12;
      tip.style.left = Math.min(left, parent.width - tip.offsetWidth - 6) + "px";
      tip.style.top = event.clientY - parent.top - 30 + "px";
    });
    area.root.addEventListener("pointerleave", () => { tip.hidden = true; });
  };

  const histogram = (host, width, h, { unit, color = "var(--a)" }) => {
    const area = frame(host, width, { x: [h.low, h.high], y: [0, upTo(h.counts)], xLabel: unit, yLabel: "" });
    h.counts.forEach((count, i) => {
      if (!count) return;
      const x = area.X(h.low + i * h.width), width = area.X(h.low + (i + 1) * h.width) - x;
      svg("rect", { x: x + .4, width: Math.max(width - .8, .6), y: area.Y(count), height: area.base - area.Y(count), fill: color, rx: 1 }, area.root);
    });
    const ends = [];  // of the labels in each row: close ones go below each other
    for (const name of ["p50", "p90", "p99"]) {
      if (h[name] > h.high) continue;
      const x = area.X(h[name]);
      svg("line", { x1: x, x2: x, y1: area.top, y2: area.base, stroke: "var(--b)", "stroke-dasharray": "3 3" }, area.root);
      const right = x > area.width - 40, from = right ? x - 28 : x + 2;
      let row = 0;
      while (ends[row] > from) row++;
      ends[row] = from + 26;
      text(area.root, x + (right ? -4 : 4), area.top + 8 + 13 * row, name, { "text-anchor": right ? "end" : "start", class: "mark" });
    }
    hover(host, area, value => {
      const i = Math.floor((value - h.low) / h.width);
      if (i < 0 || i >= h.counts.length) return null;
      return `${short(h.low + i * h.width)} – ${short(h.low + (i + 1) * h.width)} ${unit}: ${h.counts[i].toLocaleString()}`;
    });
  };

  // Nearest point of a sorted series.
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (points[mid][0] < x) low = mid; else high = mid; }
    return points.length && Math.abs(points[low][0] - x) < Math.abs(points[high][0] - x) ? points[low] : points[high];
  };

  // series: [{ name, points: [[x, y]], color, fill }]
  const lines = (host, width, series, { x, xLabel = "time (s)", unit, yMax, stems = false }) => {
    const all = series.flatMap(s => s.points.map(p => p[1]));
    const area = frame(host, width, { x, y: [0, yMax ?? upTo(all)], xLabel, yLabel: "" });
    for (const s of series) {
      const inside = s.points.filter(p => p[1] !== null && p[0] >= x[0] && p[0] <= x[1]);
      if (!inside.length) continue;
      if (stems) {
        for (const p of inside) {
          svg("line", { x1: area.X(p[0]), x2: area.X(p[0]), y1: area.base, y2: area.Y(p[1]), stroke: s.color, "stroke-width": 1.4 }, area.root);
          svg("circle", { cx: area.X(p[0]), cy: area.Y(p[1]), r: 2.2, fill: s.color }, area.root);
        }
        continue;
      }
      const d = inside.map((p, i) => (i ? "L" : "M") + area.X(p[0]).toFixed(1) + " " + area.Y(p[1]).toFixed(1)).join("");
      if (s.fill) svg("path", { d: `${d}L${area.X(inside.at(-1)[0]).toFixed(1)} ${area.base}L${area.X(inside[0][0]).toFixed(1)} ${area.base}Z`, fill: "var(--fill)" }, area.root);
      svg("path", { d, fill: "none", stroke: s.color, "stroke-width": 1.6, "stroke-linejoin": "round" }, area.root);
      if (inside.length < 40) for (const p of inside) svg("circle", { cx: area.X(p[0]), cy: area.Y(p[1]), r: 2, fill: s.color }, area.root);
    }
    hover(host, area, value => {
      const rows = series.filter(s => s.points.length).map(s => [s, nearest(s.points, value)]).filter(([, p]) => p && p[1] !== null);
      if (!rows.length) return null;
      return rows.map(([s, p]) => `${short(p[0])} s  ${s.name ? s.name + " " : ""}${short(p[1])} ${unit}`).join("\n");
    });
  };

  // Points as small circles, crosses or bars: sets: [{ name, points: [[x, y]], color, cross, bar }]
  const scatter = (host, width, sets, { x, xLabel = "time (s)", unit, yMax, describe }) => {
    const area = frame(host, width, { x, y: [0, yMax ?? upTo(sets.flatMap(s => s.points.map(p => p[1])))], xLabel, yLabel: "", height: 240 });
    for (const s of sets) for (const p of s.points) {
      if (p[1] === null) continue;
      if (s.cross) svg("path", { d: `M${area.X(p[0]) - 3} ${area.Y(p[1]) - 3}l6 6m0 -6l-6 6`, stroke: s.color, "stroke-width": 1.6 }, area.root);
      else if (s.bar) svg("line", { x1: area.X(p[0]), x2: area.X(p[0]), y1: area.base, y2: Math.min(area.Y(p[1]), area.base - 2), stroke: s.color, "stroke-width": 1.4 }, area.root);
      else svg("circle", { cx: area.X(p[0]), cy: area.Y(p[1]), r: 2.1, fill: s.color, "fill-opacity": .55 }, area.root);
    }
    hover(host, area, value => {
      const rows = sets.filter(s => s.points.length).map(s => [s, nearest(s.points, value)]);
      return rows.length ? rows.map(([s, p]) => `${s.name} ${p[1] === null ? "–" : short(p[1])} ${unit}${describe ? describe(s, p) : ""}`).join("\n") : null;
    });
  };

  return { histogram: fitted(histogram), lines: fitted(lines), scatter: fitted(scatter), short };
})();
