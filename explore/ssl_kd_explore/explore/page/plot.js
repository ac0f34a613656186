// The map, drawn by regl-scatterplot: places, colors and the selection of samples.

import createScatterplot from "./vendor/regl-scatterplot.js";

const MARGIN = 0.94; // the outermost samples are so far from the middle
const MANY = 50000; // samples; of more, only some are drawn while the map moves
const DRAWN = 25000; // of them
const STILL = 200; // milliseconds without a move until all are drawn again
const FIRST = 600; // milliseconds from the first picture until all are drawn
const SMOOTH = { transition: true, transitionDuration: 300 };

/** Bytes of the spatial index of n places (KDBush 4: header, rows, places in the order of the rows). */
export const bytesOfIndex = (n) => 8 + 8 * Math.ceil((n * (n < 65536 ? 2 : 4)) / 8) + 8 * n;

/** The coordinates x and y of all samples, in the order of the samples; move the index within the margin. */
function readPlaces(index) {
  const [n] = new Uint32Array(index, 4, 1), rows = new (n < 65536 ? Uint16Array : Uint32Array)(index, 8, n);
  const places = new Float32Array(index, bytesOfIndex(n) - 8 * n), x = new Float32Array(n), y = new Float32Array(n);
  for (let i = 0; i < n; i++) {
    x[rows[i]] = places[2 * i] *= MARGIN;
    y[rows[i]] = places[2 * i + 1] *= MARGIN;
  }
  return [x, y];
}

/** All samples as regl-scatterplot reads them, without an array for each: points[row] is [x, y, code]. */
function pointsOf(x, y, codes) {
  const texture = (side) => {
    const values = new Float32Array(4 * side * side);
    for (let row = 0, at = 0; row < x.length; row++, at += 4) {
      values[at] = x[row];
      values[at + 1] = y[row];
      values[at + 2] = codes[row];
    }
    return values;
  };
  const points = Object.assign([], { texture, length: x.length });
  return new Proxy(points, { get: (_, key) => (Object.hasOwn(x, key) ? [x[key], y[key], codes[key]] : points[key]) });
}

export class Plot {
  /**
   * @param canvas to draw on
   * @param index the places of all samples, within -1 and 1: a spatial index as an ArrayBuffer; changed
   * @param on callbacks: view(), hover(row or null), select(rows), lassoed()
   */
  constructor(canvas, index, on) {
    const [x, y] = readPlaces(index);
    Object.assign(this, { canvas, index, x, y, on, selected: [], busy: Promise.resolve() });
    const n = x.length, size = n < 3000 ? 7 : n < 30000 ? 4 : n < 300000 ? 2.5 : 1.5;
    this.map = createScatterplot({ canvas, pointSize: size, pointSizeSelected: 2, opacity: 0.85,
      opacityInactiveMax: 0.25, opacityInactiveScale: 0.4, lassoColor: "#6cb2f0", lassoMinDelay: 1,
      actionKeyMap: { lasso: "shift", merge: "ctrl", remove: "alt" },
      performanceMode: n > 500000, deselectOnEscape: false, pointOutlineWidth: 1, pointColorActive: "#ffffff" });
    const listeners = { pointover: on.hover, pointout: () => on.hover(null), lassoEnd: on.lassoed,
      select: ({ points }) => on.select(this.selected = points),
      deselect: () => on.select(this.selected = []),
      view: () => { if (this.isDrawn) { on.view(); this.thinOut(); } } };
    for (const [name, listener] of Object.entries(listeners)) this.map.subscribe(name, listener);
    this.keep(null);
    for (const event of ["wheel", "pointerdown"]) {
      canvas.addEventListener(event, () => { this.isHome = false; }, { passive: true });
    }
    new ResizeObserver(() => { if (this.isHome) this.home(false); }).observe(canvas);
  }

  /** Show only these samples; null: all. */
  keep(rows) {
    this.kept = rows;
    const n = rows?.length ?? this.x.length, at = (i) => Math.floor((i * n) / DRAWN);
    this.some = n > MANY ? Array.from({ length: DRAWN }, (_, i) => rows?.[at(i)] ?? at(i)) : null;
    if (this.isDrawn) this.drawKept();
  }

  drawKept() {
    if (this.kept) this.map.filter(Array.from(this.kept), { preventEvent: true });
    else this.map.unfilter({ preventEvent: true });
    this.select(this.selected);
  }

  set background(color) {
    this.map.set({ backgroundColor: color });
  }

  /** Give every sample a color: `codes[row]` among `colors`, each `#rrggbb`. */
  paint(codes, colors) {
    this.newest = codes;
    this.busy = this.busy.catch(() => {}).then(async () => { // the library draws one at a time
      if (this.newest !== codes) return;
      Object.assign(this, { codes, colors });
      this.map.set({ colorBy: "valueA", pointColor: colors });
      await this.map.draw(pointsOf(this.x, this.y, codes),
        { spatialIndex: this.index, zDataType: "categorical", preventFilterReset: true,
          ...(!this.isDrawn && (this.some ?? this.kept) && { filter: Array.from(this.some ?? this.kept) }) });
      if (this.some && !this.isDrawn) this.drawAllAfter(FIRST); // some show sooner than all
      if (!this.isDrawn) this.home(false);
      this.isDrawn = true;
      this.select(this.selected);
    });
    return this.busy;
  }

  colorOf(row) {
    return this.colors[this.codes[row]];
  }

  select(rows) {
    this.selected = rows;
    if (rows.length) this.map.select(Array.from(rows), { preventEvent: true });
    else this.map.deselect({ preventEvent: true });
  }

  /** Draw only some of very many samples while the map moves. */
  thinOut() {
    if (!this.some || this.selected.length > 1) return;
    if (!this.timer) {
      this.on.hover(null); // the library does not report that a hovered sample is filtered out
      this.map.filter(this.some, { preventEvent: true });
    }
    this.drawAllAfter(STILL);
  }

  drawAllAfter(wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = null;
      this.drawKept();
    }, wait);
  }

  get lasso() {
    return this.map.get("mouseMode") === "lasso";
  }

  set lasso(on) {
    this.map.set({ mouseMode: on ? "lasso" : "panZoom" });
  }

  /** The place of a sample in pixels of the canvas. */
  screen(row) {
    return this.map.getScreenPosition(row);
  }

  /** Bring a sample to the middle if it is near or beyond the edge. */
  panTo(row) {
    const [x, y] = this.screen(row), { clientWidth: width, clientHeight: height } = this.canvas;
    if (x >= 40 && y >= 40 && x <= width - 40 && y <= height - 40) return;
    this.isHome = false;
    this.map.zoomToLocation([this.x[row], this.y[row]], this.map.get("camera").distance[0], SMOOTH);
  }

  /** Show the whole map: it fills the height, or the width if that is less. */
  home(isSmooth = true) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    this.isHome = true;
    this.map.zoomToLocation([0, 0], Math.max(1, height / width), isSmooth ? SMOOTH : {});
  }

  /** Zoom to samples. */
  fit(rows) {
    this.isHome = false;
    this.map.zoomToPoints(Array.from(rows), { padding: 0.4, ...SMOOTH });
  }
}
