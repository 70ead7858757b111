// Sliders, table and charts; every figure comes from `evaluate`.

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const hidden = new Set();
const scales = { size: data.sizes, micro: data.micro_batches, sequence: data.sequences };
const start = { size: data.start.size, micro: data.start.micro_batch, sequence: data.start.sequence };

for (const [name, values] of Object.entries(scales)) {
  const slider = element(name);
  slider.max = values.length - 1;
  slider.value = values.indexOf(start[name]);
  slider.addEventListener("input", show);
}

const gigabytes = (count) => (count === undefined ? "n/a" : (count / 1e9).toFixed(count < 1e10 ? 2 : 1));
const figure = (value, digits = 3) => (value === undefined || value === null ? "n/a"
  : value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits))));

function cells(found) {
  const speed = [
    figure(found.computing), figure(found.communication), figure(found.exposed), figure(found.step),
    found.tokens === undefined ? "n/a" : Math.round(found.tokens).toLocaleString("en"),
    found.utilization === undefined || found.utilization === null ? "n/a" : (100 * found.utilization).toFixed(1),
    figure(found.hours), figure(found.energy),
  ];
  return [
    gigabytes(found.peak), found.moment || "n/a", gigabytes(found.needed),
    found.left === undefined ? "n/a" : gigabytes(found.left), found.verdict || "n/a",
    gigabytes(found.sent), gigabytes(found.between), ...speed,
  ];
}

function tableRow(found, index) {
  const row = document.createElement("tr");
  const name = document.createElement("td"), label = document.createElement("label");
  const box = document.createElement("input"), key = document.createElement("span");
  box.type = "checkbox";
  box.checked = !hidden.has(found.label);
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(found.label); else hidden.add(found.label);
    show();
  });
  key.className = "key";
  key.style.background = COLOURS[index % COLOURS.length];
  label.append(box, key, ` ${found.label}`);
  name.append(label);
  row.append(name);
  if (found.unsupported) {
    const cell = document.createElement("td");
    cell.colSpan = 15;
    cell.textContent = `unsupported: ${found.unsupported}`;
    row.append(cell);
    return row;
  }
  for (const text of cells(found)) {
    const cell = document.createElement("td");
    cell.className = "number";
    cell.textContent = text;
    row.append(cell);
  }
  row.className = (found.verdict || "").replaceAll(" ", "-");
  return row;
}

function show() {
  const [n, b, s] = ["size", "micro", "sequence"].map((name) => scales[name][Number(element(name).value)]);
  element("size-value").textContent = n.toLocaleString("en");
  element("micro-value").textContent = String(b);
  element("sequence-value").textContent = s.toLocaleString("en");
  const found = Object.keys(data.rows).map((label) => evaluate(data, label, n, b, s));
  element("rows").replaceChildren(...found.map(tableRow));
  element("charts").innerHTML = charts(data, evaluate, b, s, n, hidden).join("");
  const fitting = found.filter((row) => row.verdict === "fits" || row.verdict === "tight");
  const best = fitting.reduce((a, row) => (!a || (row.tokens || 0) > (a.tokens || 0) ? row : a), null);
  element("answer").textContent = !data.device ? "No GPU was named, so nothing is judged to fit."
    : !best ? `Nothing fits on ${n} ranks.`
      : `${fitting.map((row) => row.label).join(", ")} fit` + (best.tokens
        ? `; fastest: ${best.label}, ${Math.round(best.tokens).toLocaleString("en")} tokens/s per GPU.` : ".");
}

show();
