// Shows those rows of the table of symptoms that are of a release, a ZeRO stage, a setting, cured or told, and have some
// words.
(() => {
  const titles = [...document.querySelectorAll(".symptoms th")].map((one) => one.textContent);
  const [STAGES, FIRST, RIGHT, CURE] = ["ZeRO", "wrong from", "right from", "cure"].map((one) => titles.indexOf(one));
  const rows = [...document.querySelectorAll(".symptoms tbody tr")];
  const cell = (row, at) => row.cells[at].textContent.trim();
  const number = (release) => release.split(".").reduce((sum, part) => sum * 1000 + +part, 0);
  const chooser = document.querySelector(".chooser");
  const [release, stage, setting, help, words, shown] = chooser.querySelectorAll("input, select, output");

  const isWrong = (row, at) =>
    number(cell(row, FIRST)) <= at &&
    (cell(row, RIGHT) === "none" || at < number(cell(row, RIGHT)));
  const needs = (row) => [...row.cells[0].querySelectorAll("small")].flatMap((one) => one.textContent.split(", "));
  const isCured = (row) => row.cells[CURE].querySelector('a[href*="patches/"]') !== null;
  for (const name of [...new Set(rows.flatMap(needs))].sort()) setting.add(new Option(name));
  const choose = () => {
    const asked = release.value.match(/^\s*v?(\d+\.\d+\.\d+)/);
    const at = asked && number(asked[1]);
    release.setCustomValidity(asked || !release.value.trim() ? "" : "not a release, as 0.18.4 is");
    const parts = words.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden =
        (at && !isWrong(row, at)) ||
        !cell(row, STAGES).includes(stage.value) ||
        (setting.value && !needs(row).includes(setting.value)) ||
        (help.value && isCured(row) !== (help.value === "cured")) ||
        !parts.every((part) => text.includes(part));
    }
    shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  chooser.addEventListener("input", choose);
  chooser.hidden = false;
  choose();
})();
