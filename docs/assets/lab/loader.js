// All of the lab that a page loads before somebody opens it.
(() => {
  "use strict";

  const HERE = document.currentScript.src;
  const NEEDS = {
    sandbox: ["lab/lab.js", "lab/sandbox.js", "lab/predict.js"],
    ward: ["lab/lab.js", "lab/sandbox.js", "lab/ward.js"],
    questions: ["lab/lab.js", "lab/predict.js"],
    steppers: ["lab/steppers.js"],
    hero: ["lab/hero.js"],
    linked: ["lab/linked.js"],
  };
  const loading = new Map();

  function load(name) {
    if (!loading.has(name)) {
      loading.set(name, new Promise((resolve, reject) => {
        const made = document.createElement(name.endsWith(".css") ? "link" : "script");
        if (made.rel === undefined) made.src = new URL(`../${name}`, HERE).href;
        else Object.assign(made, { rel: "stylesheet", href: new URL(`../${name}`, HERE).href });
        made.onload = resolve;
        made.onerror = () => { loading.delete(name); reject(new Error(name)); };
        document.head.append(made);
      }));
    }
    return loading.get(name);
  }

  async function open(root) {
    root.dataset.started = "";
    const kind = root.dataset.lab;
    try {
      if (!["hero", "linked"].includes(kind)) await load("lab/lab.css"); // course.css has theirs
      for (const name of NEEDS[kind]) await load(name);
      await window.miniVllmLab.script?.("course.js");
      window.miniVllmLab.kinds[kind](root);
    } catch (error) {
      delete root.dataset.started;
      root.append(` ${error.message}`);
    }
  }

  function start() {
    for (const root of document.querySelectorAll("[data-lab]:not([data-started])")) {
      if (root.hasAttribute("data-open")) open(root);
      else root.querySelector("button")?.addEventListener("click", () => open(root), { once: true });
    }
  }

  window.miniVllmLab = { kinds: {}, load };
  if (window.document$) window.document$.subscribe(start);
  else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
