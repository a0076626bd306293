// The hero: sets the home page's still in motion, in real time and again and again.
//
// The page has the still, the texts and the times (tools/site/hero.py). Whoever prefers reduced
// motion sees the still and a button.
(() => {
  "use strict";

  class Hero {
    constructor(root) {
      const { sides, first, last, still, hold, long } = JSON.parse(root.dataset.replay);
      Object.assign(this, { root, first, last, hold, long, time: still, playing: null });
      this.words = JSON.parse(root.dataset.words);
      this.sides = [...root.querySelectorAll(".hero__side")].map((side, s) => ({
        ...sides[s],
        bar: side.querySelector(".hero__bar i"),
        lines: [...side.querySelectorAll(".hero__line")].map((line) => ({
          line, text: line.querySelector(".hero__text span"), wait: line.querySelector(".hero__wait") })),
      }));
      this.button = document.createElement("button");
      this.button.type = "button";
      this.button.addEventListener("click", () => (this.playing ? this.pause() : this.play()));
      root.querySelector("figcaption").append(" ", this.button);
      this.#label();
      root.dataset.ready = "";
      if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
      // Begins when it is seen, and rests while it is not.
      let wanted = true;
      this.button.addEventListener("click", () => { wanted = Boolean(this.playing); });
      new IntersectionObserver(([seen]) => {
        if (!seen.isIntersecting) this.pause();
        else if (wanted) this.play();
      }, { threshold: 0.4 }).observe(root);
      this.show(first);
    }

    play() {
      if (this.playing) return;
      if (this.time >= this.last + this.hold || this.root.dataset.played === undefined) this.time = this.first;
      this.root.dataset.played = "";
      let before = performance.now();
      const tick = (now) => {
        let time = this.time + (now - before) / 1000;
        before = now;
        if (time >= this.last + this.hold) time = this.first;
        this.playing = requestAnimationFrame(tick);
        this.show(time);
      };
      this.playing = requestAnimationFrame(tick);
      this.#label();
    }

    pause() {
      if (!this.playing) return;
      cancelAnimationFrame(this.playing);
      this.playing = null;
      this.#label();
    }

    #label() { this.button.textContent = this.words[this.playing ? "pause" : "play"]; }

    /** Everything as it was at a time, in seconds from the document's arrival. */
    show(moment) {
      this.time = moment;
      const time = Math.min(moment, this.last);
      this.root.dataset.time = time.toFixed(3);
      for (const { doc, tokens, computed, lines, bar } of this.sides) {
        lines.forEach(({ line, text, wait }, r) => {
          const there = tokens[r].filter(([at]) => at <= time);
          const next = tokens[r][there.length];
          const said = there.map(([, piece]) => piece).join("").replace(/\s+/g, " ").trim();
          const shown = said || (r === doc && time >= 0 ? this.words.computing : "");
          if (text.textContent !== shown) text.textContent = shown;
          const since = r !== doc && there.length && next ? time - there.at(-1)[0] : 0;
          line.classList.toggle("waits", since > this.long);
          wait.textContent = since > this.long ? `${since.toFixed(1)} s` : "";
        });
        // The prompt: what a step computes is there at its end, and the bar grows while it runs.
        let [from, done] = [0, 0];
        let share = computed.at(-1)[1];
        for (const [at, part] of computed) {
          if (time < at) {
            share = done + (part - done) * Math.max(0, (time - from) / (at - from));
            break;
          }
          [from, done] = [at, part];
        }
        bar.style.width = `${100 * share}%`;
      }
    }
  }

  window.miniVllmLab.kinds.hero = (root) => { root.hero = new Hero(root); };
})();
