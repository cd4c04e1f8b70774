// The rotation playground: drag a, b and h and see R(a, b) turn h, in two and in three dimensions.
// Every <div class="rum-playground"> of a page becomes one.
"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
  const add = (x, y, factor = 1) => x.map((value, i) => value + factor * y[i]);
  const scale = (x, factor) => x.map((value) => value * factor);
  const norm = (x) => Math.sqrt(dot(x, x));
  const unit = (x) => (norm(x) < 1e-9 ? x.map(() => 0) : scale(x, 1 / norm(x)));
  const reflect = (x, h) => add(h, x, -2 * dot(x, h)); // H_x h = h - 2 (x.h) x

  // The same policy as torchrum.rotate: a zero vector rotates nothing, opposite vectors give a half turn.
  function rotation(a, b, h) {
    const e = unit(a), w = unit(b);
    if (norm(e) === 0 || norm(w) === 0) return { e, w, m: e, g: h, out: h, theta: 0 };
    const s = add(e, w);
    let m = unit(s);
    if (norm(s) < 1e-4) {
      const smallest = e.reduce((best, value, i) => (Math.abs(value) < Math.abs(e[best]) ? i : best), 0);
      m = unit(add(e.map((_, i) => (i === smallest ? 1 : 0)), e, -e[smallest]));
    }
    const g = reflect(e, h);
    const theta = 2 * Math.atan2(norm(add(e, w, -1)), norm(s));
    return { e, w, m, g, out: reflect(m, g), theta };
  }

  const START = {
    2: { a: [1.1, 0.2], b: [0.35, 1.0], h: [0.3, -1.0] },
    3: { a: [1.0, 0.1, 0.25], b: [0.15, 1.0, 0.3], h: [0.7, -0.35, 0.85] },
  };
  const COLOURS = { a: "a", b: "b", h: "h", out: "out" };

  class Playground {
    constructor(root) {
      this.root = root;
      this.dimensions = 2;
      this.yaw = -0.6;
      this.pitch = 0.5;
      root.innerHTML = `
        <div class="rp-bar" role="group" aria-label="Playground controls">
          <button type="button" data-dim="2" aria-pressed="true">2-D</button>
          <button type="button" data-dim="3" aria-pressed="false">3-D</button>
          <button type="button" data-reset>Reset</button>
          <label><input type="checkbox" data-steps checked> show the two reflections</label>
        </div>
        <div class="rp-body">
          <svg viewBox="-1.7 -1.7 3.4 3.4" role="group"
               aria-label="Vectors a, b and h, and the rotated vector R(a, b) h. Move a handle with the arrow keys."></svg>
          <div class="rp-terms" aria-live="polite"></div>
        </div>
        <p class="rp-help">Drag the tips of <b class="rp-a">a</b>, <b class="rp-b">b</b> and <b class="rp-h">h</b>, or
        focus one with Tab and use the arrow keys<span data-only3> (Page Up and Page Down move it towards you and away;
        drag the background to turn the view)</span>.</p>`;
      this.svg = root.querySelector("svg");
      this.terms = root.querySelector(".rp-terms");
      for (const button of root.querySelectorAll("[data-dim]")) {
        button.addEventListener("click", () => this.start(Number(button.dataset.dim)));
      }
      root.querySelector("[data-reset]").addEventListener("click", () => this.start(this.dimensions));
      root.querySelector("[data-steps]").addEventListener("change", () => this.draw());
      this.svg.addEventListener("pointerdown", (event) => this.grab(event));
      this.svg.addEventListener("pointermove", (event) => this.drag(event));
      for (const end of ["pointerup", "pointercancel"]) this.svg.addEventListener(end, () => (this.held = null));
      this.svg.addEventListener("keydown", (event) => this.key(event));
      this.start(2);
    }

    start(dimensions) {
      this.dimensions = dimensions;
      this.vectors = JSON.parse(JSON.stringify(START[dimensions]));
      for (const button of this.root.querySelectorAll("[data-dim]")) {
        button.setAttribute("aria-pressed", String(Number(button.dataset.dim) === dimensions));
      }
      this.root.querySelector("[data-only3]").hidden = dimensions === 2;
      this.svg.replaceChildren();
      this.parts = {};
      for (const name of ["axes", "plane", "paths", "arrows", "handles"]) {
        this.parts[name] = this.make("g", {}, this.svg);
      }
      this.handles = {};
      for (const name of ["a", "b", "h"]) {
        const handle = this.make("circle", {
          r: 0.075, class: `rp-handle rp-${COLOURS[name]}`, tabindex: 0, role: "slider", "data-name": name,
          "aria-valuemin": -1.6, "aria-valuemax": 1.6, "aria-label": `vector ${name}`,
        }, this.parts.handles);
        this.handles[name] = handle;
      }
      this.draw();
    }

    make(tag, attributes, parent) {
      const element = document.createElementNS(NS, tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      parent.append(element);
      return element;
    }

    // The view: its right and up directions in space. In two dimensions they are the axes.
    view() {
      if (this.dimensions === 2) return [[1, 0], [0, 1]];
      const cy = Math.cos(this.yaw), sy = Math.sin(this.yaw), cp = Math.cos(this.pitch), sp = Math.sin(this.pitch);
      return [[cy, sy, 0], [-sy * sp, cy * sp, cp], [sy * cp, -cy * cp, sp]]; // right, up, towards the reader
    }

    onScreen(vector) {
      const [right, up] = this.view();
      return [dot(vector, right), -dot(vector, up)];
    }

    line(from, to, kind, parent) {
      const [x1, y1] = this.onScreen(from), [x2, y2] = this.onScreen(to);
      return this.make("line", { x1, y1, x2, y2, class: kind }, parent);
    }

    arrow(vector, name, label) {
      const [x, y] = this.onScreen(vector), length = Math.hypot(x, y);
      this.make("line", { x1: 0, y1: 0, x2: x, y2: y, class: `rp-arrow rp-${name}` }, this.parts.arrows);
      if (length > 0.12) {
        const turn = (Math.atan2(y, x) * 180) / Math.PI;
        this.make("path", {
          d: "M0 0L-0.11 0.05L-0.11 -0.05Z", transform: `translate(${x} ${y}) rotate(${turn})`, class: `rp-tip rp-${name}`,
        }, this.parts.arrows);
      }
      const away = length > 0.05 ? 0.17 / length : 0;
      const text = this.make("text", { x: x * (1 + away), y: y * (1 + away) + 0.045, class: `rp-label rp-${name}` },
        this.parts.arrows);
      text.textContent = label;
    }

    draw() {
      const { a, b, h } = this.vectors;
      const { e, w, m, g, out, theta } = rotation(a, b, h);
      const steps = this.root.querySelector("[data-steps]").checked;
      const zero = a.map(() => 0);
      for (const name of ["axes", "plane", "paths", "arrows"]) this.parts[name].replaceChildren();

      a.forEach((_, i) => {
        const axis = a.map((_, j) => (i === j ? 1.5 : 0));
        this.line(scale(axis, -1), axis, "rp-axis", this.parts.axes);
      });
      // the plane of a and b, from e and the part of w across it
      const across = unit(add(w, e, -dot(e, w)));
      if (this.dimensions === 3 && norm(across) > 0) {
        const ring = Array.from({ length: 48 }, (_, k) => (k * Math.PI) / 24)
          .map((t) => this.onScreen(add(scale(e, 1.45 * Math.cos(t)), across, 1.45 * Math.sin(t))));
        this.make("polygon", { points: ring.map((p) => p.join(",")).join(" "), class: "rp-plane" }, this.parts.plane);
      }
      // the path of the part of h in the plane; what is orthogonal to the plane does not move
      const turned = (t) => {
        const x = dot(e, h), y = dot(across, h), rest = add(add(h, e, -x), across, -y);
        const c = Math.cos(t), s = Math.sin(t);
        return add(add(rest, e, c * x - s * y), across, s * x + c * y);
      };
      if (norm(across) > 0 && theta > 1e-3) {
        const arc = (point) => "M" + Array.from({ length: 33 }, (_, k) => this.onScreen(point((theta * k) / 32)).join(" ")).join("L");
        this.make("path", { d: arc((t) => scale(add(scale(e, Math.cos(t)), across, Math.sin(t)), 0.32)), class: "rp-angle" }, this.parts.paths);
        this.make("path", { d: arc(turned), class: "rp-path" }, this.parts.paths);
      }
      if (steps) {
        this.line(zero, scale(m, 1.4), "rp-bisector", this.parts.paths);
        const [x, y] = this.onScreen(scale(m, 1.5));
        this.make("text", { x, y: y + 0.045, class: "rp-label rp-thin" }, this.parts.paths).textContent = "m";
        const [gx, gy] = this.onScreen(scale(g, 1 + 0.17 / Math.max(norm(g), 0.2)));
        this.make("text", { x: gx, y: gy + 0.045, class: "rp-label rp-thin" }, this.parts.paths).textContent = "g";
        this.line(h, g, "rp-step", this.parts.paths);
        this.line(g, out, "rp-step", this.parts.paths);
        this.line(zero, g, "rp-ghost", this.parts.paths);
      }
      this.arrow(a, "a", "a");
      this.arrow(b, "b", "b");
      this.arrow(h, "h", "h");
      this.arrow(out, "out", "R h");
      for (const [name, handle] of Object.entries(this.handles)) {
        const [x, y] = this.onScreen(this.vectors[name]);
        handle.setAttribute("cx", x);
        handle.setAttribute("cy", y);
        handle.setAttribute("aria-valuenow", this.vectors[name][0].toFixed(2));
        handle.setAttribute("aria-valuetext", `${name} = ${this.show(this.vectors[name])}`);
      }
      const rows = [
        ["e = a / |a|", this.show(e)], ["w = b / |b|", this.show(w)], ["m = (e + w) / |e + w|", this.show(m)],
        ["θ = ∠(a, b)", `${((theta * 180) / Math.PI).toFixed(1)}°`],
        ["g = h − 2 (e·h) e", this.show(g)], ["R h = g − 2 (m·g) m", this.show(out)],
        ["|h|, |R h|", `${norm(h).toFixed(3)}, ${norm(out).toFixed(3)}`],
      ];
      this.terms.innerHTML = "<dl>" + rows.map(([term, value]) => `<dt>${term}</dt><dd>${value}</dd>`).join("") + "</dl>";
    }

    show(vector) {
      return "(" + vector.map((value) => (Math.abs(value) < 0.005 ? 0 : value).toFixed(2).replace("-", "−")).join(", ") + ")";
    }

    at(event) {
      const box = this.svg.getBoundingClientRect(), size = Math.min(box.width, box.height);
      return [((event.clientX - box.left - box.width / 2) / size) * 3.4, ((event.clientY - box.top - box.height / 2) / size) * 3.4];
    }

    grab(event) {
      const name = event.target.dataset ? event.target.dataset.name : null;
      if (!name && this.dimensions === 2) return;
      this.held = { name, at: this.at(event) };
      this.svg.setPointerCapture(event.pointerId);
      if (name) this.handles[name].focus();
      event.preventDefault();
    }

    drag(event) {
      if (!this.held) return;
      const [x, y] = this.at(event), [x0, y0] = this.held.at;
      this.held.at = [x, y];
      if (this.held.name) this.move(this.held.name, x - x0, -(y - y0), 0);
      else {
        this.yaw -= (x - x0) * 0.9;
        this.pitch = Math.max(-1.5, Math.min(1.5, this.pitch + (y - y0) * 0.9));
        this.draw();
      }
    }

    key(event) {
      const name = event.target.dataset ? event.target.dataset.name : null;
      const by = { ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, 1, 0], ArrowDown: [0, -1, 0],
        PageUp: [0, 0, 1], PageDown: [0, 0, -1] }[event.key];
      if (!name || !by) return;
      const size = event.shiftKey ? 0.01 : 0.05;
      this.move(name, by[0] * size, by[1] * size, by[2] * size);
      event.preventDefault();
    }

    // Move a vector along the view's directions and keep it inside the picture.
    move(name, right, up, near) {
      const view = this.view();
      let vector = add(add(this.vectors[name], view[0], right), view[1], up);
      if (view[2]) vector = add(vector, view[2], near);
      const length = norm(vector);
      this.vectors[name] = length > 1.45 ? scale(vector, 1.45 / length) : vector;
      this.draw();
    }
  }

  const begin = () => document.querySelectorAll(".rum-playground").forEach((root) => new Playground(root));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
