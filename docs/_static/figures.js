// The page's theme button chooses the figures too; a browser looks at the system's colours alone.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const media = { light: "not all", dark: "all" };
  const sources = document.querySelectorAll('picture source[media*="prefers-color-scheme"]');
  const auto = "(prefers-color-scheme: dark)";
  const choose = () => { for (const source of sources) source.media = media[document.body.dataset.theme] ?? auto; };
  new MutationObserver(choose).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
  choose();
});
