// An attempt's page: while it is open, its tokens are not pruned; j and k step through the
// conversation.
"use strict";
(() => {
  const tabs = document.querySelector("[data-hold]");
  const HOLD_MS = 20000;
  if (tabs) setInterval(() => fetch(tabs.dataset.hold).catch(() => {}), HOLD_MS);

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
    if (event.key !== "j" && event.key !== "k") return;
    const steps = [...document.querySelectorAll("[data-step]")];
    if (!steps.length) return;
    const current = steps.indexOf(document.activeElement.closest("[data-step]"));
    const next = current < 0 ? 0 : current + (event.key === "j" ? 1 : -1);
    const target = steps[Math.min(Math.max(next, 0), steps.length - 1)];
    target.focus({ preventScroll: true });
    target.scrollIntoView({ block: "start" });
    event.preventDefault();
  });
})();
