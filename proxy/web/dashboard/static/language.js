// Chromium reports the language "en-US@posix" under the locale C. Intl refuses that, and uPlot passes it on when it is loaded.
try {
  Intl.getCanonicalLocales(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en" });
}
