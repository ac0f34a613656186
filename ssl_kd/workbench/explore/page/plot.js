// The map, by regl-scatterplot: which samples lie where, in which colours, and which are meant.

import { touches } from "./touches.js";
import createScatterplot from "./vendor/regl-scatterplot.js";

const ROOM = 0.94; // of the map between the outermost samples
const MANY = 50000; // samples, beyond which only some are drawn while the map moves
const DRAWN = 25000; // of them
const STILL = 200; // milliseconds after which all are drawn again
const QUICK = { transition: true, transitionDuration: 300 };

export class Plot {
  /**
   * @param canvas to draw on
   * @param x Float32Array, within -1 and 1; changed
   * @param y as x
   * @param on what is told: view(), hover(row or null), pick(rows), lassoed()
   */
  constructor(canvas, x, y, on) {
    Object.assign(this, { canvas, x, y, on, selected: [], busy: Promise.resolve() });
    for (const axis of [x, y]) for (let i = 0; i < axis.length; i++) axis[i] *= ROOM;
    const n = x.length, size = n < 3000 ? 7 : n < 30000 ? 4 : n < 300000 ? 2.5 : 1.5;
    this.map = createScatterplot({ canvas, pointSize: size, pointSizeSelected: 2, opacity: 0.85,
      opacityInactiveMax: 0.25, opacityInactiveScale: 0.4, lassoColor: "#6cb2f0", lassoMinDelay: 1,
      actionKeyMap: { lasso: "shift", merge: "ctrl", remove: "alt" },
      performanceMode: n > 500000, pointOutlineWidth: 1, pointColorActive: "#ffffff" });
    const hears = { pointover: on.hover, pointout: () => on.hover(null), lassoEnd: on.lassoed,
      select: ({ points }) => on.pick(this.selected = points), deselect: () => on.pick(this.selected = []),
      view: () => { if (this.index) { on.view(); this.moves(); } } };
    for (const [name, does] of Object.entries(hears)) this.map.subscribe(name, does);
    touches(canvas);
    if (n <= MANY) return;
    const every = n / DRAWN;
    this.some = Array.from({ length: DRAWN }, (_, i) => Math.floor(i * every));
  }

  set background(colour) {
    this.map.set({ backgroundColor: colour });
  }

  /** The colour of every sample: `codes[row]` among these, each `#rrggbb`. */
  paint(codes, colours) {
    this.newest = codes;
    this.busy = this.busy.catch(() => {}).then(async () => { // it draws one thing at a time
      if (this.newest !== codes) return;
      Object.assign(this, { codes, colours });
      this.map.set({ colorBy: "valueA", pointColor: colours });
      await this.map.draw({ x: this.x, y: this.y, valueA: codes },
        { spatialIndex: this.index, zDataType: "categorical", preventFilterReset: true });
      this.index = this.map.get("spatialIndex");
      this.select(this.selected);
    });
    return this.busy;
  }

  /** The colour of one sample. */
  tint(row) {
    return this.colours[this.codes[row]];
  }

  select(rows) {
    this.selected = rows;
    if (rows.length) this.map.select(Array.from(rows), { preventEvent: true });
    else this.map.deselect({ preventEvent: true });
  }

  /** Draw some of very many samples while the map moves, and all of them when it is still. */
  moves() {
    if (!this.some || this.selected.length > 1) return;
    if (!this.later) {
      this.on.hover(null); // the library forgets a sample that is not drawn, and does not say so
      this.map.filter(this.some, { preventEvent: true });
    }
    clearTimeout(this.later);
    this.later = setTimeout(() => {
      this.later = null;
      this.map.unfilter({ preventEvent: true });
      this.select(this.selected);
    }, STILL);
  }

  get width() {
    return this.canvas.clientWidth;
  }

  get height() {
    return this.canvas.clientHeight;
  }

  get lasso() {
    return this.map.get("mouseMode") === "lasso";
  }

  set lasso(on) {
    this.map.set({ mouseMode: on ? "lasso" : "panZoom" });
  }

  /** Where a sample is, in pixels of the canvas. */
  screen(row) {
    return this.map.getScreenPosition(row);
  }

  /** The sample nearest to a pixel. */
  nearest(px, py) {
    let best = -1, least = Infinity;
    for (let row = 0; row < this.x.length; row++) {
      const [x, y] = this.screen(row), far = (x - px) ** 2 + (y - py) ** 2;
      if (far < least) [best, least] = [row, far];
    }
    return best;
  }

  /** Move by so much of the map's half width and height. */
  move(x, y) {
    this.map.get("camera").pan([x, y]);
    this.map.redraw();
  }

  zoom(by) {
    this.map.get("camera").scale(by, [0, 0]);
    this.map.redraw();
  }

  /** Bring a sample to the middle. */
  show(row) {
    this.map.zoomToLocation([this.x[row], this.y[row]], this.map.get("camera").distance[0], QUICK);
  }

  home() {
    this.map.zoomToOrigin(QUICK);
  }

  /** Show these samples. */
  fit(rows) {
    this.map.zoomToPoints(Array.from(rows), { padding: 0.4, ...QUICK });
  }
}
