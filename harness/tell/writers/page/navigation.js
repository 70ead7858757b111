"use strict";
// Links open what is folded around their target and keep the filter, which stands behind '?' in the address.
const section = () => decodeURIComponent(location.hash.slice(1).split("?")[0]);
const query = () => location.hash.split("?")[1] ?? "";

const reveal = (name) => {
  const target = document.getElementById(name);
  if (!target) return;
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  target.scrollIntoView();
};

document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  for (const menu of document.querySelectorAll(".menu[open]")) {
    if (link || !menu.contains(event.target)) menu.open = false;
  }
  if (!link) return;
  event.preventDefault();
  const name = link.hash.slice(1);
  const address = query() ? `#${name}?${query()}` : `#${name}`;
  if (address !== location.hash) history.pushState(null, "", address);
  reveal(decodeURIComponent(name));
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const menu of document.querySelectorAll(".menu[open]")) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});
addEventListener("hashchange", () => reveal(section()));
addEventListener("load", () => reveal(section()));

const parts = [...document.querySelectorAll("main details")];
const unfold = document.getElementById("unfold");
if (unfold) {
  unfold.hidden = false;
  unfold.addEventListener("click", () => {
    const opens = unfold.textContent === "Open all";
    for (const part of parts) part.open = opens;
    unfold.textContent = opens ? "Close all" : "Open all";
  });
}
// Paper cannot be opened.
let folded = [];
addEventListener("beforeprint", () => {
  folded = parts.filter((part) => !part.open);
  for (const part of folded) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of folded) part.open = false;
});
