// What is wrong with the look of a page: text that lies over other text, that is cut off where no
// scrolling shows it, or that is hard to read. Returns sentences.
() => {
  const found = new Set();
  const seen = [];
  const styles = new Map();
  const paper = [document.body, document.documentElement].map(backgroundOf).find(Boolean);

  function styleOf(element) {
    if (!styles.has(element)) {
      const { backgroundColor, color, fill, overflowX, position } = getComputedStyle(element);
      styles.set(element, { backgroundColor, color, fill, overflowX, position });
    }
    return styles.get(element);
  }

  function numbers(color) {
    const [red, green, blue, alpha = 1] = color.match(/[\d.]+/g).map(Number);
    const most = color.startsWith("color(") ? 1 : 255;
    return { rgb: [red / most, green / most, blue / most], alpha };
  }

  function backgroundOf(element) {
    const { rgb, alpha } = numbers(styleOf(element).backgroundColor);
    return alpha ? rgb : null;
  }

  // https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio
  function contrast(one, other) {
    const light = (rgb) => {
      const linear = rgb.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
      return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05;
    };
    return Math.max(light(one) / light(other), light(other) / light(one));
  }

  function look(node) {
    const text = node.textContent.trim();
    const owner = node.parentElement;
    if (!text || owner.closest("style, title, details:not([open]) > :not(summary)")) return;
    const ancestors = [];
    for (let up = owner; up !== document.body; up = up.parentElement) ancestors.push(up);
    const style = styleOf(owner);
    const ink = numbers(owner instanceof SVGElement ? style.fill : style.color).rgb;
    const behind = ancestors.map(backgroundOf).find(Boolean) ?? paper;
    const ratio = contrast(ink, behind);
    if (ratio < 4.5) found.add(`contrast ${ratio.toFixed(1)}: ${text}`);

    const range = document.createRange();
    range.selectNodeContents(node);
    for (const line of range.getClientRects()) {
      let { left, right, top, bottom } = line;
      let scrolls = false;
      for (const box of ancestors.filter((up) => styleOf(up).overflowX !== "visible")) {
        if (box instanceof SVGElement) continue;
        const edge = box.getBoundingClientRect();
        scrolls ||= styleOf(box).overflowX === "auto";
        const isCut = left < edge.left - 1 || right > edge.right + 1;
        if (isCut && !scrolls && !box.closest("[title]")) found.add(`cut off: ${text}`);
        [left, right] = [Math.max(left, edge.left), Math.min(right, edge.right)];
        [top, bottom] = [Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
      }
      if (!scrolls && (left < -1 || right > innerWidth + 1)) found.add(`outside: ${text}`);
      const isFixed = ancestors.some((up) => styleOf(up).position === "sticky");
      if (right - left > 1 && bottom - top > 2) seen.push({ node, left, right, top, bottom, isFixed });
    }
  }

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) look(walker.currentNode);
  seen.sort((one, other) => one.top - other.top);
  seen.forEach((one, place) => {
    for (const other of seen.slice(place + 1)) {
      if (other.top > one.bottom - 2) break;
      if (other.node === one.node || other.isFixed !== one.isFixed) continue;
      const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      if (across > 1 && down > 2)
        found.add(`over one another: ${one.node.textContent} and ${other.node.textContent}`);
    }
  });
  if (document.documentElement.scrollWidth > innerWidth) found.add("the page is wider than the window");
  return [...found];
}
