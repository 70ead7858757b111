// As much of a browser's document as the page's script needs; prints what a reader would see.
const nodes = {};
function node() {
  return {
    style: {}, children: [], listeners: {},
    append(...more) { this.children.push(...more); },
    replaceChildren(...all) { this.children = all; },
    addEventListener(name, call) { this.listeners[name] = call; },
  };
}
globalThis.document = {
  getElementById: (id) => (nodes[id] ??= node()),
  createElement: node,
};
const text = (one) => (typeof one === "string" ? one : (one.textContent ?? "") + one.children.map(text).join(""));
function seen() {
  const value = (id) => nodes[`${id}-value`].textContent;
  return {
    at: ["size", "micro", "sequence"].map(value),
    answer: nodes.answer.textContent,
    rows: nodes.rows.children.map((row) => row.children.map(text)),
    charts: nodes.charts.innerHTML.split("<svg").length - 1,
    lines: nodes.charts.innerHTML.split("<polyline").length - 1,
  };
}
const [page] = process.argv.slice(2);
const html = require("fs").readFileSync(page, "utf8");
nodes.data = node();
nodes.data.textContent = html.match(/<script id="data"[^>]*>([^]*?)<\/script>/)[1];
const script = html.match(/<\/script>\s*<script>([^]*?)<\/script>/)[1];
require("vm").runInThisContext(script);
const first = seen();
nodes.size.value = 0;
nodes.size.listeners.input();
const box = nodes.rows.children[0].children[0].children[0].children[0];
const second = seen();
box.checked = false;
box.listeners.change();
console.log(JSON.stringify([first, second, seen()]));
