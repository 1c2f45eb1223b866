// Sets the chosen colour scheme before anything is drawn. Classic script: a module would run after the first paint.
(() => {
  try {
    const theme = localStorage.getItem("canopy.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // a browser that keeps nothing: the system's scheme holds
  }
})();
