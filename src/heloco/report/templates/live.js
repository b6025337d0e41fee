/* Newer data from where the page came from: only what has changed, or everything if the page was away for long; and the states of
   the runs. The browser connects again by itself when the connection breaks, but not if it was refused, and it does not notice a
   connection over which nothing comes any more. */
"use strict";
(() => {
  const SILENT_MS = 20_000, AGAIN_MS = 3_000;
  const data = JSON.parse(document.getElementById("data").textContent), root = [data], {states, give} = window.heloco;
  let seen = data.version, source, timer;
  const change = ([operation, path, value]) => {
    const steps = [0, ...path], last = steps.pop(), place = steps.reduce((inner, step) => inner[step], root);
    if (operation === "set") place[last] = value; else place[last].push(...value);
  };
  const name = () => { document.title = states.mark() + root[0].title; };
  const lose = () => { states.lose(); name(); };
  const connect = () => {
    if (source) source.close();
    source = new EventSource(`events?seen=${seen}`);
    const on = (kind, take) => source.addEventListener(kind, event => { seen = event.lastEventId || seen; heard(); take(JSON.parse(event.data)); name(); });
    on("message", whole => { root[0] = whole; give(whole); });
    on("change", changes => { changes.forEach(change); give(root[0]); });
    on("state", states.show);
    source.onerror = () => { lose(); if (source.readyState === EventSource.CLOSED) connectIn(AGAIN_MS); };
    connectIn(SILENT_MS, lose);
  };
  /* Connects again, unless something is heard before. */
  const connectIn = (milliseconds, before = () => {}) => { clearTimeout(timer); timer = setTimeout(() => { before(); connect(); }, milliseconds); };
  const heard = () => { states.heard(); connectIn(SILENT_MS, lose); };
  connect();
})();
