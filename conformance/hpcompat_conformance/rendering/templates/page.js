"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const filters = ["text", "group", "level", "state", "implementation"].map((name) => $(`filter-${name}`));
  const rows = [...document.querySelectorAll("tr.clause")];

  const open = (button, show) => {
    button.setAttribute("aria-expanded", String(show));
    $(button.getAttribute("aria-controls")).hidden = !show;
  };

  const closeRow = (row) => row.querySelectorAll('button[aria-expanded="true"]').forEach((button) => open(button, false));

  const apply = () => {
    const [text, group, level, state, implementation] = filters.map((filter) => filter.value.trim());
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    document.querySelectorAll("[data-implementation]").forEach((cell) => {
      cell.hidden = implementation !== "" && cell.dataset.implementation !== implementation;
    });
    let shown = 0;
    for (const row of rows) {
      const states = [...row.querySelectorAll("td.result:not([hidden])")].map((cell) => cell.dataset.state);
      const said = `${row.id} ${row.querySelector(".sentence").textContent}`.toLowerCase();
      const fits = (!group || row.parentElement.dataset.group === group)
        && (!level || row.dataset.level === level)
        && (!state || states.includes(state))
        && words.every((word) => said.includes(word));
      row.hidden = !fits;
      shown += fits ? 1 : 0;
      if (!fits || implementation) closeRow(row);
    }
    for (const body of document.querySelectorAll("#clauses > tbody")) {
      body.hidden = !body.querySelector("tr.clause:not([hidden])");
    }
    $("nothing").hidden = shown > 0;
    $("shown").textContent = `${shown} of ${rows.length} clauses`;
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[aria-controls]");
    if (!button) return;
    const show = button.getAttribute("aria-expanded") !== "true";
    closeRow(button.closest("tr"));
    open(button, show);
  });
  document.addEventListener("keydown", (event) => {
    const detail = event.key === "Escape" && event.target.closest("tr.detail, td.result");
    const id = detail && (detail.matches("tr.detail") ? detail.id : detail.querySelector("button")?.getAttribute("aria-controls"));
    const button = id && document.querySelector(`button[aria-controls="${id}"]`);
    if (button) { open(button, false); button.focus(); }
  });
  const form = document.querySelector("form.filters");
  // Not every way to choose from a list makes an input event, and not every way to type ends with a change.
  for (const kind of ["input", "change"]) form.addEventListener(kind, apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  const reset = () => {
    filters.forEach((filter) => { filter.value = ""; });
    apply();
  };
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    reset();
  });
  // A link to a clause leads to it whatever is filtered.
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (link && !$(link.hash.slice(1)).checkVisibility()) reset();
  });
  apply();
})();
