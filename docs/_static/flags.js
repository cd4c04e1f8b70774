// Where a browser may break a line within a word; no style sheet can name the words.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  // not within --flag, after its hyphens
  for (const word of document.querySelectorAll("article code .pre")) {
    if (word.textContent.startsWith("-")) word.classList.add("flag");
  }
  // a name or setting that is wider than its column: beside its punctuation rather than anywhere
  const places = { code: [24, /(?<=\w[,=(_/])(?=\w)|(?<=[a-z])(?=\.[a-z_])/], text: [30, /(?<=\w[,=])(?=\w)/] };
  const walker = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  const cells = [];
  while (walker.nextNode()) if (walker.currentNode.parentElement.closest("td")) cells.push(walker.currentNode);
  for (const cell of cells) {
    const [most, place] = places[cell.parentElement.closest("code") ? "code" : "text"];
    const long = (word) => word.length > most && !word.startsWith("-");
    const parts = cell.data.split(/(?<=\s)/).flatMap((word) => (long(word) ? word.split(place) : [word]).flatMap(
      (part, i) => (i ? [document.createElement("wbr"), part] : [part])));
    if (parts.some((part) => part instanceof Element)) cell.replaceWith(...parts);
  }
});
