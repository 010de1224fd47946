// Refreshes live pages, copies ids, offers names, draws charts, and opens the menu. Everything else works without a script.
"use strict";

(function () {
  const menu = document.getElementById("menu");
  const wide = window.matchMedia("(min-width: 48.01rem)");
  const fit = () => { if (menu) menu.open = wide.matches; };
  fit();
  wide.addEventListener("change", fit);
  const preview = document.getElementById("preview");
  if (preview) preview.focus();
})();

// The key / goes to the search; in a list j and k go to the next and the previous row, whose link Enter opens; a bar counts the rows that are selected.
(function () {
  document.addEventListener("keydown", (event) => {
    const step = { j: 1, k: -1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input:not([type=checkbox]):not([type=radio]), textarea, select")) return;
    const find = document.getElementById("find");
    if (event.key === "/" && find) {
      find.focus();
      event.preventDefault();
    }
    if (!step) return;
    const rows = [...document.querySelectorAll("table.rows tbody tr, table.dense tbody tr")].filter((row) => row.querySelector("a, summary"));
    if (!rows.length) return;
    const now = rows.indexOf(event.target.closest("tr"));
    rows[Math.max(0, Math.min(rows.length - 1, now + step))].querySelector("a, summary").focus();
    event.preventDefault();
  });
  const count = () => {
    for (const place of document.querySelectorAll("[data-selected]")) {
      place.textContent = `${place.closest("form").querySelectorAll("input[name=ids]:checked").length} selected`;
    }
  };
  document.addEventListener("change", count);
  count();
})();

// A field for a name offers those that begin with what has been typed.
(function () {
  const PAUSE_MS = 150;
  let asked = "";
  let pause = 0;
  async function offer(field) {
    const typed = field.value;
    const address = `${document.documentElement.dataset.prefix}/names/${field.list.id.slice("names-".length)}?q=${encodeURIComponent(typed)}`;
    if (address === asked) return;
    asked = address;
    try {
      const answer = await fetch(address);
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const names = await answer.json();
      if (address !== asked) return;  // More has been typed.
      field.list.replaceChildren(...names.map((name) => new Option(name, name)));
      field.list.dataset.offered = typed;
    } catch (error) {  // Names can be typed; the next key or focus asks again.
      if (address === asked) asked = "";
    }
  }
  document.addEventListener("focusin", (event) => { if (event.target.list) offer(event.target); });
  document.addEventListener("input", (event) => {
    clearTimeout(pause);
    if (event.target.list) pause = setTimeout(() => offer(event.target), PAUSE_MS);
  });
})();

// A copy button beside each shortened id.
(function () {
  const show = (root) => { if (navigator.clipboard) for (const b of root.querySelectorAll(".copy[hidden]")) b.hidden = false; };
  show(document);
  window.notifyShowCopy = show;
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".copy");
    if (!button) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    const announcement = document.getElementById("said");
    button.textContent = "copied";
    announcement.textContent = "Copied";
    setTimeout(() => { button.textContent = "copy"; announcement.textContent = ""; }, 1500);
  });
})();

// Fetches a live page again, unless that is paused, and applies only the differences, so that focus, selection and open details stay.
(function () {
  const live = document.getElementById("live");
  const fresh = document.getElementById("fresh");
  if (!live || !fresh) return;
  const every = Number(live.dataset.every) * 1000;
  const CALL_MS = 10000;
  const pause = document.getElementById("pause");
  let answered = Date.now();
  let failing = false;
  let paused = false;

  // A form has its fields as properties: a field named `id` or `contains` hides the form's own property of that name.
  // The prototype still has that property.
  const own = (node, name) => Reflect.get(Object.getPrototypeOf(node), name, node);
  const call = (node, name, ...args) => own(node, name).apply(node, args);

  function same(a, b) {
    return own(a, "nodeType") === own(b, "nodeType") && own(a, "nodeName") === own(b, "nodeName") && key(a) === key(b);
  }
  function key(node) {
    return own(node, "nodeType") === Node.ELEMENT_NODE ? own(node, "id") || own(node, "dataset").key || "" : "";
  }
  function attributes(now, next) {
    for (const { name } of [...own(now, "attributes")]) {
      if (!call(next, "hasAttribute", name) && !(name === "open" && own(now, "nodeName") === "DETAILS")) {
        call(now, "removeAttribute", name);
      }
    }
    for (const { name, value } of own(next, "attributes")) {
      if (call(now, "getAttribute", name) !== value) call(now, "setAttribute", name, value);
    }
  }
  function morph(now, next) {
    if (own(now, "nodeType") !== Node.ELEMENT_NODE) {
      if (now.nodeValue !== next.nodeValue) now.nodeValue = next.nodeValue;
      return;
    }
    if (own(now, "dataset").keep !== undefined || own(now, "classList").contains("copy")) return;
    attributes(now, next);
    if (now === document.activeElement && call(now, "matches", "input, textarea, select")) return;
    const keyed = new Map([...own(now, "children")].filter(key).map((child) => [key(child), child]));
    const after = (child) => own(child, "nextSibling");
    let place = own(now, "firstChild");
    const drop = () => { const dropped = place; place = after(place); call(dropped, "remove"); };
    for (const wanted of [...own(next, "childNodes")]) {
      let child = key(wanted) ? keyed.get(key(wanted)) : place;
      while (child && !key(wanted) && !same(child, wanted)) child = after(child);
      if (child && same(child, wanted)) {
        if (key(wanted)) {
          if (child === place) place = after(place);
          else call(now, "insertBefore", child, place);
        } else {
          while (place !== child) drop();
          place = after(place);
        }
        morph(child, wanted);
      } else {
        call(now, "insertBefore", document.importNode(wanted, true), place);
      }
    }
    while (place) drop();
  }

  function showAge() {
    const seconds = Math.round((Date.now() - answered) / 1000);
    const text = failing
      ? `No answer since ${new Date(answered).toLocaleTimeString("en-GB")}, ${seconds} s ago: these figures are old.`
      : paused ? `Updates are paused: these figures are ${seconds} s old.` : `Updated ${seconds} s ago.`;
    if (fresh.textContent !== text) fresh.textContent = text;
    fresh.classList.toggle("bad", failing);
    document.body.classList.toggle("stale", failing);
  }
  const alarm = document.getElementById("away");
  async function refresh() {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" }, signal: AbortSignal.timeout(CALL_MS) });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const next = page.getElementById("live");
      if (!answer.ok || !next) throw new Error(`status ${answer.status}`);
      morph(live, next);
      // Counts that the server does not know now, or only a part of, stay as they were.
      const counts = page.querySelectorAll("nav:not([data-uncounted]) [data-count]");
      document.querySelectorAll("[data-count]").forEach((place, n) => {
        if (counts[n] && counts[n].innerHTML !== place.innerHTML) place.replaceChildren(...counts[n].childNodes);
      });
      window.notifyShowCopy(live);
      answered = Date.now();
      failing = false;
    } catch (error) {
      failing = true;
    }
    if (alarm) alarm.hidden = !failing;
    showAge();
  }
  window.notifyRefresh = refresh;
  window.notifyIsPaused = () => paused;
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume updates" : "Pause updates";
    if (paused) showAge();
    else refresh();
  });
  showAge();
  setInterval(showAge, 1000);
  (function again() { setTimeout(async () => { if (!paused) await refresh(); again(); }, every); })();
})();

// Charts: each section fetches one address, for a span, and also shows its figures in words and as a table.
(function () {
  if (!window.uPlot) return;
  const ROWS = 100;
  const SECONDS = { "5min": 300, hour: 3600, day: 86400, week: 604800 };
  // How far apart the times on an axis may be: whole seconds, minutes, hours and days from a second on.
  const TIMES = [-3, -2, -1].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power)).concat(
    [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000, 86400000]);
  const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4"];
  const DASHES = [[], [], [6, 4], [2, 3]];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const two = (number) => String(number).padStart(2, "0");
  const clock = (at) => { const d = new Date(at * 1000); return `${two(d.getHours())}:${two(d.getMinutes())}`; };
  const day = (at) => { const d = new Date(at * 1000); return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`; };
  const moment = (at) => `${day(at)} ${clock(at)}`;
  const tick = (at) => clock(at) === "00:00" ? day(at).slice(5) : clock(at) + (at % 60 ? `:${two(at % 60)}` : "");
  const number = (value) => value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 });
  const time = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 0.9995) return `${Number((seconds * 1000).toPrecision(3))} ms`;
    const [unit, name] = seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : seconds < 172800 ? [3600, "h"] : [86400, "d"];
    return `${Number((seconds / unit).toPrecision(3))} ${name}`;
  };
  // A line's unit is a text behind its number, or "time" for seconds that are shown in the unit that fits.
  const shown = (value, unit) => unit === "time" ? time(value) : number(value);
  const measured = (value, unit) => unit === "time" ? time(value) : `${number(value)}${unit}`;
  const named = (label, unit) => unit === "time" ? label : label + unit;
  // A chart's heading says of which kind its shares are.
  const brief = (label, unit) => unit === "time" ? label.split(" ").pop() : label;
  // The figures between two gaps: no line leads to one that stands alone.
  const alone = (values) => {
    const known = (n) => values[n] !== null && values[n] !== undefined;
    return [...values.keys()].filter((n) => known(n) && !known(n - 1) && !known(n + 1));
  };
  const zone = (() => {
    const minutes = -new Date().getTimezoneOffset();
    if (minutes === 0) return "UTC";
    return `UTC${minutes < 0 ? "-" : "+"}${two(Math.floor(Math.abs(minutes) / 60))}:${two(Math.abs(minutes) % 60)}`;
  })();

  function chart(box) {
    const lines = JSON.parse(box.dataset.lines);
    const words = document.getElementById(box.getAttribute("aria-describedby"));
    if (lines.length === 1) box.dataset.solo = "";  // The heading names the only line, so that the legend is shown at the cursor only.
    const isTime = lines[0][2] === "time";
    const least = isTime ? 0.001 : 1;
    let plot = null;
    let seconds = SECONDS.hour;
    let end = Date.now() / 1000;
    const axis = () => ({ stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } });
    const options = () => ({
      width: box.clientWidth, height: 220, cursor: { drag: { x: false, y: false }, sync: { key: "charts" } },
      scales: { x: { range: () => [end - seconds, end] }, y: { range: (u, low, high) => [0, Math.max(least, (high || 0) * 1.1)] } },
      axes: [
        Object.assign(axis(), { values: (u, ticks) => ticks.map(tick) }),
        Object.assign(axis(), isTime ? { incrs: TIMES } : {}, { size: 64, values: (u, ticks) => ticks.map((t) => isTime ? time(t) : t.toLocaleString("en")) }),
      ],
      series: [{ label: "at", value: (u, at) => at === null ? "" : moment(at) }].concat(lines.map(([, label, unit], n) => (
        { label: named(brief(label, unit), unit), stroke: colour(COLOURS[n]), width: 2, dash: DASHES[n],
          points: { show: () => false, filter: (u, s) => alone(u.data[s]), size: 5 },
          value: (u, v) => v === null || v === undefined ? "" : shown(v, unit) }))),
    });
    function describe(figures) {
      const isKnown = lines.some(([name]) => figures[name].some((value) => value !== null));
      const sentences = !isKnown ? ["no figures"] : lines.map(([name, long, unit]) => {
        const label = brief(long, unit);
        const values = figures[name].filter((value) => value !== null);
        if (!values.length) return `${label}: unknown`;
        const most = values.reduce((a, b) => Math.max(a, b), 0);
        const last = figures[name][figures[name].length - 1];
        const now = last === null ? "no figure now" : `${measured(last, unit)} now`;
        return `${label} ${now}, at most ${measured(most, unit)}`;
      });
      const since = figures.at.length ? `Since ${moment(figures.at[0])} (times are ${zone})` : "";
      const text = since ? `${since}: ${sentences.join("; ")}.` : "No figures yet.";
      if (words.textContent !== text) words.textContent = text;
    }
    // In its own animation frame, because the plot changes the box's height; until then the box clips the plot.
    const refit = () => { if (plot && plot.width !== box.clientWidth) plot.setSize({ width: box.clientWidth, height: 220 }); };
    new ResizeObserver(() => requestAnimationFrame(refit)).observe(box);
    return { lines, recolour() {
      if (!plot) return;
      const data = plot.data;
      plot.destroy();
      plot = new uPlot(options(), data, box);
    }, show(figures, span) {
      seconds = SECONDS[span];
      if (figures.at.length) end = figures.at[figures.at.length - 1];
      const data = [figures.at].concat(lines.map(([name]) => figures[name]));
      if (!plot) plot = new uPlot(options(), data, box);
      else plot.setData(data);
      describe(figures);
      box.dataset.points = figures.at.length;
    } };
  }

  function table(details, lines, figures) {
    const place = details.querySelector("div");
    if (!details.open || !figures) return;
    const content = document.createElement("table");
    const row = (kind, cells) => {
      const tr = document.createElement("tr");
      cells.forEach((text, n) => {
        const cell = document.createElement(kind);
        if (kind === "th") cell.scope = "col";
        if (n) cell.className = "n";
        cell.textContent = text;
        tr.append(cell);
      });
      return tr;
    };
    content.append(row("th", ["At"].concat(lines.map(([, label, unit]) => named(label, unit)))));
    for (let n = figures.at.length - 1; n >= Math.max(0, figures.at.length - ROWS); n--) {
      content.append(row("td", [moment(figures.at[n])].concat(lines.map(([name, , unit]) => shown(figures[name][n], unit)))));
    }
    place.replaceChildren(content);
  }

  for (const section of document.querySelectorAll(".charts")) {
    const charts = [...section.querySelectorAll(".chart")].map(chart);
    const lines = charts.flatMap((one) => one.lines);
    const details = section.querySelector("details");
    let latest = null;
    let requests = 0;
    async function draw() {
      const span = section.querySelector("input:checked").value;
      const request = ++requests;
      try {
        const answer = await fetch(`${section.dataset.source}?span=${span}`);
        if (!answer.ok) return;
        const figures = await answer.json();
        if (request !== requests) return;  // A newer request is under way: this answer must not be drawn over it.
        latest = figures;
        for (const one of charts) one.show(latest, span);
        section.dataset.span = span;
        table(details, lines, latest);
      } catch (error) { /* The server is away: a live page says so itself. */ }
    }
    section.addEventListener("change", draw);
    for (const scheme of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)", "(forced-colors: active)"]) {
      window.matchMedia(scheme).addEventListener("change", () => { for (const one of charts) one.recolour(); });
    }
    details.addEventListener("toggle", () => table(details, lines, latest));
    draw();
    const isPaused = () => Boolean(window.notifyIsPaused && window.notifyIsPaused());
    setInterval(() => { if (!isPaused()) draw(); }, Number(section.dataset.every) * 1000);
  }
})();
