// The server's page: start chats on a stage, send a document, and see who waits.
//
// Chats are requests like any client's (POST /v1/chat/completions, streamed). What the engine did
// comes from GET /events. What is drawn with is the trace viewer's (drawing.js).
(() => {
  "use strict";

  const { Numbers, block, blockCounts, colour, columns, drawn, element, mark, progress, requestRow,
    requestTable, slices, state, strips, textLine } = window.miniVllmDrawing;
  const numbers = new Numbers();
  const $ = (id) => document.getElementById(id);

  const DOCUMENT = "document";
  const TOKENS_EACH = Number(new URLSearchParams(location.search).get("tokens") ?? 300); // of a chat
  const LONG = 3; // a chat that waits this many times its usual gap is said to wait
  const SECONDS = 12; // of tokens that are shown
  const BEFORE = 2; // of them before the document, once it is sent
  const AFTER = 4; // and after its first token; then the picture stands still
  const MOST_CELLS = 400; // a larger pool shows the blocks that are held, and some free ones
  const STAGES = ["01 · block manager", "02 · PagedAttention", "03 · prefix cache",
    "04 · chunked prefill"];
  const COLUMNS = ["request", "state", "prompt in cache", "tokens out", "longest wait", "blocks"];
  const KINDS = { held: "held", shared: "shared", free: "free" };
  const STATES = { absent: "not here yet", waiting: "waiting", prefilling: "prefilling",
    running: "running", length: "finished", stop: "finished", abort: "stopped", error: "refused" };

  const now = () => performance.now() / 1000;
  const title = (who) => (who === DOCUMENT ? "Document" : `Chat ${who}`);
  const letter = (who) => (who === DOCUMENT ? "¶" : who);

  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const paint = () => {
    document.documentElement.dataset.mdColorScheme = scheme.matches ? "slate" : "default";
  };
  scheme.addEventListener("change", paint);
  paint();

  // --- the server ---------------------------------------------------------------------------

  let key = sessionStorage.getItem("key") ?? "";

  /** Ask the server; an answer that is no success becomes an Error with the server's words. */
  async function ask(path, { body = null, signal = null } = {}) {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const options = body === null ? { headers, signal } : { method: "POST", signal,
      headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const response = await fetch(path, options);
    if (response.ok) return response;
    const refusal = await response.json().catch(() => null);
    const error = new Error(refusal?.error?.message ?? `${path}: ${response.status}`);
    error.status = response.status;
    throw error;
  }

  /** The JSON of each server-sent event. EventSource would do for /events, but sends no key. */
  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
      }
    }
  }

  // --- what happens -------------------------------------------------------------------------

  /** A request of this page: what it asked, and what came when. */
  class Talk {
    constructor(who, model, messages, options) {
      this.who = who;
      this.body = { model, messages, temperature: 0, stream: true, ...options };
      this.sent = now();
      this.id = null; // the server's, which the step records name
      this.tokens = []; // when text came, in seconds
      this.text = "";
      this.ended = null;
      this.reason = null;
      this.stop = new AbortController();
      this.waiters = [];
      this.over = this.#run();
    }

    async #run() {
      try {
        const response = await ask("/v1/chat/completions", { body: this.body, signal: this.stop.signal });
        this.id = response.headers.get("X-Request-Id"); // it comes before the first token
        for await (const event of events(response)) {
          if (event.error) throw new Error(event.error.message);
          this.#take(event.choices[0]);
        }
      } catch (error) {
        this.reason ??= error.name === "AbortError" ? "abort" : "error";
        if (this.reason === "error") this.text = error.message;
      }
      this.reason ??= "error";
      this.ended = now();
      this.waiters.forEach(({ tell }) => tell(false));
    }

    #take({ delta, finish_reason: reason }) {
      if (delta.content) {
        this.tokens.push(now());
        this.text += delta.content;
        this.waiters = this.waiters.filter(({ count, tell }) => {
          if (this.tokens.length >= count) tell(true);
          return this.tokens.length < count;
        });
      }
      if (reason) this.reason = reason;
    }

    /** Wait for so much text; false if it ended before. */
    reached(count) {
      if (this.tokens.length >= count) return Promise.resolve(true);
      if (this.ended !== null) return Promise.resolve(false);
      return new Promise((tell) => { this.waiters.push({ count, tell }); });
    }

    get isLive() { return this.ended === null; }

    /** Seconds since the last text, while more is to come. */
    get wait() { return this.isLive && this.reason === null ? now() - (this.tokens.at(-1) ?? this.sent) : 0; }

    /** The longest time between two texts, the one that is not over included. */
    get longest() {
      const { tokens } = this;
      let found = { start: 0, end: 0, seconds: 0 };
      const look = (start, end) => {
        if (end - start > found.seconds) found = { start, end, seconds: end - start };
      };
      for (let i = 1; i < tokens.length; i += 1) look(tokens[i - 1], tokens[i]);
      if (tokens.length && this.wait) look(tokens.at(-1), now());
      return found;
    }

    get usual() {
      const gaps = this.tokens.slice(1).map((time, i) => time - this.tokens[i]).sort((a, b) => a - b);
      return gaps[gaps.length >> 1] ?? 0;
    }
  }

  /** What the step records say about a stage, since the last `clear`. */
  class Stage {
    constructor() { this.clear(); }

    clear() {
      this.last = null; // event
      this.steps = []; // { start, end, isPrompt }
      this.most = 1; // tokens of a step
      this.requests = new Map(); // by id: { generated, since, most }
    }

    request(id) {
      if (!this.requests.has(id)) this.requests.set(id, { generated: 0, since: 0, most: 0, prompt: 0, prefilled: 0 });
      return this.requests.get(id);
    }

    take(event) {
      const { step } = event;
      this.last = event;
      this.came = now();
      for (const [id, { prefilled, prompt }] of Object.entries(event.requests)) {
        Object.assign(this.request(id), { prefilled, prompt });
      }
      if (!step) return;
      const count = step.slices.reduce((sum, [, , n]) => sum + n, 0);
      this.most = Math.max(this.most, count);
      this.steps.push({ start: this.came - step.ms / 1000, end: this.came,
        isPrompt: step.slices.some(([, , n]) => n > 1) });
      for (const [id] of step.slices) this.request(id);
      // Tokens that were computed between two tokens of a request.
      for (const one of this.requests.values()) if (one.generated) one.since += count;
      for (const id of step.sampled) {
        const one = this.request(id);
        one.most = Math.max(one.most, one.since);
        one.since = 0;
        one.generated += 1;
      }
    }
  }

  const stages = new Map();
  let example = null;
  let panels = [];

  // --- one run on the screen ------------------------------------------------------------------

  class Panel {
    constructor(models, chosen) {
      this.talks = [];
      this.stage = new Stage();
      this.select = element("select", {}, ...models.map((name) => element("option",
        { value: name, selected: name === chosen }, STAGES[Number(name.slice(-2)) - 1] ?? name)));
      this.isSecond = panels.length > 0;
      if (this.isSecond) {
        this.select.append(element("option", { value: "", selected: !chosen }, "no second stage"));
      }
      const button = (name, text, act, kind = "") => {
        const made = element("button", { type: "button", class: kind, "data-button": name }, text);
        made.addEventListener("click", act);
        return made;
      };
      this.start = button("start", "Start four chats", () => this.begin(), "main");
      this.send = button("send", "Send the document", () => this.sendDocument());
      this.halt = button("stop", "Stop", () => this.end());
      this.select.addEventListener("change", () => { this.end(); if (this.model) this.clear(); arrange(); });
      this.body = element("div");
      this.root = element("section", { class: "live viewer viewer__panel" },
        element("div", { class: "live__controls" },
          element("label", { class: "live__pick" }, element("span", {}, "Stage"), this.select),
          this.start, this.send, this.halt), this.body);
      this.#build();
    }

    get model() { return this.select.value; }

    get isLive() { return this.talks.some((talk) => talk.isLive); }

    talk(who) { return this.talks.find((talk) => talk.who === who); }

    get chats() { return this.talks.filter((talk) => talk.who !== DOCUMENT); }

    #build() {
      const heading = (text) => element("h3", { class: "viewer__heading" }, text);
      const fact = (name, text) => {
        const value = element("dd", { "data-fact": name }, "–");
        this[name] = value;
        return element("div", {}, element("dt", {}, text), value);
      };
      this.whos = [...Object.keys(example.chats), DOCUMENT];
      this.texts = this.whos.map((who) => {
        const made = textLine(who, mark(letter(who), colour(who)));
        made.line.style.setProperty("--colour", colour(who));
        return made;
      });
      this.rows = this.whos.map((who) => requestRow(who, mark(letter(who), colour(who)), title(who)));
      this.strips = drawn("svg", { class: "viewer__strips", role: "img",
        "aria-label": "A row for each request, with a tick for each of its tokens" });
      this.now = element("span", { class: "live__now" });
      this.counter = element("p", { class: "viewer__step" });
      this.bar = element("div", { class: "viewer__bar", role: "img" });
      this.pool = heading("The pool");
      this.grid = element("div", { class: "viewer__grid", role: "img" });
      this.cells = [];
      this.counts = element("ul", { class: "viewer__counts" });
      this.queues = element("p", { class: "viewer__queues" });
      this.body.append(
        element("dl", { class: "viewer__facts" }, fact("gap", "longest wait of a chat"),
          fact("between", "tokens computed meanwhile"),
          fact("ttft", "document’s first token after")),
        heading("The texts"),
        element("div", { class: "viewer__texts" }, ...this.texts.map(({ line }) => line)),
        heading("A tick for each token"), this.strips,
        heading("What the last step computed"), this.now, this.counter, this.bar,
        this.pool, this.grid, this.counts,
        heading("The requests"), requestTable(COLUMNS, this.rows), this.queues);
    }

    /** Forget the last run. */
    clear() {
      this.end();
      this.talks = [];
      this.zero = now();
      this.salt = `${Date.now()}-${Math.random()}`; // no run finds what another one has computed
      this.stage = new Stage();
      stages.set(this.model, this.stage);
      this.root.dataset.run = Number(this.root.dataset.run ?? 0) + 1;
      this.draw(true);
    }

    /** Four chats, each a little after the one before. */
    async begin() {
      panels.forEach((panel) => panel.end());
      await Promise.all(panels.flatMap((panel) => panel.talks.map((talk) => talk.over)));
      this.clear();
      const mine = this.talks;
      for (const [who, words] of Object.entries(example.chats)) {
        this.#say(who, words, { max_tokens: TOKENS_EACH, ignore_eos: true });
        if (!await mine.at(-1).reached(example.betweenChats) || mine !== this.talks) return;
      }
    }

    sendDocument() {
      const words = $("document").querySelector("textarea").value || example.document;
      const task = words === example.document ? example.task
        : `${example.lead} this document in a few sentences.\n\n`;
      panels.filter((panel) => panel !== this).forEach((panel) => panel.end());
      if (!this.isLive) this.clear();
      this.talks = this.talks.filter((talk) => talk.who !== DOCUMENT);
      this.#say(DOCUMENT, task + words, { max_tokens: example.summaryTokens });
    }

    #say(who, words, options) {
      const messages = [{ role: "system", content: example.system }, { role: "user", content: words }];
      const talk = new Talk(who, this.model, messages, { ...options, cache_salt: this.salt });
      this.talks.push(talk);
      talk.reached(1).then((came) => {
        if (came && who === DOCUMENT) $("said").textContent = this.spoken();
      });
      wake();
    }

    /** The client goes away: the server aborts what it computes for it. */
    end() { this.talks.forEach((talk) => { if (talk.isLive) talk.stop.abort(); }); }

    /** The longest gap of all chats. */
    get longest() {
      return this.chats.reduce((most, { longest }) => (longest.seconds > most.seconds ? longest : most),
        { start: 0, end: 0, seconds: 0 });
    }

    spoken() {
      return `${this.select.selectedOptions[0].text}: the longest wait of a chat was `
        + `${numbers.seconds(this.longest.seconds)}.`;
    }

    draw(inFull) {
      const isLive = this.isLive;
      this.start.disabled = isLive && !this.chats.every((talk) => !talk.isLive);
      this.send.disabled = !this.model || Boolean(this.talk(DOCUMENT)?.isLive);
      this.halt.disabled = !isLive;
      const chatting = this.chats.some((talk) => talk.isLive);
      this.start.classList.toggle("main", !chatting);
      this.send.classList.toggle("main", chatting);
      this.root.dataset.state = isLive ? "live" : "idle";
      this.#drawTexts();
      this.#drawFacts();
      if (!inFull) return;
      this.#drawStrips();
      this.#drawStep();
      this.#drawPool();
      this.#drawRequests();
    }

    #seen(talk) { return talk?.id ? this.stage.request(talk.id) : { generated: 0, most: 0, prompt: 0, prefilled: 0 }; }

    #drawTexts() {
      this.texts.forEach(({ line, text, wait }, i) => {
        const talk = this.talk(this.whos[i]);
        const seen = this.#seen(talk);
        const waits = talk && talk.isLive && talk.wait > Math.max(LONG * talk.usual, 0.25);
        line.classList.toggle("waits", Boolean(waits));
        line.classList.toggle("empty", !talk?.text);
        line.classList.toggle("failed", talk?.reason === "error");
        wait.textContent = waits ? `waiting ${numbers.fixed(talk.wait)} s …` : "";
        text.textContent = talk?.text ? talk.text.replace(/\s+/g, " ").slice(-600)
          : !talk ? "" : seen.prompt ? `${numbers.number(seen.prefilled)} of ${numbers.number(seen.prompt)} `
            + "prompt tokens are computed" : talk.isLive ? "waits for its first step" : "";
        // For those who measure: seconds here, tokens in the engine.
        line.dataset.generated = seen.generated;
        line.dataset.longestGap = (talk?.longest.seconds ?? 0).toFixed(4);
        line.dataset.mostBetween = seen.most;
        line.dataset.reason = talk?.reason ?? "";
      });
    }

    #drawFacts() {
      const { seconds } = this.longest;
      const usual = Math.max(0, ...this.chats.map((talk) => talk.usual));
      this.gap.textContent = seconds ? numbers.seconds(seconds) : "–";
      this.gap.classList.toggle("long", seconds > LONG * usual && seconds > 0.25);
      const most = Math.max(0, ...this.chats.map((talk) => this.#seen(talk).most));
      this.between.textContent = most ? numbers.number(most) : "–";
      const document_ = this.talk(DOCUMENT);
      const [first] = document_?.tokens ?? [];
      this.ttft.textContent = first ? numbers.seconds(first - document_.sent) : "–";
    }

    /** The seconds that are shown: the last ones, or those around the document's prompt. */
    #span() {
      const document_ = this.talk(DOCUMENT);
      const time = now();
      if (!document_) return [Math.max(this.zero, time - SECONDS), Math.max(this.zero + SECONDS, time)];
      const start = Math.max(this.zero, document_.sent - BEFORE);
      const done = document_.tokens[0] ?? document_.ended;
      return [start, Math.max(start + SECONDS, done ? Math.min(time, done + AFTER) : time)];
    }

    #drawStrips() {
      const zero = this.talk(DOCUMENT)?.sent ?? this.zero;
      const [start, end] = this.#span();
      const time = Math.min(now(), end);
      const clip = (moment) => Math.min(Math.max(moment, start), time) - zero;
      const isIn = (moment) => moment >= start && moment <= end;
      const rows = this.whos.map((who) => {
        const talk = this.talk(who);
        const row = { who, name: title(who), mark: letter(who), colour: colour(who) };
        if (!talk) return { ...row, arrived: null, tokens: [] };
        const ended = talk.ended ?? time;
        return { ...row, arrived: clip(talk.sent), ended: clip(ended),
          firstToken: clip(talk.tokens[0] ?? ended),
          tokens: talk.tokens.filter(isIn).map((moment) => moment - zero),
          isAborted: talk.reason === "abort" && isIn(ended) };
      });
      const gap = this.longest;
      const hole = gap.seconds && gap.end > start && gap.start < end ? { start: clip(gap.start),
        end: clip(gap.end), rows: rows.length - 1, label: numbers.seconds(gap.seconds) } : null;
      const steps = this.stage.steps.filter((step) => step.end >= start && step.start <= end)
        .map((step) => ({ ...step, start: clip(step.start), end: clip(step.end) }));
      strips(this.strips, { width: Math.max(240, this.body.clientWidth), rows, steps, hole,
        span: [start - zero, end - zero], stepsLabel: "steps",
        tick: (s) => `${numbers.number(s)} s` });
    }

    #names() { return new Map(this.talks.map((talk) => [talk.id, talk.who])); }

    #drawStep() {
      const { last } = this.stage;
      const since = this.isLive && last ? now() - this.stage.came : 0;
      this.now.textContent = since > 0.25 ? `the next one has run for ${numbers.fixed(since)} s …` : "";
      const step = last?.step;
      if (!step) {
        if (!last) { this.counter.textContent = "Nothing yet."; this.bar.replaceChildren(); }
        return;
      }
      const names = this.#names();
      const count = step.slices.reduce((sum, [, , n]) => sum + n, 0);
      this.counter.textContent = `Step ${numbers.number(step.index)}, ${numbers.seconds(step.ms / 1000)}, `
        + `tokens computed: ${numbers.number(count)}`;
      this.bar.replaceChildren(...slices(step.slices.map(([id, start, n]) => {
        const who = names.get(id);
        return { who: who ?? "", count: n, number: numbers.number(n), mark: who ? letter(who) : "·",
          colour: who ? colour(who) : "var(--fig-shared)",
          title: `${who ? title(who) : "another client"}: tokens ${start} to ${start + n - 1}` };
      }), this.stage.most));
      this.bar.setAttribute("aria-label", step.slices.map(([id, , n]) => `${names.get(id) ?? "other"} ${n}`).join(", "));
    }

    #drawPool() {
      const { last } = this.stage;
      const { num_blocks: total, block_size: size } = models.get(this.model) ?? { num_blocks: 0 };
      this.pool.textContent = `The pool, blocks of ${size}`;
      const names = this.#names();
      const holders = new Map();
      for (const [id, { block_table: table }] of Object.entries(last?.requests ?? {})) {
        for (const one of table) holders.set(one, [...(holders.get(one) ?? []), names.get(id) ?? "·"]);
      }
      // By owner, shared ones first: a pool's own order would only show which block was free.
      const order = (who) => (who === "·" ? this.whos.length : this.whos.indexOf(who));
      const held = [...holders].sort(([a, p], [b, q]) => q.length - p.length || order(p[0]) - order(q[0]) || a - b);
      const free = last ? last.free_blocks : total;
      const wanted = total <= MOST_CELLS ? total
        : Math.min(total, Math.max(200, Math.ceil(held.length / 20 + 1) * 20, this.cells.length));
      if (wanted !== this.cells.length) {
        this.cells = Array.from({ length: wanted }, () => element("span"));
        this.grid.replaceChildren(...this.cells);
        this.grid.style.setProperty("--columns", columns(wanted, 20));
        this.grid.style.setProperty("--columns-narrow", 16);
      }
      this.cells.forEach((cell, i) => {
        const [id, whos] = held[i] ?? [];
        if (!whos) block(cell, { kind: "free", who: "", text: "", colour: "var(--fig-free)", title: "free" });
        else {
          block(cell, { kind: whos.length > 1 ? "shared" : "held", who: whos.join(" "),
            text: whos.length > 1 ? `×${whos.length}` : letter(whos[0]),
            colour: whos[0] === "·" ? "var(--fig-shared)" : colour(whos[0]),
            title: `block ${id}: ${whos.map((who) => (who === "·" ? "another client" : title(who))).join(", ")}` });
        }
      });
      const shared = held.filter(([, whos]) => whos.length > 1).length;
      const counts = { held: held.length - shared, shared, free };
      this.grid.setAttribute("aria-label", Object.entries(counts).map(([kind, n]) => `${kind} ${n}`).join(", "));
      this.counts.replaceChildren(...blockCounts(counts, KINDS, numbers));
    }

    #drawRequests() {
      const { last } = this.stage;
      this.whos.forEach((who, i) => {
        const talk = this.talk(who);
        const seen = this.#seen(talk);
        const [stateCell, cache, generated, wait, blocks] = this.rows[i].cells;
        const mine = talk?.id ? last?.requests[talk.id] : null;
        const name = !talk ? "absent" : talk.reason ?? mine?.state ?? "waiting";
        stateCell.replaceChildren(state(name, STATES[name] ?? name));
        const total = seen.prompt ? numbers.number(seen.prompt) : "–";
        cache.replaceChildren(progress(mine ? mine.prefilled / mine.prompt : 0, colour(who)),
          `${mine ? numbers.number(mine.prefilled) : "–"} / ${total}`);
        generated.textContent = talk ? numbers.number(seen.generated) : "–";
        const { seconds } = talk?.longest ?? { seconds: 0 };
        wait.textContent = seconds ? numbers.seconds(seconds) : "–";
        blocks.textContent = numbers.number(mine?.blocks ?? 0);
        this.rows[i].line.classList.toggle("quiet", !mine);
      });
      this.queues.textContent = last ? `Running: ${last.running}, waiting: ${last.waiting}` : "";
    }
  }

  // --- the page -----------------------------------------------------------------------------

  const models = new Map();
  let drawing = null;
  let beat = 0;

  /** Draw while something happens, and once more after it. */
  function wake() {
    drawing ??= setInterval(() => {
      const live = panels.filter((panel) => panel.isLive);
      beat += 1;
      if (live.length) idle = 0; else idle += 1;
      panels.forEach((panel) => panel.draw(panel.isLive ? beat % 2 === 0 : idle === 5));
      if (idle >= 5) { clearInterval(drawing); drawing = null; idle = 0; }
    }, 100);
  }
  let idle = 0;

  /** One column or two. */
  function arrange() {
    const [, second] = panels;
    document.querySelector("main").classList.toggle("alone", !second.model);
    second.body.hidden = !second.model;
    [second.start, second.send, second.halt].forEach((button) => { button.hidden = !second.model; });
    panels.forEach((panel) => { if (panel.model) panel.draw(true); });
  }

  function fail(error) {
    $("failure").textContent = error.message;
    $("failure").hidden = false;
  }

  /** Take the step records for as long as the page lives. */
  async function listen() {
    for (;;) {
      try {
        for await (const event of events(await ask("/events"))) {
          $("failure").hidden = true;
          stages.get(event.model)?.take(event);
        }
        throw new Error("The server has stopped.");
      } catch (error) {
        fail(error);
      }
      await new Promise((done) => { setTimeout(done, 2000); });
    }
  }

  function takeDocument(text) {
    if (!text.trim()) return;
    $("document").querySelector("textarea").value = text;
    describe();
    const busy = panels.find((panel) => panel.isLive);
    if (busy && !busy.talk(DOCUMENT)?.isLive) busy.sendDocument();
  }

  function describe() {
    const { value } = $("document").querySelector("textarea");
    $("length").textContent = !value || value === example.document ? "the example’s"
      : `${numbers.number(value.length)} characters`;
  }

  async function open() {
    let found;
    try {
      found = (await (await ask("/v1/models")).json()).data;
      example = await (await ask("/page/example.json")).json();
    } catch (error) {
      if (error.status === 401) $("key").hidden = false;
      fail(error);
      return;
    }
    $("key").hidden = true;
    $("failure").hidden = true;
    found.forEach((model) => models.set(model.id, model));
    const names = [...models.keys()];
    const wanted = ["stage-03", "stage-04"].map((name) => (models.has(name) ? name : null));
    const isWide = matchMedia("(min-width: 60em)").matches;
    panels.push(new Panel(names, wanted[0] ?? names[0]));
    panels.push(new Panel(names, isWide && wanted[0] ? wanted[1] : null));
    document.querySelector("main").replaceChildren(...panels.map((panel) => panel.root));
    panels.filter((panel) => panel.model).forEach((panel) => panel.clear());
    arrange();
    new ResizeObserver(() => panels.forEach((panel) => { if (panel.model) panel.draw(true); }))
      .observe(document.querySelector("main"));
    listen();
    document.body.dataset.ready = "";
  }

  $("key").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").querySelector("input").value;
    sessionStorage.setItem("key", key);
    open();
  });
  $("example").addEventListener("click", () => {
    $("document").querySelector("textarea").value = example.document;
    describe();
  });
  $("document").addEventListener("input", () => describe());
  document.addEventListener("paste", (event) => {
    if (event.target.closest?.("textarea, input")) return;
    takeDocument(event.clipboardData.getData("text/plain"));
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("drops");
  });
  document.addEventListener("dragleave", () => document.body.classList.remove("drops"));
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    document.body.classList.remove("drops");
    const [file] = event.dataTransfer.files;
    takeDocument(file ? await file.text() : event.dataTransfer.getData("text/plain"));
  });
  open();
})();
