// Shows those rows of the table of symptoms that are of a release, of a ZeRO stage, and have some words.
(() => {
  const titles = [...document.querySelectorAll(".symptoms th")].map((one) => one.textContent);
  const [STAGES, FIRST, RIGHT] = ["ZeRO", "wrong from", "right from"].map((one) => titles.indexOf(one));
  const rows = [...document.querySelectorAll(".symptoms tbody tr")];
  const cell = (row, at) => row.cells[at].textContent.trim();
  const number = (release) => release.split(".").reduce((sum, part) => sum * 1000 + +part, 0);
  const chooser = document.querySelector(".chooser");
  const [release, stage, words, shown] = chooser.querySelectorAll("input, select, output");

  const isWrong = (row, at) =>
    number(cell(row, FIRST)) <= at &&
    (cell(row, RIGHT) === "none" || at < number(cell(row, RIGHT)));
  const choose = () => {
    const asked = release.value.trim();
    const at = /^\d+\.\d+\.\d+$/.test(asked) && number(asked);
    const parts = words.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden =
        (at && !isWrong(row, at)) ||
        !cell(row, STAGES).includes(stage.value) ||
        !parts.every((part) => text.includes(part));
    }
    shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} symptoms`;
  };
  chooser.addEventListener("input", choose);
  chooser.hidden = false;
  choose();
})();
