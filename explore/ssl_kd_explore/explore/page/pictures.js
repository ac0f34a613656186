// The picture of a sample: from the server, or a part of a sheet of many.

import { TOKEN, readCells } from "./data.js";
import { make, makePath } from "./messages.js";

export class Pictures {
  /** @param meta sheets: { rows: samples in order, tile, columns, per_sheet } of a static page */
  constructor(meta) {
    Object.assign(this, { sheets: meta.sheets, tiny: meta.tiny });
    this.any = meta.images && (TOKEN !== "" || this.sheets !== null);
    this.at = new Map((this.sheets?.rows ?? []).map((row, i) => [row, i]));
  }

  /** The picture as an element `size` pixels wide and high; null if there is none. */
  element(row, size) {
    if (!this.any) return null;
    const className = this.tiny ? "thumb tiny" : "thumb";
    if (TOKEN) {
      const image = new Image(size, size);
      return Object.assign(image, { className, alt: "", loading: "lazy", src: `api/image/${row}` });
    }
    if (!this.at.has(row)) return null;
    const { tile, columns, per_sheet: perSheet } = this.sheets, i = this.at.get(row);
    const k = i % perSheet, scale = size / tile;
    const box = Object.assign(document.createElement("span"), { className });
    Object.assign(box.style, { width: `${size}px`, height: `${size}px`,
      backgroundImage: `url(data/sheet_${Math.floor(i / perSheet)}.webp)`,
      backgroundSize: `${columns * tile * scale}px auto`,
      backgroundPosition: `${-(k % columns) * size}px ${-Math.floor(k / columns) * size}px` });
    return box;
  }

  /** A list of the element, or an empty one. */
  list(row, size) {
    const element = this.element(row, size);
    return element ? [element] : [];
  }
}

/** What shows such a text or file name: a text is cut at a line, a path in the middle. */
export const wordsElement = (meta, text) => (meta.media?.kind === "text"
  ? make("span", { className: "words", textContent: text }) : makePath(text));

/** The text or file name of samples (row -> text); a static page has none. */
export async function readWords(meta, rows) {
  if (!TOKEN || !rows.length) return new Map();
  const column = meta.media?.kind === "text" ? meta.media.column : "file";
  const cells = await readCells(rows, [column]);
  return new Map(rows.map((row, i) => [row, String(cells[i][0] ?? `sample ${row}`)]));
}
