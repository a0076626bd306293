// Code and picture together: a paragraph of a listing and its slices in a figure light each other.
//
// The figure says which lines are which part (tools/site/figures.py). Pointing, focus and buttons
// below the figure, for those who can do neither, all choose a part.
(() => {
  "use strict";

  /** The lines `first` to `last` of a listing as one element that can be pointed at. */
  function paragraph(anchor, last, part, title) {
    const prefix = anchor.id.replace(/\d+$/, "");
    const behind = document.getElementById(`${prefix}${last + 1}`);
    const range = document.createRange();
    range.setStartBefore(anchor);
    if (behind) range.setEndBefore(behind); else range.setEndAfter(anchor.closest("code").lastChild);
    const made = document.createElement("span");
    Object.assign(made, { className: "linked", tabIndex: 0 });
    made.dataset.part = part;
    made.setAttribute("role", "group");
    made.setAttribute("aria-label", title);
    made.append(range.extractContents());
    range.insertNode(made);
    return made;
  }

  function link(root) {
    const lines = JSON.parse(root.dataset.parts);
    const titles = JSON.parse(root.dataset.titles);
    const code = [...document.querySelectorAll(".highlight")].find((one) => (
      one.querySelector(".filename")?.textContent.startsWith(root.dataset.code)
      && one.querySelector(`[id$="-${lines[1][0]}"][id^="__codelineno"]`)));
    if (!code) return;
    const paragraphs = Object.entries(lines).map(([part, [first, last]]) => paragraph(
      code.querySelector(`[id$="-${first}"][id^="__codelineno"]`), last, part, titles[part]));
    const drawings = [...root.querySelectorAll("svg")]; // a wide one, and one for phones
    const slices = [...root.querySelectorAll("svg [data-part]")];
    let kept = ""; // chosen by a button, until it is pressed again
    const buttons = Object.entries(titles).map(([part, title]) => {
      const made = document.createElement("button");
      Object.assign(made, { type: "button", textContent: title });
      made.dataset.part = part;
      made.addEventListener("click", () => { kept = kept === part ? "" : part; light(); });
      return made;
    });
    const bar = document.createElement("p");
    bar.className = "linked__bar";
    bar.setAttribute("role", "group");
    bar.setAttribute("aria-label", root.dataset.label);
    bar.append(...buttons);
    root.querySelector("figcaption").before(bar);

    function light(pointed = "") {
      const part = pointed || kept;
      for (const one of drawings) one.classList.toggle("lights", Boolean(part));
      for (const one of [...slices, ...paragraphs]) one.classList.toggle("lit", one.dataset.part === part);
      for (const one of buttons) {
        one.classList.toggle("lit", one.dataset.part === part);
        one.setAttribute("aria-pressed", String(one.dataset.part === kept));
      }
      root.dataset.lit = part;
    }
    const at = (event) => event.target.closest?.("[data-part]")?.dataset.part;
    for (const one of [...slices, ...paragraphs, ...buttons]) {
      one.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") light(at(event)); });
      one.addEventListener("pointerleave", () => light());
      one.addEventListener("focus", (event) => light(at(event)));
      one.addEventListener("blur", () => light());
    }
    light();
    root.dataset.ready = "";
  }

  window.miniVllmLab.kinds.linked = link;
})();
