// The ward: eight broken engines. What is wrong is found by replaying, reading and running.
(() => {
  "use strict";

  const { Recording, Replay, element } = window.miniVllmReplay;
  const { Editor } = window.miniVllmSandbox;
  const lab = window.miniVllmLab;
  const KEY = "mini-vllm-ward";
  const FILES = ["scheduler.py", "block_manager.py", "model_runner.py", "sequence.py"];
  const SPEEDS = { 0.005: "1/200×", 0.02: "1/50×", 0.1: "1/10×" };

  function solved() {
    try { return JSON.parse(localStorage.getItem(KEY)) ?? []; } catch { return []; }
  }

  class Ward {
    constructor(root) {
      this.root = root;
      const { words, viewer, invariants, faults } = lab.course();
      Object.assign(this, { words: words.ward, all: words, viewer, invariants });
      this.beds = element("div", { class: "lab__tabs", role: "group", "aria-label": this.words.cases });
      this.count = faults;
      this.symptom = element("p", { class: "lab__ask" });
      this.differs = element("p", { class: "lab__hint" });
      this.status = element("p", { class: "lab__status", role: "status" }, words.starting);
      const place = element("div", { class: "viewer" });
      this.editor = new Editor(words, () => this.#run());
      this.editor.files = FILES;
      this.invariant = element("select", { "aria-label": this.words.which },
        element("option", { value: "" }, this.words.which),
        ...Object.entries(invariants).filter(([, said]) => said.chapter > 0)
          .sort(([, a], [, b]) => a.chapter - b.chapter)
          .map(([key, said]) => element("option", { value: key },
            `${said.chapter}: ${said.holds.replace(/`/g, "")}`)));
      this.line = element("input", { type: "number", min: 1, placeholder: this.words.line,
        "aria-label": this.words.line });
      this.file = element("select", { "aria-label": this.words.file },
        ...FILES.map((name) => element("option", { value: name }, name)));
      this.verdict = element("div", { class: "lab__findings", role: "status" });
      const check = element("button", { type: "submit" }, words.check);
      const form = element("form", { class: "lab__diagnosis" }, this.invariant, this.file, this.line, check);
      form.addEventListener("submit", (event) => { event.preventDefault(); this.#diagnose(); });
      // The line that the reader stands on is the one that is meant.
      const follow = () => {
        const { area, file } = this.editor;
        this.file.value = file;
        this.line.value = area.value.slice(0, area.selectionStart).split("\n").length;
      };
      for (const name of ["click", "keyup"]) this.editor.area.addEventListener(name, follow);
      this.hint = element("button", { type: "button", "data-button": "hint" }, this.words.hint);
      this.hint.addEventListener("click", () => this.#hint());
      this.hinted = element("span", { class: "lab__hint", role: "status" });
      root.replaceChildren(this.beds, this.symptom, this.status, this.differs, place,
        element("h3", {}, this.words.read), element("p", { class: "lab__hint" }, this.words.read_hint),
        this.editor.root, element("h3", {}, this.words.diagnosis), form, this.verdict,
        element("p", { class: "lab__buttons" }, this.hint, this.hinted));
      this.replay = new Replay(place, { ...viewer, ...words.replay }, { speeds: SPEEDS });
      this.#buttons();
      this.open(1);
    }

    #buttons() {
      const done = solved();
      this.beds.replaceChildren(...Array.from({ length: this.count }, (_, i) => {
        const button = element("button", { type: "button", "data-case": i + 1,
          "aria-selected": String(this.number === i + 1), "aria-pressed": String(this.number === i + 1) },
        `${this.words.case} ${i + 1}${done.includes(i + 1) ? " ✓" : ""}`);
        button.addEventListener("click", () => this.open(i + 1));
        return button;
      }));
    }

    async open(number) {
      this.number = number;
      this.#buttons();
      this.verdict.replaceChildren();
      this.hints = 0;
      this.hint.disabled = false;
      this.hinted.textContent = "";
      this.invariant.value = "";
      this.line.value = "";
      let fault;
      try { fault = await lab.call("fault", number); } catch (error) {
        this.status.textContent = error.message;
        this.root.dataset.state = "failed";
        return;
      }
      if (number !== this.number) return;
      this.status.textContent = "";
      this.fault = fault;
      this.symptom.textContent = fault.symptom;
      this.editor.fill(fault.files);
      this.#show(fault.run);
      this.root.dataset.case = number;
      this.root.dataset.state = "ready";
    }

    #show(run) {
      const made = [[run, this.words.broken], [this.fault.well, this.words.well]].map(([result, title], i) => (
        result.recording ? new Recording(`ward${i}`, { made: true, title, ...result.recording }) : null));
      this.replay.show(made[0] ? made : [made[1], null], made[0]?.first);
      this.#compare(...made);
      this.editor.tell(run.error);
      this.status.textContent = run.error
        ? this.all.failed_at.replace("{step}", run.error.step).replace("{message}", run.error.message) : "";
    }

    /** Say where the two runs part, and go there; or that their schedules are the same. */
    #compare(one, other) {
      const kept = ({ start, end, ...rest }) => JSON.stringify(rest, Object.keys(rest).sort());
      this.differs.replaceChildren();
      if (!one || !other) return;
      const count = Math.max(one.steps.length, other.steps.length);
      let step = 0;
      const same = (i) => one.steps[i] && other.steps[i] && kept(one.steps[i]) === kept(other.steps[i]);
      while (step < count && same(step)) step += 1;
      this.differs.dataset.step = step < count ? step : "";
      if (step === count) { this.differs.textContent = this.words.same_steps; return; }
      const go = element("button", { type: "button", "data-button": "go" },
        this.all.go.replace("{step}", step));
      const recording = one.frames[step] ? one : other;
      go.addEventListener("click", () => this.replay.moveTo(recording.frames[step].start));
      this.differs.append(`${this.words.same_until.replace("{step}", step)} `, go);
    }

    async #hint() {
      const number = this.number;
      const { file, place } = await lab.call("hint", number);
      if (number !== this.number) return;
      this.hints += 1;
      this.hinted.textContent = this.words.hint_file.replace("{file}", file)
        + (this.hints > 1 ? ` ${this.words.hint_place.replace("{place}", place)}` : "");
      this.hint.disabled = this.hints > 1;
    }

    async #run() {
      const edits = { ...this.fault.files, ...this.editor.edits };
      const result = await lab.call("run", this.fault.setting, edits);
      this.#show(result);
      const well = !result.broken.length && !result.error;
      if (well) this.differs.replaceChildren(); // what may differ now is the reader's way to mend it
      this.status.textContent = result.error ? this.status.textContent
        : well ? this.words.mended : this.words.not_mended;
      this.root.dataset.runs = Number(this.root.dataset.runs ?? 0) + 1;
    }

    async #diagnose() {
      const { words } = this;
      if (!this.invariant.value || !this.line.value) {
        this.verdict.replaceChildren(element("p", {}, words.both));
        return;
      }
      const said = await lab.call("diagnose", this.number, this.invariant.value, this.file.value,
        Number(this.line.value));
      const parts = [
        element("p", { class: said.invariant ? "lab__fine" : "lab__broken" },
          said.invariant ? words.right_invariant : words.wrong_invariant
            .replace("{if}", this.invariants[this.invariant.value].if)),
        element("p", { class: said.line ? "lab__fine" : "lab__broken" },
          said.line ? words.right_line : words.wrong_line)];
      if (said.why) {
        parts.push(element("p", { class: "lab__fine" }, said.why),
          element("pre", { class: "lab__change" },
            ...said.old.trimEnd().split("\n").map((line) => element("del", {}, `${line}\n`)),
            ...said.new.trimEnd().split("\n").map((line) => element("ins", {}, `${line}\n`))),
          element("p", {}, words.test.replace("{test}", said.test).replaceAll("{n}", this.number)));
        const done = [...new Set([...solved(), this.number])];
        try { localStorage.setItem(KEY, JSON.stringify(done)); } catch { /* then it is not kept */ }
        this.#buttons();
      }
      this.verdict.replaceChildren(...parts);
      this.root.dataset.verdict = `${this.number}:${said.invariant}:${said.line}`;
    }
  }

  lab.kinds.ward = (root) => { root.lab = new Ward(root); };
})();
