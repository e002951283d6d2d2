"use strict";
(() => {
  // Tables sort by any column: numbers by data-value, words by their text; cells without a number stay last.
  const words = new Intl.Collator("en", { numeric: true });

  function sort(table, at, down) {
    const body = table.tBodies[0];
    const value = (row) => row.cells[at].dataset.value;
    const rows = [...body.rows];
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === undefined && y === undefined) {
        const order = words.compare(a.cells[at].textContent, b.cells[at].textContent);
        return down ? -order : order;
      }
      if (x === undefined || y === undefined) return x === undefined ? 1 : -1;
      return down ? y - x : x - y;
    });
    body.append(...rows);
    [...table.tHead.rows[0].cells].forEach((cell, i) => {
      if (i === at) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  document.querySelectorAll("table[data-sortable]").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((cell, at) => {
      cell.querySelector("button").addEventListener("click", () => {
        const now = cell.getAttribute("aria-sort");
        const first = cell.dataset.first === "descending";
        sort(table, at, now === null ? first : now === "ascending");
      });
    });
  });
})();
