// Fetches the content of the page, at the interval that the server sends, until the job has ended.
const note = document.querySelector(".live-note");
let failures = 0;
async function update() {
  let seconds = 2;
  try {
    const response = await fetch("content", { cache: "no-store" });
    if (!response.ok) throw new Error(response.status);
    const content = await response.json();
    failures = 0;
    seconds = content.update_seconds;
    document.getElementById("body").innerHTML = content.body;
    drawCharts();
    document.title = content.title;
    note.textContent = content.note;
    document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates || 0) + 1;
    if (content.ended) return;
  } catch (error) {
    failures += 1;
    note.textContent = "The server of this page does not answer. The page shows the last known state.";
    if (failures > 30) return;
  }
  setTimeout(update, seconds * 1000);
}
update();
