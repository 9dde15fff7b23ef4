// Adds a chooser above the table of symptoms: it shows the rows of a release, a ZeRO stage, a setting and a cure.
(() => {
  const table = document.querySelector("#symptoms");
  if (!table) return;
  const chooser = document.createElement("div");
  chooser.className = "chooser";
  chooser.innerHTML = `
    <label>DeepSpeed <input size="7" placeholder="0.18.4"></label>
    <label>ZeRO stage <select><option value="">any<option>0<option>1<option>2<option>3</select></label>
    <label>with <select><option value="">any</select></label>
    <label>help <select><option value="">any<option value="patch">a patch<option value="other">something else</select></label>
    <label>words <input size="20" placeholder="two backwards"></label>
    <output></output>`;
  table.before(chooser);
  const KNOWN = "0.16.0 to 0.19.8";
  const titles = [...table.querySelectorAll("th")].map((title) => title.textContent);
  const [STAGES, FIRST, RIGHT, CURE] = ["ZeRO", "wrong from", "right from", "cure"].map((title) => titles.indexOf(title));
  const rows = [...table.querySelectorAll("tbody tr")];
  const cell = (row, index) => row.cells[index].textContent.trim();
  const number = (release) => release.split(".").reduce((sum, part) => sum * 1000 + +part, 0);
  const [release, stage, setting, help, words, output] = chooser.querySelectorAll("input, select, output");

  const isWrong = (row, version) =>
    number(cell(row, FIRST)) <= version &&
    (cell(row, RIGHT) === "none" || version < number(cell(row, RIGHT)));
  const needs = (row) => [...row.cells[0].querySelectorAll("small")].flatMap((small) => small.textContent.split(", "));
  const isCured = (row) => row.cells[CURE].querySelector('a[href*="patches/"]') !== null;
  for (const name of [...new Set(rows.flatMap(needs))].sort()) setting.add(new Option(name));
  // Why a release cannot be answered; nothing if it can.
  const doubt = (text, version) => {
    if (!text) return "";
    if (!version) return "not a release, as 0.18.4 is";
    const [oldest, newest] = KNOWN.split(" to ").map(number);
    return version < oldest || version > newest ? `${text} is not known, only ${KNOWN}` : "";
  };
  const choose = () => {
    const text = release.value.trim();
    const match = text.match(/^v?(\d+\.\d+\.\d+)$/);
    const version = match && number(match[1]);
    const why = doubt(text, version);
    release.setCustomValidity(why);
    const parts = words.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const content = row.textContent.toLowerCase();
      row.hidden =
        why !== "" ||
        (version && !isWrong(row, version)) ||
        !cell(row, STAGES).includes(stage.value) ||
        (setting.value && !needs(row).includes(setting.value)) ||
        (help.value && isCured(row) !== (help.value === "patch")) ||
        !parts.every((part) => content.includes(part));
    }
    output.textContent = why || `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  chooser.addEventListener("input", choose);
  choose();
})();
