/* Newer data from where the page came from: only what has changed, or everything if the page was away for long. The browser
   connects again by itself when the connection breaks. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const source = new EventSource(`events?seen=${data.version}`);
  const title = document.title, root = [data];
  const change = ([operation, path, value]) => {
    const steps = [0, ...path], last = steps.pop(), place = steps.reduce((inner, step) => inner[step], root);
    if (operation === "set") place[last] = value; else place[last].push(...value);
  };
  source.onopen = () => { document.title = title; };
  source.onerror = () => { document.title = `(away) ${title}`; };
  source.onmessage = event => { root[0] = JSON.parse(event.data); window.heloco.give(root[0]); };
  source.addEventListener("change", event => { JSON.parse(event.data).forEach(change); window.heloco.give(root[0]); });
})();
