"use strict";
/* Draws the page from its data. `heloco.give(data)` takes newer data: charts are known by name, and what a reader chose stays. */
(() => {
  const $ = id => document.getElementById(id);
  const state = {scale: "linear", smooth: 0, theme: "auto", run: null, view: {}, hidden: new Set(), show: "cosine", sort: "layers"};
  const cards = new Map();
  let data = {runs: [], charts: [], tables: [], notes: []};

  /* ---- elements; text never becomes markup */
  const make = (tag, properties = {}, ...inside) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties))
      if (name in element) element[name] = value; else element.setAttribute(name, value);
    element.append(...inside);
    return element;
  };
  /* Plotly reads a little HTML in its texts: names are not to be read so. */
  const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const choose = (label, options, value, then) => {
    const select = make("select", {ariaLabel: label}, ...options.map(([v, name]) => make("option", {value: v}, name)));
    select.value = value;
    select.addEventListener("change", () => then(select.value));
    return select;
  };

  /* ---- colours */
  let printing = false;
  const PAPER_WIDTH = 640;
  const dark = () => !printing && (state.theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : state.theme === "dark");
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const parts = colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  const luminance = colour => parts(colour).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const lighter = (colour, part) => "#" + parts(colour).map(v => Math.round(v + (255 - v) * part).toString(16).padStart(2, "0")).join("");
  /* The palette is made for paper: on a dark page its dark colours are lightened until they stand out. */
  const ink = colour => {
    let part = 0;
    while (dark() && luminance(lighter(colour, part)) < .16 && part < .9) part += .08;
    return part ? lighter(colour, part) : colour;
  };

  /* ---- traces and layouts, one function per kind of chart */
  const smoothed = (y, weight) => {
    let sum = 0, seen = 0;
    return y.map(v => v === null ? null : (sum = sum * weight + v * (1 - weight), seen = seen * weight + 1 - weight, sum / seen));
  };
  const axis = (more = {}) => ({gridcolor: css("--rule"), zerolinecolor: css("--rule"), linecolor: css("--strong"), automargin: true,
    title: {standoff: 8}, ...more});
  const base = (height, more = {}) => ({height, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink")}, margin: {l: 52, r: 14, t: 30, b: 44},
    hoverlabel: {bgcolor: css("--card"), bordercolor: css("--strong"), font: {color: css("--ink")}, namelength: -1},
    legend: {orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", traceorder: "normal"},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: css("--strong"), activecolor: css("--link")}, hovermode: "closest", dragmode: "zoom", ...more});
  const titled = text => ({text: plain(text), standoff: 8});
  /* An axis of counts has no ticks between whole numbers: Plotly chooses them so by itself where there are more than a few. */
  const whole = values => Math.max(...values) - Math.min(...values) <= 8 ? {dtick: 1, tick0: 0} : {};
  const isCount = label => !label.endsWith("(s)");
  /* A long name takes several lines of a legend. */
  const lettersIn = width => Math.max(12, Math.floor((width - 100) / 6.6));
  const wrapName = (name, width) => (String(name).match(new RegExp(`[^]{1,${lettersIn(width)}}`, "g")) || [""]).map(plain).join("<br>");

  const lines = (view, width, {log, smooth}) => {
    const columns = Math.max(1, Math.min(view.columns, view.panels.length, Math.floor(width / 300)));
    const labels = [...new Set(view.panels.flatMap(panel => panel.lines.map(line => line.label)))];
    const longest = Math.max(0, ...labels.map(name => name.length)), inRow = Math.max(1, Math.floor((width - 60) / (50 + 6.6 * longest)));
    const legend = Math.ceil(labels.length / inRow) * Math.ceil(longest / lettersIn(width) || 1);
    const rows = Math.ceil(view.panels.length / columns), tall = rows > 2 ? 210 : 270, gap = 78, head = 40 + 19 * legend;
    const height = head + rows * tall + (rows - 1) * gap + 50, inner = height - head - 50;
    const layout = base(height, {margin: {l: 52, r: 14, t: head, b: 50}, annotations: [], uirevision: `${view.label} ${log}`,
      hovermode: view.panels.some(p => p.points || p.lines.length > 12) ? "closest" : "x unified"});
    layout.legend = {...layout.legend, y: 1 + 22 / inner, uirevision: [...state.hidden].join()};
    const traces = [], named = new Set(), first = {x: {}, y: {}};
    view.panels.forEach((panel, i) => {
      const n = i ? i + 1 : "", row = Math.floor(i / columns), column = i % columns, wide = columns === 1 ? 0 : 56 / width;
      const span = (1 - wide * (columns - 1)) / columns, left = column * (span + wide), top = 1 - row * (tall + gap) / inner;
      const match = (side, label) => { const at = first[side][label]; if (at === undefined) first[side][label] = side + n; return at; };
      layout["xaxis" + n] = axis({domain: [left, left + span], anchor: "y" + n, title: titled(panel.x_label), matches: match("x", panel.x_label),
        hoverformat: ",.6~g", showgrid: false, zeroline: false,
        ...(isCount(panel.x_label) && panel.lines.some(line => line.x.length) ? whole(panel.lines.flatMap(line => [line.x[0] ?? 0, line.x.at(-1) ?? 0])) : {})});
      layout["yaxis" + n] = axis({domain: [Math.max(0, top - tall / inner), top], anchor: "x" + n, type: log ? "log" : "linear",
        title: titled(column && view.panels[i - 1].y_label === panel.y_label ? "" : panel.y_label), matches: match("y", panel.y_label)});
      if (panel.counts && panel.range) Object.assign(layout["yaxis" + n], whole(panel.range));
      if (!log && panel.range) layout["yaxis" + n].range = panel.range; else layout["yaxis" + n].autorange = true;
      if (panel.title) layout.annotations.push({text: `<b>${plain(panel.title)}</b>`, x: left, y: top, xref: "paper", yref: "paper",
        xanchor: "left", yanchor: "bottom", showarrow: false});
      for (const [place, line] of panel.lines.entries()) {
        const colour = ink(line.colour), group = {legendgroup: line.label, xaxis: "x" + n, yaxis: "y" + n, x: line.x,
          visible: state.hidden.has(line.label) ? "legendonly" : true};
        const y = log ? line.y.map(v => v > 0 ? v : null) : line.y;
        if (smooth) traces.push({...group, y, type: "scatter", mode: "lines", line: {color: colour, width: 1}, opacity: .25,
          showlegend: false, hoverinfo: "skip", name: plain(line.label)});
        const middle = smooth ? smoothed(y, smooth) : y;
        /* The band of a mean over seeds: two lines without ink, the second filled down to the first. */
        if (line.spread) for (const side of [-1, 1]) {
          const edge = middle.map((v, j) => v === null ? null : v + side * (line.spread[j] ?? 0));
          traces.push({...group, y: log ? edge.map(v => v > 0 ? v : null) : edge, type: "scatter", mode: "lines", line: {color: colour, width: 0},
            ...(side > 0 ? {fill: "tonexty", fillcolor: `rgba(${parts(colour).join()},.18)`} : {}), showlegend: false, hoverinfo: "skip", name: plain(line.label)});
        }
        if (panel.points) {
          const lift = .6 * (place - (panel.lines.length - 1) / 2) / panel.lines.length;
          traces.push({...group, y: y.map(v => v === null ? null : v + lift), customdata: y, type: "scatter", mode: "markers", name: wrapName(line.label, width),
            showlegend: !named.has(line.label), marker: {size: 5, color: colour}, hovertemplate: `${plain(panel.y_label)} %{customdata} at %{x:,.6~g}`});
          named.add(line.label);
          continue;
        }
        /* Lines that lie on each other take turns: the first is whole, each further one covers less of it. */
        const [turn, count] = line.stripe || [0, 1];
        traces.push({...group, y: middle, type: "scatter", name: wrapName(line.label, width),
          ...(line.spread ? {customdata: line.spread.map(v => v === null ? "" : ` ± ${v.toPrecision(2)}`)} : {}),
          mode: line.x.length > 80 || turn ? "lines" : "lines+markers", showlegend: !named.has(line.label), marker: {size: 4.5, color: colour},
          line: {color: colour, width: 1.8, dash: turn ? `${7 * (count - turn)}px,${7 * turn}px` : line.dashed ? "dash" : "solid"}, hovertemplate: line.spread ? "%{y:.5~g}%{customdata}" : "%{y:.5~g}"});
        named.add(line.label);
      }
    });
    layout.showlegend = named.size > 1 || view.panels.length === 1;
    return [traces, layout];
  };

  const heights = view => view.categories.map((_, i) => view.series.reduce((sum, series) => sum + (series.values[i] ?? 0), 0));
  const bars = (view, width) => [
    view.series.map(series => ({type: "bar", name: wrapName(series.label, width), x: view.categories.map(plain), y: series.values,
      marker: {color: ink(series.colour)}, hovertemplate: view.y_label === "share" ? "%{y:.1%}" : "%{y:,}"})),
    base(360, {barmode: view.stacked ? "stack" : "group", hovermode: "x unified", bargap: .18, margin: {l: 52, r: 14, t: 58, b: 44},
      xaxis: axis({title: titled(view.x_label), type: "category", showgrid: false}),
      yaxis: axis({title: titled(view.y_label), tickformat: view.y_label === "share" ? ".0%" : ",~g", ...(view.counts ? whole([0, ...heights(view)]) : {})})}),
  ];

  const spans = (view, width) => {
    const rows = view.rows.map(name => plain(width < 520 ? name.replace("worker ", "") : name)), hover = view.hover.map(plain);
    const row = view.row.map(i => rows[i]), colour = view.colours.map(ink);
    return [[
      {type: "bar", orientation: "h", name: "rounds", y: row, base: view.start, x: view.end.map((v, i) => v - view.start[i]), width: .62,
        marker: {color: view.row.map(i => colour[i]), opacity: .55, line: {color: css("--card"), width: 1}}, customdata: hover,
        hovertemplate: "%{y}<br>%{customdata}<extra></extra>"},
      {type: "scatter", mode: "markers", name: "arrivals", y: row, x: view.end, customdata: hover,
        marker: {symbol: "line-ns", size: 13, line: {color: view.row.map(i => colour[i]), width: 2.2}},
        hovertemplate: "%{y} arrives at %{x:,.6~g} s<br>%{customdata}<extra></extra>"},
    ], base(Math.max(220, 96 + 34 * rows.length), {barmode: "overlay", uirevision: view.label, showlegend: false, margin: {l: 52, r: 14, t: 14, b: 44},
      yaxis: axis({type: "category", categoryorder: "array", categoryarray: rows, autorange: "reversed", showgrid: false, fixedrange: true}),
      xaxis: axis({title: titled(view.x_label)})})];
  };

  const CASES = {kept: "#56b4e9", damped: "#e69f00", turned: "#cc79a7", skipped: "#7f7f7f"};
  const order = view => {
    const mean = row => { const cosines = view.cosine[row].filter(v => v !== null); return cosines.reduce((a, b) => a + b, 0) / (cosines.length || 1); };
    const rows = view.blocks.map((_, i) => i);
    if (state.sort === "size") rows.sort((a, b) => view.sizes[b] - view.sizes[a] || a - b);
    if (state.sort === "cosine") { const means = rows.map(mean); rows.sort((a, b) => means[a] - means[b] || a - b); }
    return rows;
  };
  const heat = (view, width) => {
    const rows = order(view), letters = Object.keys(view.cases), names = Object.values(view.cases), cosine = state.show === "cosine";
    /* On a narrow screen a long name takes two lines, broken at the dot that is nearest to its middle. */
    const narrow = width < 520;
    const breaks = name => [...name].flatMap((c, i) => c === "." ? [i] : []).sort((a, b) => Math.abs(a - name.length / 2) - Math.abs(b - name.length / 2));
    const label = name => narrow && name.length > 16 && breaks(name).length ? plain(name.slice(0, breaks(name)[0])) + "<br>" + plain(name.slice(breaks(name)[0])) : plain(name);
    const words = rows.map(i => view.about.map((about, j) => `${plain(about)}<br>${view.cases[view.case[i][j]] || "not applied"}, cosine ${
      view.cosine[i][j] === null ? "none" : view.cosine[i][j].toFixed(3)}<br>${view.sizes[i].toLocaleString("en")} parameters`));
    const limit = view.cosine.flat().reduce((largest, v) => v === null ? largest : Math.max(largest, Math.abs(v)), .05);
    const steps = names.flatMap((name, i) => [[i / names.length, CASES[name]], [(i + 1) / names.length, CASES[name]]]);
    const bar = {thickness: width < 520 ? 8 : 12, len: 1, outlinewidth: 0, ...(width < 520 ? {xpad: 2, tickfont: {size: 9}} : {})};
    const ys = rows.map((_, i) => i), tall = Math.max(300, Math.min(1100, 100 + 15 * rows.length));
    const every = Math.ceil(rows.length / ((tall - 90) / (narrow ? 24 : 12)));
    return [[{type: "heatmap", x: view.columns.map(([a, b]) => (a + b) / 2), y: ys, hovertext: words, text: rows.map(() => view.columns.map(() => "")),
      customdata: rows.map(i => view.columns.map(() => plain(view.blocks[i]))), hovertemplate: "<b>%{customdata}</b><br>%{hovertext}<extra></extra>",
      z: rows.map(i => cosine ? view.cosine[i] : [...view.case[i]].map(c => letters.includes(c) ? letters.indexOf(c) : null)),
      ...(cosine ? {zmin: -limit, zmax: limit, colorscale: [[0, "#b35806"], [.25, "#f1a340"], [.5, dark() ? "#23282e" : "#f7f7f7"], [.75, "#4f9bd0"], [1, dark() ? "#bfe0ff" : "#053d73"]],
        colorbar: {...bar, title: {text: width < 520 ? "" : "cosine", side: "top"}}}
        : {zmin: 0, zmax: names.length, colorscale: steps, colorbar: {...bar, tickvals: names.map((_, i) => i + .5), ticktext: names}}),
    }], base(tall, {uirevision: view.label + state.sort, margin: {l: 52, r: 14, t: 14, b: 44}, xaxis: axis({title: titled("arrival"), showgrid: false, ...whole(view.columns.flat())}),
      yaxis: axis({autorange: "reversed", tickvals: ys.filter(i => i % every === 0), ticktext: ys.filter(i => i % every === 0).map(i => label(view.blocks[rows[i]])),
        tickfont: {size: narrow ? 9 : 10}, showgrid: false, zeroline: false})})];
  };
  const KINDS = {lines, bars, spans, heat};

  /* ---- the numbers behind a chart */
  const common = (view, name, otherwise) => new Set(view.panels.map(panel => panel[name])).size === 1 ? view.panels[0][name] : otherwise;
  const ROWS = {
    lines: view => {
      const spread = view.panels.some(panel => panel.lines.some(line => line.spread));
      return [["panel", "line", common(view, "x_label", "x"), common(view, "y_label", "value"), ...(spread ? ["±"] : [])],
        view.panels.flatMap(p => p.lines.flatMap(line => line.x.map((x, i) =>
          [p.title || p.y_label, line.label, x, line.y[i], ...(spread ? [line.spread ? line.spread[i] : null] : [])])))];
    },
    bars: view => [[view.x_label || "worker", ...view.series.map(s => s.label)], view.categories.map((c, i) => [c, ...view.series.map(s => s.values[i])])],
    spans: view => [["worker", "start (s)", "arrival (s)", "rounds", "about"],
      view.row.map((r, i) => [view.rows[r], view.start[i], view.end[i], view.count[i], view.hover[i]])],
    heat: view => [["block", "parameters", "first arrival", "last arrival", "cosine", "case", "about"],
      order(view).flatMap(i => view.columns.map(([a, b], j) =>
        [view.blocks[i], view.sizes[i], a, b, view.cosine[i][j], view.cases[view.case[i][j]] ?? "", view.about[j]]))],
  };
  /* Text that a spreadsheet would take for a formula is kept text. */
  const field = value => {
    if (value === null || typeof value === "number") return value ?? "";
    const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  const csv = view => { const [header, rows] = ROWS[view.kind](view); return [header, ...rows].map(row => row.map(field).join(",")).join("\n") + "\n"; };
  const save = (name, text) => {
    const link = make("a", {href: URL.createObjectURL(new Blob([text], {type: "text/csv"})), download: `${name}.csv`});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const ROW_LIMIT = 300;
  const tabled = (header, rows, numeric) => make("table", {}, make("thead", {}, make("tr", {}, ...header.map((name, i) =>
    make("th", {scope: "col", className: numeric(i) ? "number" : ""}, name)))), make("tbody", {}, ...rows));
  const numbers = view => {
    const [header, rows] = ROWS[view.kind](view), firstRows = rows.slice(0, ROW_LIMIT);
    const numeric = i => firstRows.length > 0 && firstRows.every(row => row[i] === null || typeof row[i] === "number");
    const cellText = value => value === null ? "–" : typeof value === "number" ? value.toLocaleString("en", {maximumSignificantDigits: 6}) : value;
    const body = firstRows.map(row => make("tr", {}, ...row.map((v, i) => make("td", {className: numeric(i) ? "number" : ""}, cellText(v)))));
    return [make("div", {className: "wide", tabIndex: 0}, tabled(header, body, numeric)),
      ...(rows.length > ROW_LIMIT ? [make("p", {className: "caption"}, `The first ${ROW_LIMIT} of ${rows.length.toLocaleString("en")} rows; the CSV has all.`)] : [])];
  };

  /* ---- cards */
  const runNames = () => [...new Set(data.charts.filter(chart => chart.by === "run").flatMap(chart => chart.views.map(view => view.label)))];
  const shownRun = () => state.run ?? data.run;
  const runChoice = () => {
    const names = runNames(), select = $("run");
    $("run-choice").hidden = names.length < 2;
    if ([...select.options].map(option => option.value).join("\n") !== names.join("\n"))
      select.replaceChildren(...names.map(name => make("option", {value: name}, name)));
    select.value = names.includes(shownRun()) ? shownRun() : names[0];
  };
  const current = chart => {
    const wanted = chart.by === "run" ? shownRun() : state.view[chart.name];
    return chart.views.find(view => view.label === wanted) || chart.views[0];
  };
  const FULL = ["scores", "sources", "norms", "traffic", "participation", "timeline", "correction"];
  const build = chart => {
    const card = {plot: make("div", {className: "plot"}), picks: make("span", {className: "head"}), caption: make("p", {className: "caption"}),
      details: make("details", {}, make("summary", {}, "Data table")), chart, near: false, dirty: true};
    const download = make("button", {type: "button", title: "Save the numbers of this chart"}, "CSV");
    download.addEventListener("click", () => save(`heloco-${card.chart.name}`, csv(current(card.chart))));
    card.details.addEventListener("toggle", () => refreshTable(card));
    card.title = make("h2", {}, chart.title);
    card.about = make("p", {className: "about"}, chart.about);
    card.element = make("section", {className: FULL.includes(chart.name) || chart.wide ? "card full" : "card", id: `chart-${chart.name}`},
      make("div", {className: "head"}, card.title, card.picks, download), card.about, card.plot, card.caption, card.details);
    card.plot.setAttribute("role", "img");
    return card;
  };
  /* A chart without views has nothing to draw: its words say why. */
  const wordsOnly = card => !card.chart.views.length;
  const refreshTable = card => wordsOnly(card) || card.details.replaceChildren(card.details.firstChild, ...(card.details.open ? numbers(current(card.chart)) : []));
  const picks = card => {
    if (wordsOnly(card)) return;
    const {chart} = card, pickers = [], view = current(chart);
    if (chart.by === "run" && runNames().length > 1) pickers.push(make("span", {className: "of"}, `of ${view.label}`));
    else if (chart.views.length > 1) pickers.push(choose("what is shown", chart.views.map(v => [v.label, v.label]), view.label, value => {
      state.view[chart.name] = value;
      refresh(card);
    }));
    if (view.kind === "heat") {
      pickers.push(choose("colour", [["cosine", "cosine"], ["case", "case"]], state.show, value => { state.show = value; refresh(card); }));
      pickers.push(choose("order of the blocks", [["layers", "by layer"], ["size", "by size"], ["cosine", "by mean cosine"]], state.sort, value => { state.sort = value; refresh(card); }));
    }
    card.picks.replaceChildren(...pickers);
  };
  const draw = card => {
    card.dirty = false;
    if (wordsOnly(card)) return null;
    const view = current(card.chart), width = printing ? PAPER_WIDTH : card.plot.clientWidth || 600;
    card.plot.setAttribute("aria-label", view.alt);
    card.caption.textContent = view.caption;
    const [traces, layout] = KINDS[view.kind](view, width, {
      log: state.scale === "log" && card.chart.switches.includes("log"), smooth: card.chart.switches.includes("smooth") ? state.smooth : 0});
    layout.width = width;
    card.plot.style.minHeight = `${layout.height}px`;
    /* Plotly offers by default to upload a chart to its makers: a run's numbers stay with the person who has the page. */
    return Plotly.react(card.plot, traces, layout, {displaylogo: false, showSendToCloud: false, showEditInChartStudio: false, plotlyServerURL: "", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: {filename: `heloco-${card.chart.name}`, scale: 2}, displayModeBar: width < 520 ? false : "hover"});
  };
  const refresh = only => {
    for (const card of only ? [only] : cards.values()) {
      card.dirty = true;
      card.element.classList.toggle("words", wordsOnly(card));
      picks(card);
      refreshTable(card);
      if (card.near) draw(card);
    }
  };
  /* Charts are drawn when they come near the window: a long page opens at once. */
  const watcher = new IntersectionObserver(entries => entries.forEach(entry => {
    const card = cards.get(entry.target.id.slice("chart-".length));
    card.near = entry.isIntersecting;
    if (card.near && card.dirty) draw(card);
  }), {rootMargin: "400px"});
  const drawAll = () => Promise.all([...cards.values()].filter(card => card.dirty).map(draw));

  /* ---- tables, notes, chips */
  const table = content => {
    const count = content.header.length;
    const looks = text => /^[-+−]?[\d.,:]+(–[\d.,:]+)?( ± [\d.]+)?(%| s)?( of [\d,]+)?$|^–$/.test(text) && !/, /.test(text);
    const numeric = i => i > 0 && content.rows.length > 0 && content.rows.every(row => looks(row[i].text)) && count > 2;
    const cell = (c, i) => make(i ? "td" : "th", {className: [numeric(i) ? "number" : "", c.tone].filter(Boolean).join(" "),
      ...(i ? {"data-label": content.header[i]} : {scope: "row"})}, make("span", {}, c.text, ...(c.tone === "best" ? [make("span", {title: "best", ariaLabel: "best"}, " ★")] : []), ...(c.note ? [make("small", {}, c.note)] : [])));
    const body = content.rows.map(row => make("tr", {}, ...row.map(cell)));
    return make("section", {className: "card"}, make("h2", {}, content.title),
      content.rows.length ? make("div", {className: count > 2 ? "wide stack" : "wide", tabIndex: 0}, tabled(content.header, body, numeric)) : make("p", {className: "about"}, "None."),
      ...(content.caption ? [make("p", {className: "caption"}, content.caption)] : []));
  };
  const chips = () => $("chips").replaceChildren(...(data.runs.length < 2 ? [] : data.runs.map(run => {
    const dot = make("i");
    dot.style.background = ink(run.colour);
    const button = make("button", {type: "button", title: `${run.method}: show or hide it in all charts`}, dot, make("span", {}, run.name));
    button.setAttribute("aria-pressed", String(!state.hidden.has(run.name)));
    button.addEventListener("click", () => {
      if (!state.hidden.delete(run.name)) state.hidden.add(run.name);
      chips();
      refresh();
    });
    return button;
  })));
  const theme = () => {
    document.documentElement.toggleAttribute("data-dark", dark());
    document.documentElement.toggleAttribute("data-light", !dark());
    chips();
    refresh();
  };

  /* ---- taking data, now or later */
  const give = more => {
    const chartsByName = new Map(data.charts.map(chart => [chart.name, chart]));
    data = {...data, ...more, charts: [...new Map([...chartsByName, ...(more.charts || []).map(chart => [chart.name, chart])]).values()]};
    document.title = $("title").textContent = data.title;
    $("notes").replaceChildren(...data.notes.map(note => make("p", {className: "note"}, note)));
    $("tables-first").replaceChildren(...data.tables.slice(0, -1).map(table));
    $("tables-last").replaceChildren(...data.tables.slice(-1).map(table));
    for (const chart of data.charts) {
      const card = cards.get(chart.name) || build(chart);
      card.chart = chart;
      if (!cards.has(chart.name)) { cards.set(chart.name, card); $("charts").append(card.element); watcher.observe(card.element); }
    }
    chips();
    runChoice();
    refresh();
  };

  $("run").addEventListener("change", () => { state.run = $("run").value; refresh(); });
  for (const input of document.querySelectorAll(".bar input"))
    input.addEventListener("change", () => {
      state[input.name] = input.name === "smooth" ? Number(input.value) : input.value;
      if (input.name === "theme") theme(); else refresh();
    });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
  let width = innerWidth, timer;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; refresh(); } }, 120); });
  /* On paper the page is light and each chart as wide as a sheet, whatever the window is. */
  addEventListener("beforeprint", () => { printing = true; theme(); drawAll(); });
  addEventListener("afterprint", () => { printing = false; theme(); });
  theme();
  give(JSON.parse($("data").textContent));
  window.heloco = {give, drawAll, cards, state, csv: name => csv(current(cards.get(name).chart))};
})();
