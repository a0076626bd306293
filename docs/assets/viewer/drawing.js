// What a run is drawn with: a bar of slices, a grid of blocks, a row of ticks for each request.
//
// The trace viewer draws recordings with it, the server's page what happens now. It knows neither
// recordings nor servers: callers say what is to be seen. `who` names the requests that a mark
// belongs to, colours are CSS. No dependency, no state.
(() => {
  "use strict";

  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = ["a", "b", "c", "d"];

  /** An HTML element. An attribute that is null or false is left out. */
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  /** An SVG element. */
  function drawn(name, attributes, ...children) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  /** Numbers and times as the reader's language writes them. */
  class Numbers {
    constructor(language = document.documentElement.lang || "en") {
      this.format = new Intl.NumberFormat(language, { maximumFractionDigits: 2 });
      this.hundredths = new Intl.NumberFormat(language,
        { minimumFractionDigits: 2, maximumFractionDigits: 2, signDisplay: "negative" });
    }

    number(value) { return this.format.format(value); }

    fixed(value) { return this.hundredths.format(value); }

    seconds(value) {
      return value < 0.9995 ? `${this.number(Math.round(value * 1000) || 0)} ms` : `${this.fixed(value)} s`;
    }
  }

  /** The colour of a request: A, B, ... have those of chats, anything else the document's. */
  function colour(id) {
    const known = /^[A-Z]$/.test(id);
    return `var(--fig-${known ? COLOURS[(id.charCodeAt(0) - 65) % COLOURS.length] : "doc"})`;
  }

  /** A request's letter on its colour. */
  function mark(text, colour_) {
    return element("span", { class: "viewer__mark", "aria-hidden": "true",
      style: `--colour: ${colour_}` }, text);
  }

  /** The largest number of columns up to `most` that makes full rows. */
  function columns(count, most) {
    let found = most;
    while (found > most / 2 && count % found) found -= 1;
    return count % found ? most : found;
  }

  /** A request's line of text: its mark, the end of what it says, and beside it what it waits for. */
  function textLine(who, mark_) {
    const text = element("span", { class: "viewer__tail" });
    const wait = element("span", { class: "viewer__waits" });
    const line = element("p", { "data-who": who }, mark_,
      element("span", { class: "viewer__said" }, text), wait);
    return { line, text, wait };
  }

  /** The slices of a step, as wide as they have tokens: [{ who, count, mark, colour, title }]. */
  function slices(all, most) {
    return all.map((one) => {
      const share = (one.count / Math.max(most, 1)) * 100;
      return element("span", { class: "viewer__slice", "data-tokens": one.count,
        "data-who": one.who, title: one.title,
        style: `--colour: ${one.colour}; flex: 0 1 calc(1.25rem + ${share}%)` },
      one.count > 1 ? `${one.mark} ${one.number}` : one.mark);
    });
  }

  /** Make a cell show a block: held by one or shared by several, cached and free, or free. */
  function block(cell, { kind, who, text, colour: colour_, title }) {
    cell.className = `viewer__cell ${kind}`;
    cell.dataset.kind = kind;
    cell.dataset.who = who;
    cell.textContent = text;
    cell.style.setProperty("--colour", kind === "shared" ? "var(--fig-shared)" : colour_);
    cell.title = title;
  }

  /** What the cells mean, and how many there are: { held: 3, ... }, with a word for each kind. */
  function blockCounts(counts, kinds, numbers) {
    return Object.entries(counts).map(([kind, n]) => element("li", {},
      element("span", { class: `viewer__cell ${kind}`, "aria-hidden": "true",
        style: `--colour: var(--fig-${kind === "shared" ? "shared" : "a"})` },
      { held: "A", shared: "×2", cached: "A", free: "" }[kind]),
      `${kinds[kind]} `, element("b", { "data-count": kind }, numbers.number(n))));
  }

  /** A request's row: `cells` for its state, prompt in cache, tokens out, longest wait, blocks. */
  function requestRow(who, mark_, name) {
    const cells = ["state", "cache", "generated", "wait", "blocks"]
      .map((column) => element("td", { "data-column": column }));
    const head = element("th", { scope: "row" }, mark_, name);
    return { line: element("tr", { "data-who": who }, head, ...cells), cells };
  }

  /** The rows below a word for each of their columns, the request's first. */
  function requestTable(words, rows) {
    const head = words.map((text) => element("th", { scope: "col" }, text));
    return element("table", { class: "viewer__requests" },
      element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...rows.map((row) => row.line)));
  }

  /** A state's name, framed while the request is alive. */
  function state(name, text) {
    return element("span", { class: `viewer__state ${name}` }, text);
  }

  /** How much of a prompt is done, a share. */
  function progress(share, colour_) {
    return element("span", { class: "viewer__progress", style: `--share: ${share}; --colour: ${colour_}` });
  }

  /**
   * Tokens in time: a row for each request, below them the steps, and the longest gap as a hole.
   *
   * Times are seconds within `span`. A row is { who, name, mark, colour, arrived, firstToken, ended,
   * tokens, isAborted }, where arrived is null if it has yet to come, a step { start, end, isPrompt }, the hole { start, end, rows, label } or
   * null. `stepsLabel` names the steps' row, `tick(seconds)` writes a time on the axis.
   *
   * Returns { x, left, ticks: [[time, line]], top, bottom }: where a time is, and its line.
   */
  function strips(svg, { width, span: [first, last], rows, steps, hole, stepsLabel, tick }) {
    const left = width < 480 ? 26 : 92;
    const rowHeight = 22;
    const top = 20;
    const height = top + (rows.length + 1) * rowHeight + 20;
    const x = (time) => left + ((time - first) / (last - first)) * (width - left - 8);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = `${height}px`;
    const parts = [];
    // 1. The hole.
    if (hole) {
      const [from, to] = [x(hole.start), x(hole.end)];
      parts.push(drawn("rect", { class: "hole", x: from, y: top, width: Math.max(1, to - from),
        height: hole.rows * rowHeight }));
      parts.push(drawn("text", { class: "hole-label", y: top - 6, "text-anchor": "middle",
        x: Math.min(width - 30, (from + to) / 2) }, hole.label));
    }
    // 2. A row for each request: its wait, its tokens.
    const ticks = [];
    rows.forEach((row, i) => {
      const y = top + i * rowHeight + rowHeight / 2;
      const mine = parts.length;
      parts.push(drawn("text", { class: "label", x: 0, y: y + 4 }, left > 40 ? row.name : row.mark));
      if (row.arrived !== null) {
        parts.push(drawn("line", { class: "rail", x1: x(row.arrived), x2: x(row.ended), y1: y, y2: y }));
      }
      if (row.firstToken > row.arrived) {
        parts.push(drawn("rect", { class: "wait", x: x(row.arrived), y: y - 4, height: 8, rx: 2,
          width: Math.max(1, x(row.firstToken) - x(row.arrived)), style: `stroke: ${row.colour}` }));
      }
      for (const time of row.tokens) {
        const line = drawn("line", { class: "tick", x1: x(time), x2: x(time), y1: y - 7,
          y2: y + 7, style: `stroke: ${row.colour}` });
        ticks.push([time, line]);
        parts.push(line);
      }
      if (row.isAborted) {
        parts.push(drawn("path", { class: "abort", d: `M${x(row.ended) - 4} ${y - 4}l8 8m0 -8l-8 8` }));
      }
      for (const part of parts.slice(mine)) part.dataset.who = row.who;
    });
    // 3. The steps, and the seconds.
    const y = top + rows.length * rowHeight + 5;
    if (left > 40) parts.push(drawn("text", { class: "label", x: 0, y: y + 9 }, stepsLabel));
    for (const { start, end, isPrompt } of steps) {
      parts.push(drawn("rect", { class: isPrompt ? "step prompt" : "step", x: x(start), y,
        width: Math.max(0.4, x(end) - x(start) - 0.5), height: 11 }));
    }
    const every = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20].find((s) => x(s) - x(0) > 46) ?? 50;
    for (let n = Math.ceil(first / every); n * every <= last; n += 1) {
      const s = n * every || 0; // not -0
      if (x(s) > width - 14) break; // its label would be cut off
      parts.push(drawn("text", { class: "axis", x: x(s), y: height - 4, "text-anchor": "middle" }, tick(s)));
    }
    svg.replaceChildren(...parts);
    return { x, left, ticks, top: top - 4, bottom: height - 18 };
  }

  window.miniVllmDrawing = { Numbers, block, blockCounts, colour, columns, drawn, element, mark,
    progress, requestRow, requestTable, slices, state, strips, textLine };
})();
