// A trained recall model in the browser: type pairs and a key, and watch the memory R bind and find them.
// Every <div class="rum-recall"> of a page becomes one. The weights are those of torchrum.lab.trained, in RUM_RECALL.
"use strict";
(() => {
  const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
  const scale = (x, factor) => x.map((value) => value * factor);
  const reflect = (x, v) => { const c = 2 * dot(x, v); return v.map((value, i) => value - c * x[i]); };
  const unit = (x) => { const n = Math.sqrt(dot(x, x)); return n ? scale(x, 1 / n) : x; };
  const softmax = (x) => {
    const most = Math.max(...x), e = x.map((value) => Math.exp(value - most)), sum = e.reduce((a, b) => a + b);
    return scale(e, 1 / sum);
  };

  // A .safetensors file: the length of the header, the header in JSON, the numbers. Matrices become lists of rows.
  function tensors(base64) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const start = 8 + new DataView(bytes.buffer).getUint32(0, true);
    const found = {};
    for (const [name, { shape, data_offsets }] of Object.entries(JSON.parse(new TextDecoder().decode(bytes.slice(8, start))))) {
      if (!shape) continue; // metadata
      const flat = Array.from(new Float32Array(bytes.slice(start + data_offsets[0], start + data_offsets[1]).buffer));
      found[name] = shape.length === 1 ? flat
        : Array.from({ length: shape[0] }, (_, i) => flat.slice(i * shape[1], (i + 1) * shape[1]));
    }
    return found;
  }

  // The paper's cell with lam = 1, as torchrum/ops/rum_scan/reference.py has it.
  class RecallModel {
    constructor(base64) {
      const weights = tensors(base64);
      this.input = weights["layer.weight_ih_l0"]; // (3H, I), rows: tau, u, eps
      this.hidden = weights["layer.weight_hh_l0"]; // (2H, H), rows: tau, u
      this.bias = weights["layer.bias_ih_l0"];
      this.readout = { weight: weights["readout.weight"], bias: weights["readout.bias"] };
      this.size = this.hidden[0].length;
      this.values = this.readout.bias.length;
      this.keys = this.input[0].length - 1 - this.values; // symbols: the mark "?", the keys, the values
    }

    start() {
      const row = (i) => Array.from({ length: this.size }, (_, j) => Number(i === j));
      return { h: Array(this.size).fill(0), R: Array.from({ length: this.size }, (_, i) => row(i)) };
    }

    // State and symbol -> new state, with the angle of the rotation that was added to R.
    step({ h, R }, symbol) {
      const H = this.size, x = this.input.map((row, i) => row[symbol] + this.bias[i]);
      const gates = this.hidden.map((row, i) => x[i] + dot(row, h));
      const e = unit(x.slice(2 * H)), w = unit(gates.slice(0, H)), s = e.map((value, i) => value + w[i]), m = unit(s);
      R = R.map((row) => reflect(e, reflect(m, row)));
      const turned = R.map((row) => dot(row, h));
      const u = gates.slice(H).map((value) => 1 / (1 + Math.exp(-value)));
      h = h.map((value, i) => u[i] * value + (1 - u[i]) * Math.max(0, x[2 * H + i] + turned[i]));
      return { h, R, angle: 2 * Math.atan2(Math.sqrt(dot(e, e) + dot(w, w) - 2 * dot(e, w)), Math.sqrt(dot(s, s))) };
    }

    run(state, symbols) { return symbols.reduce((now, symbol) => this.step(now, symbol), state); }

    answer({ h }) {
      return softmax(this.readout.weight.map((row, i) => dot(row, h) + this.readout.bias[i]));
    }

    // What the model would answer to a key if it were asked now.
    ask(state, key) { return this.answer(this.run(state, [0, 0, key])); }
  }

  const LETTERS = "abcdefghijklmnopqrstuvwxyz";

  class Demo {
    constructor(root, model) {
      this.root = root;
      this.model = model;
      this.letters = LETTERS.slice(0, model.keys);
      root.innerHTML = `
        <div class="rr-bar">
          <label>Pairs <input class="rr-pairs" size="24" spellcheck="false" autocomplete="off" autocapitalize="off"></label>
          <label>Key <input class="rr-key" size="2" maxlength="1" spellcheck="false" autocomplete="off" autocapitalize="off"></label>
          <button type="button" data-random>Random</button>
        </div>
        <p class="rr-message" role="alert" hidden></p>
        <div class="rr-shown">
          <div class="rr-tape" role="group" aria-label="What the model reads; choose a step"></div>
          <div class="rr-bar">
            <button type="button" data-play>Play</button>
            <button type="button" data-by="-1" aria-label="One step back">◀</button>
            <button type="button" data-by="1" aria-label="One step on">▶</button>
            <label><input type="checkbox" data-erase> erase R before the question</label>
          </div>
          <div class="rr-body">
            <figure>
              <canvas class="rr-matrix" width="${model.size}" height="${model.size}" role="img" aria-label="The matrix R"></canvas>
              <figcaption class="rr-caption"></figcaption>
            </figure>
            <figure>
              <table class="rr-memory"><caption>What it would answer now</caption><tbody></tbody></table>
              <figcaption class="rr-answer" aria-live="polite"></figcaption>
            </figure>
          </div>
        </div>`;
      this.part = (name) => root.querySelector(name);
      for (const name of [".rr-pairs", ".rr-key"]) this.part(name).addEventListener("input", () => this.read());
      this.part("[data-erase]").addEventListener("change", () => this.read());
      this.part("[data-random]").addEventListener("click", () => this.random(5));
      this.part("[data-play]").addEventListener("click", () => this.play());
      for (const button of root.querySelectorAll("[data-by]")) {
        button.addEventListener("click", () => { this.stop(); this.show(this.at + Number(button.dataset.by)); });
      }
      this.part(".rr-pairs").value = "a3 d7 b1 c0";
      this.part(".rr-key").value = "d";
      this.read();
    }

    random(count) {
      const keys = [...this.letters].sort(() => Math.random() - 0.5).slice(0, count);
      this.part(".rr-pairs").value = keys.map((key) => key + Math.floor(Math.random() * this.model.values)).join(" ");
      this.part(".rr-key").value = keys[Math.floor(Math.random() * count)];
      this.read();
      this.show(0);
      this.play();
    }

    // The pairs and the key as typed, or what is wrong with them.
    parse() {
      const text = this.part(".rr-pairs").value.replace(/[\s,;:=]/g, "").toLowerCase();
      const key = this.part(".rr-key").value.toLowerCase(), pairs = text.match(/../g) ?? [];
      const last = this.letters.at(-1);
      if (!/^([a-z][0-9])+$/.test(text)) return { wrong: "Type a letter and a digit for each pair, such as a3 d7 b1." };
      if (pairs.some(([letter]) => !this.letters.includes(letter))) return { wrong: `The model knows the keys a to ${last}.` };
      if (new Set(pairs.map(([letter]) => letter)).size < pairs.length) {
        return { wrong: "Each key may stand once: the model has not learnt to replace a value." };
      }
      if (!pairs.some(([letter]) => letter === key)) return { wrong: "Ask for one of the keys of the pairs." };
      return { pairs, key };
    }

    symbol(letter) {
      if (letter === "?") return 0;
      const key = this.letters.indexOf(letter);
      return key >= 0 ? 1 + key : 1 + this.model.keys + Number(letter);
    }

    read() {
      this.stop();
      const { pairs, key, wrong } = this.parse(), message = this.part(".rr-message");
      message.hidden = !wrong;
      message.textContent = wrong ?? "";
      this.part(".rr-shown").classList.toggle("rr-stale", Boolean(wrong));
      if (wrong) return;
      this.pairs = pairs;
      this.letters_read = [...pairs.join(""), "?", "?", key];
      this.states = [this.model.start()];
      const erase = this.part("[data-erase]").checked;
      this.letters_read.forEach((letter, t) => {
        const before = this.states.at(-1), forget = erase && t === 2 * pairs.length;
        this.states.push(this.model.step(forget ? { h: before.h, R: this.model.start().R } : before, this.symbol(letter)));
      });
      const tape = this.part(".rr-tape");
      tape.replaceChildren(...this.letters_read.map((letter, t) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = letter;
        if (t % 2 === 0 && t <= 2 * pairs.length) button.classList.add("rr-first");
        button.addEventListener("click", () => { this.stop(); this.show(t + 1); });
        return button;
      }));
      this.show(this.letters_read.length);
    }

    play() {
      if (this.timer) { this.stop(); return; }
      if (this.at >= this.letters_read.length) this.show(0);
      this.part("[data-play]").textContent = "Pause";
      this.timer = setInterval(() => {
        this.show(this.at + 1);
        if (this.at >= this.letters_read.length) this.stop();
      }, 700);
    }

    stop() {
      clearInterval(this.timer);
      this.timer = null;
      this.part("[data-play]").textContent = "Play";
    }

    // The model after ``at`` symbols.
    show(at) {
      this.at = Math.max(0, Math.min(this.letters_read.length, at));
      const state = this.states[this.at], { pairs } = this, end = this.at === this.letters_read.length;
      this.part(".rr-tape").childNodes.forEach((button, t) => {
        button.classList.toggle("rr-read", t < this.at);
        button.setAttribute("aria-current", t === this.at - 1 ? "step" : "false");
      });
      this.draw(state.R);
      const read = this.at ? `R after “${this.letters_read.slice(0, this.at).join("")}”` : "R before the first symbol: the identity";
      const turned = this.at ? `; the last step turned it by ${((state.angle * 180) / Math.PI).toFixed(0)}°` : "";
      this.part(".rr-caption").textContent = read + turned;

      const asked = this.at > 2 * pairs.length, from = asked ? this.states[2 * pairs.length] : state;
      const erased = asked && this.part("[data-erase]").checked ? { h: from.h, R: this.model.start().R } : from;
      this.part(".rr-memory tbody").replaceChildren(...pairs.map(([letter, digit], i) => {
        const told = 2 * i + 2 <= this.at, chances = this.model.ask(erased, this.symbol(letter)), row = document.createElement("tr");
        row.innerHTML = `<th scope="row">${letter}</th>` + chances.map((chance, value) =>
          `<td style="--chance:${chance.toFixed(3)}" title="${letter} → ${value}: ${(100 * chance).toFixed(1)}%"
            class="${told && Number(digit) === value ? "rr-true" : ""}">${value}</td>`).join("");
        row.classList.toggle("rr-untold", !told);
        return row;
      }));
      const key = this.letters_read.at(-1), truth = pairs.find(([letter]) => letter === key)[1];
      const chances = this.model.answer(state), best = chances.indexOf(Math.max(...chances));
      this.part(".rr-answer").textContent = end
        ? `${key} → ${best} (${(100 * chances[best]).toFixed(1)}%), ${Number(truth) === best ? "right" : `wrong: it was ${truth}`}`
        : "The stronger the colour, the likelier; a frame marks the value that was told.";
    }

    // Orange for positive, blue for negative entries, clear for zero.
    draw(R) {
      const context = this.part(".rr-matrix").getContext("2d"), image = context.createImageData(R.length, R.length);
      R.flat().forEach((value, i) => {
        image.data.set([...(value > 0 ? [214, 94, 0] : [0, 114, 178]), Math.min(255, 340 * Math.abs(value))], 4 * i);
      });
      context.putImageData(image, 0, 0);
    }
  }

  if (typeof module !== "undefined") {
    module.exports = { RecallModel };
    return;
  }
  const begin = () => document.querySelectorAll(".rum-recall").forEach((root) => new Demo(root, new RecallModel(RUM_RECALL)));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
