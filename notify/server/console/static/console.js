// Charts of the overview, and the menu of narrow screens. Everything else works without a script.
"use strict";

(function () {
  const menu = document.getElementById("menu");
  const wide = window.matchMedia("(min-width: 48.01rem)");
  const fit = () => { if (menu) menu.open = wide.matches; };
  fit();
  wide.addEventListener("change", fit);

  const box = document.getElementById("chart");
  if (!box || !window.uPlot) return;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const lines = [
    ["halves", "halves", "--accent", []], ["committed", "committed", "--good", []],
    ["delivered", "delivered", "--warn", [6, 4]], ["acked", "acknowledged", "--bad", [2, 3]],
  ];
  let plot = null;
  const axis = () => ({ stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } });
  const options = (width) => ({
    width, height: 240, cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (u, low, high) => [0, Math.max(1, high * 1.1)] } },
    axes: [axis(), Object.assign(axis(), { size: 64, values: (u, ticks) => ticks.map((t) => t.toLocaleString("en")) })],
    series: [{ label: "at", value: "{HH}:{mm}:{ss}" }].concat(lines.map(([, label, stroke, dash]) => (
      { label: label + "/s", stroke: colour(stroke), width: 2, dash, points: { show: false } }))),
  });
  async function draw() {
    try {
      const answer = await fetch("/overview/history");
      if (!answer.ok) return;
      const found = await answer.json();
      const data = [found.at].concat(lines.map(([name]) => found[name]));
      if (!plot) plot = new uPlot(options(box.clientWidth), data, box);
      else plot.setData(data);
      box.dataset.points = found.at.length;
    } catch (error) { /* The server is away: the page says so where it refreshes itself. */ }
  }
  // In a frame of its own, for the plot changes the height of the box: until then the box hides what is too wide.
  const refit = () => { if (plot && plot.width !== box.clientWidth) plot.setSize({ width: box.clientWidth, height: 240 }); };
  new ResizeObserver(() => requestAnimationFrame(refit)).observe(box);
  draw();
  setInterval(draw, 5000);
})();
