"use strict";
// Links open what is folded around their target.

const follow = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
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
  if (link.hash !== location.hash) history.pushState(null, "", link.hash);
  follow();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const menu of document.querySelectorAll(".menu[open]")) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});
addEventListener("hashchange", follow);
addEventListener("load", follow);

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
