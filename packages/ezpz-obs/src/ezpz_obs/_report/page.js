"use strict";
// Over the drawn curves: values under the pointer, zoom, a log axis, smoothing, runs on and off.
// The still picture stays what is shown until something else is asked for.
(() => {
  const tool = { log: false, smooth: 0, off: new Set(), zoom: new Map() };
  const say = value => {
    const short = +value.toPrecision(5), size = Math.abs(short);
    return size >= 1e6 || (size && size < 1e-4) ? short.toExponential() : String(short);
  };
  const make = (parent, name, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    made.textContent = text;
    return parent.appendChild(made);
  };
  const ticks = (low, high, log) => {
    const found = [];
    if (log && Math.log10(high / low) >= 1) {
      const each = Math.ceil(Math.log10(high / low) / 6);
      for (let at = Math.ceil(Math.log10(low)); at <= Math.log10(high); at += each) found.push(10 ** at);
      return found;
    }
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find(each => each * power >= rough);
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(+at.toPrecision(12));
    return found;
  };
  const smoothed = values => { // an exponential moving average, without its bias to the start
    let sum = 0, weight = 0;
    return tool.smooth ? values.map(value => value === null ? null : (
      sum = tool.smooth * sum + (1 - tool.smooth) * value,
      weight = tool.smooth * weight + 1 - tool.smooth, sum / weight)) : values;
  };
  let plots = [];
  const draw = plot => {
    const { box: [left, top, right, bottom], live } = plot;
    const lines = plot.lines.filter(line => !tool.off.has(line.label));
    const zoom = tool.zoom.get(plot.name), asked = zoom || tool.log || tool.smooth || lines.length < plot.lines.length;
    for (const part of plot.still) part.style.display = asked ? "none" : "";
    live.replaceChildren();
    plot.over.replaceChildren();
    [plot.low, plot.high] = zoom || plot.x;
    plot.to = step => left + (step - plot.low) / (plot.high - plot.low) * (right - left);
    plot.shown = lines.map(line => ({ ...line, y: asked ? smoothed(line.y) : line.y }));
    if (!asked) return;
    const seen = plot.shown.flatMap(({ x, y }) => y.filter((value, at) =>
      value !== null && x[at] >= plot.low && x[at] <= plot.high && (!tool.log || value > 0)));
    let low = seen.reduce((a, b) => Math.min(a, b), Infinity);
    let high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low > high) [low, high] = [tool.log ? 1 : 0, 10];
    if (low === high) [low, high] = tool.log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 9, high + (Math.abs(high) || 1) / 9];
    const scale = tool.log ? Math.log10 : value => value;
    const up = value => bottom - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (bottom - top);
    const ink = { fill: "currentColor", "font-size": 10.5 };
    for (const value of ticks(low, high, tool.log)) {
      make(live, "line", { x1: left, x2: right, y1: up(value), y2: up(value), stroke: "currentColor", opacity: 0.13 });
      make(live, "text", { ...ink, x: left - 5, y: up(value) + 3.5, "text-anchor": "end" }, say(value));
    }
    for (const step of ticks(plot.low, plot.high, false))
      make(live, "text", { ...ink, x: plot.to(step), y: bottom + 15, "text-anchor": "middle" }, say(step));
    for (const { x, y, place } of plot.shown) {
      let path = "", pen = "M";
      y.forEach((value, at) => {
        const out = value === null || x[at] < plot.low || x[at] > plot.high || (tool.log && value <= 0);
        if (!out) path += `${pen}${plot.to(x[at]).toFixed(1)} ${up(value).toFixed(1)}`;
        pen = out ? "M" : "L";
      });
      make(live, "path", { d: path, fill: "none", stroke: `var(--series-${place})`, "stroke-width": 1.7 });
    }
  };
  const step = (plot, event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.svg.getScreenCTM().inverse()).x;
    const [left, , right] = plot.box;
    return plot.low + (Math.min(Math.max(at, left), right) - left) / (right - left) * (plot.high - plot.low);
  };
  const listen = plot => {
    const { svg, over, box: [left, top, right, bottom] } = plot;
    let from = null;
    svg.style.touchAction = "pan-y";
    svg.addEventListener("pointerdown", event => { from = step(plot, event); });
    svg.addEventListener("pointermove", event => {
      over.replaceChildren();
      const here = step(plot, event), x = plot.to(here);
      if (from !== null && event.buttons) {
        const [a, b] = [plot.to(from), x].sort((one, two) => one - two);
        make(over, "rect", { x: a, y: top, width: b - a, height: bottom - top, fill: "currentColor", opacity: 0.12 });
      }
      make(over, "line", { x1: x, x2: x, y1: top, y2: bottom, stroke: "currentColor", opacity: 0.4 });
      plot.shown.forEach((line, row) => {
        const at = line.x.reduce((best, each, place) =>
          Math.abs(each - here) < Math.abs(line.x[best] - here) ? place : best, 0);
        if (!line.x.length) return;
        const value = line.y[at] === null ? "no number" : say(line.y[at]);
        const side = x < (left + right) / 2 ? { x: x + 6 } : { x: x - 6, "text-anchor": "end" };
        make(over, "text", { ...side, y: top + 12 + 13 * row, fill: `var(--series-${line.place})`, "font-size": 11,
          "paint-order": "stroke", stroke: "var(--paper, Canvas)", "stroke-width": 3 },
          `${say(Math.round(line.x[at]))}: ${value}${plot.lines.length > 1 ? ` ${line.label.slice(0, 20)}` : ""}`);
      });
    });
    svg.addEventListener("pointerup", event => {
      const to = step(plot, event), [low, high] = [from ?? to, to].sort((a, b) => a - b);
      if (plot.to(high) - plot.to(low) > 5) { tool.zoom.set(plot.name, [low, high]); draw(plot); }
      from = null;
    });
    svg.addEventListener("pointerleave", () => { from = null; over.replaceChildren(); });
    svg.addEventListener("dblclick", () => { tool.zoom.delete(plot.name); draw(plot); });
    draw(plot);
  };
  const start = () => {
    plots = [...document.querySelectorAll("svg[data-curves]")].map(svg => {
      const still = [...svg.children], told = JSON.parse(svg.dataset.curves);
      const name = svg.getAttribute("aria-label");
      return { svg, still, ...told, name, live: make(svg, "g", {}), over: make(svg, "g", {}) };
    });
    plots.forEach(listen);
    if (!plots.length) return;
    const bar = document.createElement("p");
    bar.className = "tools small";
    const add = (type, text, change, more = {}) => {
      const label = bar.appendChild(document.createElement("label"));
      const input = Object.assign(document.createElement("input"), { type, ...more });
      input.addEventListener("input", () => { change(input); plots.forEach(draw); });
      label.append(input, ` ${text}`);
      return input;
    };
    add("checkbox", "log axis", input => { tool.log = input.checked; }, { checked: tool.log });
    add("range", "smoothing", input => { tool.smooth = +input.value; }, { min: 0, max: 0.99, step: 0.01, value: tool.smooth });
    const several = plots.filter(plot => plot.lines.length > 1);
    for (const [label, place] of new Map(several.flatMap(({ lines }) => lines.map(line => [line.label, line.place]))))
      add("checkbox", label, input => { tool.off[input.checked ? "delete" : "add"](label); }, { checked: !tool.off.has(label) })
        .style.accentColor = `var(--series-${place})`;
    bar.append(" Drag to zoom, double-click for all.");
    plots[0].svg.closest("section").querySelector("h2").after(bar);
  };
  start();
})();
