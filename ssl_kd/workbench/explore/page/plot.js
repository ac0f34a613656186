// The map, drawn by regl-scatterplot: places, colors and the selection of samples.

import createScatterplot from "./vendor/regl-scatterplot.js";

const MARGIN = 0.94; // the outermost samples are so far from the middle
const MANY = 50000; // samples; of more, only some are drawn while the map moves
const DRAWN = 25000; // of them
const STILL = 200; // milliseconds without a move until all are drawn again
const SMOOTH = { transition: true, transitionDuration: 300 };

export class Plot {
  /**
   * @param canvas to draw on
   * @param x Float32Array, within -1 and 1; changed
   * @param y like x
   * @param on callbacks: view(), hover(row or null), select(rows), lassoed()
   */
  constructor(canvas, x, y, on) {
    Object.assign(this, { canvas, x, y, on, selected: [], busy: Promise.resolve() });
    for (const axis of [x, y]) for (let i = 0; i < axis.length; i++) axis[i] *= MARGIN;
    const n = x.length, size = n < 3000 ? 7 : n < 30000 ? 4 : n < 300000 ? 2.5 : 1.5;
    this.map = createScatterplot({ canvas, pointSize: size, pointSizeSelected: 2, opacity: 0.85,
      opacityInactiveMax: 0.25, opacityInactiveScale: 0.4, lassoColor: "#6cb2f0", lassoMinDelay: 1,
      actionKeyMap: { lasso: "shift", merge: "ctrl", remove: "alt" },
      performanceMode: n > 500000, deselectOnEscape: false, pointOutlineWidth: 1, pointColorActive: "#ffffff" });
    const listeners = { pointover: on.hover, pointout: () => on.hover(null), lassoEnd: on.lassoed,
      select: ({ points }) => on.select(this.selected = points),
      deselect: () => on.select(this.selected = []),
      view: () => { if (this.index) { on.view(); this.thinOut(); } } };
    for (const [name, listener] of Object.entries(listeners)) this.map.subscribe(name, listener);
    if (n > MANY) this.some = Array.from({ length: DRAWN }, (_, i) => Math.floor((i * n) / DRAWN));
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
      await this.map.draw({ x: this.x, y: this.y, valueA: codes },
        { spatialIndex: this.index, zDataType: "categorical", preventFilterReset: true });
      this.index = this.map.get("spatialIndex");
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
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = null;
      this.map.unfilter({ preventEvent: true });
      this.select(this.selected);
    }, STILL);
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
    this.map.zoomToLocation([this.x[row], this.y[row]], this.map.get("camera").distance[0], SMOOTH);
  }

  home() {
    this.map.zoomToOrigin(SMOOTH);
  }

  /** Zoom to samples. */
  fit(rows) {
    this.map.zoomToPoints(Array.from(rows), { padding: 0.4, ...SMOOTH });
  }
}
