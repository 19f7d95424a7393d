// Curves of metrics by run. The page also lists the values in a table.
"use strict";
(() => {
  const plot = document.getElementById("plot");
  const source = document.getElementById("curve-data");
  if (!plot || !source || !window.uPlot) return;
  const { lines, axes } = JSON.parse(source.textContent);
  const HEIGHT = 380;
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000];
  const style = getComputedStyle(document.documentElement);
  const ink = (name) => style.getPropertyValue(name).trim();
  // Distinguishable without red and green, and also by dashes.
  const LIGHT = ["#3249b3", "#c25b00", "#00796b", "#a0307a", "#6b5b00", "#0077a8", "#7a4a2a", "#5c5f66"];
  const DARK = ["#a3b4ff", "#ffb066", "#5fd0c0", "#f08cc8", "#e0c860", "#6cc6f0", "#d9a683", "#b4b8bf"];
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4], [1, 4], [6, 2, 2, 2]];
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const columns = lines.map((line) => {
    const known = new Map(line.steps.map((step, i) => [step, line.y[i]]));
    return steps.map((step) => known.get(step) ?? null);
  });

  let chart = null;
  function draw() {
    if (chart) chart.destroy();
    const palette = dark.matches ? DARK : LIGHT;
    const axis = { stroke: ink("--dim"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line") }, font: "12px system-ui, sans-serif" };
    const labelled = { labelSize: 20, labelFont: "12px system-ui, sans-serif" };
    // Without axes of their own, all lines share one that needs no name.
    const values = (axes.length ? axes : [""]).map((name, n) => ({
      ...axis, size: 64, scale: `y${n}`, side: n % 2 ? 1 : 3,
      ...(name && { label: name, ...labelled }), grid: { show: !n, ...axis.grid },
    }));
    chart = new uPlot({
      width: plot.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false } },
      axes: [{ ...axis, incrs: WHOLE, label: "step", ...labelled }, ...values],
      series: [{ label: "step" }, ...lines.map((line, n) => ({
        label: line.label, scale: axes.length ? `y${line.axis}` : "y0",
        stroke: palette[n % 8], dash: DASHES[(n + (n >> 3)) % 8], width: 2, spanGaps: true,
        points: { show: steps.length < 60, size: 5 },
      }))],
    }, [steps, ...columns], plot);
  }

  draw();
  dark.addEventListener("change", draw);
  new ResizeObserver(() => chart.setSize({ width: plot.clientWidth, height: HEIGHT })).observe(plot);
})();
