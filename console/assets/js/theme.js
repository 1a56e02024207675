// Before anything is painted: the theme that was chosen last. A plain script, since modules wait for the page.
(() => {
  try {
    const theme = localStorage.getItem("tokenbucket-theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch { /* storage may be forbidden: the system's theme it is */ }
})();
