// uPlot hands "en-US@posix", the language of the locale C, to Intl.
try {
  Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en" });
}
