"use strict";
// Makes each drawn chart one that can be touched: values under the pointer, zoom, a log axis,
// smoothing, lines on and off. The still picture is shown until something else is asked for.

const SVG = "http://www.w3.org/2000/svg";

function add(parent, name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  element.textContent = text;
  return parent.appendChild(element);
}

function format(value) {
  const short = +value.toPrecision(5);
  const size = Math.abs(short);
  const isFar = size >= 1e6 || (size > 0 && size < 1e-4);
  return isFar ? short.toExponential() : String(short);
}

function makeTicks(low, high, isLog) {
  const ticks = [];
  if (isLog && Math.log10(high / low) >= 1) {
    const each = Math.ceil(Math.log10(high / low) / 6);
    for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power += each) {
      ticks.push(10 ** power);
    }
    return ticks;
  }
  const rough = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find(factor => factor * unit >= rough);
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) {
    ticks.push(+tick.toPrecision(12));
  }
  return ticks;
}

// An exponential moving average, without its bias to the start.
function smooth(values, share) {
  let sum = 0;
  let weight = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + 1 - share;
    return sum / weight;
  });
}

class Chart {
  constructor(svg, state) {
    const data = JSON.parse(svg.dataset.curves);
    this.svg = svg;
    this.state = state;
    this.lines = data.lines;
    this.all = data.x;
    [this.left, this.top, this.right, this.bottom] = data.box;
    this.still = [...svg.children];
    this.live = add(svg, "g", {});
    this.over = add(svg, "g", {});
    this.dragFrom = null;
    svg.style.touchAction = "pan-y";
    svg.addEventListener("pointerdown", event => { this.dragFrom = this.stepAt(event); });
    svg.addEventListener("pointermove", event => this.read(event));
    svg.addEventListener("pointerup", event => this.zoom(event));
    svg.addEventListener("pointerleave", () => this.leave());
    svg.addEventListener("dblclick", () => { state.zoom = null; state.redraw(); });
    this.draw();
  }

  toX(step) {
    return this.left + (step - this.low) / (this.high - this.low) * (this.right - this.left);
  }

  stepAt(event) {
    const point = new DOMPoint(event.clientX, event.clientY);
    const x = point.matrixTransform(this.svg.getScreenCTM().inverse()).x;
    const inside = Math.min(Math.max(x, this.left), this.right);
    return this.low + (inside - this.left) / (this.right - this.left) * (this.high - this.low);
  }

  draw() {
    const { isLog, smoothing, hidden, zoom } = this.state;
    const isStill = !zoom && !isLog && !smoothing && !hidden.size;
    [this.low, this.high] = zoom || this.all;
    this.shown = this.lines.filter(line => !hidden.has(line.label));
    if (!isStill && smoothing) {
      this.shown = this.shown.map(line => ({ ...line, y: smooth(line.y, smoothing) }));
    }
    for (const part of this.still) part.style.display = isStill ? "" : "none";
    this.live.replaceChildren();
    this.over.replaceChildren();
    if (!isStill) this.drawLive(isLog);
  }

  drawLive(isLog) {
    const isIn = (line, at) => {
      const value = line.y[at];
      const step = line.x[at];
      return value !== null && step >= this.low && step <= this.high && (!isLog || value > 0);
    };
    let low = Infinity;
    let high = -Infinity;
    for (const line of this.shown) {
      line.y.forEach((value, at) => {
        if (!isIn(line, at)) return;
        low = Math.min(low, value);
        high = Math.max(high, value);
      });
    }
    if (low > high) [low, high] = isLog ? [1, 10] : [0, 1];
    if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
    const scale = isLog ? Math.log10 : value => value;
    const span = scale(high) - scale(low);
    const toY = value => this.bottom - (scale(value) - scale(low)) / span * (this.bottom - this.top);
    const ink = { fill: "currentColor", "font-size": 10.5 };
    for (const value of makeTicks(low, high, isLog)) {
      const y = toY(value);
      add(this.live, "line", { x1: this.left, x2: this.right, y1: y, y2: y, stroke: "currentColor", opacity: 0.13 });
      add(this.live, "text", { ...ink, x: this.left - 5, y: y + 3.5, "text-anchor": "end" }, format(value));
    }
    for (const step of makeTicks(this.low, this.high, false)) {
      add(this.live, "text", { ...ink, x: this.toX(step), y: this.bottom + 15, "text-anchor": "middle" }, format(step));
    }
    for (const line of this.shown) {
      let path = "";
      let pen = "M";
      line.y.forEach((value, at) => {
        if (!isIn(line, at)) {
          pen = "M";
          return;
        }
        path += `${pen}${this.toX(line.x[at]).toFixed(1)} ${toY(value).toFixed(1)}`;
        pen = "L";
      });
      const stroke = `var(--series-${line.color})`;
      add(this.live, "path", { d: path, fill: "none", stroke, "stroke-width": 1.7 });
    }
  }

  read(event) {
    this.over.replaceChildren();
    const step = this.stepAt(event);
    const x = this.toX(step);
    if (this.dragFrom !== null && event.buttons) {
      const from = this.toX(this.dragFrom);
      add(this.over, "rect", {
        x: Math.min(from, x), y: this.top, width: Math.abs(x - from),
        height: this.bottom - this.top, fill: "currentColor", opacity: 0.12,
      });
    }
    add(this.over, "line", { x1: x, x2: x, y1: this.top, y2: this.bottom, stroke: "currentColor", opacity: 0.4 });
    const isLeft = x < (this.left + this.right) / 2;
    const place = isLeft ? { x: x + 6 } : { x: x - 6, "text-anchor": "end" };
    this.shown.forEach((line, row) => {
      if (!line.x.length) return;
      let nearest = 0;
      line.x.forEach((other, at) => {
        if (Math.abs(other - step) < Math.abs(line.x[nearest] - step)) nearest = at;
      });
      const value = line.y[nearest] === null ? "no number" : format(line.y[nearest]);
      const label = this.lines.length > 1 ? ` ${line.label.slice(0, 20)}` : "";
      add(this.over, "text", {
        ...place, y: this.top + 12 + 13 * row, fill: `var(--series-${line.color})`, "font-size": 11,
        "paint-order": "stroke", stroke: "var(--paper, Canvas)", "stroke-width": 3,
      }, `${format(Math.round(line.x[nearest]))}: ${value}${label}`);
    });
  }

  zoom(event) {
    const ends = [this.dragFrom ?? 0, this.stepAt(event)].sort((one, two) => one - two);
    const isDrag = this.dragFrom !== null && this.toX(ends[1]) - this.toX(ends[0]) > 5;
    this.dragFrom = null;
    if (!isDrag) return;
    this.state.zoom = ends;
    this.state.redraw();
  }

  leave() {
    this.dragFrom = null;
    this.over.replaceChildren();
  }
}

// The switches of one chart, beside it.
function addSwitches(figure, state, lines) {
  const bar = document.createElement("p");
  bar.className = "tools";
  const addInput = (type, text, attributes, change) => {
    const label = bar.appendChild(document.createElement("label"));
    const input = Object.assign(document.createElement("input"), { type, ...attributes });
    input.addEventListener("input", () => { change(input); state.redraw(); });
    label.append(input, ` ${text}`);
    return input;
  };
  addInput("checkbox", "log", {}, input => { state.isLog = input.checked; });
  addInput("range", "smooth", { min: 0, max: 0.99, step: 0.01, value: 0 }, input => { state.smoothing = +input.value; });
  for (const line of lines.length > 1 ? lines : []) {
    const input = addInput("checkbox", line.label, { checked: true }, box => {
      if (box.checked) state.hidden.delete(line.label);
      else state.hidden.add(line.label);
    });
    input.style.accentColor = `var(--series-${line.color})`;
  }
  figure.querySelector("figcaption").after(bar);
}

for (const figure of document.querySelectorAll("figure")) {
  const state = { isLog: false, smoothing: 0, hidden: new Set(), zoom: null };
  const charts = [...figure.querySelectorAll("svg[data-curves]")].map(svg => new Chart(svg, Object.assign(state, { redraw() {} })));
  state.redraw = () => charts.forEach(chart => chart.draw());
  addSwitches(figure, state, charts[0].lines);
}
