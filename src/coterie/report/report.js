"use strict";
(() => {
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";

  function tell(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y - box.height - 14 < 4 ? y + 18 : y - box.height - 14}px`;
  }

  function short(y) {
    return y !== 0 && Math.abs(y) < 0.1 ? y.toPrecision(3) : y.toFixed(2);
  }

  function interval(halves, i) {  // of several seeds
    return halves && halves[i] !== null ? ` ± ${short(halves[i])}` : "";
  }

  function hush() {
    tip.hidden = true;
    document.querySelectorAll(".cross").forEach((line) => line.remove());
  }

  function made(name, attributes, text = "") {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  }

  function place(svg, x, y) {  // of the chart -> of the window
    return new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
  }

  function inside(svg, event) {  // of the window -> of the chart
    return new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  }

  // Line charts: all values at the nearest x, by pointer or arrow keys.
  function readable(svg) {
    const chart = JSON.parse(svg.dataset.lines);
    const [[low, high, left, right], [, , bottom, top]] = chart.axes;
    const at = (x) => left + ((x - low) / (high - low)) * (right - left);
    let index = chart.x.length - 1;

    function show(i) {
      index = Math.max(0, Math.min(chart.x.length - 1, i));
      hush();
      const x = at(chart.x[index]);
      svg.append(made("line", { x1: x, x2: x, y1: top, y2: bottom, class: "cross" }));
      const values = chart.series
        .filter(([, ys]) => ys[index] !== null)
        .map(([name, ys, halves]) => `${name}: ${short(ys[index])}${interval(halves, index)}`);
      const point = place(svg, x, top + 30);
      tell([`${chart.x_name} ${+chart.x[index].toFixed(2)}`, ...values].join("\n"), point.x, point.y);
    }

    svg.tabIndex = 0;
    svg.addEventListener("pointermove", (event) => {
      const x = inside(svg, event).x;
      const far = chart.x.map((value) => Math.abs(at(value) - x));
      show(far.indexOf(Math.min(...far)));
    });
    svg.addEventListener("pointerleave", hush);
    svg.addEventListener("blur", hush);
    svg.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: chart.x.length - 1 }[event.key];
      if (event.key === "Escape") hush();
      if (to === undefined) return;
      event.preventDefault();
      show(to);
    });
  }

  // Charts of marks with tips: one after the other, by arrow keys.
  function steppable(svg) {
    const marks = [...svg.querySelectorAll("[data-tip]")];
    let index = -1;
    svg.tabIndex = 0;
    svg.addEventListener("blur", hush);
    svg.addEventListener("keydown", (event) => {
      const last = marks.length - 1;
      const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") hush();
      if (to === undefined) return;
      event.preventDefault();
      index = Math.max(0, Math.min(last, to));
      const box = marks[index].getBoundingClientRect();
      tell(marks[index].dataset.tip, box.x, box.y);
    });
  }

  // Confusion matrices: of the method and the client that are chosen.
  function confused(box) {
    const { classes, methods } = JSON.parse(box.dataset.confusion);
    const [method, client] = ["select.method", "select.client"].map((name) => box.querySelector(name));
    const [body, caption] = ["tbody", "caption span"].map((name) => box.querySelector(name));

    function fill(select, names) {
      const chosen = Math.max(0, names.indexOf(select.value));
      select.replaceChildren(...names.map((name) => new Option(name, name)));
      select.selectedIndex = chosen;
    }

    function show() {
      const { name, clients } = methods[method.selectedIndex];
      const [who, cells] = clients[client.selectedIndex];
      const counts = classes.map(() => classes.map(() => 0));
      for (let i = 0; i < cells.length; i += 3) counts[cells[i]][cells[i + 1]] = cells[i + 2];
      counts.forEach((row, i) => {
        const all = row.reduce((sum, n) => sum + n, 0);
        row.forEach((n, j) => {
          const cell = body.rows[i].cells[j + 1];
          cell.textContent = n;
          cell.className = n ? `h${Math.min(4, Math.floor((5 * n) / all))}` : "";
        });
      });
      const whose = client.selectedIndex ? `client ${who}` : who;
      caption.textContent = `${name}, ${whose}: samples by class and prediction`;
    }

    function list() {
      fill(client, methods[method.selectedIndex].clients.map(([name]) => name));
      show();
    }

    fill(method, methods.map(({ name }) => name));
    method.addEventListener("change", list);
    client.addEventListener("change", show);
    box.querySelector(".choices").hidden = false;
    list();
  }

  // Downloads: tables as CSV, charts as SVG, made in the page.
  function save(content, kind, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function fileName(text, ending) {
    const words = text.toLowerCase().normalize("NFKD").replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "");
    return `${words.slice(0, 80) || "coterie"}.${ending}`;
  }

  function quoted(text) {  // a spreadsheet would run text that begins like a formula
    const safe = /^[=+\-@\t\r]/.test(text) && !/^[+-]?[\d.]+(e[+-]?\d+)?$/i.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  function csv(table) {
    const rows = [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    const both = /^(-?[\d.]+(?:e-?\d+)?) ± ([\d.]+(?:e-?\d+)?)$/;
    const split = rows[0].map((_, i) => rows.slice(1).some((row) => both.test(row[i])));
    const parts = (text, i, head) => {  // a mean and its interval are two columns
      if (!split[i]) return [text];
      return head ? [text, `${text} ±`] : (both.exec(text)?.slice(1) ?? [text, ""]);
    };
    return rows.map((row, at) => row.flatMap((text, i) => parts(text, i, at === 0)).map(quoted).join(",")).join("\r\n") + "\r\n";
  }

  const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity",
    "font-family", "font-size", "font-weight", "text-anchor"];

  function standalone(svg) {  // with the style of a light page in its attributes
    hush();
    const copy = svg.cloneNode(true);
    document.documentElement.classList.add("light");
    const [from, to] = [svg, copy].map((root) => [...root.querySelectorAll("*")]);
    from.forEach((element, i) => {
      const style = getComputedStyle(element);
      const kinds = element.tagName === "text" ? DRAWN : DRAWN.slice(0, 7);
      if (["title", "desc"].includes(element.tagName)) return;
      if (element.tagName !== "g") kinds.forEach((kind) => to[i].setAttribute(kind, style.getPropertyValue(kind)));
      ["class", "data-tip", "data-slanted"].forEach((name) => to[i].removeAttribute(name));
    });
    document.documentElement.classList.remove("light");
    const [, , wide, high] = svg.getAttribute("viewBox").split(" ").map(Number);
    const ground = made("rect", { width: wide, height: high, fill: "#ffffff" });
    copy.prepend(made("title", {}, svg.getAttribute("aria-label")), ground);
    [...copy.attributes].filter(({ name }) => name !== "viewBox").forEach(({ name }) => copy.removeAttribute(name));
    copy.setAttribute("xmlns", SVG);
    copy.setAttribute("width", wide);
    copy.setAttribute("height", high);
    return new XMLSerializer().serializeToString(copy);
  }

  function button(text, label, act) {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "save";
    made.textContent = text;
    made.setAttribute("aria-label", label);
    made.title = label;
    made.addEventListener("click", act);
    return made;
  }

  function downloadable(root) {
    root.querySelectorAll(".wide > table").forEach((table) => {
      const frame = document.createElement("div");
      const label = `Download as CSV: ${table.caption.textContent}`;
      const act = () => {  // the table may have been replaced
        const shown = frame.querySelector("table");
        save(csv(shown), "text/csv;charset=utf-8", fileName(shown.caption.textContent, "csv"));
      };
      frame.className = "tabled";
      table.parentElement.before(frame);
      frame.append(button("CSV", label, act), table.parentElement);
    });
    root.querySelectorAll("svg.chart").forEach((svg) => {
      const name = svg.getAttribute("aria-label");
      const act = () => save(standalone(svg), "image/svg+xml", fileName(svg.getAttribute("aria-label"), "svg"));
      svg.before(button("SVG", `Download as SVG: ${name}`, act));
    });
  }

  // Heat maps: one byte per cell, the square root of its share.
  function heat(figure) {
    const rounds = JSON.parse(figure.dataset.heat);
    const [slider, output, svg] = ["input", "output", "svg.heat"].map((name) => figure.querySelector(name));
    const [cells, labels] = ["g.cells", "g.labels"].map((name) => svg.querySelector(name));
    const ground = svg.querySelector(".ground");
    const [left, top, size] = ["x", "y", "width"].map((name) => +ground.getAttribute(name));
    const numbers = figure.querySelector(".numbers");
    const details = figure.querySelector("details");
    let clients = [];
    let bytes = [];

    const percent = (byte) => (100 * (byte / 255) ** 2).toFixed(1);

    function paths() {
      const count = clients.length;
      const drawn = Array(10).fill("");
      const levels = bytes.map((byte) => (byte ? (byte * 10) >> 8 : -1));  // -1: nothing
      for (let i = 0; i < count; i++) {
        const row = levels.slice(i * count, (i + 1) * count);
        for (let j = 0, start = 0; j < count; j++) {
          if (row[j + 1] === row[j]) continue;
          const long = j + 1 - start;
          if (row[j] >= 0) drawn[row[j]] += `M${start} ${i}h${long}v1h-${long}z`;
          start = j + 1;
        }
      }
      return drawn;
    }

    function label() {
      const cell = size / clients.length;
      const slanted = "slanted" in labels.dataset;
      const every = slanted ? Math.ceil(15 / cell) : clients.length > 12 ? Math.ceil(34 / cell) : 1;
      const short = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);
      const round = (value) => +value.toFixed(2);
      const above = (at) =>
        slanted
          ? { x: round(left + at), y: round(top - 6), "text-anchor": "start",
              transform: `rotate(-45 ${round(left + at)} ${round(top - 6)})` }
          : { x: round(left + at), y: round(top - 6), "text-anchor": "middle" };
      const named = clients.map((client, i) => [client, (i + 0.5) * cell]).filter((_, i) => i % every === 0);
      labels.replaceChildren(
        ...named.map(([name, at]) => made("text", above(at), short(name))),
        ...named.map(([name, at]) =>
          made("text", { x: round(left - 6), y: round(top + at + 4.5), "text-anchor": "end" }, short(name))),
      );
    }

    function tabulate() {
      if (!details.open) return;
      const table = document.createElement("table");
      table.createCaption().textContent = svg.getAttribute("aria-label");
      const head = table.createTHead().insertRow();
      const header = (row, text, scope) => {
        const cell = document.createElement("th");
        cell.scope = scope;
        cell.textContent = text;
        row.append(cell);
      };
      header(head, "client", "col");
      clients.forEach((client) => header(head, client, "col"));
      const body = table.createTBody();
      clients.forEach((client, i) => {
        const row = body.insertRow();
        header(row, client, "row");
        clients.forEach((_, j) => (row.insertCell().textContent = percent(bytes[i * clients.length + j])));
      });
      numbers.replaceChildren(table);
      if (!numbers.parentElement.classList.contains("tabled")) downloadable(details);
    }

    function show() {
      const chosen = rounds[+slider.value];
      clients = chosen.clients;
      bytes = Array.from(atob(chosen.cells), (letter) => letter.charCodeAt(0));
      output.textContent = chosen.round;
      slider.setAttribute("aria-valuetext", `round ${chosen.round}`);
      svg.setAttribute("aria-label", svg.getAttribute("aria-label").replace(/\d+$/, chosen.round));
      const scale = Math.round((1e5 * size) / clients.length) / 1e5;
      cells.setAttribute("transform", `translate(${left} ${top}) scale(${scale})`);
      paths().forEach((d, level) => cells.children[level].setAttribute("d", d));
      label();
      tabulate();
    }

    slider.addEventListener("input", show);
    details.addEventListener("toggle", tabulate);
    svg.addEventListener("pointerleave", hush);
    svg.addEventListener("pointermove", (event) => {
      const point = inside(svg, event);
      const [i, j] = [point.y - top, point.x - left].map((v) => Math.floor((v / size) * clients.length));
      if (Math.min(i, j) < 0 || Math.max(i, j) >= clients.length) return hush();
      const share = percent(bytes[i * clients.length + j]);
      tell(`${share} % of the head of client ${clients[i]}\nis from client ${clients[j]}`, event.clientX, event.clientY);
    });
    show();
  }

  function start(root) {
    root.querySelectorAll("svg[role=img]").forEach((svg) => {
      const title = svg.querySelector("title");  // browsers would show a second tooltip
      svg.setAttribute("aria-label", title.textContent);
      title.remove();
    });
    root.querySelectorAll("svg[data-lines]").forEach(readable);
    root.querySelectorAll("figure[data-heat]").forEach(heat);
    root.querySelectorAll("[data-confusion]").forEach(confused);
    root.querySelectorAll("svg.chart:not([data-lines]):has([data-tip])").forEach(steppable);
    downloadable(root);
  }

  document.addEventListener("pointerover", (event) => {
    const target = event.target.closest("[data-tip]");
    if (target) tell(target.dataset.tip, event.clientX, event.clientY);
  });
  document.addEventListener("pointerout", (event) => {
    if (event.target.closest("[data-tip]")) hush();
  });
  document.addEventListener("scroll", hush, { passive: true });

  // A live page requests updates until the run has ended.
  async function follow(main) {
    for (let version = ""; !main.querySelector("[data-ended]"); ) {
      await new Promise((resolve) => setTimeout(resolve, 1000));
      try {
        const answer = await fetch("news", { cache: "no-store", headers: { "If-None-Match": version } });
        if (answer.status !== 200) continue;
        version = answer.headers.get("ETag");
        const open = [...main.querySelectorAll("details")].map((details) => details.open);
        main.innerHTML = await answer.text();
        main.querySelectorAll("details").forEach((details, i) => (details.open = open[i] ?? false));
        hush();
        start(main);
      } catch {
        document.getElementById("status").textContent = "The run has ended, and this page is no longer served.";
        return;
      }
    }
  }

  start(document);
  const live = document.querySelector("main[data-live]");
  if (live) follow(live);
})();
