// The trace viewer: replays recorded runs of the running example, two of them side by side. The lab
// replays with it what the reader has just run (`miniVllmReplay`).
//
// A recording is a file that `python -m shared.trace record` wrote (its format is described in
// shared/trace_record.py), wrapped so that a page from the disk can load it as a script. All words
// come from the page (docs/_data/words.*.yml). No dependency, no network, no state but the address.
(() => {
  "use strict";

  const FOLDER = new URL("../traces/", document.currentScript.src);
  const { Numbers, block: drawBlock, blockCounts, colour, columns, drawn, element, mark, progress,
    requestRow, requestTable, slices, state: stateChip, strips, textLine } = window.miniVllmDrawing; // drawing.js, loaded before
  const DOCUMENT = "document";
  const SPEEDS = { 0.25: "0.25×", 1: "1×", 4: "4×" };
  const LONG = 3; // a chat that waits this many times its usual gap is said to wait
  const ICONS = {
    back: "M11 4 3 12l8 8V4Zm2 0h2v16h-2V4Z",
    play: "M6 4v16l14-8L6 4Z",
    pause: "M6 4h4v16H6V4Zm8 0h4v16h-4V4Z",
    forward: "M13 4v16l8-8-8-8ZM9 4h2v16H9V4Z",
  };

  // --- recordings ---------------------------------------------------------------------------

  const loading = new Map();
  let received = null;
  window.miniVllmTrace = (content) => { received = content; };

  /** Load a recording once. Scripts, not fetch(): that fails on pages opened from the disk. */
  function load(name) {
    if (!loading.has(name)) {
      loading.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = new URL(`${name}.js`, FOLDER).href;
        script.onload = () => { resolve(new Recording(name, received)); };
        script.onerror = () => { loading.delete(name); reject(new Error(name)); };
        document.head.append(script);
      }));
    }
    return loading.get(name);
  }

  /** A recording in full: `frames[i]` is how everything stood in step i, and one after the last. */
  class Recording {
    constructor(name, content) {
      Object.assign(this, content);
      this.name = name;
      const document_ = this.requests.find((r) => r.id === DOCUMENT);
      this.zero = this.made ? 0 : document_.arrived; // all times below count from here
      this.first = -this.zero;
      this.last = this.steps.at(-1).end - this.zero;
      this.frames = this.#expand();
      this.starts = this.frames.map((frame) => frame.start);
      this.tokens = this.requests.map(() => []);
      this.frames.forEach((frame) => frame.sampled.forEach(([r]) => this.tokens[r].push(frame.end)));
      this.waits = this.tokens.map((times) => this.#longestGap(times));
      this.longest = this.waits.reduce((most, one, r) => (this.isDocument(r)
        || one.seconds <= most.seconds ? most : one), { start: 0, end: 0, seconds: 0 });
      const first = document_ && this.tokens[this.requests.indexOf(document_)][0];
      this.ttft = first === undefined ? null : first - (document_.arrived - this.zero);
      this.usual = this.tokens.map((times) => {
        const gaps = times.slice(1).map((time, i) => time - times[i]).sort((a, b) => a - b);
        return gaps[gaps.length >> 1] ?? 0;
      });
      this.most = Math.max(...this.frames.map((frame) => frame.numTokens));
    }

    #expand() {
      const tables = this.requests.map(() => []);
      const findable = new Set();
      const lastHolder = [];
      const inCache = this.requests.map(() => 0);
      const generated = this.requests.map(() => 0);
      const text = this.requests.map(() => "");
      const begun = new Set();
      let firstTokens = [];
      const frames = [];
      for (const [index, raw] of this.steps.entries()) {
        const step = { slices: [], sampled: [], preempted: [], waiting: [], running: [],
          prefilling: [], tables: [], published: [], forgotten: [], ...raw };
        // 1. The pool.
        for (const [r, keep, blocks] of step.tables) tables[r].splice(keep, Infinity, ...blocks);
        step.published.forEach((block) => findable.add(block));
        step.forgotten.forEach((block) => findable.delete(block));
        const holders = Array.from({ length: this.num_blocks }, () => []);
        tables.forEach((table, r) => table.forEach((block, i) => holders[block].push([r, i])));
        const cells = holders.map((held, block) => {
          if (held.length) lastHolder[block] = held[0];
          const kind = held.length > 1 ? "shared" : held.length ? "held"
            : findable.has(block) ? "cached" : "free";
          return { kind, held, before: kind === "cached" ? lastHolder[block] : null };
        });
        // 2. The requests, as they stand while the step runs: what it computes is not there yet.
        step.preempted.forEach((r) => { inCache[r] = 0; });
        const hits = [];
        for (const [r, start] of step.slices) {
          if (inCache[r] === 0 && start > 0) hits.push([r, start, begun.has(r)]);
          begun.add(r);
          inCache[r] = start;
        }
        const start = step.start - this.zero;
        const before = index ? frames[index - 1] : null;
        frames.push({ ...step, index, start, end: step.end - this.zero, cells, hits,
          numTokens: step.slices.reduce((sum, slice) => sum + slice[2], 0),
          arrived: this.#between("arrived", before?.start ?? -Infinity, start),
          ended: this.#between("ended", before?.start ?? -Infinity, start),
          firstTokens, // those of the step before
          requests: this.requests.map((request, r) => ({
            state: this.#state(request, r, step, before), inCache: inCache[r],
            generated: generated[r], text: text[r], blocks: tables[r].length,
            table: this.made ? [...tables[r]] : null })) });
        // 3. What it computed.
        step.slices.forEach(([r, first, count]) => { inCache[r] = first + count; });
        firstTokens = step.sampled.map(([r]) => r).filter((r) => generated[r] === 0);
        step.sampled.forEach(([r, piece]) => { generated[r] += 1; text[r] += piece; });
      }
      // When all is over: nobody holds a block.
      const last = frames.at(-1);
      frames.push({ ...last, index: frames.length, start: last.end, end: last.end, over: true,
        slices: [], sampled: [], preempted: [], waiting: [], running: [], prefilling: [], hits: [],
        numTokens: 0, free: this.num_blocks, arrived: [], firstTokens,
        ended: this.#between("ended", last.start, Infinity),
        cells: last.cells.map((cell, block) => {
          const kind = findable.has(block) ? "cached" : "free";
          return { kind, held: [], before: kind === "cached" ? lastHolder[block] : null };
        }),
        requests: this.requests.map((request, r) => ({ state: request.reason, inCache: inCache[r],
          generated: generated[r], text: text[r], blocks: 0, table: [] })) });
      return frames;
    }

    #between(what, before, now) {
      return this.requests.flatMap((request, r) => {
        const moment = request[what] - this.zero;
        return moment > before && moment <= now ? [r] : [];
      });
    }

    /** A request's state while a step runs. `prefilling` names those that are so after it. */
    #state(request, r, step, before) {
      if (step.running.includes(r)) {
        const decodes = before?.running.includes(r) && !before.prefilling.includes(r);
        return this.stage < 4 || decodes ? "running" : "prefilling";
      }
      if (step.waiting.includes(r)) return "waiting";
      return request.arrived > step.start ? "absent" : request.reason;
    }

    isDocument(r) { return this.requests[r].id.startsWith(DOCUMENT); }

    /** The longest time between two of these tokens. */
    #longestGap(times) {
      let longest = { start: 0, end: 0, seconds: 0 };
      for (let i = 1; i < times.length; i += 1) {
        const seconds = times[i] - times[i - 1];
        if (seconds > longest.seconds) longest = { start: times[i - 1], end: times[i], seconds };
      }
      return longest;
    }

    /** Seconds since the last token of a stream, 0 for what does not stream. */
    sinceToken(r, time) {
      const times = this.tokens[r];
      let last = null;
      let next = null;
      for (const one of times) {
        if (one <= time) last = one;
        else { next = one; break; }
      }
      return last === null || next === null ? 0 : time - last;
    }

    /** The step that runs at a time: the last one that has started. */
    frameAt(time) {
      let low = 0;
      let high = this.starts.length;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (this.starts[middle] <= time + 1e-9) low = middle; else high = middle;
      }
      return this.frames[low];
    }
  }

  // --- drawing ------------------------------------------------------------------------------

  function icon(name) {
    return drawn("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" },
      drawn("path", { d: ICONS[name] }));
  }

  /** One recording, at one time. Knows nothing of the other one or of who moves the time. */
  class Panel {
    constructor(viewer) {
      this.viewer = viewer;
      this.words = viewer.words;
      this.select = element("select", { class: "viewer__select" });
      this.body = element("div", { class: "viewer__body" });
      const label = viewer.picks ? element("label", { class: "viewer__pick" },
        element("span", {}, this.words.recording), this.select) : null;
      this.heading = viewer.picks ? null : element("h3", { class: "viewer__title" });
      this.root = element("section", { class: "viewer__panel" });
      this.root.append(...[label, this.heading, this.body].filter(Boolean));
    }

    show(recording) {
      const { words } = this;
      this.recording = recording;
      this.frame = null;
      this.body.replaceChildren();
      if (!recording) return;
      this.title = recording.title ?? this.viewer.title(recording.name);
      this.root.setAttribute("aria-label", this.title);
      if (this.heading) this.heading.textContent = this.title;
      const heading = (text) => element("h3", { class: "viewer__heading" }, text);
      // 1. What is known before anything moves.
      this.body.append(element("dl", { class: "viewer__facts" },
        this.#fact(words.longest_gap, recording.longest.seconds, "longest-gap"),
        ...(recording.made && recording.ttft === null ? []
          : [this.#fact(words.ttft, recording.ttft, "ttft")])));
      // 2. The step.
      this.counter = element("p", { class: "viewer__step" });
      this.bar = element("div", { class: "viewer__bar", role: "img" });
      this.elapsed = element("div", { class: "viewer__elapsed" });
      this.events = element("p", { class: "viewer__events" });
      this.body.append(heading(words.computes), this.counter, this.bar, this.elapsed, this.events);
      // 3. The tokens in time.
      this.strips = drawn("svg", { class: "viewer__strips", role: "img" });
      this.strips.setAttribute("aria-label", words.strips_label
        .replace("{gap}", this.viewer.seconds(recording.longest.seconds)));
      this.strips.addEventListener("pointerdown", (event) => this.#seek(event));
      this.body.append(heading(words.strips), this.strips);
      // 4. The texts, or where there are none, the block tables.
      this.texts = recording.requests.map((request, r) => this.#text(request, r));
      this.body.append(heading(recording.made ? words.tables : words.texts),
        element("div", { class: "viewer__texts" }, ...this.texts.map((one) => one.line)));
      // 5. The pool.
      this.grid = element("div", { class: "viewer__grid", role: "img",
        style: `--columns: ${columns(recording.num_blocks, 20)}; `
          + `--columns-narrow: ${columns(recording.num_blocks, 14)}` });
      this.cells = Array.from({ length: recording.num_blocks }, () => element("span", {}));
      this.grid.append(...this.cells);
      this.counts = element("ul", { class: "viewer__counts" });
      this.body.append(heading(words.pool.replace("{size}", recording.block_size)),
        this.grid, this.counts);
      // 6. The requests and their queues.
      this.rows = recording.requests.map((request, r) => this.#row(request, r));
      this.queues = element("p", { class: "viewer__queues" });
      this.body.append(heading(words.requests), requestTable(words.columns, this.rows), this.queues);
      this.draw();
    }

    #fact(text, seconds, name) {
      const value = seconds === null ? "–" : this.viewer.seconds(seconds);
      return element("div", {}, element("dt", {}, text),
        element("dd", { "data-fact": name }, value));
    }

    #row(request, r) {
      return requestRow(r, this.#mark(r), this.viewer.name(request.id));
    }

    #text(request, r) { return textLine(r, this.#mark(r)); }

    #mark(r) {
      const { id } = this.recording.requests[r];
      return mark(this.viewer.mark(id), this.#colour(r));
    }

    #colour(r) { return this.viewer.colour(this.recording.requests[r].id); }

    #name(r) {
      return this.viewer.name(this.recording.requests[r].id);
    }

    #seek(event) {
      const box = this.strips.getBoundingClientRect();
      const share = (event.clientX - box.left - this.left) / (box.width - this.left - 8);
      const [first, last] = this.viewer.span;
      this.viewer.moveTo(first + Math.min(1, Math.max(0, share)) * (last - first));
    }

    /** Everything that does not move: the strips, for the width that there is. */
    draw() {
      const { recording } = this;
      if (!recording) return;
      const chats = recording.made ? recording.requests.length
        : recording.requests.filter((one) => !one.id.startsWith(DOCUMENT)).length;
      const rows = recording.requests.map((request, r) => {
        const ended = request.ended - recording.zero;
        return { who: r, name: this.#name(r), mark: this.viewer.mark(request.id),
          colour: this.#colour(r), arrived: request.arrived - recording.zero, ended,
          firstToken: recording.tokens[r][0] ?? ended, tokens: recording.tokens[r],
          isAborted: request.reason === "abort" };
      });
      const steps = recording.frames.filter((frame) => !frame.over).map(({ start, end, slices: all }) => ({
        start, end, isPrompt: all.some(([r, , n]) => n > 1 && (recording.made || recording.isDocument(r))) }));
      const { longest } = recording;
      const { x, left, ticks, top, bottom } = strips(this.strips, {
        width: Math.max(240, this.body.clientWidth), span: this.viewer.span, rows, steps,
        hole: { ...longest, rows: chats, label: this.viewer.seconds(longest.seconds) },
        stepsLabel: this.words.steps,
        tick: (s) => (this.viewer.span[1] < 1 ? `${this.viewer.number(s * 1000)} ms`
          : `${this.viewer.number(s)} s`) });
      Object.assign(this, { x, left, ticks });
      this.cursor = drawn("line", { class: "cursor", y1: top, y2: bottom });
      this.strips.append(this.cursor);
    }

    /** Show a time. Cheap while the step stays the same. */
    update(time) {
      const { recording } = this;
      if (!recording) return;
      const frame = recording.frameAt(time);
      const at = this.x(time);
      this.cursor.setAttribute("x1", at);
      this.cursor.setAttribute("x2", at);
      for (const [moment, tick] of this.ticks) tick.classList.toggle("ahead", moment > time);
      const duration = frame.end - frame.start;
      const done = frame.over ? 0 : Math.min(1, (time - frame.start) / duration);
      this.elapsed.style.setProperty("--done", done);
      if (!recording.made) this.#updateWaits(time);
      if (frame === this.frame) return;
      this.frame = frame;
      this.#updateStep(frame);
      this.#updatePool(frame);
      this.#updateRequests(frame);
    }

    /** Beside each text: for how long nothing has come. */
    #updateWaits(time) {
      this.texts.forEach(({ line, wait }, r) => {
        const since = this.recording.sinceToken(r, time);
        const long = since > LONG * this.recording.usual[r] && since > 0.1;
        line.classList.toggle("waits", long);
        wait.textContent = long
          ? this.words.waits.replace("{time}", `${this.viewer.fixed(since)} s`) : "";
      });
    }

    #updateStep(frame) {
      const { recording, words, viewer } = this;
      const count = recording.steps.length;
      this.counter.textContent = frame.over ? words.over : words.step
        .replace("{step}", viewer.number(frame.index)).replace("{last}", viewer.number(count - 1))
        .replace("{tokens}", viewer.number(frame.numTokens))
        .replace("{seconds}", viewer.seconds(frame.end - frame.start));
      this.counter.dataset.step = frame.index;
      this.counter.dataset.tokens = frame.numTokens;
      const parts = frame.slices.map(([r, start, n]) => `${this.#name(r)} ${viewer.number(n)}`);
      this.bar.setAttribute("aria-label", parts.join(", "));
      this.bar.replaceChildren(...slices(frame.slices.map(([r, start, n]) => ({
        who: r, count: n, number: viewer.number(n), mark: viewer.mark(recording.requests[r].id),
        colour: this.#colour(r), title: words.slice.replace("{name}", this.#name(r))
          .replace("{start}", viewer.number(start)).replace("{end}", viewer.number(start + n - 1)) })),
      viewer.most));
      this.events.textContent = this.sentences(frame).join(" ");
    }

    /** What happened since the step before, in words. */
    sentences(frame) {
      const { words, viewer } = this;
      const say = (text, r, values = {}) => Object.entries({ name: this.#name(r), ...values })
        .reduce((said, [key, value]) => said.replace(`{${key}}`, value), text);
      const said = [];
      for (const r of frame.ended) {
        said.push(say(words.events[this.recording.requests[r].reason], r));
      }
      frame.arrived.forEach((r) => said.push(say(words.events.arrived, r)));
      frame.preempted.forEach((r) => said.push(say(words.events.preempted, r)));
      frame.hits.forEach(([r, n, again]) => said.push(
        say(again ? words.events.own_hit : words.events.hit, r, { tokens: viewer.number(n) })));
      frame.firstTokens.forEach((r) => said.push(say(words.events.first_token, r)));
      return said;
    }

    #updatePool(frame) {
      const { words, viewer, recording } = this;
      const size = recording.block_size;
      const counts = { held: 0, shared: 0, cached: 0, free: 0 };
      frame.cells.forEach((cell, block) => {
        counts[cell.kind] += 1;
        const owner = cell.held[0] ?? cell.before;
        const holders = (cell.held.length ? cell.held : cell.before ? [cell.before] : [])
          .map(([r, i]) => words.holder.replace("{name}", this.#name(r))
            .replace("{start}", viewer.number(i * size))
            .replace("{end}", viewer.number((i + 1) * size - 1)));
        drawBlock(this.cells[block], {
          kind: cell.kind, who: [...new Set(cell.held.map(([r]) => r))].join(" "),
          text: cell.kind === "shared" ? `×${cell.held.length}`
            : owner ? viewer.mark(recording.requests[owner[0]].id) : "",
          colour: owner ? this.#colour(owner[0]) : "var(--fig-free)",
          title: `${words.block.replace("{block}", block)}: `
            + [words.kinds[cell.kind], ...holders].join(", ") });
      });
      const summary = Object.entries(counts).map(([kind, n]) => `${words.kinds[kind]} ${n}`);
      this.grid.setAttribute("aria-label", summary.join(", "));
      this.counts.replaceChildren(...blockCounts(counts, words.kinds, viewer));
    }

    #updateRequests(frame) {
      const { words, viewer, recording } = this;
      frame.requests.forEach((one, r) => {
        const [state, cache, generated, wait, blocks] = this.rows[r].cells;
        const total = recording.requests[r].prompt_tokens;
        const prompt = Math.min(one.inCache, total);
        const live = ["waiting", "prefilling", "running"].includes(one.state);
        state.replaceChildren(stateChip(one.state, words.states[one.state]));
        const share = live ? prompt / total : 0;
        cache.replaceChildren(progress(share, this.#colour(r)), live ? `${viewer.number(prompt)} / ${viewer.number(total)}` : `– / ${viewer.number(total)}`);
        generated.textContent = one.state === "absent" ? "–" : viewer.number(one.generated);
        const { seconds } = recording.waits[r];
        wait.textContent = seconds && one.generated > 1 ? viewer.seconds(seconds) : "–";
        blocks.textContent = viewer.number(one.blocks);
        this.rows[r].line.classList.toggle("quiet", !live);
        const said = this.texts[r];
        said.line.classList.toggle("quiet", !live);
        said.text.textContent = recording.made ? this.#ranges(one.table)
          : one.text.replace(/\s+/g, " ").slice(-240)
            || (one.state === "prefilling" ? words.computing
              : one.state === "waiting" ? words.states.waiting : " ");
        said.line.classList.toggle("empty", !recording.made && !one.text);
      });
      const list = (queue) => queue.map((r) => this.#name(r)).join(", ") || "–";
      this.queues.replaceChildren(element("span", {}, `${words.queues.running}: `,
        element("b", { "data-queue": "running" }, list(frame.running))), " ",
      element("span", {}, `${words.queues.waiting}: `,
        element("b", { "data-queue": "waiting" }, list(frame.waiting))));
    }

    /** A block table, runs of neighbours as ranges. */
    #ranges(table) {
      const runs = [];
      for (const block of table) {
        const last = runs.at(-1);
        if (last && last[1] + 1 === block) last[1] = block; else runs.push([block, block]);
      }
      return runs.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`))
        .join(", ") || "–";
    }

    /** The panel in one sentence, for those who hear it. */
    spoken() {
      const { recording, frame } = this;
      if (!recording || !frame) return "";
      const parts = frame.slices.map(([r, , n]) => `${this.#name(r)} ${this.viewer.number(n)}`);
      const step = `${this.title}: ${this.counter.textContent}.`;
      return [step, parts.length ? `${parts.join(", ")}.` : "", ...this.sentences(frame)].join(" ");
    }
  }

  // --- the whole ----------------------------------------------------------------------------

  /** Controls and one or two panels, moved together. Knows nothing of where recordings come from. */
  class Replay extends Numbers {
    constructor(root, words, { speeds = SPEEDS, picks = false } = {}) {
      super();
      this.root = root;
      this.words = words;
      this.speeds = speeds;
      this.picks = picks;
      this.panels = [new Panel(this), new Panel(this)];
      this.span = [0, 1];
      this.most = 1;
      this.stops = [0];
      this.time = 0;
      this.playing = null;
      this.#build();
      new ResizeObserver(() => {
        this.panels.forEach((panel) => { panel.draw(); });
        this.render();
      }).observe(root);
    }

    name(id) { return this.words.names[id] ?? this.words.chat.replace("{name}", id); }

    mark(id) { return this.words.marks[id] ?? id; }

    colour(id) { return colour(id); }

    #build() {
      const { words } = this;
      const button = (name, label) => element("button", { type: "button", "aria-label": label,
        title: label, "data-button": name }, icon(name));
      this.back = button("back", words.back);
      this.play = button("play", words.play);
      this.forward = button("forward", words.forward);
      this.slider = element("input", { type: "range", min: "0", step: "1", value: "0",
        "aria-label": words.slider });
      this.clock = element("output", { class: "viewer__clock" });
      this.speed = element("select", { class: "viewer__speed", "aria-label": words.speed },
        ...Object.entries(this.speeds).sort(([a], [b]) => a - b).map(([speed, text], i) => element(
          "option", { value: speed, selected: i === 0 }, text)));
      this.live = element("p", { class: "viewer__live", role: "status" });
      const controls = element("div", { class: "viewer__controls", role: "group",
        "aria-label": words.controls }, this.back, this.play, this.forward, this.slider, this.clock,
      this.speed);
      this.root.tabIndex = -1;
      this.root.replaceChildren(controls, this.live,
        element("div", { class: "viewer__panels" }, ...this.panels.map((panel) => panel.root)));
      this.back.addEventListener("click", () => this.step(-1));
      this.forward.addEventListener("click", () => this.step(1));
      this.play.addEventListener("click", () => this.toggle());
      this.slider.addEventListener("input", () => {
        this.pause();
        this.moveTo(this.stops[this.slider.valueAsNumber]);
      });
      this.root.addEventListener("keydown", (event) => this.#key(event));
      const light = (event) => this.light(event.target.closest?.("[data-who]")?.dataset.who);
      this.root.addEventListener("pointerover", light);
      this.root.addEventListener("pointerleave", () => this.light(""));
    }

    /** Light requests everywhere: their slices, ticks, blocks, texts and rows. */
    light(who = "") {
      this.lit = who;
      const wanted = who.split(" ").filter(Boolean);
      this.root.classList.toggle("lights", wanted.length > 0);
      for (const one of this.root.querySelectorAll("[data-who]")) {
        const mine = one.dataset.who.split(" ");
        one.classList.toggle("lit", wanted.some((r) => mine.includes(r)));
      }
    }

    #key(event) {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.target.closest("select, input")) return; // they have keys of their own
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (move) this.step(move);
      else if (event.key === "Home") this.moveTo(this.stops[0]);
      else if (event.key === "End") this.moveTo(this.stops.at(-1));
      else if (event.key === " " && !event.target.closest("button")) this.toggle();
      else return;
      event.preventDefault();
    }

    /** Show one recording or two, at a time. */
    show(recordings, time) {
      const there = recordings.filter(Boolean);
      this.span = [Math.min(...there.map((one) => one.first)), Math.max(...there.map((one) => one.last))];
      this.most = Math.max(...there.map((one) => one.most));
      this.stops = [...new Set(there.flatMap((one) => one.starts))].sort((a, b) => a - b);
      this.slider.max = this.stops.length - 1;
      this.root.classList.toggle("alone", there.length === 1);
      this.panels.forEach((panel, side) => panel.show(recordings[side]));
      this.panels[1].root.hidden = !recordings[1] && !this.picks;
      this.moveTo(time ?? this.stops[0]);
    }

    /** The index of the last stop that is not after the time. */
    get stop() {
      let found = 0;
      while (found + 1 < this.stops.length && this.stops[found + 1] <= this.time + 1e-9) found += 1;
      return found;
    }

    step(by) {
      this.pause();
      const stop = this.stop;
      const back = by < 0 && this.time > this.stops[stop] + 1e-9 ? by + 1 : by;
      this.moveTo(this.stops[Math.max(0, Math.min(this.stops.length - 1, stop + back))]);
    }

    moveTo(time) {
      this.time = time;
      this.render();
      if (this.playing) return;
      this.live.textContent = this.panels.map((panel) => panel.spoken()).join(" ");
      this.moved?.(this.stop);
    }

    toggle() {
      if (this.playing) { this.pause(); return; }
      if (this.time >= this.stops.at(-1)) this.time = this.stops[0];
      let before = performance.now();
      const tick = (now) => {
        const time = this.time + ((now - before) / 1000) * Number(this.speed.value);
        before = now;
        if (time >= this.stops.at(-1)) { this.pause(); this.moveTo(this.stops.at(-1)); return; }
        this.playing = requestAnimationFrame(tick);
        this.moveTo(time);
      };
      this.playing = requestAnimationFrame(tick);
      this.#label("pause");
    }

    pause() {
      if (!this.playing) return;
      cancelAnimationFrame(this.playing);
      this.playing = null;
      this.#label("play");
      this.moveTo(this.time);
    }

    #label(name) {
      this.play.replaceChildren(icon(name));
      this.play.setAttribute("aria-label", this.words[name]);
      this.play.title = this.words[name];
    }

    render() {
      if (!this.panels[0].recording) return;
      this.panels.forEach((panel) => panel.update(this.time));
      this.slider.value = this.stop;
      const text = this.picks ? `${this.fixed(this.time)} s` : this.seconds(this.time);
      this.clock.textContent = text;
      this.slider.setAttribute("aria-valuetext", this.words.at.replace("{time}", text));
      if (this.lit) this.light(this.lit);
    }
  }

  /** The page of recordings: which are shown is chosen here and stands in the address. */
  class Viewer extends Replay {
    constructor(root) {
      super(root, JSON.parse(root.dataset.words), { picks: true });
      this.recordings = JSON.parse(root.dataset.recordings);
      const { words } = this;
      this.traffic = element("select", { class: "viewer__select" }, ...Object.entries(words.traffic)
        .map(([value, text]) => element("option", { value }, text)));
      this.about = element("p", { class: "viewer__about" });
      root.prepend(element("label", { class: "viewer__pick" },
        element("span", {}, words.traffic_label), this.traffic), this.about);
      this.traffic.addEventListener("change", () => { this.#fill(); this.#open(); });
      for (const panel of this.panels) {
        panel.select.addEventListener("change", () => this.#open(null, this.time));
      }
      this.moved = (stop) => {
        this.address = `#${this.opening}@${stop}`;
        history.replaceState(null, "", this.address);
      };
      const wanted = this.#fromAddress();
      this.traffic.value = this.recordings.find((one) => one.name === wanted.names[0]).traffic;
      this.#fill(wanted.names);
      this.#open(wanted.stop);
      window.addEventListener("hashchange", () => {
        const now = this.#fromAddress();
        if (location.hash === this.address) return;
        this.traffic.value = this.recordings.find((one) => one.name === now.names[0]).traffic;
        this.#fill(now.names);
        this.#open(now.stop);
      });
    }

    title(name) {
      const { stage, chunk_size: chunk } = this.recordings.find((one) => one.name === name);
      const title = this.words.stages[stage - 1];
      return chunk ? this.words.with_chunks.replace("{stage}", title).replace("{chunk}", chunk) : title;
    }

    #fill(names = null) {
      const offered = this.recordings.filter((one) => one.traffic === this.traffic.value);
      const chosen = names ?? [offered.find((one) => one.stage === 3).name,
        offered.filter((one) => one.stage === 4).at(offered.length > 3 ? 1 : 0).name];
      this.panels.forEach((panel, side) => {
        panel.select.replaceChildren(...offered.map((one) => element("option",
          { value: one.name, selected: one.name === chosen[side] }, this.title(one.name))));
        if (side) {
          panel.select.append(element("option", { value: "", selected: !chosen[side] },
            this.words.nothing));
        }
      });
    }

    #fromAddress() {
      const [, left, right, stop] = /^#([\w-]+)\+([\w-]*)(?:@(\d+))?$/.exec(location.hash) ?? [];
      const known = (name) => this.recordings.find((one) => one.name === name);
      if (known(left) && (right === "" || known(right)?.traffic === known(left).traffic)) {
        return { names: [left, right], stop: stop === undefined ? null : Number(stop) };
      }
      const names = [3, 4].map((stage) => this.recordings.filter((one) => one.traffic === "example"
        && one.stage === stage));
      return { names: [names[0][0].name, names[1][Math.min(1, names[1].length - 1)].name],
        stop: null };
    }

    /** Load what is chosen and show it: at a stop, at a time, or in the middle of the stall. */
    async #open(stop = null, time = null) {
      this.pause();
      const names = this.panels.map((panel) => panel.select.value);
      this.opening = names.join("+");
      this.root.setAttribute("aria-busy", "true");
      let shown;
      try {
        shown = await Promise.all(names.map((name) => (name ? load(name) : null)));
      } catch (error) {
        this.live.textContent = this.words.failed.replace("{name}", error.message);
        this.live.classList.add("failed");
        return;
      }
      if (this.opening !== names.join("+")) return; // another choice was faster
      const there = shown.filter(Boolean);
      const [one] = there;
      this.about.textContent = this.words.about[this.traffic.value]
        + ` ${this.words.recorded.replace("{model}", one.model)
          .replace("{cores}", one.machine.cores).replace("{cpu}", one.machine.cpu)
          .replace("{date}", one.date)}`;
      this.root.removeAttribute("aria-busy");
      const middle = (one.longest.start + one.longest.end) / 2;
      this.show(shown, time ?? middle);
      if (stop !== null) this.moveTo(this.stops[Math.min(stop, this.stops.length - 1)]);
      this.root.dataset.ready = this.opening;
    }
  }

  window.miniVllmReplay = { Recording, Replay, element, drawn, load };

  function start() {
    for (const root of document.querySelectorAll(".viewer:not([data-started])")) {
      root.dataset.started = "";
      new Viewer(root);
    }
  }
  if (window.document$) window.document$.subscribe(start);
  else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
