// The sandbox: a setting, run by the stage's own scheduler in the worker and drawn by the viewer.
//
// The whole setting stands in the address. Whatever is changed is run again at once.
(() => {
  "use strict";

  const { Recording, Replay, element, drawn } = window.miniVllmReplay;
  const lab = window.miniVllmLab;
  const SPEEDS = { 0.005: "1/200×", 0.02: "1/50×", 0.1: "1/10×" }; // the made-up steps take ms
  const FILES = ["scheduler.py", "block_manager.py", "sequence.py"];
  // Options: name, letter in the address, first stage that has it, smallest, largest, step.
  const OPTIONS = [
    ["num_blocks", "n", 1, 1, 400, 1],
    ["block_size", "k", 1, 1, 256, 1],
    ["max_num_seqs", "q", 1, 1, 64, 1],
    ["max_num_batched_tokens", "t", 1, 1, 65536, 1],
    ["max_prefill_chunk_size", "c", 4, 1, 65536, 1],
    ["max_decode_share", "d", 4, 0.05, 1, 0.05],
    ["target_step_ms", "ms", 4, 1, 10000, 1],
  ];
  const FIELDS = ["arrival", "prompt", "shared", "max_tokens", "abort"];
  const copy = (value) => JSON.parse(JSON.stringify(value));

  // --- the address ----------------------------------------------------------------------------

  /** A setting (or two that differ) as the part of an address behind the #. */
  function encode([one, other]) {
    const said = new URLSearchParams();
    const side = (setting, suffix) => {
      said.set(`s${suffix}`, setting.stage);
      for (const [name, letter] of OPTIONS) {
        const value = setting.options[name];
        if (value !== undefined && value !== null) said.set(letter + suffix, value);
      }
    };
    side(one, "");
    if (other) side(other, "2");
    said.set("r", one.requests.map((r) => [r.id.replace(/ /g, "_"),
      ...FIELDS.map((field) => r[field] ?? "")].join(".")).join("~"));
    return said.toString();
  }

  /** The settings of an address; null if it names none that can be run. */
  function decode(text) {
    const said = new URLSearchParams(text);
    if (!said.get("r")) return null;
    const requests = said.get("r").split("~").slice(0, 12).map((part) => {
      const [id, ...values] = part.split(".");
      const one = { id: id.replace(/_/g, " ").slice(0, 20) };
      FIELDS.forEach((field, i) => {
        if (values[i]) one[field] = Math.min(100000, Math.max(0, Math.round(Number(values[i]))));
      });
      return { arrival: 0, ...one };
    });
    const fine = requests.every((one) => one.id && one.prompt >= 1 && one.max_tokens >= 1
      && Object.values(one).every((value) => !Number.isNaN(value)));
    if (!fine || new Set(requests.map((one) => one.id)).size < requests.length) return null;
    const side = (suffix) => {
      const stage = Number(said.get(`s${suffix}`));
      if (![1, 2, 3, 4].includes(stage)) return null;
      const options = {};
      for (const [name, letter, , low, high] of OPTIONS) {
        const value = Number(said.get(letter + suffix));
        if (value) options[name] = Math.min(high, Math.max(low, value));
      }
      return options.num_blocks && options.block_size ? { stage, options, requests } : null;
    };
    const one = side("");
    return one && [one, side("2")].filter(Boolean);
  }

  // --- the time line --------------------------------------------------------------------------

  /** Requests on a line of steps. Each can be dragged, or moved with the arrow keys. */
  class Timeline {
    constructor(words, changed, colour) {
      Object.assign(this, { words, changed, colour });
      this.root = drawn("svg", { class: "lab__timeline", role: "group" });
      this.root.setAttribute("aria-label", words.timeline);
    }

    draw(requests) {
      const width = Math.max(280, this.root.clientWidth || 600);
      const [left, row, top] = [8, 26, 22];
      const last = Math.max(20, ...requests.map((one) => one.arrival + 6));
      const longest = Math.max(...requests.map((one) => one.prompt));
      const height = top + requests.length * row + 4;
      const x = (step) => left + (step / last) * (width - left - 130);
      this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.root.style.height = `${height}px`;
      const parts = [];
      const every = [1, 2, 5, 10, 20, 50].find((n) => x(n) - x(0) > 34) ?? 100;
      for (let step = 0; step <= last; step += every) {
        parts.push(drawn("line", { class: "grid", x1: x(step), x2: x(step), y1: top - 6, y2: height }));
        parts.push(drawn("text", { class: "axis", x: x(step), y: 11, "text-anchor": "middle" }, step));
      }
      requests.forEach((one, i) => {
        const y = top + i * row;
        const long = 12 + 46 * Math.sqrt(one.prompt / longest);
        const bar = drawn("g", { class: "request", tabindex: 0, role: "slider",
          "aria-valuemin": 0, "aria-valuemax": last, "aria-valuenow": one.arrival,
          "aria-label": this.words.arrives.replace("{name}", one.id),
          transform: `translate(${x(one.arrival)} ${y})`, style: `--colour: ${this.colour(one.id)}` },
        drawn("rect", { width: long, height: row - 6, rx: 3 }),
        drawn("text", { x: long + 6, y: 14 }, `${one.id} · ${one.prompt} + ${one.max_tokens}`));
        const move = (step) => {
          const now = Math.max(0, Math.min(999, Math.round(step)));
          if (now === one.arrival) return;
          one.arrival = now;
          bar.setAttribute("transform", `translate(${x(now)} ${y})`);
          bar.setAttribute("aria-valuenow", now);
          this.changed();
        };
        bar.addEventListener("keydown", (event) => {
          const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
          if (!by) return;
          event.preventDefault();
          move(one.arrival + by);
        });
        bar.addEventListener("pointerdown", (event) => {
          bar.setPointerCapture(event.pointerId);
          const [from, at] = [one.arrival, event.clientX];
          const scale = this.root.getBoundingClientRect().width / width;
          const drag = (now) => move(from + ((now.clientX - at) / scale) / (x(1) - x(0)));
          const end = () => {
            bar.removeEventListener("pointermove", drag);
            this.draw(requests);
          };
          bar.addEventListener("pointermove", drag);
          bar.addEventListener("pointerup", end, { once: true });
          bar.addEventListener("pointercancel", end, { once: true });
        });
        parts.push(bar);
      });
      const focused = [...this.root.children].filter((c) => c.tabIndex === 0).indexOf(document.activeElement);
      this.root.replaceChildren(...parts);
      if (focused >= 0) this.root.querySelectorAll("[tabindex]")[focused]?.focus();
    }
  }

  // --- the code -------------------------------------------------------------------------------

  /** A stage's files, to read and to change. Knows nothing of what is run. */
  class Editor {
    constructor(words, run) {
      this.words = words;
      this.run = run;
      this.edits = {};
      this.original = {};
      this.file = FILES[0];
      this.tabs = element("div", { class: "lab__tabs", role: "tablist" });
      this.gutter = element("div", { class: "lab__gutter", "aria-hidden": "true" });
      this.area = element("textarea", { class: "lab__area", spellcheck: "false", wrap: "off",
        autocapitalize: "off", autocomplete: "off", "aria-label": words.code });
      this.said = element("p", { class: "lab__said", role: "status" });
      const button = (name, act) => {
        const made = element("button", { type: "button", "data-button": name }, words[name]);
        made.addEventListener("click", act);
        return made;
      };
      this.buttons = element("div", { class: "lab__buttons" }, button("run", run),
        button("restore", () => { this.edits = {}; this.open(this.file); run(); }));
      this.root = element("div", { class: "lab__editor" }, this.tabs,
        element("div", { class: "lab__code" }, this.gutter, this.area), this.buttons, this.said);
      this.area.addEventListener("scroll", () => { this.gutter.scrollTop = this.area.scrollTop; });
      this.area.addEventListener("input", () => this.#changed());
      this.area.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
        else if (event.key === "Enter") {
          const before = this.area.value.slice(0, this.area.selectionStart).split("\n").at(-1);
          const indent = /^ */.exec(before)[0] + (before.trimEnd().endsWith(":") ? "    " : "");
          event.preventDefault();
          this.area.setRangeText(`\n${indent}`, this.area.selectionStart, this.area.selectionEnd, "end");
          this.#changed();
        }
      });
    }

    #changed() {
      const { value } = this.area;
      if (value === this.original[this.file]) delete this.edits[this.file];
      else this.edits[this.file] = value;
      this.#lines();
      this.#tabs();
    }

    #tabs() {
      const names = this.files ?? FILES;
      this.tabs.replaceChildren(...names.map((name) => {
        const tab = element("button", { type: "button", role: "tab",
          "aria-selected": String(name === this.file) },
        name + (name in this.edits ? ` (${this.words.edited})` : ""));
        tab.addEventListener("click", () => this.open(name));
        return tab;
      }));
    }

    #lines(wrong = null) {
      const count = this.area.value.split("\n").length;
      if (wrong === null && this.count === count && !this.wrong) return;
      this.count = count;
      this.wrong = wrong;
      this.gutter.replaceChildren(...Array.from({ length: count }, (_, i) => element("span",
        i + 1 === wrong ? { class: "wrong" } : {}, String(i + 1))));
    }

    /** Show the files of a stage; edits of another stage are gone. */
    fill(files) {
      this.original = files;
      this.edits = {};
      this.open(this.file, "def schedule(");
    }

    open(name, at = null) {
      this.file = name;
      this.area.value = this.edits[name] ?? this.original[name];
      this.#lines(null);
      this.#tabs();
      const line = at ? this.area.value.slice(0, this.area.value.indexOf(at)).split("\n").length : 1;
      this.show(line);
    }

    show(line) {
      const height = parseFloat(getComputedStyle(this.area).lineHeight) || 18;
      this.area.scrollTop = Math.max(0, (line - 3) * height);
      this.gutter.scrollTop = this.area.scrollTop;
    }

    /** Say what a run raised, at its line; null when all is well. */
    tell(error) {
      this.#lines(null);
      this.root.classList.toggle("failed", Boolean(error));
      if (!error) { this.said.textContent = Object.keys(this.edits).length ? this.words.ran : ""; return; }
      if (error.file && (this.files ?? FILES).includes(error.file)) {
        if (error.file !== this.file) this.open(error.file);
        this.#lines(error.line);
        this.show(error.line);
      }
      this.said.textContent = error.file
        ? this.words.raised.replace("{file}", error.file).replace("{line}", error.line)
          .replace("{message}", error.message) : error.message;
    }
  }

  // --- the whole ------------------------------------------------------------------------------

  class Sandbox {
    constructor(root) {
      this.root = root;
      const { words, viewer, presets, invariants } = lab.course();
      Object.assign(this, { words, viewer, presets, invariants });
      this.own = root.hasAttribute("data-open"); // the page is the sandbox's: so is its address
      const [wanted, edits] = [this.own && decode(location.hash.slice(1)), null];
      const first = copy(presets[root.dataset.preset || "example"]);
      const stages = (root.dataset.stages || "3 4").split(" ").map(Number);
      this.sides = wanted || stages.map((stage) => ({ ...copy(first), stage }));
      this.#build();
      this.#fill();
      this.run(edits);
      if (this.own) {
        window.addEventListener("hashchange", () => {
          const now = decode(location.hash.slice(1));
          if (!now || location.hash.slice(1) === this.address) return;
          this.sides = now;
          this.#fill();
          this.run();
        });
      }
    }

    get requests() { return this.sides[0].requests; }

    #build() {
      const { words } = this;
      this.preset = element("select", { "data-field": "preset" },
        element("option", { value: "" }, words.own_setting),
        ...Object.entries(words.presets).map(([value, text]) => element("option", { value }, text)));
      this.preset.addEventListener("change", () => {
        if (!this.preset.value) return;
        const made = copy(this.presets[this.preset.value]);
        this.sides = this.sides.map(({ stage }) => ({ ...copy(made), stage }));
        this.#fill();
        this.run();
      });
      this.link = element("button", { type: "button" }, words.link);
      this.link.addEventListener("click", async () => {
        const page = new URL("lab.html", lab.base);
        page.hash = encode(this.sides);
        try {
          await navigator.clipboard.writeText(page.href);
          this.status.textContent = words.copied;
        } catch { window.prompt(words.link, page.href); }
      });
      this.status = element("p", { class: "lab__status", role: "status" }, words.starting);
      this.options = element("div", { class: "lab__options" });
      this.timeline = new Timeline(words, () => this.#changed(), (id) => this.replay.colour(id));
      this.table = element("div", { class: "lab__requests" });
      this.findings = element("div", { class: "lab__findings", role: "status" });
      const place = element("div", { class: "viewer" });
      this.editor = new Editor(words, () => this.run());
      this.code = element("details", { class: "lab__fold" }, element("summary", {}, words.change_code),
        this.editor.root);
      this.code.addEventListener("toggle", () => this.editor.show(
        this.editor.area.value.split("def schedule(")[0].split("\n").length));
      this.questions = element("div", { class: "lab__predict" });
      this.root.replaceChildren(
        element("div", { class: "lab__bar" },
          element("label", {}, element("span", {}, words.preset), this.preset), this.link),
        element("div", { class: "lab__setup" }, this.options, element("div", {},
          element("p", { class: "lab__hint" }, words.traffic_hint), this.timeline.root,
          element("details", { class: "lab__fold" }, element("summary", {}, words.traffic), this.table))),
        this.status, this.findings, place, this.questions, this.code);
      this.replay = new Replay(place, { ...this.viewer, ...words.replay }, { speeds: SPEEDS });
      this.preset.value = this.own && decode(location.hash.slice(1)) ? ""
        : this.root.dataset.preset || "example";
      new ResizeObserver(() => this.timeline.draw(this.requests)).observe(this.timeline.root);
    }

    /** All fields, from the setting. */
    #fill() {
      const { words } = this;
      const [one, other] = this.sides;
      const number = (value, low, high, step, label, set) => {
        const made = element("input", { type: "number", min: low, max: high, step,
          value: value ?? "", "aria-label": label, placeholder: words.off });
        made.addEventListener("change", () => {
          const now = made.value === "" ? null : Number(made.value);
          if (now !== null && !(now >= low && now <= high)) { made.value = value ?? ""; return; }
          set(now);
          this.#changed();
        });
        return made;
      };
      // 1. Options: a row each, a column for each side.
      const stage = (side, i) => {
        const made = element("select", { "aria-label": `${words.stage} ${i + 1}`, "data-field": `stage${i}` },
          ...(i ? [element("option", { value: "" }, words.alone)] : []),
          ...this.viewer.stages.map((text, n) => element("option",
            { value: n + 1, selected: side?.stage === n + 1 }, text)));
        made.addEventListener("change", () => {
          if (!made.value) this.sides.length = 1;
          else if (!side) this.sides = [one, { ...copy(one), requests: one.requests, stage: Number(made.value) }];
          else side.stage = Number(made.value);
          this.#fill();
          this.#changed();
        });
        return element("td", {}, made);
      };
      if (other) other.requests = one.requests;
      const rows = OPTIONS.map(([name, letter, first, low, high, step]) => element("tr", {},
        element("th", { scope: "row" }, words.options[name]),
        ...this.sides.map((side, i) => element("td", {}, side.stage < first
          ? element("span", { class: "lab__none" }, "–")
          : Object.assign(number(side.options[name], low, high, step, `${words.options[name]} ${i + 1}`,
            (value) => {
              if (value === null) delete side.options[name]; else side.options[name] = value;
            }), { name: letter + (i ? "2" : "") })))));
      this.options.replaceChildren(element("table", { class: "lab__grid" },
        element("tbody", {}, element("tr", {}, element("th", { scope: "row" }, words.stage),
          stage(one, 0), stage(other, 1)), ...rows)));
      // 2. Requests.
      const remove = (i) => {
        const made = element("button", { type: "button", title: words.remove,
          "aria-label": `${words.remove} ${this.requests[i].id}` }, "×");
        made.disabled = this.requests.length === 1;
        made.addEventListener("click", () => { this.requests.splice(i, 1); this.#fill(); this.#changed(); });
        return made;
      };
      const add = element("button", { type: "button", "data-button": "add" }, words.add);
      add.disabled = this.requests.length >= 12;
      add.addEventListener("click", () => {
        const id = [..."ABCDEFGHIJKLMNOP"].find((name) => !this.requests.some((one) => one.id === name));
        const arrival = Math.max(...this.requests.map((one) => one.arrival)) + 2;
        this.requests.push({ id, arrival, prompt: 60, max_tokens: 20 });
        this.#fill();
        this.#changed();
      });
      this.table.replaceChildren(element("table", { class: "lab__grid" },
        element("thead", {}, element("tr", {}, ...words.request_columns.map((text) => element("th",
          { scope: "col" }, text)), element("td", {}))),
        element("tbody", {}, ...this.requests.map((request, i) => element("tr", {},
          element("th", { scope: "row" }, request.id),
          ...FIELDS.map((field, f) => element("td", {}, number(request[field],
            ["prompt", "max_tokens"].includes(field) ? 1 : 0, 100000, 1,
            `${request.id}: ${words.request_columns[f + 1]}`, (value) => {
              if (value === null) {
                if (["prompt", "max_tokens", "arrival"].includes(field)) return;
                delete request[field];
              } else request[field] = value;
            }))), element("td", {}, remove(i)))))), add);
      this.timeline.draw(this.requests);
    }

    #changed() {
      this.preset.value = "";
      this.timeline.draw(this.requests);
      clearTimeout(this.soon);
      this.soon = setTimeout(() => this.run(), 120);
    }

    /** Run both sides and show them. The newest run wins. */
    async run() {
      const { words } = this;
      const turn = this.turn = (this.turn ?? 0) + 1;
      this.address = encode(this.sides);
      if (this.own) history.replaceState(null, "", `#${this.address}`);
      this.root.setAttribute("aria-busy", "true");
      let results;
      try {
        const [one] = this.sides;
        if (this.filled !== one.stage) {
          const files = await lab.call("files", one.stage);
          if (turn !== this.turn) return;
          this.filled = one.stage;
          this.editor.fill(files);
        }
        const sides = this.sides.map((side, i) => lab.call("run", side, i ? {} : this.editor.edits));
        results = await Promise.all(sides);
      } catch (error) {
        if (turn !== this.turn) return;
        this.status.textContent = error.message;
        this.root.removeAttribute("aria-busy");
        this.root.dataset.state = "failed";
        return;
      }
      if (turn !== this.turn) return;
      this.root.removeAttribute("aria-busy");
      this.status.textContent = "";
      this.results = results;
      this.#show(results);
      this.root.dataset.state = "ready";
      this.root.dataset.runs = Number(this.root.dataset.runs ?? 0) + 1;
    }

    #show(results) {
      const { words } = this;
      const edited = Object.keys(this.editor.edits).length > 0;
      const recordings = results.map((result, i) => {
        if (!result.recording) return null;
        const { stage, options } = this.sides[i];
        const differ = OPTIONS.filter(([name, , first]) => stage >= first && this.sides[1]
          && this.sides[0].options[name] !== this.sides[1].options[name])
          .map(([name]) => `${words.short[name]} ${options[name] ?? words.off}`);
        const title = [this.viewer.stages[stage - 1], ...differ,
          ...(edited && !i ? [words.edited] : [])].join(", ");
        return new Recording(`lab${i}`, { made: true, title, ...result.recording });
      });
      const shown = recordings.filter(Boolean);
      if (shown.length) {
        const time = this.shown ? Math.min(this.replay.time, Math.max(...shown.map((one) => one.last)))
          : (shown[0].longest.start + shown[0].longest.end) / 2;
        this.shown = true;
        this.replay.show(recordings[0] ? recordings : shown, time);
      }
      this.editor.tell(results[0].error);
      // What must hold.
      const link = ({ chapter, page }) => element("a", { href: new URL(page, lab.base).href },
        words.chapter.replace("{n}", chapter));
      const parts = [];
      results.forEach((result, i) => {
        const name = this.viewer.stages[this.sides[i].stage - 1];
        for (const { id, why } of result.refused) {
          parts.push(element("p", { class: "lab__refused" }, `${name}: `,
            words.refused.replace("{name}", id).replace("{why}", why)));
        }
        if (result.error) {
          parts.push(element("p", { class: "lab__broken" }, `${name}: `,
            words.failed_at.replace("{step}", result.error.step).replace("{message}", result.error.message)));
        }
        for (const { key, step, what } of result.broken) {
          const said = this.invariants[key];
          const go = element("button", { type: "button" }, words.go.replace("{step}", step));
          const recording = recordings[i];
          go.addEventListener("click", () => {
            this.replay.moveTo(recording.frames[Math.min(step, recording.frames.length - 1)].start);
          });
          parts.push(element("p", { class: "lab__broken", "data-invariant": key }, `${name}: `,
            element("b", {}, said.holds.replace(/`/g, "")), ` ${words.does_not} ${what}. ${said.if} (`,
            link(said), ") ", ...(recording ? [go] : [])));
        }
        if (!result.broken.length && !result.error && result.recording) {
          parts.push(element("p", { class: "lab__fine" }, `${name}: `,
            words.holds.replace("{steps}", result.recording.steps.length)));
        }
      });
      this.findings.replaceChildren(...parts);
      window.miniVllmPredict?.(this, lab);
    }
  }

  window.miniVllmSandbox = { Sandbox, Editor, encode, decode };
  lab.kinds.sandbox = (root) => { root.lab = new Sandbox(root); };
})();
