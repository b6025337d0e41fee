/* The states of the runs that are watched, and of the page's own connection. `live.js` gives both to `heloco.states`. */
"use strict";
(() => {
  const top = document.getElementById("states"), cards = new Map(), ENDED = ["suspended", "finished", "stopped", "gave-up", "failed"];
  const PRESENCE = {here: "here", away: "not back yet", gone: "gone", unknown: "not known"};
  let states = [], lost = false, heardAt = Date.now() / 1000;

  const make = (tag, className, ...inside) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.append(...inside);
    return element;
  };
  /* Texts are written only when they change: screen readers read out what is written. */
  const write = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const clock = seconds => {
    const time = new Date(seconds * 1000), day = `${time.getFullYear()}-${String(time.getMonth() + 1).padStart(2, "0")}-${String(time.getDate()).padStart(2, "0")}`;
    const text = [time.getHours(), time.getMinutes(), time.getSeconds()].map(part => String(part).padStart(2, "0")).join(":");
    return time.toDateString() === new Date().toDateString() ? text : `${day} ${text}`;
  };
  const duration = seconds => {
    const whole = Math.round(seconds), two = part => String(part).padStart(2, "0");
    return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two(Math.floor(whole % 3600 / 60))}:${two(whole % 60)}`;
  };
  const numbers = number => number.toLocaleString("en", {maximumSignificantDigits: 3});

  const connection = make("p", "connection");
  connection.setAttribute("role", "status");
  const build = () => {
    const card = {badge: make("strong", "badge"), name: make("span", "name"), reason: make("span", "reason"), bar: make("progress"), facts: make("p", "facts"),
      goesOn: make("p", "goes-on"), rows: make("tbody"), summary: make("summary"), more: make("p", "about")};
    const head = make("tr", "", ...["machine", "is", "last heard of", "worker", "arrivals", "per minute"].map((name, i) => make("th", i > 2 ? "number" : "", name)));
    const line = make("p", "line", card.badge, card.name, card.reason);
    line.setAttribute("role", "status");
    card.machines = make("details", "", card.summary, make("div", "wide", make("table", "", make("thead", "", head), card.rows)), card.more);
    card.machines.open = true;
    card.bar.setAttribute("aria-label", "arrivals");
    card.element = make("div", "state", line, card.bar, card.facts, card.goesOn, card.machines);
    return card;
  };
  const row = machine => {
    const heard = machine.heard_at !== null ? clock(machine.heard_at) : machine.heard_run ? `${machine.heard_run} into the run` : "–";
    const presence = make("td", `presence ${machine.presence}`, PRESENCE[machine.presence], ...(machine.why ? [make("small", "", machine.why)] : []));
    const name = make("th", "", machine.name);
    name.scope = "row";
    return make("tr", "", name, presence, make("td", "", heard), make("td", "number", machine.worker),
      make("td", "number", machine.arrivals.toLocaleString("en")), make("td", "number", machine.per_minute === null ? "–" : numbers(machine.per_minute)));
  };
  const draw = (card, state) => {
    const isSilent = state.kind === "silent", goesOn = ["going", "paused"].includes(state.kind);
    card.element.dataset.kind = lost && !ENDED.includes(state.kind) ? "lost" : state.kind;
    write(card.badge, isSilent && state.news_at !== null ? `${state.label} since ${clock(state.news_at)}` : state.label);
    write(card.name, states.length > 1 ? state.name : "");
    write(card.reason, state.reason);
    card.bar.max = state.planned;
    card.bar.value = state.arrivals;
    write(card.facts, [`${state.arrivals.toLocaleString("en")} of ${state.planned.toLocaleString("en")} arrivals`,
      ...(goesOn ? [state.per_minute === null ? "rate not known yet" : `${numbers(state.per_minute)} a minute`] : []),
      ...(state.left_s !== null ? [`about ${duration(state.left_s)} left`] : []),
      ...(!isSilent && state.news_at !== null ? [`last news ${clock(state.news_at)}`] : [])].join(" · "));
    write(card.goesOn, state.goes_on ? `${state.goes_on} goes on with it.` : "");
    card.machines.hidden = !state.is_real;
    if (!state.is_real) return;
    const here = state.machines.filter(machine => machine.presence === "here").length;
    write(card.summary, state.machines.length ? `Machines: ${here} here of ${state.machines.length + state.machines_left_out} so far` : "Machines: none so far");
    write(card.more, state.machines_left_out ? `${state.machines_left_out} more are left out.` : "");
    card.rows.replaceChildren(...state.machines.map(row));
  };
  const refresh = () => {
    top.hidden = !lost && !states.length;
    top.classList.toggle("lost", lost);
    write(connection, lost ? `Connection lost: the last news came at ${clock(heardAt)}. What is shown is of then. The page tries again by itself.` : "");
    connection.hidden = !lost;
    states.forEach(state => {
      if (!cards.has(state.name)) cards.set(state.name, build());
      draw(cards.get(state.name), state);
    });
    const elements = [connection, ...states.map(state => cards.get(state.name).element)];
    if (elements.length !== top.children.length || elements.some((element, i) => element !== top.children[i])) top.replaceChildren(...elements);
  };
  /* Before the page's name in the browser's tab: what a reader must know who looks at another tab. */
  const mark = () => {
    const kinds = [...new Set(states.map(state => state.label))];
    return lost ? "(connection lost) " : kinds.length === 1 && kinds[0] !== "going" ? `(${kinds[0]}) ` : "";
  };
  window.heloco.states = {
    show: newStates => { states = newStates; lost = false; refresh(); },
    heard: () => { heardAt = Date.now() / 1000; if (lost) { lost = false; refresh(); } },
    lose: () => { if (!lost) { lost = true; refresh(); } },
    mark,
  };
})();
