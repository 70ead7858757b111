// A heading sorts the rows of each group by value or meaning, unknown values last; the heading of a column that
// makes the groups sorts these. The third click gives the original order back.
const sortedNext = { ascending: "descending", descending: null };

const before = (left, right, upwards) => {
  const unknown = (cell) => "unknown" in cell.dataset;
  if (unknown(left) || unknown(right)) return unknown(left) - unknown(right);
  const [a, b] = [left.dataset.value, right.dataset.value];
  if ((a === undefined) !== (b === undefined)) return a === undefined ? 1 : -1;
  const order = a === undefined ? left.textContent.localeCompare(right.textContent, "en", { numeric: true }) : a - b;
  return upwards ? order : -order;
};

for (const table of document.querySelectorAll("main table")) {
  const bodies = [...table.tBodies];
  const rows = bodies.map((body) => [...body.rows]);
  const headings = [...table.tHead.rows[0].cells];
  const sort = (column, order) => {
    const byColumn = (a, b) => before(a.cells[column], b.cells[column], order === "ascending");
    const groups = order && "group" in headings[column].dataset
      ? bodies.toSorted((a, b) => byColumn(a.rows[0], b.rows[0])) : bodies;
    table.append(...groups);
    bodies.forEach((body, number) => body.append(...(order ? rows[number].toSorted(byColumn) : rows[number])));
  };
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const now = heading.getAttribute("aria-sort");
      const next = now ? sortedNext[now] : "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      if (next) heading.setAttribute("aria-sort", next);
      sort(column, next);
    });
  });
}
