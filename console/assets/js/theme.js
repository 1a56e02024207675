// Sets the theme chosen last before anything is painted. This is a plain script, because modules run after the page is
// parsed.
(() => {
  try {
    const theme = localStorage.getItem("tokenbucket-theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch { /* storage may be forbidden: then the system's theme is used */ }
})();
