/* Applies the saved theme before the first paint, so that the page does not flash. A classic script, because modules load later. */
try {
  const chosen = localStorage.getItem("penstock.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be blocked; the system theme applies.
}
