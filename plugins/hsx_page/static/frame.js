// Links out of the page. Airflow shows the page in a sandboxed frame that may not navigate what is around it; a link
// of the outer document may. Alone in a tab, links are plain links.

const outer = (() => {
  try {
    return window.parent !== window && window.parent.document ? window.parent : null;
  } catch {
    return null;
  }
})();

export function airflow(path) {
  return new URL(`../${path}`, document.baseURI).href;
}

export function follow(event) {
  const link = event.currentTarget;
  if (!outer) return;
  event.preventDefault();
  const twin = outer.document.createElement("a");
  twin.href = link.href;
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button === 1) twin.target = "_blank";
  outer.document.body.append(twin);
  twin.click();
  twin.remove();
}
