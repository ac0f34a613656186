// The map: points drawn by WebGL 2 out of typed arrays, moved by mouse, finger and key.

const VERTEX = `#version 300 es
in float x, y;
in vec4 colour;
uniform vec2 middle, scale;
uniform highp float size;
uniform float alpha;
out vec4 shade;
void main() {
  gl_Position = vec4((vec2(x, y) - middle) * scale, 0.0, 1.0);
  gl_PointSize = size;
  shade = vec4(colour.rgb, alpha * colour.a);
}`;
const FRAGMENT = `#version 300 es
precision highp float;
in vec4 shade;
uniform highp float size;
uniform vec4 rim;
out vec4 seen;
void main() {
  float inside = size * 0.5 - length(gl_PointCoord - 0.5) * size;
  vec3 tint = mix(shade.rgb, rim.rgb, rim.a * clamp(2.0 - inside, 0.0, 1.0));
  seen = vec4(tint, shade.a * clamp(inside + 0.5, 0.0, 1.0));
}`;
const ROOM = 0.94; // of the map, at home, between the outermost samples
const STILL = 160; // milliseconds after which all points are drawn again
const SLOW = 45, FAST = 22, SPARSEST = 60; // milliseconds a frame; one point in so many
const NEAR = 10; // pixels from a sample that mean it
const MANY = 100000; // selected, so that the others are only made pale and nothing is drawn twice
const PALE = 0.22, PLAIN = 0.85; // opacity
const MOST_ZOOM = 4000;

/** Which samples lie where: their numbers, sorted by the cells of a grid. */
class Grid {
  constructor(x, y) {
    const n = x.length, side = Math.min(1024, Math.max(1, Math.ceil(Math.sqrt(n / 4))));
    Object.assign(this, { side, start: new Uint32Array(side * side + 1), rows: new Uint32Array(n) });
    const cell = (i) => this.at(y[i]) * side + this.at(x[i]);
    for (let i = 0; i < n; i++) this.start[cell(i) + 1]++;
    for (let k = 0; k < side * side; k++) this.start[k + 1] += this.start[k];
    const next = this.start.slice();
    for (let i = 0; i < n; i++) this.rows[next[cell(i)]++] = i;
  }

  at(place) {
    return Math.min(this.side - 1, Math.max(0, Math.floor((place + 1) / 2 * this.side)));
  }

  /** The sample nearest to a place, at most `far` away; -1 where there is none. */
  nearest(x, y, px, py, far) {
    let best = -1, least = far * far;
    for (let row = this.at(py - far); row <= this.at(py + far); row++) {
      const first = this.start[row * this.side + this.at(px - far)];
      const last = this.start[row * this.side + this.at(px + far) + 1];
      for (let i = first; i < last; i++) {
        const k = this.rows[i], square = (x[k] - px) ** 2 + (y[k] - py) ** 2;
        if (square <= least) [best, least] = [k, square];
      }
    }
    return best;
  }
}

export class Plot {
  /**
   * @param canvas to draw on
   * @param outline an SVG polygon: the lasso
   * @param x Float32Array, within -1 and 1
   * @param y as x
   * @param on what is told: view(), hover(row or null), pick(rows), lassoed(rows)
   */
  constructor(canvas, outline, x, y, on) {
    Object.assign(this, { canvas, outline, x, y, on, lasso: false, selected: new Uint32Array(0) });
    this.colours = new Uint32Array(x.length);
    this.grid = new Grid(x, y);
    this.camera = { x: 0, y: 0, zoom: ROOM };
    this.sparse = 1; // one point in so many is drawn while the map moves
    this.dots = x.length < 3000 ? 7 : x.length < 30000 ? 4 : x.length < 300000 ? 2.5 : 1.5;
    this.drawn = 0; // frames
    this.gl = canvas.getContext("webgl2", { alpha: false, antialias: false, depth: false });
    if (!this.gl) throw new Error("This browser has no WebGL 2, or it is switched off");
    this.setUp();
    canvas.addEventListener("webglcontextlost", (event) => event.preventDefault());
    canvas.addEventListener("webglcontextrestored", () => { this.setUp(); this.redraw(); });
    new ResizeObserver(() => this.resize()).observe(canvas);
    this.resize();
    this.listen();
  }

  setUp() {
    const { gl } = this, program = this.program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS) && !gl.isContextLost()) {
      throw new Error(`The map cannot be drawn: ${gl.getProgramInfoLog(program)}`);
    }
    gl.useProgram(program);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA);
    this.buffers = {};
    for (const [name, values] of Object.entries({ x: this.x, y: this.y, colour: this.colours })) {
      this.buffers[name] = gl.createBuffer();
      gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[name]);
      gl.bufferData(gl.ARRAY_BUFFER, values, gl.STATIC_DRAW);
      gl.enableVertexAttribArray(gl.getAttribLocation(program, name));
    }
    this.buffers.rows = gl.createBuffer();
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, this.buffers.rows);
    gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, this.selected, gl.DYNAMIC_DRAW);
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    this.dense = Math.min(2, devicePixelRatio || 1);
    Object.assign(this, { width: clientWidth, height: clientHeight });
    this.canvas.width = Math.max(1, Math.round(clientWidth * this.dense));
    this.canvas.height = Math.max(1, Math.round(clientHeight * this.dense));
    this.redraw();
  }

  // --- What is shown ----------------------------------------------------------------------------

  /** The colour of every sample: `code(row)` among these, `[red, green, blue]` of 255. */
  paint(codes, colours) {
    const known = Uint32Array.from(colours, ([r, g, b]) => (b << 16 | g << 8 | r) >>> 0);
    for (let i = 0; i < codes.length; i++) this.colours[i] = known[codes[i]];
    this.tone();
  }

  /** The colour of one sample, as CSS takes it. */
  tint(row) {
    const code = this.colours[row];
    return `rgb(${code & 255} ${(code >> 8) & 255} ${(code >> 16) & 255})`;
  }

  select(rows) {
    this.selected = Uint32Array.from(rows);
    this.gl.bufferData(this.gl.ELEMENT_ARRAY_BUFFER, this.selected, this.gl.DYNAMIC_DRAW);
    const was = this.many;
    this.many = this.selected.length > MANY;
    if (was || this.many) this.tone();
    else this.redraw();
  }

  /** Give the colours to the graphics card; where many are selected, the others are pale. */
  tone() {
    const { gl, colours } = this, pale = Math.round(255 * PALE / PLAIN) << 24;
    for (let i = 0; i < colours.length; i++) colours[i] = (colours[i] & 0xffffff) | (this.many ? pale : 0xff000000);
    if (this.many) for (const row of this.selected) colours[row] |= 0xff000000;
    gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers.colour);
    gl.bufferSubData(gl.ARRAY_BUFFER, 0, colours);
    this.redraw();
  }

  /** How long a whole frame takes says how many points to draw while the map moves. */
  measure() {
    const { gl } = this, began = performance.now();
    this.draw();
    gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));
    this.sparse = Math.min(SPARSEST, Math.max(1, Math.round((performance.now() - began) / FAST)));
  }

  /** Draw soon: some of very many points while it moves, and all of them when it is still. */
  redraw(moving = false) {
    this.moving = moving;
    clearTimeout(this.later);
    if (moving) this.later = setTimeout(() => this.redraw(), STILL);
    this.frame ??= requestAnimationFrame((now) => {
      this.frame = null;
      if (this.moving) this.pace(now);
      this.last = this.moving ? now : null;
      this.draw();
    });
  }

  /** Fewer points where frames come late, more where they come early. */
  pace(now) {
    if (!this.last) return;
    const took = now - this.last;
    this.took = 0.5 * (this.took ?? took) + 0.5 * took;
    if (this.took > SLOW) this.sparse = Math.min(SPARSEST, 2 * this.sparse);
    else if (this.took < FAST) this.sparse = Math.max(1, Math.floor(this.sparse * 0.75));
    else return;
    this.took = (SLOW + FAST) / 2;
  }

  draw() {
    const { gl, program, camera, canvas, width, height } = this;
    if (!width || !height || gl.isContextLost()) return;
    const set = (name, ...values) => gl[`uniform${values.length}f`](
      gl.getUniformLocation(program, name), ...values);
    gl.viewport(0, 0, canvas.width, canvas.height);
    gl.clearColor(...this.background, 1);
    gl.clear(gl.COLOR_BUFFER_BIT);
    set("middle", camera.x, camera.y);
    set("scale", 2 * this.unit() / width, 2 * this.unit() / height);
    const every = this.moving && this.x.length > 20000 ? this.sparse : 1;
    const size = this.dots * this.dense * Math.max(1, Math.asinh(camera.zoom) / 0.89);
    set("size", Math.min(size * Math.min(2, Math.sqrt(every)), 28));
    set("alpha", this.selected.length > 1 && !this.many ? PALE : PLAIN);
    set("rim", 0, 0, 0, 0);
    this.point(every);
    gl.drawArrays(gl.POINTS, 0, Math.floor((this.x.length - 1) / every) + 1);
    if (this.selected.length && !this.many) {
      const few = this.selected.length < 3000;
      set("size", Math.min(size + (few ? 3 : 1) * this.dense, 34));
      set("alpha", 1);
      set("rim", ...this.ink, few ? 0.9 : 0);
      this.point(1);
      gl.drawElements(gl.POINTS, this.selected.length, gl.UNSIGNED_INT, 0);
    }
    this.drawn++;
    this.on.view();
  }

  /** Read one point in so many. */
  point(every) {
    const { gl } = this;
    for (const [name, parts, kind] of [["x", 1, gl.FLOAT], ["y", 1, gl.FLOAT],
      ["colour", 4, gl.UNSIGNED_BYTE]]) {
      gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[name]);
      gl.vertexAttribPointer(gl.getAttribLocation(this.program, name), parts, kind,
        kind !== gl.FLOAT, 4 * every, 0);
    }
  }

  // --- Where it is ------------------------------------------------------------------------------

  /** Pixels of one unit of the map. */
  unit() {
    return this.camera.zoom * Math.min(this.width, this.height) / 2;
  }

  /** Where a sample is, in pixels of the canvas. */
  screen(row) {
    return [this.width / 2 + (this.x[row] - this.camera.x) * this.unit(),
      this.height / 2 - (this.y[row] - this.camera.y) * this.unit()];
  }

  /** The place under a pixel. */
  place(px, py) {
    return [this.camera.x + (px - this.width / 2) / this.unit(),
      this.camera.y - (py - this.height / 2) / this.unit()];
  }

  nearest(px, py, far = NEAR) {
    return this.grid.nearest(this.x, this.y, ...this.place(px, py), far / this.unit());
  }

  move(dx, dy) {
    this.camera.x = Math.min(1.2, Math.max(-1.2, this.camera.x - dx / this.unit()));
    this.camera.y = Math.min(1.2, Math.max(-1.2, this.camera.y + dy / this.unit()));
    this.redraw(true);
  }

  zoom(by, px = this.width / 2, py = this.height / 2) {
    const [x, y] = this.place(px, py);
    this.camera.zoom = Math.min(MOST_ZOOM, Math.max(ROOM / 2, this.camera.zoom * by));
    const [nowX, nowY] = this.place(px, py);
    this.camera.x += x - nowX;
    this.camera.y += y - nowY;
    this.redraw(true);
  }

  /** Go there, in a third of a second where nobody asked for less motion. */
  go(to) {
    const from = { ...this.camera }, began = performance.now();
    const quick = matchMedia("(prefers-reduced-motion: reduce)").matches;
    cancelAnimationFrame(this.going);
    const step = () => {
      const t = quick ? 1 : Math.min(1, (performance.now() - began) / 320), part = t * (2 - t);
      this.camera.zoom = from.zoom * (to.zoom / from.zoom) ** part;
      for (const axis of ["x", "y"]) this.camera[axis] = from[axis] + (to[axis] - from[axis]) * part;
      this.redraw(true);
      if (t < 1) this.going = requestAnimationFrame(step);
    };
    step();
  }

  home() {
    this.go({ x: 0, y: 0, zoom: ROOM });
  }

  /** Show these samples. */
  fit(rows) {
    let [left, right, low, high] = [1, -1, 1, -1];
    for (const row of rows) {
      [left, right] = [Math.min(left, this.x[row]), Math.max(right, this.x[row])];
      [low, high] = [Math.min(low, this.y[row]), Math.max(high, this.y[row])];
    }
    const wide = Math.max(right - left, high - low, 0.02);
    this.go({ x: (left + right) / 2, y: (low + high) / 2, zoom: Math.min(ROOM * 2 / wide / 1.4, 40) });
  }

  // --- What hands do ----------------------------------------------------------------------------

  listen() {
    const fingers = new Map(), { canvas } = this;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const spread = () => {
      const [[ax, ay], [bx, by]] = fingers.values();
      return { far: Math.hypot(ax - bx, ay - by), x: (ax + bx) / 2, y: (ay + by) / 2 };
    };
    let path = null, from = null, hovering = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      cancelAnimationFrame(this.going);
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, at(event));
      from = fingers.size === 1 ? at(event) : null;
      path = from && (this.lasso || event.shiftKey) ? [from] : null;
      this.on.hover(null);
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = at(event), before = fingers.get(event.pointerId);
      if (!before) {
        hovering ??= requestAnimationFrame(() => { hovering = null; this.over(...this.mouse); });
        this.mouse = now;
      } else if (path) {
        const [x, y] = path.at(-1);
        if (Math.hypot(x - now[0], y - now[1]) > 2) path.push(now);
        this.outline.setAttribute("points", path.map((corner) => corner.join()).join(" "));
      } else if (fingers.size === 2) {
        const was = spread();
        fingers.set(event.pointerId, now);
        const is = spread();
        this.move(is.x - was.x, is.y - was.y);
        this.zoom(is.far / Math.max(was.far, 1), is.x, is.y);
      } else if (!from || Math.hypot(now[0] - from[0], now[1] - from[1]) > 4) {
        fingers.set(event.pointerId, now);
        from = null;
        this.move(now[0] - before[0], now[1] - before[1]);
      }
    });
    const done = (event) => {
      if (!fingers.delete(event.pointerId)) return;
      if (event.type === "pointerup" && path?.length > 2) this.on.lassoed(this.inside(path));
      else if (event.type === "pointerup" && from) {
        const row = this.nearest(...from, event.pointerType === "touch" ? 2 * NEAR : NEAR);
        if (row >= 0) this.on.pick([row]);
      }
      this.outline.removeAttribute("points");
      path = from = null;
    };
    canvas.addEventListener("pointerup", done);
    canvas.addEventListener("pointercancel", done);
    canvas.addEventListener("pointerleave", () => { this.mouse = [-99, -99]; this.on.hover(null); });
    canvas.addEventListener("dblclick", (event) => { if (this.nearest(...at(event)) < 0) this.on.pick([]); });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      cancelAnimationFrame(this.going);
      const lines = event.deltaMode ? 16 : 1;
      this.zoom(Math.exp(-event.deltaY * lines * 0.0016), ...at(event));
    }, { passive: false });
  }

  over(px, py) {
    const row = this.nearest(px, py);
    this.on.hover(row < 0 ? null : row);
  }

  /** The samples within a line drawn on the screen, to the pixel. */
  inside(path) {
    const xs = path.map(([x]) => x), ys = path.map(([, y]) => y);
    const left = Math.floor(Math.min(...xs)), top = Math.floor(Math.min(...ys));
    const width = Math.ceil(Math.max(...xs)) - left + 1, height = Math.ceil(Math.max(...ys)) - top + 1;
    const mask = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    mask.beginPath();
    for (const [x, y] of path) mask.lineTo(x - left, y - top);
    mask.fill("evenodd");
    const { data } = mask.getImageData(0, 0, width, height);
    const unit = this.unit(), found = new Uint32Array(this.x.length);
    const dx = this.width / 2 - this.camera.x * unit - left;
    const dy = this.height / 2 + this.camera.y * unit - top;
    let n = 0;
    for (let i = 0; i < this.x.length; i++) {
      const px = Math.floor(this.x[i] * unit + dx), py = Math.floor(dy - this.y[i] * unit);
      if (px < 0 || py < 0 || px >= width || py >= height) continue;
      if (data[4 * (py * width + px) + 3] > 127) found[n++] = i;
    }
    return found.slice(0, n);
  }
}
