// The picture of a sample: asked of the server, or cut out of a sheet of many.

export class Pictures {
  /**
   * @param meta sheets: { rows: samples in order, tile, columns, per_sheet } in a static export
   * @param served whether images are there for the asking
   */
  constructor(meta, served) {
    this.sheets = meta.sheets;
    this.served = Boolean(served);
    this.any = meta.images && (this.served || this.sheets !== null);
    this.at = new Map((this.sheets?.rows ?? []).map((row, i) => [row, i]));
    this.tiny = meta.tiny;
  }

  /** The picture as an element `size` pixels wide and high; null where there is none. */
  element(row, size) {
    if (!this.any) return null;
    if (this.served) {
      const image = new Image(size, size);
      Object.assign(image, { className: this.tiny ? "thumb tiny" : "thumb", alt: "", loading: "lazy" });
      image.src = `api/image/${row}`;
      return image;
    }
    if (!this.at.has(row)) return null;
    const { tile, columns, per_sheet: perSheet } = this.sheets, i = this.at.get(row);
    const k = i % perSheet, scale = size / tile, box = document.createElement("span");
    box.className = this.tiny ? "thumb tiny" : "thumb";
    Object.assign(box.style, { width: `${size}px`, height: `${size}px`,
      backgroundImage: `url(data/sheet_${Math.floor(i / perSheet)}.webp)`,
      backgroundSize: `${columns * tile * scale}px auto`,
      backgroundPosition: `${-(k % columns) * size}px ${-Math.floor(k / columns) * size}px` });
    return box;
  }

  /** What there is to show of it: a list of one element, or of none. */
  all(row, size) {
    const element = this.element(row, size);
    return element ? [element] : [];
  }
}
