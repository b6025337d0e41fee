/* Newer data from where the page came from. The browser connects again by itself when the connection breaks. */
"use strict";
(() => {
  const seen = JSON.parse(document.getElementById("data").textContent).version;
  const source = new EventSource(`events?seen=${seen}`);
  const title = document.title;
  source.onopen = () => { document.title = title; };
  source.onerror = () => { document.title = `(away) ${title}`; };
  source.onmessage = event => window.heloco.give(JSON.parse(event.data));
})();
