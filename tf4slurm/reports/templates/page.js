// Shows above a chart the values of its lines at the sample nearest to the pointer.
document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest ? event.target.closest("svg.chart") : null;
  for (const other of document.querySelectorAll(".cursor")) other.remove();
  for (const reading of document.querySelectorAll(".reading")) reading.textContent = "";
  if (!chart) return;
  const data = JSON.parse(chart.dataset.chart), frame = chart.getBoundingClientRect();
  const x = ((event.clientX - frame.left) / frame.width) * chart.viewBox.baseVal.width;
  const at = ((x - data.left) / (data.right - data.left)) * data.end;
  let nearest = 0;
  data.x.forEach((value, number) => {
    if (Math.abs(value - at) < Math.abs(data.x[nearest] - at)) nearest = number;
  });
  const words = data.lines.filter((line) => line[1][nearest] !== null).slice(0, 4);
  chart.parentElement.querySelector(".reading").textContent =
    "at " + data.x[nearest] + " s: " + words.map((line) => line[0] + " " + line[1][nearest]).join(", ");
  const cursor = document.createElementNS(chart.namespaceURI, "path");
  const where = data.left + (data.x[nearest] / data.end) * (data.right - data.left);
  cursor.setAttribute("class", "cursor axis");
  cursor.setAttribute("d", "M" + where + " 10V166");
  chart.append(cursor);
});
