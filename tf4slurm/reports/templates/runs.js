// Sorts the table of the runs, and names the run at the pointer or of the arrow keys.
{
  const rows = [...document.querySelectorAll(".runs tbody tr")];
  const areas = [...document.querySelectorAll(".area")];
  const REACH = 30; // distance in pixels at which a run is no longer at the pointer
  const words = new Intl.Collator("en", { numeric: true });

  function compare(first, second, isNumber, sign) {
    if (first === undefined || second === undefined) return (first === undefined) - (second === undefined); // last
    return sign * (isNumber ? Number(first) - Number(second) : words.compare(first, second));
  }

  // Sorts by a column, upwards first. Rows with equal values keep the order of the page.
  function sortBy(heading) {
    const column = heading.cellIndex, isNumber = heading.classList.contains("number");
    const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const each of heading.parentElement.cells) each.setAttribute("aria-sort", each === heading ? order : "none");
    const value = (row) => row.cells[column].dataset.value;
    const sign = order === "ascending" ? 1 : -1;
    document.querySelector(".runs tbody").append(...[...rows].sort((a, b) => compare(value(a), value(b), isNumber, sign)));
  }

  for (const heading of document.querySelectorAll(".runs th")) {
    heading.querySelector("button").addEventListener("click", () => sortBy(heading));
  }

  // Emphasizes a run, a number as text, in the table, the legend and all plots. Null for none.
  function pick(run) {
    for (const each of document.querySelectorAll(".on")) each.classList.remove("on");
    for (const area of areas) {
      const path = run === null ? null : area.querySelector(`path[data-run="${run}"]`);
      area.classList.toggle("picking", path !== null);
      area.parentElement.querySelector(".named").textContent = path ? path.querySelector("title").textContent : "";
    }
    if (run !== null) for (const each of document.querySelectorAll(`[data-run="${run}"]`)) each.classList.add("on");
  }

  const pointsOf = new Map(); // by path: its coordinates, from 0 to 1000

  function readPoints(path) {
    if (!pointsOf.has(path)) pointsOf.set(path, path.getAttribute("d").slice(1).replace("h0", "").split("L").map((each) => each.split(" ").map(Number)));
    return pointsOf.get(path);
  }

  // Returns the distance of a point to the segment between two others.
  function distance(x, y, ax, ay, bx, by) {
    const dx = bx - ax, dy = by - ay;
    const share = dx || dy ? Math.max(0, Math.min(1, ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy))) : 0;
    return Math.hypot(x - ax - share * dx, y - ay - share * dy);
  }

  function nearestRun(area, event) {
    const svg = area.querySelector("svg"), { left, top, width, height } = svg.getBoundingClientRect();
    const x = event.clientX - left, y = event.clientY - top;
    let nearest = null, least = REACH;
    for (const path of svg.children) {
      let before = null;
      for (const [px, py] of readPoints(path)) {
        const point = [(px * width) / 1000, (py * height) / 1000];
        const found = distance(x, y, ...(before || point), ...point);
        if (found < least) [nearest, least] = [path.dataset.run, found];
        before = point;
      }
    }
    return nearest;
  }

  for (const area of areas) {
    const runs = [...area.querySelectorAll("path")].map((path) => path.dataset.run);
    let position = -1;
    const point = (event) => pick(nearestRun(area, event));
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("pointerleave", () => pick(null));
    area.addEventListener("blur", () => pick(null));
    area.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") pick(null);
      if (!step) return;
      event.preventDefault();
      position = position < 0 && step < 0 ? runs.length - 1 : (position + step + runs.length) % runs.length;
      pick(runs[position]);
    });
  }

  for (const each of [...rows, ...document.querySelectorAll(".lines-legend [data-run]")]) {
    each.addEventListener("mouseenter", () => pick(each.dataset.run));
    each.addEventListener("mouseleave", () => pick(null));
    each.addEventListener("focusin", () => pick(each.dataset.run));
    each.addEventListener("focusout", () => pick(null));
  }
}
