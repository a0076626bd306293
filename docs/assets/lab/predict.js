// Predict, then see: questions from the real scheduler, typed answers, a reason for each usual mistake.
// The score stays in this browser.
(() => {
  "use strict";

  const lab = window.miniVllmLab;
  const KEY = "mini-vllm-score";

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  /** How many answers were right at the first try, by chapter; the sandbox is one of them. */
  const score = {
    all() {
      try { return JSON.parse(localStorage.getItem(KEY)) ?? {}; } catch { return {}; }
    },
    add(where, right) {
      const all = this.all();
      const [rights, asked] = all[where] ?? [0, 0];
      all[where] = [rights + (right ? 1 : 0), asked + 1];
      try { localStorage.setItem(KEY, JSON.stringify(all)); } catch { /* then it is not kept */ }
    },
    said(where, words) {
      const [rights, asked] = this.all()[where] ?? [0, 0];
      return asked ? words.score.replace("{right}", rights).replace("{asked}", asked) : "";
    },
  };

  /** One question after the other. `next` fetches one; `solved` is told when it has been answered. */
  class Asker {
    constructor(root, words, where, solved = () => {}) {
      Object.assign(this, { root, words, where, solved });
      this.text = element("p", { class: "lab__ask" });
      this.input = element("input", { type: "text", autocomplete: "off", spellcheck: "false",
        "aria-label": words.answer, placeholder: words.answer });
      this.check = element("button", { type: "submit" }, words.check);
      this.give = element("button", { type: "button", "data-button": "give" }, words.give_up);
      this.verdict = element("p", { class: "lab__verdict", role: "status" });
      this.tally = element("p", { class: "lab__hint" }, score.said(where, words));
      this.form = element("form", { class: "lab__answer" }, this.input, this.check, this.give);
      this.form.addEventListener("submit", (event) => { event.preventDefault(); this.#check(); });
      this.give.addEventListener("click", () => this.#give());
      root.replaceChildren(this.text, this.form, this.verdict, this.tally);
      this.form.hidden = true;
    }

    ask(question) {
      this.question = question;
      this.first = true;
      this.text.textContent = question.ask;
      this.verdict.textContent = "";
      this.verdict.className = "lab__verdict";
      this.input.value = "";
      this.input.inputMode = question.form === "numbers" ? "decimal" : "text";
      this.form.hidden = false;
      this.root.dataset.state = "asked";
    }

    async #check() {
      const { right, why } = await lab.call("judge", this.question, this.input.value);
      this.verdict.textContent = why;
      this.verdict.className = `lab__verdict ${right === null ? "" : right ? "right" : "wrong"}`;
      if (right !== null && this.first) this.#count(right);
      this.root.dataset.state = right === null ? "asked" : right ? "right" : "wrong";
      if (right) this.#done();
    }

    #give() {
      if (this.first) this.#count(false);
      const said = this.question.right.map((one) => [one].flat().map((part) => (
        typeof part === "number" ? Number(part.toPrecision(4)) : part)).join(" ")).join(", ");
      this.verdict.textContent = this.words.it_is.replace("{answer}", said)
        + ` ${this.question.hint}`;
      this.verdict.className = "lab__verdict";
      this.root.dataset.state = "given";
      this.#done();
    }

    #count(right) {
      this.first = false;
      score.add(this.where, right);
      this.tally.textContent = score.said(this.where, this.words);
    }

    #done() {
      this.form.hidden = true;
      this.solved(this.question);
    }
  }

  // --- at the end of a chapter ------------------------------------------------------------------

  lab.kinds.questions = async (root) => {
    const { words } = lab.course();
    const chapter = Number(root.dataset.chapter);
    const status = element("p", { class: "lab__hint", role: "status" }, words.starting);
    const place = element("div", { class: "lab__predict" });
    const next = element("button", { type: "button", "data-button": "next" }, words.next);
    const number = element("p", { class: "lab__count" });
    root.replaceChildren(status, number, place, next);
    const asker = new Asker(place, words, chapter, () => { next.hidden = false; });
    let kind = -1;
    const kinds = lab.course().kinds[chapter];
    const ask = async () => {
      kind += 1;
      try {
        const seed = Number(root.dataset.seed ?? Math.floor(Math.random() * 1e9));
        const question = await lab.call("ask", chapter, kind, seed);
        status.textContent = "";
        number.textContent = words.question_of.replace("{n}", (kind % kinds) + 1).replace("{all}", kinds);
        asker.ask(question);
        next.hidden = true;
        if (kind) asker.input.focus();
        root.dataset.kind = kind;
      } catch (error) { status.textContent = error.message; root.dataset.state = "failed"; }
    };
    next.hidden = true;
    next.addEventListener("click", ask);
    await ask();
  };

  // --- in the sandbox ---------------------------------------------------------------------------

  /** Called after each run: the panel that asks about the step that comes next. */
  window.miniVllmPredict = (sandbox) => {
    if (sandbox.asker) return;
    const { words } = lab.course();
    const place = element("div", {});
    const said = element("span", { class: "lab__hint", role: "status" });
    const see = () => {
      const recording = sandbox.replay.panels[0].recording;
      const { step } = sandbox.asker.question;
      sandbox.replay.moveTo(recording.frames[Math.min(step, recording.frames.length - 1)].start);
    };
    sandbox.asker = new Asker(place, words, "sandbox", see);
    const buttons = Object.entries(words.predict).map(([what, text]) => {
      const button = element("button", { type: "button", "data-ask": what }, text);
      button.addEventListener("click", async () => {
        sandbox.replay.pause();
        const index = (sandbox.replay.panels[0].frame?.index ?? -1) + 1;
        const seed = Math.floor(Math.random() * 1e9);
        const question = await lab.call("ask_about", sandbox.sides[0], index, what, seed);
        said.textContent = question ? words.about_step.replace("{step}", question.step)
          : words.nothing_to_ask;
        if (question) {
          const { frames } = sandbox.replay.panels[0].recording;
          sandbox.replay.moveTo(frames[Math.max(0, Math.min(question.step, frames.length - 1) - 1)].start);
          sandbox.asker.ask(question);
          sandbox.asker.input.focus();
        }
      });
      return button;
    });
    sandbox.questions.replaceChildren(
      element("p", { class: "lab__buttons" }, element("b", {}, words.predict_title), ...buttons, said),
      place);
  };
})();
