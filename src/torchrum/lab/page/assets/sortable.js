// Tables of numbers sort by the column whose head is clicked, or focused and entered; numbers as numbers, blanks last.
// A row whose first cell is bold sums up the others and stays below them.
"use strict";
(() => {
  // "99.93% (99.88% to 99.96%)" sorts by its first number; "1,024" is 1024; words sort as words.
  function key(cell) {
    const text = cell ? (cell.dataset.sort ?? cell.textContent).trim() : "";
    const found = text.replace(/,(?=\d{3})/g, "").match(/^[^\d+-]{0,2}([-+−]?\d+(\.\d+)?(e[-+]?\d+)?)/i);
    return { text, number: found ? Number(found[1].replace("−", "-")) : NaN };
  }

  function compare(x, y) {
    if (!x.text || !y.text) return x.text ? -1 : y.text ? 1 : 0;
    if (!Number.isNaN(x.number) && !Number.isNaN(y.number)) return x.number - y.number;
    return x.text.localeCompare(y.text);
  }

  function sort(table, column, head) {
    const down = head.getAttribute("aria-sort") === "ascending";
    const body = table.tBodies[0];
    const rows = Array.from(body.rows).filter((row) => !sumsUp(row)).map((row) => ({ row, key: key(row.cells[column]) }));
    rows.sort((x, y) => (down && x.key.text && y.key.text ? -1 : 1) * compare(x.key, y.key));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows.map((entry) => entry.row), ...Array.from(body.rows).filter(sumsUp));
  }

  function sumsUp(row) {
    const strong = row.cells[0].querySelector("strong");
    return strong !== null && strong.textContent.trim() === row.cells[0].textContent.trim();
  }

  // words need no order other than the writer's
  function hasNumbers(rows) {
    const count = (column) => rows.filter((row) => !Number.isNaN(key(row.cells[column]).number)).length;
    return Array.from(rows[0].cells).some((_, column) => 2 * count(column) > rows.length);
  }

  function begin() {
    for (const table of document.querySelectorAll("table")) {
      const heads = table.tHead && table.tHead.rows[0] ? Array.from(table.tHead.rows[0].cells) : [];
      if (!table.tBodies[0] || table.tBodies[0].rows.length < 3 || !hasNumbers(Array.from(table.tBodies[0].rows))) continue;
      heads.forEach((head, column) => {
        head.tabIndex = 0;
        head.classList.add("sortable");
        head.title = "Sort by this column";
        head.addEventListener("click", () => sort(table, column, head));
        head.addEventListener("keydown", (event) => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(table, column, head); }
        });
      });
    }
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
