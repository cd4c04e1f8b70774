// A browser may break a line within --flag, after its hyphens; no style sheet can name the words that begin with them.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const word of document.querySelectorAll("article code .pre")) {
    if (word.textContent.startsWith("-")) word.classList.add("flag");
  }
});
