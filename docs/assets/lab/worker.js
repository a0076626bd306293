// What runs in the lab's worker: CPython (Pyodide), and in it the course's own Python files.
//
// The page hands everything over as text, since a worker of a page from the disk can read no file.
// This function is never called here: its source becomes the worker (see lab.js).
window.miniVllmWorker = () => {
  "use strict";

  let python = null;

  async function unpacked(packed) {
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  }

  const address = (buffer, type) => URL.createObjectURL(new Blob([buffer], { type }));

  /** Start Python from memory. Pyodide asks for its wasm with fetch(): that is answered here. */
  async function boot({ parts, files }) {
    const names = Object.keys(parts);
    const all = await Promise.all(names.map((name) => unpacked(parts[name])));
    const part = Object.fromEntries(names.map((name, i) => [name, all[i]]));
    const fetched = self.fetch;
    self.fetch = (url, ...rest) => (String(url.url ?? url).endsWith(".wasm")
      ? Promise.resolve(new Response(part.wasm, { headers: { "Content-Type": "application/wasm" } }))
      : fetched(url, ...rest));
    const { loadPyodide } = await import(address(part.loader, "text/javascript"));
    const module = await import(address(part.module, "text/javascript"));
    python = await loadPyodide({
      createPyodideModule: module.default,
      indexURL: "https://lab.invalid/",
      lockFileContents: new TextDecoder().decode(part.lock),
      packageBaseUrl: "https://lab.invalid/",
      stdLibURL: address(part.library, "application/zip"),
    });
    for (const [path, text] of Object.entries(files)) {
      const folder = `/course/${path}`.replace(/\/[^/]*$/, "");
      python.FS.mkdirTree(folder);
      python.FS.writeFile(`/course/${path}`, text);
    }
    python.runPython("import sys; sys.path.insert(0, '/course'); from tools.lab import page");
    return { python: python.runPython("sys.version.split()[0]") };
  }

  /** Call a function of tools/lab/page.py. Arguments and result cross as JSON. */
  function call({ name, args }) {
    python.globals.set("request", JSON.stringify([name, args]));
    return JSON.parse(python.runPython("page.answer(request)"));
  }

  self.onmessage = async ({ data }) => {
    try {
      const result = data.kind === "boot" ? await boot(data) : call(data);
      self.postMessage({ id: data.id, result });
    } catch (error) {
      self.postMessage({ id: data.id, error: String(error.message ?? error) });
    }
  };
};
