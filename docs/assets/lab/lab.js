// The lab's engine room: starts the worker when somebody opens a lab, and passes questions to it.
//
// `miniVllmLab.call(name, ...args)` calls a function of tools/lab/page.py. One worker serves the
// page. A call that takes too long ends it (an edited loop may never end); the next one starts anew.
(() => {
  "use strict";

  const HERE = document.currentScript.src;
  const PATIENCE = 20000; // ms for a call
  let parts = null;
  let course = null;
  let starting = null;
  let worker = null;
  let number = 0;
  const waiting = new Map();

  window.miniVllmPyodide = (content) => { parts = content; };
  window.miniVllmCourse = (content) => { course = content; };

  const loading = new Map();

  /** Load a script once. Not fetch(): that fails on pages opened from the disk. */
  function script(name) {
    if (!loading.has(name)) {
      loading.set(name, new Promise((resolve, reject) => {
        const made = document.createElement("script");
        made.src = new URL(name, HERE).href;
        made.onload = resolve;
        made.onerror = () => { loading.delete(name); reject(new Error(`${name} cannot be loaded`)); };
        document.head.append(made);
      }));
    }
    return loading.get(name);
  }

  function send(message) {
    return new Promise((resolve, reject) => {
      number += 1;
      waiting.set(number, { resolve, reject });
      worker.postMessage({ ...message, id: number });
    });
  }

  function stop(error) {
    worker?.terminate();
    worker = null;
    starting = null;
    for (const one of waiting.values()) one.reject(error);
    waiting.clear();
  }

  /** Start Python, once. Rejects with a sentence for the reader where that is impossible. */
  function boot() {
    starting ??= (async () => {
      await script("course.js");
      const { words } = course;
      if (typeof WebAssembly !== "object" || typeof DecompressionStream !== "function") {
        throw new Error(words.no_wasm);
      }
      const began = performance.now();
      await Promise.all([script("worker.js"), script("pyodide.js")]);
      if (!parts) throw new Error(words.no_pyodide);
      // A module, as Pyodide wants it; by a data URL, since a page from the disk may start no other.
      const source = encodeURIComponent(`(${window.miniVllmWorker})();`);
      const Native = window.miniVllmNativeWorker ?? Worker;
      worker = new Native(`data:text/javascript;charset=utf-8,${source}`, { type: "module" });
      worker.onmessage = ({ data }) => {
        const one = waiting.get(data.id);
        waiting.delete(data.id);
        if (data.error) one?.reject(new Error(data.error));
        else one?.resolve(data.result);
      };
      worker.onerror = (event) => stop(new Error(event.message || words.no_worker));
      const said = await send({ kind: "boot", parts, files: course.files });
      window.miniVllmLab.bootSeconds = (performance.now() - began) / 1000;
      return said;
    })();
    starting.catch(() => { starting = null; });
    return starting;
  }

  async function call(name, ...args) {
    await boot();
    let timer = null;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => {
        const error = new Error(course.words.too_long);
        reject(error);
        stop(error);
      }, PATIENCE);
    });
    try {
      return await Promise.race([send({ kind: "call", name, args }), late]);
    } finally {
      clearTimeout(timer);
    }
  }

  Object.assign(window.miniVllmLab, { boot, call, script, course: () => course,
    base: new URL("../../", HERE).href });
})();
