// The page of a report: figures enlarge, long tables can be filtered, verdicts have colours.
"use strict";
(() => {
  const dialog = document.getElementById("zoom");
  for (const button of document.querySelectorAll("figure .zoom")) {
    button.addEventListener("click", () => {
      dialog.querySelector("div").replaceChildren(...Array.from(button.children, (image) => image.cloneNode(true)));
      dialog.showModal();
    });
  }
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  for (const box of document.querySelectorAll("[data-filter]")) {
    const input = document.createElement("input");
    input.type = "search";
    input.className = "filter";
    input.placeholder = "Filter rows";
    input.setAttribute("aria-label", "Filter the rows of the table below");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of box.querySelectorAll("tbody tr")) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    box.before(input);
  }
  const WORDS = ["reproduced", "better", "not reproduced", "not comparable", "not run"];
  for (const cell of document.querySelectorAll("td")) {
    const word = cell.textContent.trim();
    if (WORDS.includes(word)) cell.classList.add("word", "word-" + word.replace(" ", "-"));
  }
})();
