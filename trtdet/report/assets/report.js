"use strict";
(() => {
  const source = document.getElementById("figures");
  const figures = source ? JSON.parse(source.textContent) : [];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Colours of axes and letters, by the ground that the reader's system asks for.
  function themed(layout) {
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--rule"), linecolor: colour("--rule"), automargin: true };
    const merged = {
      ...layout,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { align: "left", namelength: -1, bgcolor: colour("--panel"), font: { color: colour("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--ink") },
      margin: { l: 50, r: 10, t: 10, b: 40, ...(layout.margin || {}) },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, ...(layout.legend || {}) },
    };
    for (const name of ["xaxis", "yaxis"]) merged[name] = { ...axis, ...(layout[name] || {}) };
    if (narrow.matches && layout.narrow) Object.assign(merged, layout.narrow);
    return merged;
  }

  const drawn = new Map();

  function draw(element, figure) {
    const copy = JSON.parse(JSON.stringify(figure));
    drawn.set(element, figure);
    const done = Plotly.newPlot(element, copy.traces, themed(copy.layout), {
      responsive: true,
      displaylogo: false,
      scrollZoom: Boolean(copy.layout.scrollzoom),
      modeBarButtonsToRemove: ["select2d", "lasso2d"],
    });
    if (figure.layout.scrollzoom) done.then(() => { element.removeAllListeners("plotly_relayout"); element.on("plotly_relayout", () => names(element)); });
    return done;
  }

  // Names stand beside marks once few enough of them are in view.
  function names(element) {
    const [left, right] = element._fullLayout.xaxis.range;
    const [low, high] = element._fullLayout.yaxis.range;
    let seen = 0;
    element.data.forEach((trace) => { if (trace.text) trace.x.forEach((x, place) => { seen += x > left && x < right && trace.y[place] > low && trace.y[place] < high; }); });
    const mode = seen <= 30 ? "markers+text" : "markers";
    const which = element.data.map((trace, place) => [trace, place]).filter(([trace]) => trace.text && trace.mode !== mode).map(([, place]) => place);
    if (which.length) Plotly.restyle(element, { mode }, which);
  }

  // + and - zoom, arrows move, 0 shows all.
  function keys(event) {
    const element = event.currentTarget;
    const full = element._fullLayout;
    if (!full || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "0") {
      Plotly.relayout(element, { "xaxis.autorange": true, "yaxis.autorange": full.yaxis.autorange === "reversed" || element.dataset.reversed ? "reversed" : true });
      event.preventDefault();
      return;
    }
    const zoom = { "+": 0.8, "=": 0.8, "-": 1.25 }[event.key];
    const shift = { ArrowLeft: ["xaxis", -0.15], ArrowRight: ["xaxis", 0.15], ArrowDown: ["yaxis", -0.15], ArrowUp: ["yaxis", 0.15] }[event.key];
    if (!zoom && !shift) return;
    event.preventDefault();
    const change = {};
    for (const name of zoom ? ["xaxis", "yaxis"] : [shift[0]]) {
      const [low, high] = full[name].range.map(Number);
      if (low > high) element.dataset.reversed = "yes";
      const middle = (low + high) / 2;
      const half = ((high - low) / 2) * (zoom || 1);
      const moved = shift ? shift[1] * (high - low) : 0;
      change[name + ".range"] = [middle - half + moved, middle + half + moved];
    }
    Plotly.relayout(element, change);
  }

  function histogram(entry) {
    const bytes = atob(entry.heights);
    const step = entry.top / bytes.length;
    const x = [], y = [];
    for (let place = 0; place < bytes.length; place++) {
      x.push((place + 0.5) * step);
      y.push(Math.pow(10, bytes.charCodeAt(place) / 20) - 1);
    }
    const colours = { minmax: "#7b5ea7", entropy: "#d9822b", percentile: "#3a9d5d", mse: "#b5446e" };
    const highest = Math.max(...y, 1);
    const line = (amax, name, style) => ({ type: "scatter", mode: "lines", x: [amax, amax], y: [0.8, highest], name, line: { width: 2, ...style }, hovertemplate: name + " " + amax.toPrecision(4) + "<extra></extra>" });
    const traces = [{ type: "bar", x, y, width: step, marker: { color: "#2f6db5" }, name: "values", hovertemplate: "|x| %{x:.4g}: %{y:.4s}<extra></extra>", showlegend: false }];
    for (const [rule, amax] of Object.entries(entry.thresholds)) traces.push(line(amax, rule, { color: colours[rule] || "#888" }));
    const layout = { bargap: 0, xaxis: { title: { text: "|x|" } }, yaxis: { type: "log", dtick: 2 }, margin: { t: 30 } };
    if (entry.chosen !== null) {
      traces.push(line(entry.chosen, "in use", { color: colour("--ink"), dash: "dot" }));
      // The share stands at the line that cuts, on the side with more room.
      const left = entry.chosen > 0.6 * entry.top;
      layout.annotations = [{ x: entry.chosen, xanchor: left ? "right" : "left", y: 1, yref: "paper", yanchor: "top", showarrow: false, text: cutOff(entry), bgcolor: colour("--ground"), borderpad: 2 }];
    }
    return { traces, layout };
  }

  function cutOff(entry) {
    if (entry.cut_off === 0) return "nothing cut off";
    const percent = 100 * entry.cut_off;
    return (percent < 0.005 ? "under 0.01" : percent.toFixed(2)) + " % cut off";
  }

  function panel(parent, entry, begin = later) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = entry.name;
    const chart = document.createElement("div");
    chart.className = "chart";
    chart.tabIndex = 0;
    chart.style.height = "250px";
    chart.setAttribute("role", "group");
    chart.setAttribute("aria-label", "histogram of " + entry.tensor);
    const note = document.createElement("p");
    note.className = "note";
    const range = entry.chosen === null ? "" : "; range in use " + entry.chosen.toPrecision(4) + ", " + cutOff(entry);
    note.textContent = entry.tensor + range + "; largest " + entry.largest.toPrecision(4);
    figure.append(caption, chart, note);
    parent.append(figure);
    chart.addEventListener("keydown", keys);
    begin(chart, () => draw(chart, histogram(entry)));
  }

  function histograms(element) {
    const part = figures[element.dataset.figure];
    const label = document.createElement("label");
    label.textContent = "any other input: ";
    const select = document.createElement("select");
    select.append(new Option("choose", ""));
    part.entries.forEach((entry, place) => select.append(new Option(entry.name, place)));
    label.append(select);
    const one = document.createElement("div");
    one.className = "one";
    const many = document.createElement("div");
    many.className = "many";
    element.append(label, one, many);
    part.shown.forEach((place) => panel(many, part.entries[place]));
    select.addEventListener("change", () => {
      one.replaceChildren();
      if (select.value !== "") panel(one, part.entries[select.value], (element, start) => start());
    });
  }

  // Charts are drawn as they come near the window, so that long reports open at once.
  const waiting = new Map();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      const start = waiting.get(entry.target);
      waiting.delete(entry.target);
      if (start) start();
    }
  }, { rootMargin: "800px" });
  function later(element, start) {
    waiting.set(element, start);
    watcher.observe(element);
  }

  // Paper has all that is folded, in light colours, and charts as wide as the page.
  const root = document.documentElement;
  let folded = [];
  const redraw = () => { for (const [element, figure] of drawn) if (element.isConnected) draw(element, figure); };
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const element of folded) element.open = true;
    redraw();
    for (const start of waiting.values()) start();
    waiting.clear();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    for (const element of folded) element.open = false;
    redraw();
  });

  // A link to a bundle opens it.
  function reveal() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (!target) return;
    target.closest("details").open = true;
    target.parentElement.scrollIntoView();
  }
  addEventListener("hashchange", reveal);
  reveal();

  const collator = new Intl.Collator("en", { numeric: true });
  const number = (text) => {
    const found = /^[-+\u2212]?[\d ]*\.?\d+(e[-+]?\d+)?/i.exec(text.trim());
    return found ? Number(found[0].replace(/ /g, "").replace("\u2212", "-")) : NaN;
  };

  function grid(element) {
    const table = element.querySelector("table");
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => {
      if (!head.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const falling = head.getAttribute("aria-sort") === "ascending" || (head.classList.contains("number") && !head.hasAttribute("aria-sort"));
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const text = (row) => row.cells[place].textContent;
        const order = (a, b) => {
          const first = text(a), second = text(b);
          if (!first || !second) return first ? -1 : second ? 1 : 0;
          const [left, right] = [number(first), number(second)];
          const found = Number.isNaN(left) || Number.isNaN(right) ? collator.compare(first, second) : left - right;
          return falling ? -found : found;
        };
        body.append(...[...rows].sort(order));
      });
    });
    if (rows.length < 8) return;
    const tools = document.createElement("div");
    tools.className = "tools";
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "filter rows";
    field.setAttribute("aria-label", "filter rows");
    const count = document.createElement("output");
    const chosen = [];
    const apply = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        const fits = words.every((word) => text.includes(word)) && chosen.every(({ place, select }) => select.selectedIndex === 0 || row.cells[place].textContent === select.value);
        row.hidden = !fits;
        left += fits;
      }
      count.textContent = left + " of " + rows.length + " rows";
    };
    tools.append(field);
    for (const title of JSON.parse(element.dataset.choices)) {
      const place = heads.findIndex((head) => head.textContent === title);
      if (place < 0) continue;
      const select = document.createElement("select");
      select.setAttribute("aria-label", title);
      select.append(new Option(title + ": all", ""));
      for (const value of [...new Set(rows.map((row) => row.cells[place].textContent))].sort(collator.compare)) select.append(new Option(value || "(none)", value));
      select.addEventListener("change", apply);
      chosen.push({ place, select });
      tools.append(select);
    }
    tools.append(count);
    field.addEventListener("input", apply);
    element.before(tools);
    apply();
  }

  document.querySelectorAll(".grid").forEach(grid);
  document.querySelectorAll(".chart[data-figure]").forEach((element) => {
    element.addEventListener("keydown", keys);
    later(element, () => draw(element, figures[element.dataset.figure]));
  });
  document.querySelectorAll(".histograms").forEach(histograms);
  for (const query of [dark, narrow]) query.addEventListener("change", redraw);
})();
