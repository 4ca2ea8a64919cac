// Light or dark as Airflow is: within its frame its root element says so, alone the choice that it has stored.
(() => {
  const outer = (() => {
    try {
      return window.parent !== window ? window.parent.document : null;
    } catch {
      return null; // framed by another site's page: nothing to follow
    }
  })();
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    if (outer) return outer.documentElement.classList.contains("dark") ? "dark" : "light";
    const stored = window.localStorage.getItem("theme");
    if (stored === "dark" || stored === "light") return stored;
    return system.matches ? "dark" : "light";
  }

  function apply() {
    const root = document.documentElement;
    const theme = chosen();
    if (outer) {
      const ground = window.parent.getComputedStyle(outer.body).backgroundColor;
      if (!/rgba\(.*, 0\)|transparent/.test(ground)) root.style.setProperty("--ground", ground);
    }
    if (root.dataset.theme !== theme) {
      root.dataset.theme = theme;
      window.dispatchEvent(new Event("themechange"));
    }
  }

  apply();
  system.addEventListener("change", apply);
  window.addEventListener("storage", apply);
  if (outer) new MutationObserver(apply).observe(outer.documentElement, { attributeFilter: ["class", "style"] });
})();
