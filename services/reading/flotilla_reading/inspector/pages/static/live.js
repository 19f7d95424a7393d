// The live board, refreshed every two seconds while the page is visible.
"use strict";
(() => {
  const board = document.getElementById("live");
  const source = board && board.dataset.live;
  if (!source) return;
  const EVERY_MS = 2000;

  async function refresh() {
    if (document.hidden || board.contains(document.activeElement)) return;
    const answer = await fetch(source, { credentials: "same-origin" });
    if (!answer.ok) return;
    const text = await answer.text();
    // Rendered and escaped by the server, like the page itself.
    if (text !== board.dataset.shown) board.innerHTML = text;
    board.dataset.shown = text;
  }

  // Keep polling a server that has ended: it may come back.
  const again = () => refresh().catch(() => {}).finally(() => setTimeout(again, EVERY_MS));
  setTimeout(again, EVERY_MS);
})();
