// What is wrong with the page as it is shown now: a list of sentences, empty if nothing is. `browser.py` evaluates it.
(() => {
  const complaints = [];
  const say = (what, where) => complaints.push(where ? `${what}: ${where}` : what);
  const name = (element) => (element.getAttribute("aria-label") || element.textContent).trim().slice(0, 60);
  const page = document.documentElement;
  const isPage = page.localName === "html";
  document.querySelectorAll("details").forEach((details) => { details.open = true; });

  // Nothing is wider than the window; what is wider than its place scrolls by itself.
  if (page.scrollWidth > innerWidth && isPage) say(`the page is ${page.scrollWidth} wide in a window of ${innerWidth}`);
  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  for (const element of document.querySelectorAll("body svg, table, h1, h2, p, li, dl, figure")) {
    const place = element.localName === "table" && element.closest(".scroll");
    if (place && !scrolls(place)) say("a table's place does not scroll", name(element));
    const box = (place || element).getBoundingClientRect();
    if (box.width === 0 || box.height === 0) say(`an empty ${element.localName}`, name(element));
    if (box.left < -1 || box.right > innerWidth + 1) say(`${element.localName} sticks out`, name(element));
  }

  // Words of a plot are inside of it and apart from each other.
  const pictures = [...document.querySelectorAll("svg")].filter((svg) => !svg.closest(".legend"));
  for (const svg of pictures) {
    const whole = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")];
    const boxes = texts.map((text) => text.getBoundingClientRect());
    const title = svg.querySelector("title").textContent;
    texts.forEach((text, n) => {
      const box = boxes[n];
      const out = box.left < whole.left - 1 || box.right > whole.right + 1 || box.bottom > whole.bottom + 1;
      if (out) say(`"${text.textContent}" sticks out of its plot`, title);
      const crosses = (other) => Math.min(box.right, other.right) - Math.max(box.left, other.left) > 1
        && Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 4;
      const over = texts.findIndex((other, m) => m > n && crosses(boxes[m]));
      if (over > 0) say(`"${text.textContent}" is over "${texts[over].textContent}"`, title);
    });
    if (svg.querySelectorAll(".mark:not(.paper)").length === 0) say("a plot without marks", title);
    if (!svg.querySelector("desc").textContent) say("a plot without a description", title);
  }
  for (const table of document.querySelectorAll("table")) {
    if (!table.caption || !table.querySelector("thead th[scope=col]")) say("a table without caption or headings", name(table));
    if (table.querySelectorAll("tbody th[scope=row]").length === 0) say("a table without rows", name(table));
  }

  // Words stand out from the paper by 4.5 to 1, marks by 3 to 1 (WCAG 2.2, 1.4.3 and 1.4.11).
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map(Number).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const rect = document.querySelector("rect.paper");
  const paper = light(rect ? getComputedStyle(rect).fill : getComputedStyle(document.body).backgroundColor);
  const stands = (selector, least, property) => document.querySelectorAll(selector).forEach((element) => {
    const found = contrast(light(getComputedStyle(element)[property]), paper);
    if (found < least) say(`contrast ${found.toFixed(1)} of ${selector}`, name(element));
  });
  stands("p, td, th, dt, dd, a, small, summary", 4.5, "color");
  stands("svg text", 4.5, "fill");
  stands("svg .mark:not(.paper)", 3, "fill");
  stands("svg .line, svg .roof", 3, "stroke");

  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) say("an id is given twice");
  document.querySelectorAll("[href^='#']").forEach((link) => {
    if (!document.getElementById(link.getAttribute("href").slice(1))) say("a link leads nowhere", name(link));
  });
  if (document.querySelector("script, img, iframe, object, parsererror")) say("something that a report never holds");
  return { complaints, dark: paper < 0.1, plots: pictures.length, tables: document.querySelectorAll("table").length };
})()
