/* The search of the troubleshooting page. It needs no network: the entries and their texts are in the page. */
"use strict";
{
  const normalize = (text) => ` ${(text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? []).join(" ")}`;
  const entries = [...document.querySelectorAll("ul.symptoms > li")].map((item) => ({
    item,
    message: normalize(item.textContent),
    text: normalize(item.dataset.text),
    parts: item.textContent.split("…").map(normalize).filter(Boolean),
  }));

  /* A rare word counts more than a frequent one, in the message more than in the remedy. A whole message counts most. */
  function find(typed) {
    const words = [...new Set(normalize(typed).split(" "))].filter((word) => word.length > 1);
    const scores = new Map(entries.map((entry) => [entry, 0]));
    for (const word of words) {
      const found = entries.filter((entry) => `${entry.message}${entry.text}`.includes(` ${word}`));
      for (const entry of found) {
        const weight = entry.message.includes(` ${word}`) ? 3 : 1;
        scores.set(entry, scores.get(entry) + weight * Math.log(entries.length / found.length));
      }
    }
    const whole = normalize(typed);
    for (const entry of entries) {
      const isWhole = entry.message.length > 20 && entry.parts.every((part) => whole.includes(part));
      if (isWhole) scores.set(entry, scores.get(entry) + 100);
    }
    const best = Math.max(...scores.values());
    const good = [...scores].filter(([, score]) => score > 0 && score >= best / 2);
    return good.sort(([, a], [, b]) => b - a).slice(0, 8).map(([entry]) => entry.item.cloneNode(true));
  }

  const field = document.querySelector("#symptom-search input");
  const results = document.querySelector("#symptom-search ul");
  function show() {
    const typed = field.value.trim();
    results.replaceChildren(...(typed ? find(typed) : []));
    document.querySelector("#symptom-search p").hidden = !typed || results.childElementCount > 0;
  }
  field.addEventListener("input", show);
  field.value = new URLSearchParams(location.search).get("q") ?? "";
  show();
}
