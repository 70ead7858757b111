"use strict";
// Click on a heading sorts its table: numbers by value, n/a last, text by the reader's language.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.tHead.querySelectorAll("th").forEach((heading, column) => {
    heading.addEventListener("click", () => {
      const upwards = heading.getAttribute("aria-sort") !== "ascending";
      table.tHead.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", upwards ? "ascending" : "descending");
      const number = (row) => row.cells[column].dataset.value;
      const text = (row) => row.cells[column].textContent;
      const rows = [...body.rows];
      rows.sort((a, b) => {
        const [left, right] = [number(a), number(b)];
        if (left !== undefined && right !== undefined) return upwards ? left - right : right - left;
        if (left !== undefined || right !== undefined) return left === undefined ? 1 : -1;
        return (upwards ? 1 : -1) * text(a).localeCompare(text(b));
      });
      body.append(...rows);
    });
  });
}
