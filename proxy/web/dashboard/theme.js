/* Before the first paint, so that the page never flashes in the other theme. A plain script: it must not wait for the modules. */
try {
  const chosen = localStorage.getItem("penstock.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden; the system's theme is a good one too.
}
