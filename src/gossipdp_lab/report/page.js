"use strict";
// What the pointer shows: of line charts the value of each line nearest to it, of the timeline what
// the worker under it did. Everything else has titles of its own.
const tip = document.getElementById("tip");

function place(event, rows) {
  tip.replaceChildren();
  for (const [words, colour] of rows) {
    const row = document.createElement("div");
    if (colour) {
      const dot = document.createElement("span");
      dot.textContent = "● ";
      dot.style.color = colour;
      row.append(dot);
    }
    row.append(words);
    tip.append(row);
  }
  tip.hidden = rows.length === 0;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const y = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - x) < Math.abs(points[high][0] - x) ? low : high;
}

function linesAt(data, x) {
  const rows = [];
  data.lines.forEach((points, index) => {
    if (points.length) rows.push([points[nearest(points, x)], index]);
  });
  if (!rows.length) return [[], x];
  rows.sort((one, other) => Math.abs(one[0][0] - x) - Math.abs(other[0][0] - x));
  const at = rows[0][0];
  const near = rows.filter(([point]) => Math.abs(point[0] - x) < 25);
  near.sort((one, other) => one[0][1] - other[0][1]);
  const shown = near.slice(0, 12).map(([point, index]) =>
    [`${data.labels[index]}: ${point[3]}`, data.colours[index]]);
  return [[[`at ${at[2]}`], ...shown], at[0]];
}

function rowAt(data, x, y) {
  const row = data.rows.find((one) => y >= one.top && y < one.top + one.height);
  const span = row && row.spans.find((one) => x >= one[0] && x <= one[1]);
  return [span ? [[`worker ${row.worker}, at ${span[2]}`], [span[3]]] : [], x];
}

for (const chart of document.querySelectorAll(".chart")) {
  const source = chart.querySelector('script[type="application/json"]');
  if (!source) continue;
  const data = JSON.parse(source.textContent);
  const svg = chart.querySelector("svg");
  const cursor = chart.querySelector(".cursor");
  svg.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const [rows, x] = data.rows ? rowAt(data, at.x, at.y) : linesAt(data, at.x);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    place(event, rows);
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
  });
}
