"use strict";
// The theme: the system's, until the reader chooses one. Storage may be refused, as for some local files.
const root = document.documentElement, button = document.getElementById("theme"), tip = document.getElementById("tip");
const dark = matchMedia("(prefers-color-scheme: dark)");
const stored = () => { try { return localStorage.getItem("onchip-theme"); } catch { return null; } };
const store = theme => { try { localStorage.setItem("onchip-theme", theme); } catch { /* it lasts until the page closes */ } };
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
const show = theme => {
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  button.textContent = isDark() ? "Light" : "Dark";
};
button.hidden = false;
button.addEventListener("click", () => { const theme = isDark() ? "light" : "dark"; show(theme); store(theme); });
dark.addEventListener("change", () => show());
show(stored());

// A mark's title, at once and on touch, where browsers show none. Removed while it is shown, to not appear twice.
let marked = null, title = "";
const hide = () => {
  if (marked) marked.insertAdjacentElement("afterbegin", Object.assign(
    document.createElementNS("http://www.w3.org/2000/svg", "title"), { textContent: title }));
  marked = null;
  tip.hidden = true;
};
const reveal = (mark, x, y) => {
  hide();
  const own = mark.querySelector(":scope > title");
  title = own.textContent;
  own.remove();
  marked = mark;
  tip.textContent = title;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x - box.width / 2, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y - box.height - 14 > 8 ? y - box.height - 14 : y + 20}px`;
};
const markOf = target => {
  for (let at = target; at instanceof SVGElement; at = at.parentElement)
    if (at === marked || at.querySelector(":scope > title")) return at;
  return null;
};
for (const kind of ["pointerover", "pointerdown"])
  document.addEventListener(kind, event => {
    const mark = event.target instanceof Element ? markOf(event.target) : null;
    if (!mark) hide(); else if (mark !== marked) reveal(mark, event.clientX, event.clientY);
  });
document.addEventListener("focusin", event => {
  const mark = markOf(event.target);
  if (!mark) return hide();
  const box = mark.getBoundingClientRect();
  if (event.target.matches(":focus-visible")) reveal(mark, box.left + box.width / 2, box.top);
});
document.addEventListener("keydown", event => { if (event.key === "Escape") hide(); });
document.addEventListener("scroll", hide, { passive: true });

// A link to the details of a group opens them.
const open = () => {
  const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  const details = target && target.closest("details");
  if (details) { details.open = true; target.scrollIntoView({ block: "center" }); target.focus({ preventScroll: true }); }
};
addEventListener("hashchange", open);
open();
