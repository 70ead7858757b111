// Which cells are shown is chosen in the form, kept in the address, and obeyed by rows.
const form = document.getElementById("choices");
if (form) {
  const cells = JSON.parse(document.getElementById("cells").textContent);
  const names = [...new Set([...form.elements].map((element) => element.name).filter(Boolean))];
  const boxes = (name) => [...form.querySelectorAll(`input[name="${name}"]`)];
  const menu = document.getElementById("filter");
  const reset = document.querySelector('button[form="choices"]');
  const note = document.getElementById("filtered");

  const chosen = () => {
    const partly = names.filter((name) => boxes(name).some((box) => !box.checked));
    return new Map(partly.map((name) => [name, boxes(name).filter((box) => box.checked).map((box) => box.value)]));
  };

  const hideRows = (isShown) => {
    for (const table of document.querySelectorAll("main table")) {
      const rows = [...table.querySelectorAll("tr[data-cells]")];
      for (const row of rows) row.classList.toggle("hidden", !row.dataset.cells.split(" ").some((n) => isShown[n]));
      const hidden = rows.filter((row) => row.classList.contains("hidden")).length;
      const box = table.parentElement;
      let line = box.nextElementSibling;
      if (!line?.classList.contains("left-out")) {
        if (!hidden) continue;
        box.insertAdjacentHTML("afterend", '<p class="left-out"></p>');
        line = box.nextElementSibling;
      }
      line.hidden = !hidden;
      line.textContent = hidden ? `The filter hides ${hidden} of ${table.querySelectorAll("tbody tr").length} rows.` : "";
    }
  };

  const apply = () => {
    const wanted = chosen();
    const isWanted = (of) => [...wanted].every(([name, values]) => values.includes(String(of[name])));
    const isShown = cells.map(isWanted);
    const count = `${isShown.filter(Boolean).length} of ${cells.length} cells shown`;
    menu.querySelector("output").textContent = count;
    reset.hidden = note.hidden = wanted.size === 0;
    const words = [...wanted].map(([name, values]) => `${name} ${values.join(", ") || "none"}`);
    note.textContent = `Filter: ${words.join("; ")}: ${count}. Sentences and pictures cover all cells. `;
    // The short report may leave rows out; this table has all.
    if (document.getElementById("results")) note.insertAdjacentHTML("beforeend", '<a href="#results">All results</a>');
    hideRows(isShown);
  };

  const keep = () => {
    const found = new URLSearchParams();
    for (const [name, values] of chosen()) for (const value of values.length ? values : [""]) found.append(name, value);
    const address = `#${encodeURIComponent(section())}${String(found) && `?${found}`}`;
    history.replaceState(null, "", address);
  };

  const read = () => {
    const given = new URLSearchParams(query());
    for (const name of names) {
      const values = given.getAll(name);
      for (const box of boxes(name)) box.checked = !given.has(name) || values.includes(box.value);
    }
    apply();
  };

  form.addEventListener("change", () => { keep(); apply(); });
  form.addEventListener("click", (event) => {
    const what = event.target.dataset.choose;
    if (!what) return;
    for (const box of event.target.closest("fieldset").querySelectorAll("input")) box.checked = what === "all";
    keep();
    apply();
  });
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    for (const box of form.querySelectorAll("input")) box.checked = true;
    keep();
    apply();
  });
  addEventListener("hashchange", read);
  addEventListener("popstate", read);
  menu.hidden = false;
  read();
}
