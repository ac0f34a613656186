// The pictures of the dock: all selected samples, most typical first. Only those in view are drawn.

import { findRows, readCells } from "./data.js";
import { playButton } from "./media.js";
import { $, make, number } from "./messages.js";
import { wordsElement } from "./pictures.js";

const GAP = 6, SOUND = 44, LINE = 17.4, HIGHEST = 1e7, STILL = 80; // pixels between pictures, of a sound, of a line of text and of the highest element; milliseconds

export class Gallery {
  constructor(box, dock) {
    const { pictures, meta } = dock.app;
    Object.assign(this, { box, dock, rows: [], tiles: new Map(), sheet: make("div") });
    this.caption = !pictures.any && meta.media?.kind === "text" ? meta.media.column : "file";
    if (!pictures.any) $("show-gallery").textContent = "Samples";
    box.append(this.sheet);
    box.onscroll = () => this.draw();
    box.onkeydown = (event) => dock.onKey(event, this.rows, this.across, (at) => this.reveal(at));
    $("tile-size").oninput = () => this.clear();
  }

  /** Show rows, most typical first; all samples if there are none. */
  async show(rows) {
    this.order ??= findRows({}, "confidence", true); // decisions do not change it
    const order = await this.order, text = rows.nearestTo, isShown = new Uint8Array(order.length), { decisions, nameOf, isVisible } = this.dock.app;
    for (const row of rows) isShown[row] = 1;
    this.rows = text ? rows : order.filter(rows.length ? (row) => isShown[row] : isVisible);
    const k = decisions.clusters[rows[0]], isOne = rows.every((row) => decisions.clusters[row] === k);
    $("gallery-about").textContent = `${number(this.rows.length)} samples`
      + (text ? `, nearest to “${text}” first` : `${!rows.length ? "" : isOne ? ` of ${nameOf(k)}` : " selected"}, most typical first`);
    if (this.subset !== rows) this.box.scrollTop = 0;
    this.subset = rows;
    this.clear();
  }

  clear() {
    this.tiles.clear();
    this.sheet.replaceChildren();
    this.draw();
  }

  draw() {
    const { box, sheet, rows } = this, { pictures, meta } = this.dock.app, room = sheet.clientWidth + GAP;
    const width = Number($("tile-size").value), size = pictures.any || meta.media?.kind !== "audio" ? width : SOUND;
    const least = (pictures.any ? width : 2 * width) + GAP, high = this.high = size + GAP;
    const across = this.across = Math.max(1, Math.floor(room / least)), wide = pictures.any ? least : room / across;
    const all = Math.ceil(rows.length / across) * high, height = Math.min(all, HIGHEST), view = box.clientHeight;
    sheet.style.setProperty("--lines", Math.max(1, Math.floor((size - 14) / LINE)));
    sheet.style.height = `${height}px`;
    this.scale = height > view ? (all - view) / (height - view) : 1; // of places, if there are very many
    const top = box.scrollTop * this.scale, first = Math.max(0, Math.floor(top / high) - 1) * across;
    const tiles = new Map(), last = Math.min(rows.length, (Math.ceil((top + view) / high) + 1) * across);
    for (let at = first; at < last; at++) {
      const tile = this.tiles.get(at) ?? sheet.appendChild(this.tile(at, size));
      Object.assign(tile.style, { left: `${(at % across) * wide}px`, width: `${wide - GAP}px`,
        top: `${Math.floor(at / across) * high - top + box.scrollTop}px`, height: `${size}px` });
      tiles.set(at, tile);
    }
    for (const [at, tile] of this.tiles) if (!tiles.has(at)) tile.remove();
    this.tiles = tiles;
    this.mark();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.label(), STILL);
  }

  tile(at, size) {
    const row = this.rows[at], pick = (event) => this.dock.pick(this.rows, at, event);
    return make("div", { role: "option", id: `tile-${row}`, onclick: pick, ondblclick: () => this.dock.app.view(row) },
      ...this.dock.app.pictures.list(row, size - 4));
  }

  /** Name the pictures in view; without pictures, show the text or the file name. */
  async label() {
    const unnamed = [...this.tiles].filter(([, tile]) => !tile.title).slice(0, 1000);
    if (!unnamed.length) return;
    const cells = await readCells(unnamed.map(([at]) => this.rows[at]), [this.caption]);
    unnamed.forEach(([, tile], i) => {
      tile.title = tile.ariaLabel = cells[i][0] ?? "no text";
      if (tile.firstElementChild) return;
      const { meta } = this.dock.app, at = this.rows[unnamed[i][0]];
      if (meta.media?.kind === "audio") tile.append(playButton(at));
      tile.append(wordsElement(meta, tile.title));
    });
  }

  /** Mark the selected samples; bring the first one into view if it `moves`. */
  mark(moves = false) {
    const { isChosen, chosen } = this.dock.app;
    for (const [at, tile] of this.tiles) tile.ariaSelected = isChosen[this.rows[at]] === 1;
    this.box.classList.toggle("part", chosen.length < this.rows.length);
    this.box.setAttribute("aria-activedescendant", `tile-${this.dock.reached}`);
    if (moves) this.reveal(this.rows.findIndex((row) => isChosen[row]));
  }

  reveal(at) {
    const { box, high, scale } = this, top = (Math.floor(at / this.across) * high) / scale;
    if (at < 0 || (top >= box.scrollTop && top + high <= box.scrollTop + box.clientHeight)) return;
    box.scrollTop = top - box.clientHeight / 3;
  }
}
