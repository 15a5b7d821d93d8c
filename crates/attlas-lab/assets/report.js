"use strict";
// Draws the figures of a report from the JSON beside it, and keeps them in step with the controls.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const element = (tag, props = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };
  // Ticks of a logarithmic axis: the powers of `base` that the values span, and one beyond on either side.
  const powers = (values, base) => {
    const [lo, hi] = d3.extent(values).map((v) => Math.log(v) / Math.log(base));
    const first = Math.floor(lo + 1e-9);
    return d3.range(first, Math.max(Math.ceil(hi - 1e-9), first + 1) + 1).map((p) => base ** p);
  };
  const narrow = () => window.innerWidth < 640;

  const digits = (x) => (x === null || x === undefined ? "none" : x === 0 ? "0" : Math.abs(x) >= 1000 ? x.toFixed(0)
    : Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3))));
  const percent = (x) => (x === null ? "none" : `${digits(100 * x)} %`);
  const time = (s) => (s >= 1 ? `${digits(s)} s` : s >= 1e-3 ? `${digits(1e3 * s)} ms` : `${digits(1e6 * s)} µs`);
  const size = (b) => (b >= 2 ** 30 ? `${digits(b / 2 ** 30)} GiB` : b >= 2 ** 20 ? `${digits(b / 2 ** 20)} MiB`
    : b >= 1024 ? `${digits(b / 1024)} KiB` : `${b} B`);
  // As little as fits into a cell.
  const brief = { share: (x) => `${Math.round(100 * x)}%`, number: (x) => (x < 0.01 ? "<.01" : String(Number(x.toPrecision(x < 1 ? 2 : 3)))) };
  const shown = { count: digits, number: digits, share: percent };
  const place = (h) => (h.layer === null ? `head ${h.head}` : `layer ${h.layer}, head ${h.head}`);

  // A figure that can be walked through: `next(i, key)` gives the place an arrow key leads to, `tell` what is there.
  function walk(svg, marks, label, next, tell, choose) {
    let at = -1;
    const go = (i) => {
      if (i < 0 || i >= marks.length) return;
      if (at >= 0) marks[at].classList.remove("active");
      at = i;
      marks[at].classList.add("active");
      tell(at);
    };
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", label);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && choose && at >= 0) choose(at);
      else if (!event.key.startsWith("Arrow")) return;
      else go(at < 0 ? 0 : next(at, event.key));
      event.preventDefault();
    });
    svg.addEventListener("blur", () => at >= 0 && marks[at].classList.remove("active"));
    marks.forEach((mark, i) => {
      mark.addEventListener("pointerenter", () => tell(i));
      if (choose) {
        mark.style.cursor = "pointer";
        mark.addEventListener("click", () => choose(i));
      }
    });
  }

  // The neighbour of a cell in a direction, among cells with a layer and a head.
  const beside = (cells) => (i, key) => {
    const { layer, head } = cells[i];
    const vertical = key === "ArrowUp" || key === "ArrowDown";
    const sign = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1;
    const fits = (c) => (vertical ? c.head === head && sign * (c.layer - layer) > 0
      : c.layer === layer && sign * (c.head - head) > 0);
    const gap = (c) => Math.abs(vertical ? c.layer - layer : c.head - head);
    const rest = cells.map((c, j) => [c, j]).filter(([c]) => fits(c)).sort((a, b) => gap(a[0]) - gap(b[0]));
    return rest.length ? rest[0][1] : i;
  };

  // Cells over layers and heads, sized to their number.
  function cellPlot(cells, width, color, marks) {
    const layers = new Set(cells.map((c) => c.layer)).size;
    const heads = new Set(cells.map((c) => c.head)).size;
    const tall = Math.max(12, Math.min(26, 300 / layers));
    // Few heads would be stretched into bars.
    const inner = Math.min(width - 42, heads * 64);
    return Plot.plot({
      width: inner + 42, height: layers * tall + 34, marginLeft: 34, marginTop: 24, marginBottom: 4, marginRight: 4,
      padding: 0.06, x: { axis: "top", label: null, tickSize: 0, type: "band" },
      y: { label: null, tickSize: 0, type: "band", ticks: undefined },
      color, style: { fontSize: "11px" }, marks,
    });
  }

  function drawMaps() {
    const box = find("maps");
    box.replaceChildren();
    const cells = data.heads.map((h) => ({ ...h, layer: h.layer ?? 0 }));
    const across = new Set(cells.map((c) => c.head)).size;
    const least = 48 + across * (cells.length <= 60 ? 38 : 20);
    box.style.setProperty("--map", `${Math.min(340, Math.max(158, least))}px`);
    const status = find("map-status");
    data.figures.forEach((figure, f) => {
      const show = shown[figure.kind];
      // Only so much is known of a rank where not all singular values were computed.
      const told = (c, write) => (c.open[f] ? ">" : "") + write(c.figures[f]);
      const panel = element("figure", { className: "panel" }, element("h4", { textContent: figure.name }));
      box.append(panel);
      const values = cells.map((c) => c.figures[f]);
      const [lo, hi] = d3.extent(values);
      const dark = (v) => hi === lo || (v - lo) / (hi - lo) < 0.6;
      const width = panel.clientWidth - 26;
      const marks = [
        Plot.cell(cells, { x: "head", y: "layer", fill: (c) => c.figures[f], tip: true,
          title: (c) => `${place(c)}\n${figure.name}: ${told(c, show)}` }),
      ];
      if (cells.length <= 60) marks.push(Plot.text(cells, { x: "head", y: "layer", text: (c) => told(c, brief[figure.kind] ?? show),
        fill: (c) => (dark(c.figures[f]) ? "#fff" : "#000"), pointerEvents: "none" }));
      const svg = cellPlot(cells, width, { scheme: "viridis", type: "linear", domain: [lo, hi === lo ? lo + 1 : hi] },
        marks);
      panel.append(svg);
      walk(svg, [...svg.querySelectorAll('g[aria-label="cell"] rect')], `${figure.name}, over layers and heads`, beside(cells),
        (i) => (status.textContent = `${place(cells[i])}: ${figure.name} ${told(cells[i], show)}`),
        (i) => { chooseHead(i); find("spectra").scrollIntoView({ behavior: "smooth" }); });
    });
  }

  let head = 0;
  function chooseHead(i) {
    head = Math.max(0, Math.min(data.heads.length - 1, i));
    find("head").value = String(head);
    drawHead();
  }

  function drawHead() {
    const box = find("head-view");
    box.replaceChildren();
    const h = data.heads[head];
    if (!h) return;
    const panel = (title, name, ...children) => {
      const node = element("figure", { className: `panel ${name}` }, element("h4", { textContent: title }), ...children);
      box.append(node);
      return node;
    };
    panel(`First ${h.leading.size} tokens`, "pattern",
      element("img", { src: h.leading.image, alt: `Weights of the first ${h.leading.size} tokens of ${place(h)}` }));
    panel(`All ${h.map.size} tokens`, "pattern",
      element("img", { src: h.map.image, alt: `Weights of all tokens of ${place(h)}, averaged over blocks` }));
    const lines = h.spectra.flatMap((s) => s.points.map(([n, v]) => ({ n, v, name: s.name })));
    const color = { domain: h.spectra.map((s) => s.name), range: h.spectra.map((s) => s.colour), legend: true };
    const spectra = panel("Singular values over the largest", "spectra");
    spectra.append(Plot.plot({
      width: spectra.clientWidth - 26, height: narrow() ? 240 : 270, marginLeft: 46, grid: true, color,
      ariaLabel: `Singular values of ${place(h)}`,
      style: { fontSize: "11px" },
      x: { type: "log", label: "number →", ticks: powers(lines.map((d) => d.n), 2).filter((_, i) => i % 2 === 0), tickFormat: String },
      y: { type: "log", label: null, domain: [1e-6, 1], clamp: true, ticks: [1, 1e-2, 1e-4, 1e-6], tickFormat: (v) => v.toExponential(0) },
      marks: [
        Plot.line(lines, { x: "n", y: "v", stroke: "name", strokeWidth: 1.8 }),
        Plot.tip(lines, Plot.pointer({ x: "n", y: "v", stroke: "name", title: (d) => `${d.name}, number ${d.n}: ${digits(d.v)}` })),
      ],
    }));
    const mass = h.mass.map(([k, m]) => ({ k, m }));
    const curve = panel("Mass of a row held by its largest weights", "mass");
    curve.append(Plot.plot({
      width: curve.clientWidth - 26, height: narrow() ? 210 : 250, marginLeft: 46, grid: true, style: { fontSize: "11px" }, ariaLabel: `Mass of the largest weights of ${place(h)}`,
      x: { type: "log", label: "weights →", ticks: mass.map((d) => d.k), tickFormat: String },
      y: { domain: [0, 1], label: null, ticks: 5, tickFormat: (v) => `${Math.round(100 * v)} %` },
      marks: [
        Plot.ruleY([0.9], { strokeDasharray: "4 4", strokeOpacity: 0.5 }),
        Plot.line(mass, { x: "k", y: "m", stroke: "var(--accent)", strokeWidth: 2 }),
        Plot.dot(mass, { x: "k", y: "m", fill: "var(--accent)", r: 4, tip: true, title: (d) => `top ${d.k}: ${percent(d.m)}` }),
      ],
    }));
    const facts = element("table");
    const row = (...cells) => facts.append(element("tr", {}, ...cells.map((c, i) =>
      element(facts.rows.length ? "td" : "th", { textContent: c, scope: i ? "" : "row" }))));
    row("matrix", "rank at 90 %", "stable rank");
    h.spectra.forEach((s) => row(s.name, `${s.open ? "more than " : ""}${s.rank}`, digits(s.stable)));
    const sinks = h.sinks.length ? h.sinks.map((s) => `key ${s.key} (${percent(s.weight)})`).join(", ") : "none";
    panel(`${place(h)[0].toUpperCase()}${place(h).slice(1)}`, "facts", facts,
      element("p", { textContent: `Sinks: ${sinks}. ` +
        h.keys.map(([m, k]) => `${digits(k)} keys hold ${Math.round(100 * m)} %`).join(", ") + " of a row on average." }));
  }

  const costs = {
    seconds: { label: "time of all heads →", show: time },
    bytes: { label: "memory beyond inputs and output →", show: size },
    keys: { label: "share of exact attention's scores →", show: percent },
  };

  function drawFront() {
    const box = find("pareto");
    const boxes = [...document.querySelectorAll("input[data-filter]")];
    const on = new Set(boxes.filter((b) => b.checked).map((b) => b.dataset.filter));
    const cost = find("cost").value;
    // Errors of zero have no logarithm: they stand on a line of their own, a power of ten below the others.
    const drawn = [data.exact, ...data.methods.filter((m) => on.has(m.family))]
      .filter((m) => m.error !== null && m.error >= 0 && m[cost] > 0);
    const errors = drawn.map((m) => m.error).filter((e) => e > 0);
    const above = powers(errors.length ? errors : [0.1, 1], 10);
    const floor = above[0] / 10;
    const up = [floor, ...above];
    const points = drawn
      .map((m) => ({ ...m, x: m[cost], y: Math.max(m.error, floor), lo: Math.max(m.lo, floor), hi: Math.max(m.hi, floor) }))
      .sort((a, b) => a.x - b.x);
    // Who is on the front is known from the measurements; the line joins those that are shown.
    const members = new Set(data.fronts[cost]);
    const front = points.filter((p) => members.has(p.method));
    const { label, show } = costs[cost];
    const tell = (p) => `${p.method}: error ${digits(p.error)}${p.exact ? " (exact at this length)" : ""}, ${time(p.seconds)} ` +
      `(${digits(p.speedup)}× exact's speed), ${size(p.bytes)}, ${p.keys ? `${percent(p.keys)} of the scores` : "no scores"}`;
    const exact = data.exact[cost];
    const width = box.clientWidth - 26;
    const across = powers([...points.map((p) => p.x), exact || 1], cost === "bytes" ? 16 : 10);
    const svg = Plot.plot({
      width, height: narrow() ? 380 : 460, marginLeft: 52, marginRight: 24, marginBottom: 42, grid: true,
      style: { fontSize: "12px" }, ariaLabel: "Error against cost of every method",
      x: { type: "log", label, domain: d3.extent(across), ticks: across, tickFormat: show },
      y: { type: "log", label: "↑ relative error", domain: d3.extent(up), ticks: up, tickFormat: (v) => (v === floor ? "0" : digits(v)), clamp: true },
      marks: [
        exact > 0 ? Plot.ruleX([exact], { stroke: "var(--ink)", strokeDasharray: "5 4", strokeOpacity: 0.7 }) : null,
        Plot.ruleX(points, { x: "x", y1: "lo", y2: "hi", stroke: (p) => `var(--${p.family})`, strokeOpacity: 0.35 }),
        Plot.line(front, { x: "x", y: "y", stroke: "var(--front)", strokeOpacity: 0.9, strokeWidth: 2 }),
        Plot.dot(points, { x: "x", y: "y", r: 5, fill: (p) => (p.exact ? "var(--card)" : `var(--${p.family})`), stroke: (p) => (p.exact ? `var(--${p.family})` : "var(--card)"), strokeWidth: 1.5 }),
        Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: (p) => tell(p).replace(/: |, /g, "\n") })),
      ].filter(Boolean),
    });
    box.replaceChildren(svg);
    const status = find("front-status");
    const marked = front.filter((p) => p.family !== "baseline" && p.method !== data.exact.method).length;
    status.textContent = `${points.length - 1} methods shown, ${marked} on the front beside exact attention` +
      (points.length > 1 ? "; arrow keys move from one to the next" : "; tick a family to see some");
    if (points.length) {
      labels(svg, points, width);
      walk(svg, [...svg.querySelectorAll('g[aria-label="dot"] circle')], "Error against cost of every method",
        (i, key) => (key === "ArrowRight" || key === "ArrowDown" ? Math.min(i + 1, points.length - 1) : Math.max(i - 1, 0)),
        (i) => (status.textContent = tell(points[i])));
    }
    for (const row of find("methods-table").rows) {
      const method = data.methods.find((m) => m.method === row.cells[0].textContent);
      if (method) row.hidden = !on.has(method.family);
    }
  }

  // Names beside their points where they cover nothing.
  function labels(svg, points, width) {
    const [x, y] = [svg.scale("x"), svg.scale("y")];
    const spots = points.map((p) => [x.apply(p.x), y.apply(p.y)]);
    const taken = spots.map(([a, b]) => [a - 5, b - 5, a + 5, b + 5]);
    const layer = d3.select(svg).append("g").attr("fill", "currentColor").attr("font-size", 11)
      .attr("text-anchor", "start").attr("pointer-events", "none");
    points.forEach((p, i) => {
      const [a, b] = spots[i];
      const w = 6.2 * p.method.length;
      const sides = [[8, 4], [-8 - w, 4], [-w / 2, -9], [-w / 2, 18]];
      const tries = [0, -10, 10, -20, 20, -30, 30].flatMap((lift) => sides.map(([dx, dy]) => [a + dx, b + dy + lift]));
      const free = ([tx, ty]) => tx > 40 && tx + w < width && ty > 14 &&
        !taken.some((t) => tx < t[2] && t[0] < tx + w && ty - 10 < t[3] && t[1] < ty + 2);
      const spot = tries.find(free);
      if (!spot) return;
      taken.push([spot[0], spot[1] - 10, spot[0] + w, spot[1] + 2]);
      layer.append("text").attr("x", spot[0]).attr("y", spot[1]).text(p.method);
    });
  }

  function drawRecipe() {
    const box = find("recipe-map");
    if (!box || !data.recipe) return;
    const { cells, quality } = data.recipe;
    const names = data.recipe.colours.map((c) => c.name);
    const colours = new Map(data.recipe.colours.map((c) => [c.name, c.colour]));
    const tell = (c) => `layer ${c.layer}, head ${c.head}: ${c.name}` +
      (c.error === null ? "" : `, error ${digits(c.error)}`) + (c.cost === null ? "" : `, ${percent(c.cost)} of exact's time`);
    const svg = cellPlot(cells, box.clientWidth - 26, { domain: names, range: names.map((n) => colours.get(n)) }, [
      Plot.cell(cells, { x: "head", y: "layer", fill: "name", tip: true, title: (c) => tell(c).replace(/: |, (?!h)/g, "\n") }),
    ]);
    const legend = element("div", { className: "controls" });
    for (const name of names) {
      const dot = element("span", { className: "dot" });
      dot.style.background = colours.get(name);
      const count = cells.filter((c) => c.name === name).length;
      legend.append(element("span", {}, dot, ` ${name} (${count})`));
    }
    const status = element("p", { className: "status" });
    status.setAttribute("role", "status");
    box.replaceChildren(legend, svg, status);
    walk(svg, [...svg.querySelectorAll('g[aria-label="cell"] rect')], "Method of each head, over layers and heads", beside(cells),
      (i) => (status.textContent = tell(cells[i])));
    const before = find("quality");
    if (!before) return;
    before.replaceChildren();
    for (const q of quality) {
      const rows = [{ who: "exact", v: q.before }, { who: "recipe", v: q.after }];
      const show = q.what === "seconds" ? time : (v) => v.toFixed(3);
      before.append(element("h4", { textContent: q.what }), Plot.plot({
        width: before.clientWidth - 26, height: 84, marginLeft: 60, marginRight: 70, marginBottom: 4, marginTop: 4,
        x: { axis: null, domain: [0, Math.max(q.before, q.after)] }, y: { label: null, tickSize: 0 },
        ariaLabel: `${q.what} with exact attention and with the recipe`,
        marks: [
          Plot.barX(rows, { x: "v", y: "who", fill: (d) => (d.who === "exact" ? "var(--baseline)" : "var(--accent)"), rx: 3 }),
          Plot.text(rows, { x: "v", y: "who", text: (d) => show(d.v), textAnchor: "start", dx: 6 }),
        ],
      }));
    }
  }

  const draw = () => { drawMaps(); drawHead(); drawFront(); drawRecipe(); };
  draw();

  for (const input of document.querySelectorAll("input[data-filter], #cost")) input.addEventListener("change", drawFront);
  find("head").addEventListener("change", (event) => chooseHead(Number(event.target.value)));
  find("before").addEventListener("click", () => chooseHead(head - 1));
  find("after").addEventListener("click", () => chooseHead(head + 1));

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = find("theme");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; name(); });
  system.addEventListener("change", name);
  name();

  let width = window.innerWidth;
  let pending;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(pending);
    pending = setTimeout(draw, 150);
  });
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((d) => (d.open = true));
  });
  window.addEventListener("afterprint", () => opened.forEach((d) => (d.open = false)));
})();
