"use strict";
// Tells what is under the pointer or has the focus; hides families; keeps the front of what is shown.
(() => {
  const tip = document.getElementById("tip");
  const say = (event) => {
    const part = event.target.closest("[tabindex]");
    const title = part && part.querySelector("title");
    tip.textContent = title ? title.textContent : "";
  };
  for (const svg of document.querySelectorAll("svg")) {
    svg.addEventListener("mouseover", say);
    svg.addEventListener("focusin", say);
  }
  const boxes = [...document.querySelectorAll("input[data-filter]")];
  const points = [...document.querySelectorAll(".point")];
  const front = document.querySelector(".front");
  const draw = () => {
    const shown = new Set(boxes.filter((b) => b.checked).map((b) => b.dataset.filter));
    for (const p of points) p.style.display = shown.has(p.dataset.family) ? "" : "none";
    // Downwards on the screen is a smaller error.
    let best = -Infinity;
    const line = points
      .filter((p) => shown.has(p.dataset.family) && p.dataset.family !== "baseline")
      .map((p) => [Number(p.dataset.x), Number(p.dataset.y)])
      .sort((a, b) => a[0] - b[0])
      .filter(([, y]) => y > best && ((best = y), true));
    if (front) front.setAttribute("points", line.map((p) => p.join(",")).join(" "));
  };
  for (const b of boxes) b.addEventListener("change", draw);
})();
