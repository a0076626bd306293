// Three things to play with: the slot of a token, the online softmax, the roofline and the memory.
//
// The arithmetic stands in `miniVllmSteppers`, apart from the drawing: tests compare it with the
// Python functions. No Python is loaded here.
(() => {
  "use strict";

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  const format = (value, digits = 3) => new Intl.NumberFormat(document.documentElement.lang || "en",
    { maximumSignificantDigits: digits }).format(value);
  const whole = (value) => new Intl.NumberFormat(document.documentElement.lang || "en",
    { maximumFractionDigits: 0 }).format(value);

  // --- the arithmetic ---------------------------------------------------------------------------

  /** Slot of token `t`: as `slot_mapping` has it. */
  function slot(table, t, size) {
    const block = table[Math.floor(t / size)];
    return { logical: Math.floor(t / size), offset: t % size, block, slot: block * size + (t % size) };
  }

  /** The running maximum, total and accumulator after each block of scores. */
  function softmax(scores, values, size) {
    let [maximum, total, acc] = [-Infinity, 0, 0];
    const steps = [];
    for (let i = 0; i < scores.length; i += size) {
      const part = scores.slice(i, i + size);
      const now = Math.max(maximum, ...part);
      const scale = maximum === -Infinity ? 0 : Math.exp(maximum - now);
      const weights = part.map((score) => Math.exp(score - now));
      total = total * scale + weights.reduce((a, b) => a + b, 0);
      acc = acc * scale + weights.reduce((sum, weight, j) => sum + weight * values[i + j], 0);
      maximum = now;
      steps.push({ maximum, scale, weights, total, acc, output: acc / total });
    }
    return steps;
  }

  /** Seconds of a step of (start_pos, num_tokens): as `shared.measure.roofline.Roofline` has it. */
  function stepSeconds(gpu, model, slices) {
    const flops = gpu.flops * gpu.flop_share;
    const bandwidth = gpu.bandwidth * gpu.byte_share;
    let [tokens, attention] = [0, 0];
    for (const [start, n] of slices) {
      tokens += n;
      attention += Math.max((n * (start + (n + 1) / 2) * model.attention) / flops,
        ((start + n) * model.kv_bytes) / bandwidth);
    }
    const linear = Math.max((2 * (tokens * model.linear + slices.length * model.head)) / flops,
      (2 * (model.linear + model.head)) / bandwidth);
    return gpu.overhead + linear + attention;
  }

  /** What fits and what it takes. `chunk` is null where even one token is too long a step. */
  function roofline(gpu, model, { size = 16, streams = 16, context = 1000, target = 50 } = {}) {
    const room = gpu.memory * 0.9 - 2 * model.total;
    const blocks = Math.max(0, Math.floor(room / (size * model.kv_bytes)));
    const batch = Math.ceil((gpu.flops * gpu.flop_share) / (gpu.bandwidth * gpu.byte_share));
    const decodes = Array.from({ length: streams }, () => [context, 1]);
    const seconds = (chunk) => stepSeconds(gpu, model, chunk ? [...decodes, [0, chunk]] : decodes);
    let [low, high] = [0, 1 << 17];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (seconds(middle) <= target / 1000) low = middle; else high = middle - 1;
    }
    return { kv_bytes: model.kv_bytes, tokens: blocks * size, batch, decode: seconds(0),
      chunk: low || null };
  }

  window.miniVllmSteppers = { slot, softmax, roofline, stepSeconds };

  // --- the slot ---------------------------------------------------------------------------------

  const COLOURS = ["a", "b", "c", "d", "doc", "shared"];

  function slotStepper(words) {
    const [size, table] = [8, [7, 2, 5, 0, 9]];
    const [count, blocks] = [37, 12];
    const colour = (i) => `--colour: var(--fig-${COLOURS[i % COLOURS.length]})`;
    const slider = element("input", { type: "range", min: 0, max: count - 1, value: 20,
      "aria-label": words.slot.slider });
    const tokens = Array.from({ length: count }, (_, t) => element("span",
      { style: colour(Math.floor(t / size)), "data-t": t }, String(t)));
    const entries = table.map((block, i) => element("span", { style: colour(i) }, String(block)));
    const pool = Array.from({ length: blocks }, (_, block) => {
      const i = table.indexOf(block);
      return element("div", { class: "step__block", "data-block": block, style: i < 0 ? "" : colour(i) },
        element("b", {}, String(block)), ...Array.from({ length: size }, (_unused, offset) => {
          const t = i * size + offset;
          return element("span", { class: i >= 0 && t < count ? "held" : "" });
        }));
    });
    const formula = element("p", { class: "step__formula", role: "status" });
    const show = () => {
      const t = slider.valueAsNumber;
      const one = slot(table, t, size);
      tokens.forEach((cell, i) => cell.classList.toggle("on", i === t));
      entries.forEach((cell, i) => cell.classList.toggle("on", i === one.logical));
      pool.forEach((cell, block) => {
        cell.classList.toggle("on", block === one.block);
        [...cell.children].slice(1).forEach((part, offset) => part.classList.toggle("on",
          block === one.block && offset === one.offset));
      });
      formula.textContent = words.slot.formula.replaceAll("{t}", t).replaceAll("{size}", size)
        .replaceAll("{logical}", one.logical).replaceAll("{offset}", one.offset)
        .replaceAll("{block}", one.block).replaceAll("{slot}", one.slot);
      slider.setAttribute("aria-valuetext", words.slot.says.replace("{t}", t)
        .replace("{block}", one.block).replace("{offset}", one.offset).replace("{slot}", one.slot));
    };
    slider.addEventListener("input", show);
    const row = element("div", { class: "step__tokens" }, ...tokens);
    const pick = (event) => {
      const cell = document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-t]");
      if (!cell || !row.contains(cell)) return;
      slider.value = cell.dataset.t;
      show();
    };
    row.addEventListener("pointerdown", (event) => { row.setPointerCapture(event.pointerId); pick(event); });
    row.addEventListener("pointermove", (event) => { if (event.buttons) pick(event); });
    show();
    return element("section", { "data-step": "slot" }, element("h2", {}, words.slot.title),
      element("p", {}, words.slot.text), slider,
      element("h3", {}, words.slot.tokens), row,
      element("h3", {}, words.slot.table), element("div", { class: "step__table" }, ...entries),
      formula, element("h3", {}, words.slot.pool), element("div", { class: "step__pool" }, ...pool));
  }

  // --- the softmax ------------------------------------------------------------------------------

  function softmaxStepper(words) {
    const scores = [1, 0.5, 2.5, -1, 0, 3];
    const values = [4, 8, 2, 6, 10, 1];
    const size = 2;
    let done = 0;
    const body = element("tbody");
    const said = element("p", { class: "step__formula", role: "status" });
    const inputs = scores.map((score, i) => {
      const made = element("input", { type: "range", min: -4, max: 6, step: 0.5, value: score,
        "aria-label": words.softmax.score.replace("{t}", i) });
      made.addEventListener("input", () => { scores[i] = made.valueAsNumber; show(); });
      return made;
    });
    const shown = scores.map(() => element("output", {}));
    const next = element("button", { type: "button", "data-button": "next" }, words.softmax.next);
    const again = element("button", { type: "button", "data-button": "again" }, words.softmax.again);
    next.addEventListener("click", () => { done = Math.min(scores.length / size, done + 1); show(); });
    again.addEventListener("click", () => { done = 0; show(); });
    const cards = element("div", { class: "step__scores" }, ...scores.map((_, i) => element("label",
      { "data-part": Math.floor(i / size) }, element("span", {}, words.softmax.token
        .replace("{t}", i).replace("{value}", values[i])), inputs[i], shown[i])));
    function show() {
      const steps = softmax(scores, values, size);
      shown.forEach((one, i) => { one.textContent = format(scores[i]); });
      next.disabled = done === steps.length;
      [...cards.children].forEach((card, i) => {
        card.classList.toggle("on", Math.floor(i / size) === done - 1);
        card.classList.toggle("ahead", Math.floor(i / size) >= done);
      });
      body.replaceChildren(...steps.map((step, i) => element("tr", { class: i >= done ? "ahead" : i === done - 1 ? "on" : "" },
        element("th", { scope: "row" }, String(i)),
        ...[step.maximum, i ? step.scale : null, step.total, step.acc].map((value) => element("td", {},
          i < done && value !== null ? format(value) : "–")))));
      const last = steps[done - 1];
      said.textContent = last ? words.softmax.says.replace("{acc}", format(last.acc))
        .replace("{total}", format(last.total)).replace("{output}", format(last.output))
        .replace("{n}", done * size) : words.softmax.begin;
      said.dataset.output = last?.output ?? "";
    }
    show();
    return element("section", { "data-step": "softmax" }, element("h2", {}, words.softmax.title),
      element("p", {}, words.softmax.text), cards, element("p", {}, next, " ", again),
      element("table", { class: "lab__grid" }, element("thead", {}, element("tr", {}, ...words.softmax.columns
        .map((text) => element("th", { scope: "col" }, text)))), body), said);
  }

  // --- the roofline -----------------------------------------------------------------------------

  function rooflineStepper(words, gpus, models) {
    const said = words.roofline;
    const pick = (label, options) => element("select", { "aria-label": label },
      ...options.map((one, i) => element("option", { value: i }, one.name)));
    const gpu = pick(said.gpu, gpus);
    const model = pick(said.model, models);
    const field = (name, value) => {
      const input = element("input", { type: "number", min: 0, step: "any", value: value ?? "",
        "data-name": name });
      input.addEventListener("input", show);
      return [name, input, element("label", {}, element("span", {}, said.fields[name]), input)];
    };
    const names = ["tflops", "bandwidth", "memory", "billions", "kv_bytes", "streams", "context", "target"];
    const fields = names.map((name) => field(name, { streams: 16, context: 1000, target: 50 }[name]));
    const value = Object.fromEntries(fields.map(([name, input]) => [name, input]));
    const result = element("dl", { class: "step__result", role: "status" });
    const choose = () => {
      const [g, m] = [gpus[gpu.value], models[model.value]];
      value.tflops.value = g.flops / 1e12;
      value.bandwidth.value = g.bandwidth / 1e9;
      value.memory.value = g.memory / 1e9;
      value.billions.value = m.total / 1e9;
      value.kv_bytes.value = m.kv_bytes;
      show();
    };
    function show() {
      const [g, m] = [gpus[gpu.value], models[model.value]];
      const number = (name) => Math.max(0, Number(value[name].value) || 0);
      const scale = (number("billions") * 1e9) / m.total; // another size of the chosen shape
      const made = roofline(
        { ...g, flops: number("tflops") * 1e12, bandwidth: number("bandwidth") * 1e9,
          memory: number("memory") * 1e9 },
        { linear: m.linear * scale, head: m.head * scale, total: m.total * scale,
          attention: m.attention, kv_bytes: number("kv_bytes") },
        { streams: Math.min(4096, Math.round(number("streams"))), context: number("context"),
          target: number("target") });
      const rows = [["kv_bytes", whole(made.kv_bytes)], ["tokens", whole(made.tokens)],
        ["batch", whole(made.batch)], ["decode", `${format(made.decode * 1000)} ms`],
        ["chunk", made.chunk ? whole(made.chunk) : said.none]];
      result.replaceChildren(...rows.map(([name, text]) => element("div", {},
        element("dt", {}, said.results[name]), element("dd", { "data-result": name }, text))));
    }
    gpu.addEventListener("change", choose);
    model.addEventListener("change", choose);
    choose();
    return element("section", { "data-step": "roofline" }, element("h2", {}, said.title),
      element("p", {}, said.text),
      element("div", { class: "step__fields" },
        element("label", {}, element("span", {}, said.gpu), gpu),
        element("label", {}, element("span", {}, said.model), model),
        ...fields.map(([, , label]) => label)), result);
  }

  window.miniVllmLab.kinds.steppers = (root) => {
    const words = JSON.parse(root.dataset.words);
    const all = { slot: () => slotStepper(words), softmax: () => softmaxStepper(words),
      roofline: () => rooflineStepper(words, JSON.parse(root.dataset.gpus), JSON.parse(root.dataset.models)) };
    const wanted = (root.dataset.only || Object.keys(all).join(" ")).split(" ");
    root.replaceChildren(...wanted.map((name) => all[name]()));
    root.dataset.state = "ready";
  };
})();
