"use strict";
// One setting's figures at a time; all of them in print and where scripts are off.
const pick = document.querySelector("#setting");
const panels = [...document.querySelectorAll("[data-setting]")];
function show() {
  for (const panel of panels) panel.style.display = panel.dataset.setting === pick.value ? "" : "none";
}
if (pick) {
  pick.addEventListener("change", show);
  show();
}
