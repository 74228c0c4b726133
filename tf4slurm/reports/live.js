// Asks for the page's content again and again, as often as the server says, until the job has ended.
const note = document.querySelector(".live-note");
let failures = 0;
async function update() {
  let pause = 2;
  try {
    const answer = await fetch("content", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const said = await answer.json();
    failures = 0;
    pause = said.pause;
    if (said.body) document.getElementById("body").innerHTML = said.body;
    document.title = said.title;
    note.textContent = said.note;
    document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates || 0) + 1;
    if (said.ended) return;
  } catch (error) {
    failures += 1;
    note.textContent = "The page's server does not answer: this is what was known last.";
    if (failures > 30) return;
  }
  setTimeout(update, pause * 1000);
}
update();
